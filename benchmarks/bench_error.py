"""How far gradients are off when saved tensors are packed: every lossy hook, each kind of tensor alone and all at once.

    python benchmarks/bench_error.py [--device cuda] [--seeds 5] [--json FILE]
    python benchmarks/bench_error.py --markdown FILE        # the table in docs/hooks.md

    x [batch, tokens, width] --> 4 Llama-shaped blocks, float32 --> loss --> gradients of all weights   g, exact
                                       |  the same graph, saved tensors through a hook                  g', hook
                                       error = |g' - g| / |g|, all weights as one vector

Four kinds of data: "normal" (x and the gradient of the blocks' output are normal), "outliers" (the same, 1% of the
channels 50 times as large, which the residual stream carries through all blocks, as in large language models),
"cauchy" (x is Cauchy-distributed, cut off at 10000) and "text" (bytes of Python source, embedding, head and
cross-entropy around the blocks, after some training). A seed is other weights, data and random rounding.

One graph serves all hooks: what is inlined is an operator that looks up, when it runs, through which hook the tensor
goes. That this is no other thing than what users get is checked: some hooks are inlined as usual too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import statistics
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from measure import conditions, format_columns, parser_of, relative_error, write
from model import Stack
from torch import Tensor, nn
from ways import lossy_hooks

import aot_hooks
from aot_hooks import KEEP, Hook, SavedTensor

DATA = ("normal", "outliers", "cauchy", "text")
WIDTH, HEADS, KV_HEADS, HIDDEN = 384, 3, 1, 1024  # heads of 128, as Llama's
BATCH, TOKENS = 2, 64
OUTLIER_CHANNELS, OUTLIER = 4, 50.0
CAUCHY_LIMIT = 1e4


# ----------------------------------------------------------------------------- one graph, any hook: decided at run time


@dataclasses.dataclass
class Switch:
    """Which hook each kind of saved tensor goes through now, and what it takes."""

    hooks: dict[str, Hook] = dataclasses.field(default_factory=dict)
    rows: dict[str, SavedTensor] = dataclasses.field(default_factory=dict)  # one of each kind
    packed_bytes: int = 0
    element_count: int = 0

    def learn(self, compiled: Callable[..., Any]) -> None:
        """Which kinds there are, from what was first compiled, with `by_switch`."""
        plan = aot_hooks.last_plans(compiled)[0]
        self.rows = {kind_of(d.saved): d.saved for d in plan.decisions if d.hook is not KEEP}

    @contextlib.contextmanager
    def on(self, hook: Hook, kinds: tuple[str, ...] | None = None) -> Iterator[None]:
        """All tensors that `hook` does not decline, or those of `kinds`, go through it."""
        takes = [k for k, row in self.rows.items() if not hook.why_not(row)]
        self.hooks = {kind: hook for kind in takes if kinds is None or kind in kinds}
        self.packed_bytes = self.element_count = 0
        try:
            yield
        finally:
            self.hooks = {}


SWITCH = Switch()


@torch.library.custom_op("aot_hooks_benchmarks::through_hook", mutates_args=())
def through_hook(x: Tensor, kind: str) -> Tensor:
    """`x` as it comes back from the hook that the switch has for `kind`."""
    hook = SWITCH.hooks.get(kind)
    if hook is None:
        return x.clone()
    packed = hook.pack(x)
    SWITCH.packed_bytes += sum(t.nbytes for t in pytree.tree_leaves(packed) if isinstance(t, Tensor))
    SWITCH.element_count += x.numel()
    return torch.empty_like(x).copy_(hook.unpack(packed))


@through_hook.register_fake
def _(x: Tensor, kind: str) -> Tensor:
    return torch.empty_like(x)


@dataclasses.dataclass(frozen=True)
class _Through:
    kind: str

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.aot_hooks_benchmarks.through_hook(x, self.kind)


def _same(packed: Tensor) -> Tensor:
    return packed


def by_switch(saved: SavedTensor) -> Hook:
    """The policy: every floating-point tensor goes by the switch, under the name of its kind."""
    if not saved.dtype.is_floating_point:
        return KEEP
    kind = kind_of(saved)
    # names no switch: what a policy reads is part of what it is; lossy, so that queries and keys stay, as with hooks
    return Hook(f"switch({kind})", _Through(kind), _same, lossy=True)


def kind_of(saved: SavedTensor) -> str:
    """What of a block `saved` is. Raises `ValueError` for what the blocks are not known to save."""
    module = saved.module_path.rpartition(".")[2]
    if "scaled_dot_product" in saved.op:
        return "attention output" if len(saved.shape) == 4 else "log-sum-exp"
    if "rsqrt" in saved.op:
        return "reciprocal rms"
    for name, there in {
        "norm output": module.endswith("norm"),
        "w1 output": module == "w1",
        "w3 output": module == "w3",
        "residual": module.isdigit() and "add" in saved.op,
        "silu(w1) * w3": module.isdigit() and "mul" in saved.op,
        "key": "self.k(x)" in saved.source_line,
        "value": "self.v(x)" in saved.source_line,
        "query": module == "attention" and "cat" in saved.op,
        "attention output": "self.out(" in saved.source_line,
    }.items():
        if there:
            return name
    raise ValueError(f"no kind is known for saved {saved.describe()}, made by {saved.op} in {saved.module_path!r}")


# ------------------------------------------------------------------------------------------------------- model and data


class Work:
    """The blocks, what stands around them for text, and gradients by whichever compiled form of the blocks."""

    def __init__(self, device: torch.device, layer_count: int) -> None:
        self.device = device
        self.stack = Stack(layer_count, WIDTH, HEADS, KV_HEADS, HIDDEN, TOKENS).to(device)
        self.embedding = nn.Embedding(256, WIDTH).to(device)
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)).to(device)
        self.blocks = torch.compile(self.stack, backend="aot_hooks", fullgraph=True, options={"inner": "aten"})
        self.x = self.output_gradient = torch.empty(0)
        self.tokens: Tensor | None = None

    def set(self, kind: str, seed: int, training_steps: int) -> None:
        """Weights and data of `kind`, from `seed`."""
        torch.manual_seed(seed)
        for module in (self.stack, self.embedding, self.head):
            for m in module.modules():
                if hasattr(m, "reset_parameters"):
                    m.reset_parameters()
        self.tokens = None
        x = torch.randn(BATCH, TOKENS, WIDTH)
        if kind == "outliers":
            x[..., torch.randperm(WIDTH)[:OUTLIER_CHANNELS]] *= OUTLIER
        elif kind == "cauchy":
            x = torch.distributions.Cauchy(0.0, 1.0).sample(x.shape).clamp(-CAUCHY_LIMIT, CAUCHY_LIMIT)
        self.x = x.to(self.device).requires_grad_()
        self.output_gradient = torch.randn(BATCH, TOKENS, WIDTH).to(self.device)
        if kind == "text":
            self.train(training_steps)

    def train(self, step_count: int) -> None:
        """Some steps in eager mode, without hooks; then the next batch is the data."""
        modules = nn.ModuleList([self.stack, self.embedding, self.head])
        optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-3)
        for _ in range(step_count):
            self.tokens = self.draw()
            self.loss(self.stack).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.tokens = self.draw()

    def draw(self) -> Tensor:
        text = read_text()
        starts = torch.randint(len(text) - TOKENS, (BATCH, 1))
        return text[starts + torch.arange(TOKENS + 1)].long().to(self.device)

    def loss(self, blocks: Callable[[Tensor], Tensor]) -> Tensor:
        if self.tokens is None:
            return (blocks(self.x) * self.output_gradient).sum()
        logits = self.head(blocks(self.embedding(self.tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())

    def gradient(self, policy: Any = by_switch) -> Tensor:
        """float32[number of weights of the blocks], from one forward and backward."""

        def packed(x: Tensor) -> Tensor:
            with aot_hooks.saved_tensors_policy(policy):
                return self.blocks(x)

        self.loss(packed).backward()
        gradient = torch.cat([p.grad.flatten() for p in self.stack.parameters()])
        for module in (self.stack, self.embedding, self.head):
            module.zero_grad(set_to_none=True)
        self.x.grad = None
        return gradient


@functools.cache
def read_text(byte_count: int = 1 << 20) -> Tensor:
    """Bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:byte_count], dtype=torch.uint8)


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(
    work: Work, compared: dict[str, Hook], kinds_of_data: tuple[str, ...], seed_count: int, training_steps: int
) -> dict[str, dict[str, Any]]:
    """For each hook its bytes an element and, for each kind of data, its errors: all packed (a list over the seeds),
    and each kind of tensor alone (of the first seed)."""
    results: dict[str, dict[str, Any]] = {name: {"errors": {}, "alone": {}} for name in compared}
    for data in kinds_of_data:
        for seed in range(seed_count):
            work.set(data, seed, training_steps)
            exact = work.gradient()
            SWITCH.learn(work.blocks)
            if not exact.isfinite().all():
                raise ArithmeticError(f"the exact gradient on {data!r} data is not finite")
            for name, hook in compared.items():
                result = results[name]
                with SWITCH.on(hook):
                    taken = tuple(SWITCH.hooks)
                    error = relative_error(work.gradient(), exact)
                    result["bytes_per_element"] = SWITCH.packed_bytes / SWITCH.element_count
                result["errors"].setdefault(data, []).append(error)
                for kind in taken if seed == 0 else ():
                    with SWITCH.on(hook, (kind,)):
                        alone = relative_error(work.gradient(), exact)
                    result["alone"].setdefault(data, {})[kind] = alone
            print(f"  {data}, seed {seed}: done", flush=True)
    return results


def inlined_difference(work: Work, hook: Hook) -> float:
    """How far the gradient with `hook` inlined as users get it is from that by the switch, relative to the error of
    both; on normal data. Without rounding at random it should be 0."""
    work.set("normal", 0, 0)
    exact = work.gradient()
    SWITCH.learn(work.blocks)
    with SWITCH.on(hook):
        by_operator = work.gradient()
    inlined = work.gradient(aot_hooks.policies.everything(hook))
    return float((inlined - by_operator).norm() / (by_operator - exact).norm())


def format_table(results: dict[str, dict[str, Any]]) -> str:
    """Errors as median (worst) over the seeds; the worst tensor is that which errs most when packed alone."""
    data = list(next(iter(results.values()))["errors"])
    rows = [["hook", "bytes", *data, f"worst tensor alone ({data[0]})"]]
    for name, result in results.items():
        errors = [f"{statistics.median(e):.4f} ({max(e):.4f})" for e in result["errors"].values()]
        kind, alone = max(result["alone"][data[0]].items(), key=lambda item: item[1])
        rows.append([name, f"{result['bytes_per_element']:.3f}", *errors, f"{kind} {alone:.4f}"])
    return format_columns(rows)


def format_markdown(results: dict[str, dict[str, Any]]) -> str:
    """Median errors over the seeds, in the order of the results."""
    data = list(next(iter(results.values()))["errors"])
    lines = [f"| hook | bytes | {' | '.join(data)} | worst tensor alone |", "|---" * (len(data) + 3) + "|"]
    for name, result in results.items():
        errors = " | ".join(f"{statistics.median(e):.4f}" for e in result["errors"].values())
        kind, alone = max(result["alone"][data[0]].items(), key=lambda item: item[1])
        lines.append(f"| {name} | {result['bytes_per_element']:.2f} | {errors} | {kind} {alone:.4f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--hooks", nargs="+", help="names as in the table; default: all")
    parser.add_argument("--training-steps", type=int, default=40, help="before the gradient on text is taken")
    parser.add_argument("--markdown", type=pathlib.Path, help="only print what this file holds as a table")
    options = parser.parse_args(arguments)
    if options.markdown:
        print(format_markdown(json.loads(options.markdown.read_text())["results"]))
        return
    compared = lossy_hooks()
    unknown = set(options.hooks or ()) - set(compared)
    if unknown:
        parser.error(f"no hook {unknown.pop()!r}; there are: {', '.join(compared)}")
    compared = {name: hook for name, hook in compared.items() if not options.hooks or name in options.hooks}
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("highest")
    work = Work(device, options.layers)
    shapes = {"layers": options.layers, "width": WIDTH, "head_width": WIDTH // HEADS, "hidden": HIDDEN}
    header = conditions(
        device, **shapes, batch=BATCH, tokens=TOKENS, seeds=options.seeds, training_steps=options.training_steps
    )
    print(", ".join(f"{k} {v}" for k, v in header.items()), flush=True)
    results = measure(work, compared, tuple(options.data), options.seeds, options.training_steps)
    defaults = [
        aot_hooks.float8(),
        aot_hooks.int8(),
        aot_hooks.int8(32, power_of_two=True),
        aot_hooks.int4(stochastic=False),
    ]
    differences = {hook.name: inlined_difference(work, hook) for hook in defaults if hook.name in compared}
    print(format_table(results))
    print("inlined, difference from the above / error:", ", ".join(f"{n} {d:.1e}" for n, d in differences.items()))
    write(options.json, {"conditions": header, "inlined_difference": differences, "results": results})


if __name__ == "__main__":
    main()
