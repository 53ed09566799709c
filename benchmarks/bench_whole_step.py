"""A whole training step as one CUDA graph beside torch's CUDA graph trees: time of a step, and memory.

    python benchmarks/bench_whole_step.py --json out.json            needs CUDA; ten minutes, mostly compilation
    python benchmarks/bench_whole_step.py --only mlp                 a minute
    python benchmarks/bench_whole_step.py --only world --rounds 3    two minutes; each variant adds to the row
    python benchmarks/bench_whole_step.py --only gpt2 --batches 1    two minutes
    python benchmarks/bench_whole_step.py --small                    a CPU: tiny sizes on the tests' simulator

Each row is written when it is measured, beside the rows that the file has: a run that is cut leaves what it has.

MLPs of bench_cudagraph_host.py, 32 x 128, synchronized after each step, in microseconds:

    torch_trees      mode="reduce-overhead": forward, sum, backward, gradients zeroed in place; with AdamW: its step
    whole            `cudagraph.whole_step` of the same step, model not compiled
    whole_compiled   the same, model compiled by Inductor
    replay           the graph of `whole` launched by hand: the floor
    eager            no graphs, nothing compiled

A world model: an actor and a critic trained on 50 latent steps that a recurrent model imagines, with AdamW. Ways to run
the same step: `eager`; `compiled`, by Inductor, 10 latent steps at a time; and each of them as one graph, `whole` and
`whole_compiled`. Of each way, in microseconds:

    us               of a call, synchronized; of `replay` too: the graph launched by hand
    in_a_row_us      of a call in a loop that waits for the device only at its end
    host_us          until a call returns, on an idle device
    kernels          how many kernels and copies the step runs uncaptured, and their time together, by the profiler
    in_graph         the same of a replay
    nodes            of the graph by kind, and its edges: one less than nodes if they are a chain

`ratio_to_kernels`: `us` over the time of the kernels of the same step uncaptured.

Models: GPT-2 small (12 layers, 768 wide, 1024 tokens) and ViT-B/16 (197 tokens), bfloat16 autocast, fused AdamW, in
milliseconds: `torch_trees`, and `whole` with the same compiled model. Memory: bytes that the allocator has reserved at
most, compiled blocks, eager loss and fused AdamW, each variant in a process of its own.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import json
import pathlib
import statistics
import sys
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import torch
from measure import conditions, own_process, parser_of, synchronize, write
from torch import nn
from torch.nn import functional as F

import cudagraph

DEPTHS = (4, 24)
BATCHES = (1, 8)
PARTS = ("mlp", "world", "gpt2", "vit", "memory")
LATENT_STEPS, COMPILED_AT_ONCE = 50, 10
Tensors = list[torch.Tensor]


def medians_us(
    variants: dict[str, Callable[[], Any]], device: torch.device, calls: int, rounds: int
) -> dict[str, float]:
    """Microseconds of a call, synchronized, by variant; variants take turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            for _ in range(5):
                call()
            synchronize(device)
            begin = time.perf_counter()
            for _ in range(calls):
                call()
                synchronize(device)
            times[name].append((time.perf_counter() - begin) / calls * 1e6)
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def mlp(depth: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(depth)]).to(device)


def bench_mlp(depth: int, device: torch.device, *, optimizer: bool, calls: int, rounds: int) -> dict[str, Any]:
    torch._dynamo.reset()
    cudagraph.reset()
    x = torch.randn(32, 128, device=device)
    on_gpu = device.type == "cuda"

    def step_of(compile_it: Callable[[Any], Any]) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
        model = mlp(depth, device)
        if not optimizer:  # gradients that stay, and are no outputs of torch's graphs
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=on_gpu) if optimizer else None
        f = compile_it(model)

        def step(x: torch.Tensor) -> torch.Tensor:
            model.zero_grad(set_to_none=adamw is not None)
            loss = f(x).sum()
            loss.backward()
            if adamw is not None:
                adamw.step()
            return loss.detach()

        return model, step

    models, variants = {}, {}
    models["eager"], eager = step_of(lambda model: model)
    variants["eager"] = lambda: eager(x)
    if on_gpu:
        models["torch_trees"], trees = step_of(lambda m: torch.compile(m, mode="reduce-overhead", fullgraph=True))

        def torch_trees() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            trees(x)

        variants["torch_trees"] = torch_trees
    models["whole"], plain = step_of(lambda model: model)
    whole = cudagraph.whole_step(plain)
    variants["whole"] = lambda: whole(x)
    if on_gpu:
        models["whole_compiled"], compiled = step_of(lambda model: torch.compile(model, fullgraph=True))
        whole_compiled = cudagraph.whole_step(compiled)
        variants["whole_compiled"] = lambda: whole_compiled(x)
    for name, call in variants.items():
        for _ in range(6):
            call()
        for ours, theirs in zip(models[name].parameters(), models["eager"].parameters(), strict=True):
            pairs = [(ours, theirs), (ours.grad, theirs.grad)]
            for a, b in pairs:
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2, msg=lambda m, name=name: f"{name}: {m}")
    assert not whole.refused, whole.refused
    us = medians_us({**variants, "replay": whole.latest.launch}, device, calls, rounds)
    row: dict[str, Any] = {"model": f"mlp {depth}", "optimizer": "adamw, fused" if optimizer else "none", "us": us}
    if on_gpu:
        ratios = {name: round(us[name] / us["torch_trees"], 3) for name in ("whole", "whole_compiled")}
        row["ratio_to_torch_trees"] = ratios
    return row


class World(nn.Module):
    """The loss of an actor and a critic over latent steps of a recurrent model, with rewards that it predicts."""

    def __init__(self, width: int, actions: int = 8) -> None:
        super().__init__()

        def head(outputs: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, outputs))

        self.cell, self.actor, self.critic, self.reward = nn.GRUCell(actions, width), head(actions), head(1), head(1)

    def imagine(self, h: torch.Tensor, count: int) -> tuple[torch.Tensor, Tensors, Tensors, torch.Tensor]:
        """The state after `count` latent steps from `h`; their values, their rewards, and their entropy together."""
        values, rewards, entropy = [], [], h.new_zeros(())
        for _ in range(count):
            chances = self.actor(h).softmax(-1)
            entropy = entropy - (chances * chances.log()).sum(-1).mean()
            h = self.cell(chances + 0.1 * torch.randn_like(chances), h)
            values.append(self.critic(h))
            rewards.append(self.reward(h).tanh())
        return h, values, rewards, entropy

    def losses(self, values: Tensors, rewards: Tensors, discount: float = 0.97) -> torch.Tensor:
        target, losses = values[-1].detach(), []
        for value, reward in zip(reversed(values[:-1]), reversed(rewards[:-1]), strict=True):
            target = reward + discount * (0.05 * value.detach() + 0.95 * target)
            losses.append((value - target.detach()).square().mean() - 0.1 * target.mean())
        return torch.stack(losses).sum()

    def forward(self, h: torch.Tensor, steps: int, at_once: int) -> torch.Tensor:
        values, rewards, entropies = [], [], []
        for begin in range(0, steps, at_once):
            h, new_values, new_rewards, entropy = self.imagine(h, min(at_once, steps - begin))
            values += new_values
            rewards += new_rewards
            entropies.append(entropy)
        entropy = functools.reduce(torch.add, entropies)
        return self.losses(values, rewards) - 0.01 * entropy


def work_of(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call runs on the GPU, by the profiler: how many kernels and copies of each kind, and their microseconds
    together."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kinds = collections.Counter(e.name.split()[0] if e.name.startswith("Mem") else "kernel" for e in found)
    return {"count": len(found), "us": round(sum(e.device_time for e in found), 1), "kinds": dict(kinds)}


KINDS_OF_NODES = ("kernel", "memcpy", "memset", "host", "graph", "empty", "wait", "record")  # of the driver, by number


def nodes_of(graph: torch.cuda.CUDAGraph) -> dict[str, int]:
    """How many nodes of each kind a graph has, and how many edges. The graph was made with `keep_graph`."""
    driver, pointer, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()

    def ask(function: Any, *arguments: Any) -> None:
        if (code := function(*arguments)) != 0:
            raise RuntimeError(f"{function.__name__} returned {code}")

    ask(driver.cuGraphGetNodes, pointer, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    ask(driver.cuGraphGetNodes, pointer, nodes, ctypes.byref(count))
    kinds: collections.Counter[str] = collections.Counter()
    for node in nodes:
        kind = ctypes.c_int()
        ask(driver.cuGraphNodeGetType, ctypes.c_void_p(node), ctypes.byref(kind))
        kinds[KINDS_OF_NODES[kind.value] if kind.value < len(KINDS_OF_NODES) else f"kind {kind.value}"] += 1
    ask(driver.cuGraphGetEdges, pointer, None, None, ctypes.byref(count))
    return {**kinds, "edges": count.value}


def host_us(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Microseconds until a call returns, while the device has nothing else to do."""
    times = []
    for _ in range(calls):
        synchronize(device)
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    synchronize(device)
    return round(statistics.median(times), 1)


def in_a_row_us(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Microseconds of a call in a loop that waits for the device only at its end."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return round((time.perf_counter() - begin) / calls * 1e6, 1)


def bench_world(
    device: torch.device,
    add: Callable[[dict[str, Any]], None],
    *,
    at_once: int,
    calls: int,
    rounds: int,
    width: int,
    batch: int,
    steps: int,
) -> None:
    """`add` gets the row each time when more of it is known. `at_once`: latent steps that are compiled together."""
    on_gpu = device.type == "cuda"
    row: dict[str, Any] = {"model": "world", "batch": batch, "steps": steps, "compiled_at_once": at_once}
    h = torch.randn(batch, width, device=device)

    def step_of(is_compiled: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        model = World(width).to(device)
        if is_compiled:
            how: dict[str, Any] = {"dynamic": False} if on_gpu else {"dynamic": False, "backend": "aot_eager"}
            model.imagine, model.losses = (torch.compile(f, **how) for f in (model.imagine, model.losses))
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=on_gpu)

        def step(h: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(h, steps, at_once if is_compiled else steps)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            adamw.step()
            adamw.zero_grad()
            return loss.detach()

        return step

    def losses_of(call: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        torch.manual_seed(1)
        return [float(call(h)) for _ in range(6)]

    def note(key: str, **values: Any) -> None:
        row.setdefault(key, {}).update(values)

    def measure(name: str, call: Callable[[], Any], how_many: int) -> None:
        note("us", **medians_us({name: call}, device, how_many, rounds))
        note("in_a_row_us", **{name: in_a_row_us(call, device, how_many)})
        note("host_us", **{name: host_us(call, device, how_many)})

    for is_compiled, uncaptured, end in ((False, "eager", ""), (True, "compiled", "_compiled")):
        torch._dynamo.reset()
        cudagraph.reset()
        captured = f"whole{end}"
        began = time.perf_counter()
        plain = step_of(is_compiled)
        note("loss", **{uncaptured: losses_of(plain)})
        note("ready_s", **{uncaptured: round(time.perf_counter() - began, 1)})
        measure(uncaptured, functools.partial(plain, h), max(calls // 5, 1))
        if on_gpu:
            note("kernels", **{uncaptured: work_of(functools.partial(plain, h))})
        # The graph is kept beside what is made of it, so that its nodes can be counted.
        with unittest.mock.patch("torch.cuda.CUDAGraph", functools.partial(torch.cuda.CUDAGraph, keep_graph=True)):
            whole = cudagraph.whole_step(step_of(is_compiled))
            note("loss", **{captured: losses_of(whole)})
        assert not whole.refused and not whole.update_refused, (whole.refused, whole.update_refused)
        first, *_ = row["loss"]["eager"]
        assert abs(row["loss"][captured][0] - first) < 0.2 * abs(first), row["loss"]  # compiled code draws other noise
        measure(captured, functools.partial(whole, h), calls)
        measure(f"replay{end}", whole.latest.launch, calls)
        add(row)
        if on_gpu:
            of_kernels = row["kernels"][uncaptured]["us"]
            note("ratio_to_kernels", **{x: round(row["us"][x] / of_kernels, 3) for x in (uncaptured, captured)})
            note("in_graph", **{captured: work_of(functools.partial(whole, h))})
            add(row)
            note("nodes", **{captured: nodes_of(whole.latest.graph)})
            add(row)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, w = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257, tokens: int = 1024
    ):
        super().__init__()
        self.tokens, self.vocabulary = tokens, vocabulary
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*[Block(width, heads, causal=True) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def batch(self, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(self.vocabulary, (size, self.tokens + 1), device=device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


class ViT(nn.Module):
    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, image: int = 224, patch: int = 16):
        super().__init__()
        self.image = image
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, heads, causal=False) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def batch(self, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(size, 3, self.image, self.image, device=device)
        return images, torch.randint(1000, (size,), device=device)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, -2).float(), target.flatten())


def training(model: nn.Module, device: torch.device, compile_it: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    """A step with autocast, the model and its loss compiled together."""
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=device.type == "cuda")

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return loss_of(model(x), y)

    compiled = compile_it(forward)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = compiled(x, y)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss.detach()

    return step


def bench_model(make: Callable[[], Any], size: int, device: torch.device, calls: int, rounds: int) -> dict[str, Any]:
    torch._dynamo.reset()
    cudagraph.reset()
    variants: dict[str, Callable[[], Any]] = {}
    torch.manual_seed(0)
    model: Any = make()
    batch = model.batch(size, device)
    torch.manual_seed(0)
    whole = cudagraph.whole_step(
        training(make().to(device), device, lambda f: torch.compile(f, dynamic=False) if device.type == "cuda" else f)
    )
    variants["whole"] = lambda: whole(*batch)
    if device.type == "cuda":
        torch.manual_seed(0)
        trees = training(make().to(device), device, lambda f: torch.compile(f, mode="reduce-overhead", dynamic=False))

        def torch_trees() -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return trees(*batch)

        variants["torch_trees"] = torch_trees
    losses = {name: [float(call()) for _ in range(6)][-1] for name, call in variants.items()}
    assert not whole.refused, whole.refused
    ms = {name: us / 1e3 for name, us in medians_us(variants, device, calls, rounds).items()}
    row: dict[str, Any] = {"model": type(model).__name__, "batch": size, "loss": losses, "ms": ms}
    if "torch_trees" in ms:
        row["ratio_to_torch_trees"] = round(ms["whole"] / ms["torch_trees"], 3)
    return row


def reserved_bytes(graphs: bool, size: int, device: torch.device) -> int:
    """The most that the allocator reserves in steps after the first four. Blocks are compiled, the loss is eager."""
    torch.manual_seed(0)
    model = GPT2().to(device)
    batch = model.batch(size, device)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, dynamic=False)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(out, y)

    def autocast_model(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            out: torch.Tensor = model(x)
        return out

    if graphs:
        step = cudagraph.whole_step(autocast_model, loss_fn, adamw)
    else:

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            loss_fn(autocast_model(x), y).backward()
            adamw.step()
            adamw.zero_grad()

    for i in range(10):
        if i == 4:
            synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        step(*batch)
    synchronize(device)
    return torch.cuda.max_memory_reserved(device)


def bench_memory(size: int) -> dict[str, Any]:
    found = {}
    for variant in ("without", "with"):
        found[variant] = json.loads(own_process(__file__, ["--reserved", variant, "--batches", str(size)])[-1])
    return {
        "model": "GPT2, memory",
        "batch": size,
        "reserved_bytes": found,
        "ratio": round(found["with"] / found["without"], 4),
    }


def main() -> None:
    parser = parser_of(__doc__, small="tiny sizes on a CPU, to see that it runs", rounds=5)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--calls", type=int, default=100, help="calls a round")
    parser.add_argument("--at-once", type=int, default=COMPILED_AT_ONCE, help="latent steps compiled together")
    parser.add_argument("--reserved", choices=("without", "with"), help="print what this variant reserves, for itself")
    options = parser.parse_args()
    device = torch.device("cpu") if options.small else torch.device("cuda", torch.cuda.current_device())
    if options.reserved:
        print(reserved_bytes(options.reserved == "with", options.batches[0], device))
        return
    if options.small:
        sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"))
        from capture_simulator import Simulator

        from cudagraph.step import whole

        simulator = Simulator(1 << 26)
        whole.cuda_driver = lambda: simulator  # type: ignore[assignment, return-value]
    result: dict[str, Any] = {**conditions(device, calls=options.calls, rounds=options.rounds), "rows": []}
    if options.json and options.json.exists():
        result["rows"] = json.loads(options.json.read_text())["rows"]

    def add(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        name = [row.get(key) for key in ("model", "optimizer", "batch")]
        kept = [old for old in result["rows"] if [old.get(key) for key in ("model", "optimizer", "batch")] != name]
        result["rows"] = [*kept, row]
        write(options.json, result)

    if "mlp" in options.only:
        for depth in (2,) if options.small else DEPTHS:
            for optimizer in (False, True):
                add(bench_mlp(depth, device, optimizer=optimizer, calls=options.calls, rounds=options.rounds))
    if "world" in options.only:
        sizes = (
            {"width": 8, "batch": 2, "steps": 3}
            if options.small
            else {"width": 256, "batch": 64, "steps": LATENT_STEPS}
        )
        at_once, calls = (2, 1) if options.small else (options.at_once, max(options.calls // 4, 1))
        bench_world(device, add, at_once=at_once, calls=calls, rounds=options.rounds, **sizes)
    for part, make, tiny in (
        ("gpt2", GPT2, lambda: GPT2(1, 8, 2, 16, 4)),
        ("vit", ViT, lambda: ViT(1, 8, 2, 8, 4)),
    ):
        if part in options.only:
            for size in options.batches:
                made = tiny if options.small else make
                add(bench_model(made, size, device, max(options.calls // 4, 1), options.rounds))
    if "memory" in options.only and not options.small:
        add(bench_memory(options.batches[-1]))


if __name__ == "__main__":
    main()
