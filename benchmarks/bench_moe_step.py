"""A step of mixture-of-experts blocks of Qwen3-30B-A3B's shape: time, peak, and the peaks of many routings.

    python benchmarks/bench_moe_step.py --json FILE                 needs CUDA; by blocks, 2 x 8192 tokens
    python benchmarks/bench_moe_step.py --small                     a CPU, tiny sizes

128 experts of which each token takes 8, width 2048, 768 wide each, bfloat16, `grouped_mm` over tokens sorted by expert,
no token dropped. The loss is a mean square with the balancing and z-losses of the routers. `skewed`: the bias of the
scores is set so that one expert gets four times its share.

ms is the fastest of the steps, `median_ms` their median, `ratio` to stock's with the same routing. Bytes are over what
is allocated before the step: parameters and gradients. `peaks_gib` are those of steps whose routing differs.

Of a captured step, `saved_gib` is what the recording has allocated between forward and backward. `used_share` is that
beside what the same blocks save uncaptured. `pool_gib` is the most that the recording has allocated. `peak_gib` is what
the device lacks afterwards: also the gradients, and what the allocator has reserved and can't use.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bench_moe import FOR_ROUTERS
from measure import (
    GIB,
    StepBytes,
    conditions,
    first_line,
    format_columns,
    free,
    measure_bytes,
    parser_of,
    synchronize,
    write,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
import cudagraph

BALANCE, Z = 0.01, 0.001  # shares of the two router losses
SKEW = 4  # times its share, that the first expert gets
WARM_UP = 14
SEND = functools.partial(aot_hooks.offload, then=aot_hooks.float8(), across_graphs=True)
AGAIN = " again"  # end of the names of rows with options["recompute_pointwise"]
HOOKS = {
    "no hooks": aot_hooks.KEEP,
    "float8": aot_hooks.float8(),
    "for routers": FOR_ROUTERS,
    "int8": aot_hooks.int8(),
    "offload(then=float8)": SEND(),
    "offload(then=float8) 12 ms again": SEND(max_stall_ms=12.0, in_flight_bytes=768 << 20),
}
BUDGETS = {"budget as checkpointing": ("checkpointing", 1.0), "budget": ("stock", 0.5)}  # a share of a row's peak
CAPTURED = {"captured": "no hooks", "captured float8": "float8"}  # forward and backward in one graph
ROWS = ("stock", "checkpointing", *HOOKS, *BUDGETS, *CAPTURED)


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int = 8
    width: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_width: int = 128
    experts: int = 128
    chosen: int = 8
    hidden: int = 768
    batch: int = 2
    tokens: int = 8192


SMALL = Sizes(2, 64, 4, 2, 16, 8, 2, 64, 2, 64)


class Experts(nn.Module):
    """A router and its experts: x [token, width] to the output and the router's losses. `bias` moves its choices."""

    bias: Tensor
    load: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.chosen, count = sizes.chosen, sizes.experts
        self.router = nn.Linear(sizes.width, count, bias=False)
        self.gate = nn.Parameter(torch.randn(count, sizes.width, sizes.hidden) / sizes.width**0.5)
        self.up = nn.Parameter(torch.randn(count, sizes.width, sizes.hidden) / sizes.width**0.5)
        self.down = nn.Parameter(torch.randn(count, sizes.hidden, sizes.width) / sizes.hidden**0.5)
        self.register_buffer("bias", torch.zeros(count))
        self.register_buffer("load", torch.zeros(count, dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x).float()
        p = logits.softmax(-1)
        expert = (p + self.bias).topk(self.chosen).indices
        score = p.gather(-1, expert)
        score = score / score.sum(-1, keepdim=True)
        flat = expert.reshape(-1)
        order = flat.argsort()
        load = torch.zeros_like(self.load).scatter_add(0, flat, torch.ones_like(flat))
        self.load.copy_(load)
        ends = load.cumsum(0).to(torch.int32)
        rows = x[order // self.chosen]
        y = F.silu(F.grouped_mm(rows, self.gate, offs=ends)) * F.grouped_mm(rows, self.up, offs=ends)
        y = F.grouped_mm(y, self.down, offs=ends) * score.reshape(-1)[order][:, None].to(x.dtype)
        y = y[order.argsort()].unflatten(0, (-1, self.chosen)).sum(1)
        balance = len(self.load) * (load / flat.numel() * p.mean(0)).sum()
        return y, BALANCE * balance + Z * logits.logsumexp(-1).square().mean()


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm1, self.norm2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.q_norm, self.k_norm = nn.RMSNorm(sizes.head_width), nn.RMSNorm(sizes.head_width)
        inner, kv = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
        self.q, self.k = nn.Linear(sizes.width, inner, bias=False), nn.Linear(sizes.width, kv, bias=False)
        self.v, self.out = nn.Linear(sizes.width, kv, bias=False), nn.Linear(inner, sizes.width, bias=False)
        self.experts = Experts(sizes)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.sizes.head_width)).transpose(1, 2)

        x = self.norm1(h)
        q, k, v = self.q_norm(heads(self.q(x))), self.k_norm(heads(self.k(x))), heads(self.v(x))
        k, v = (y.repeat_interleave(self.sizes.heads // self.sizes.kv_heads, dim=1) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        y, losses = self.experts(self.norm2(h).flatten(0, 1))
        return h + y.view_as(h), losses


class Model(nn.Module):
    """x [batch, token, width] to the loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        losses = x.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            x, more = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            losses = losses + more
        return x.float().square().mean() + losses

    def route(self, bias: Callable[[int], Tensor]) -> None:
        """Set the biases of all routers: that of each block is `bias(experts)`."""
        for block in self.blocks:
            block.experts.bias.copy_(bias(len(block.experts.bias)))


def skewed(model: Model, x: Tensor) -> None:
    """Set the bias of each first expert so that it gets `SKEW` times its share of the tokens, by bisection."""
    with torch.no_grad():
        for block in model.blocks:
            experts = block.experts
            count, low, high = len(experts.bias), 0.0, 1.0
            for _ in range(12):
                experts.bias[0] = (low + high) / 2
                model(x)
                share = float(experts.load[0]) * count / float(experts.load.sum())
                low, high = (low, (low + high) / 2) if share > SKEW else ((low + high) / 2, high)


def prepared(row: str, model: Model, inner: str, budget_bytes: int) -> Callable[[Tensor], Tensor]:
    model.checkpointed = row == "checkpointing"
    how: dict[str, Any] = {"backend": "inductor" if inner == "inductor" else "aot_eager"}
    name = CAPTURED.get(row, row)
    if name in HOOKS or name in BUDGETS:
        policy = aot_hooks.budget(f"{budget_bytes}B") if name in BUDGETS else HOOKS[name]
        options = {"inner": inner, "policy": policy, "recompute_pointwise": name.endswith(AGAIN)}
        how = {"backend": "aot_hooks", "options": options}
    for block in model.blocks:
        block.compile(**how)
    return model


def reserved_bytes(device: torch.device) -> int:
    """What torch's allocator has of the device and can't give back. A recording never gives its memory back."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


class Recorded:
    """Bytes of the last call of a step that ran its Python code, which was its capture.

    They are attributes of a class: `whole_step` compares those of objects, and would take them for state of the step.
    """

    saved_bytes = most_bytes = 0

    @staticmethod
    def of(forward: Callable[[], Tensor]) -> Tensor:
        """The loss of a step that runs `forward`, and backward."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = forward()
        Recorded.saved_bytes = torch.cuda.memory_allocated() - before
        loss.backward()
        Recorded.most_bytes = torch.cuda.max_memory_allocated() - before
        return loss.detach()


def kernels(step: Callable[[], Any]) -> dict[str, list[float]]:
    """The kernels of a step on CUDA, longest first: how many there are of a name, and their milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    rows = {row.key[:100]: [row.count, row.self_device_time_total / 1e3] for row in profile.key_averages()}
    return dict(sorted(rows.items(), key=lambda row: -row[1][1])[:60])


def replayed_errors(row: str, model: Model, x: Tensor, call: Callable[[], Tensor], inner: str) -> list[float]:
    """The relative errors of all gradients in replays with other routings, the last with all tokens at few experts.

    They are compared with the same graphs without a recording.
    """
    eager = copy.deepcopy(model)
    for block in eager.blocks:
        block._compiled_call_impl = None
    run = prepared(CAPTURED[row], eager, inner, 0)
    errors = []
    generator = torch.Generator().manual_seed(3)
    for spread in (0.001, 0.01, 1.0):
        noise = torch.randn(eager.sizes.experts, generator=generator)
        for each in (model, eager):
            each.route(lambda _, bias=spread * noise: bias)
        eager.zero_grad()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()  # in place: a replay adds to the memory that it was recorded with
        call()
        run(x).backward()
        wrong = whole = 0.0
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            wrong += float((p.grad.float() - q.grad.float()).square().sum())
            whole += float(q.grad.float().square().sum())
        errors.append((wrong / whole) ** 0.5)
    return errors


def measured(row: str, first: Model, x: Tensor, said: Any, known: dict[str, StepBytes]) -> dict[str, Any]:
    """A row of one routing, that of `first`, with what was `said` on the command line. Adds its bytes to `known`."""
    budget_bytes = 0
    if row in BUDGETS:
        of, share = BUDGETS[row]
        budget_bytes = int(share * known[of].peak)
    device = x.device
    model = copy.deepcopy(first)
    run = prepared(row, model, said.inner, budget_bytes)

    def forward() -> Tensor:
        return run(x)

    def step() -> Tensor:
        if row in CAPTURED and x.is_cuda:
            return Recorded.of(forward)
        loss = run(x)
        loss.backward()
        return loss.detach()

    call = cudagraph.whole_step(step) if row in CAPTURED else step
    before_gib = reserved_bytes(device) / GIB
    times: list[float] = []
    for n in range(WARM_UP + said.steps):
        synchronize(device)
        began = time.perf_counter()
        loss = call()
        synchronize(device)
        if n >= WARM_UP:
            times.append(1e3 * (time.perf_counter() - began))
        elif n == 0:
            first_s = time.perf_counter() - began
    found: dict[str, Any] = {"row": row, "ms": min(times), "median_ms": statistics.median(times)}
    found |= {"loss": float(loss), "first_step_s": first_s}
    if row in CAPTURED:
        found |= {"saved_gib": Recorded.saved_bytes / GIB, "pool_gib": Recorded.most_bytes / GIB}
        if CAPTURED[row] in known:
            found["used_share"] = Recorded.saved_bytes / known[CAPTURED[row]].after_forward
        found |= {"refused": call.refused, "peak_gib": reserved_bytes(device) / GIB - before_gib}
        return found | {"errors": replayed_errors(row, model, x, call, said.inner)}
    if said.kernels and x.is_cuda:
        found["kernels"] = kernels(step)
    nbytes, _ = measure_bytes(forward, torch.Tensor.backward, device)
    plans = aot_hooks.last_plans(model) if row in HOOKS or row in BUDGETS else []
    found |= {"saved_gib": nbytes.after_forward / GIB, "peak_gib": nbytes.peak / GIB}
    found |= {"budget_gib": budget_bytes / GIB or None}
    found["predicted_gib"] = max((plan.peak_bytes for plan in plans), default=0) / GIB or None
    known[row] = nbytes
    generator = torch.Generator().manual_seed(2)
    own: list[float] = []
    for _ in range(said.routings if row in BUDGETS else 0):
        spread = float(torch.rand((), generator=generator)) / 64
        model.route(lambda n, spread=spread: spread * torch.randn(n, generator=generator))
        own.append(measure_bytes(forward, torch.Tensor.backward, device)[0].peak / GIB)
    return found | ({"peaks_gib": [round(peak, 4) for peak in own]} if own else {})


def main() -> None:
    parser = parser_of(__doc__, small="sizes for a CPU", steps=9)
    parser.add_argument("--rows", default=",".join(ROWS), help=", ".join(ROWS))
    parser.add_argument("--routings", type=int, default=50, help="others whose peaks are measured under a budget")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a step")
    parser.add_argument("--routing", default="uniform,skewed")
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    parser.add_argument("--inner", choices=("inductor", "aten"), default="inductor")
    said = parser.parse_args()
    sizes = SMALL if said.small else dataclasses.replace(Sizes(), layers=said.layers)
    device = torch.device("cpu" if said.small else "cuda")
    torch.manual_seed(0)
    with device:
        first = Model(sizes).to(torch.bfloat16)
        x = torch.randn(sizes.batch, sizes.tokens, sizes.width).to(torch.bfloat16)
    for block in first.blocks:
        block.experts.bias = block.experts.bias.float()
    result = {"conditions": conditions(device, **dataclasses.asdict(sizes), inner=said.inner), "rows": []}
    for routing in said.routing.split(","):
        if routing == "skewed":
            skewed(first, x)
        loads = torch.stack([block.experts.load for block in first.blocks]).float()
        known: dict[str, StepBytes] = {}
        stock_ms = 0.0
        for row in said.rows.split(","):
            try:
                found = measured(row, first, x, said, known)
                stock_ms = found["ms"] if row == "stock" else stock_ms
                found["ratio"] = found["ms"] / stock_ms if stock_ms else None
            except (RuntimeError, ValueError, KeyError) as error:
                found = {"row": row, "error": first_line(error)}
            if routing == "skewed":
                found["largest_load"] = float((loads.max(-1).values / loads.mean(-1)).max())
            result["rows"].append({"routing": routing, **found})
            write(said.json, result)
            print(result["rows"][-1], flush=True)
            free(device)
    columns = ("routing", "row", "ms", "ratio", "saved_gib", "peak_gib")
    shown = [[str(row.get(name, ""))[:24] for name in columns] for row in result["rows"]]
    print(format_columns([list(columns), *shown]))


if __name__ == "__main__":
    main()
