"""Random training steps on a CPU: ways that a user can type, each at its measured peak, and a budget at that peak.

    python tests/support/fuzz_budgets.py --first 0 --count 20                  programs of these seeds
    python tests/support/fuzz_budgets.py --models --json PATH                  models of transformers
    python tests/support/fuzz_budgets.py --first 17 --count 1 --ways 99        all ways of one program

      seed --> parts, loss, which of them are one compiled graph
      typed(program, way)    steps run: the profiler's bytes, gradients, the time that the plans predict
      budget at those bytes  the same. Never over them, never slower by more than 0.5%, gradients as promised

Times are predicted with the rates of an H200. Copies to the host are tried only in steps of several graphs: on a CPU
they free nothing within one. Prints what is wrong, and a summary. Exit code 0 only if nothing is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import zoo_models
from profiled import most_allocated
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks.graphs import speeds
from aot_hooks.graphs.speeds import Rates
from aot_hooks.offloading import at_run_time
from aot_hooks.planning import candidates

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from measure import conditions

__all__ = ["Made", "Measured", "Row", "as_on_an_h200", "compared", "made", "ways_of"]

H200 = Rates(55e9, 55e9, 3.9e12, 8.2e14, 5.2e13)
STEPS = 6  # until plans of a step of several graphs no longer change
OF_A_THREAD = (
    64 << 10
)  # bytes of buffers that kernels of a CPU take whatever the size of tensors: plans don't count them
SLOWER = 1.005  # times the predicted time of the way
EXACT = ("recompute", "chunk", "lossless", "offload")
HOOKS: dict[str, Callable[[], Any]] = {
    "": lambda: aot_hooks.KEEP,
    "float8": aot_hooks.float8,
    "int8": aot_hooks.int8,
    "int4": aot_hooks.int4,
    "lossless": aot_hooks.lossless,
    "offload": lambda: aot_hooks.offload(across_graphs=True, rates=H200, min_bytes=0),
    "offload(float8)": lambda: aot_hooks.offload(then=aot_hooks.float8(), across_graphs=True, rates=H200, min_bytes=0),
}
MODELS = ("llama", "gemma3", "mixtral", "gpt2", "gpt-neox", "bert", "t5", "vit", "swin", "whisper")
ERRORS = {"float8": 0.05, "int8": 0.05, "int4": 0.2, "offload(float8)": 0.05}


class Mlp(nn.Module):
    def __init__(self, width: int, choose: random.Random) -> None:
        super().__init__()
        wide = choose.choice([2, 4]) * width
        self.norm = choose.choice([nn.LayerNorm, nn.RMSNorm])(width)
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width, bias=False)
        self.activation = choose.choice([F.gelu, F.relu, F.silu, torch.tanh])
        self.dropout = nn.Dropout(choose.choice([0.0, 0.0, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.activation(self.up(self.norm(x)))))


class Gated(nn.Module):
    def __init__(self, width: int, choose: random.Random) -> None:
        super().__init__()
        wide = choose.choice([2, 3, 4]) * width
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Attention(nn.Module):
    def __init__(self, width: int, choose: random.Random) -> None:
        super().__init__()
        self.norm = choose.choice([nn.LayerNorm, nn.RMSNorm])(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.by_hand = choose.random() < 0.3

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
        if self.by_hand:
            y = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """Over tokens, with a norm that has statistics over the batch, or over groups of channels."""

    def __init__(self, width: int, choose: random.Random) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv1d(width, width, 3, padding=1, bias=False) for _ in range(2))
        batch = choose.random() < 0.4
        self.norm = nn.BatchNorm1d(width, track_running_stats=False) if batch else nn.GroupNorm(4, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.norm(self.first(x.transpose(1, 2)))))
        return x + F.silu(y).transpose(1, 2)


PARTS = (Mlp, Gated, Attention, Convolution)
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "words": lambda y, labels: F.cross_entropy(y.float().flatten(0, 1), labels),
    "smoothed": lambda y, labels: F.cross_entropy(y.flatten(0, 1), labels, label_smoothing=0.1),
    "squares": lambda y, labels: y.float().square().mean() + y.float().logsumexp(-1).mean(),
    "binary": lambda y, labels: F.binary_cross_entropy_with_logits(
        y.float().flatten(), (labels % 2).float().repeat(y.shape[-1])
    ),
}


class Head(nn.Module):
    def __init__(self, width: int, words: int, loss: str) -> None:
        super().__init__()
        self.norm, self.words, self.loss = nn.LayerNorm(width), nn.Linear(width, words, bias=False), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return LOSSES[self.loss](self.words(self.norm(x)), labels)


class Block(nn.Module):
    """Parts one after the other. `checkpointed`: the backward computes all again but the block's input."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts, self.checkpointed = nn.Sequential(*parts), False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.parts, x, use_reentrant=False) if self.checkpointed else self.parts(x)


class Model(nn.Module):
    def __init__(self, blocks: Sequence[Block], head: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), head

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x, labels)


@dataclass
class Made:
    """A program with its inputs.

    Attributes:
        loss: runs the program, compiled or not.
        inputs: those that get a gradient.
        calls: the compiled parts of a step in the order of their calls; the whole program, if it is one graph.
        named: what is in it, for people.
    """

    program: nn.Module
    loss: Callable[[Any], Tensor]
    inputs: list[Tensor]
    calls: list[nn.Module]
    named: str

    @property
    def one(self) -> bool:
        return self.calls == [self.program]


def made(seed: int) -> Made:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    width, words = choose.choice([32, 64]), choose.choice([32, 256, 1024])
    batch, length = choose.choice([2, 4, 8]), choose.choice([64, 128])
    dtype = choose.choice([torch.float32, torch.float32, torch.bfloat16])
    graphs = choose.choice(["one", "blocks", "blocks"])
    kinds = [choose.choice(PARTS) for _ in range(choose.choice([1, 1, 2]))]
    count = choose.choice([2, 3]) if graphs == "one" else choose.choice([3, 4, 6, 8])
    state = choose.getstate()
    blocks: list[Block] = []
    for _ in range(count):  # blocks are alike
        choose.setstate(state)
        blocks.append(Block([kind(width, choose) for kind in kinds]))
    sharing = choose.choice(["", "", "a block", "a weight"])
    if sharing == "a block":
        blocks[1] = blocks[0]
    elif sharing == "a weight":
        ours, theirs = (next(m for m in b.modules() if isinstance(m, nn.Linear | nn.Conv1d)) for b in blocks[:2])
        theirs.weight = ours.weight
    loss = choose.choice([*LOSSES])
    model = Model(blocks, Head(width, words, loss)).to(dtype)
    x = torch.randn(batch, length, width, dtype=dtype, requires_grad=choose.random() < 0.5)
    labels = torch.randint(words, (batch * length,))
    calls: list[nn.Module] = [model] if graphs == "one" else [*blocks, model.head]
    named = [f"{count} x {'+'.join(kind.__name__ for kind in kinds)}", f"{batch}x{length}x{width} to {words}", loss]
    found = [x] if x.requires_grad else []
    return Made(model, lambda run: run(x, labels), found, calls, ", ".join([*named, str(dtype)[6:], graphs, sharing]))


def model(name: str) -> Made:
    """A model of zoo_models.py, small and with random weights, as one graph."""
    work = zoo_models.MODELS[name]()
    return Made(work.module, work.loss, [], [work.module], name)


# --- a step and what it takes -----------------------------------------------------------------------------------------


@dataclass
class Measured:
    """`ms` of a step as the plans predict it; None where copies to the host hold it up, which its plans don't know."""

    peak_bytes: int
    ms: float | None
    predicted_peak_bytes: int
    gradients: list[Tensor] = field(repr=False)
    means: str = ""


def run(program: Made, policy: Any, *, checkpointed: bool = False, steps: int = STEPS, **options: Any) -> Measured:
    """Some steps of `program` under `policy`. The last one is measured. It starts with no gradients."""
    torch._dynamo.reset()
    aot_hooks.reset()
    for part in program.program.modules():
        if isinstance(part, Block):
            part.checkpointed = checkpointed
    if checkpointed and not isinstance(program.program, Model):
        program.program.gradient_checkpointing_enable({"use_reentrant": False})
    options = {"inner": "aten", "policy": policy, **options}
    one = torch.compile(program.program, backend="aot_hooks", options=options) if program.one else None
    for part in [] if program.one else dict.fromkeys(program.calls):
        part.compile(backend="aot_hooks", options=options)
    whole = program.program if one is None else one
    leaves = [*program.inputs, *(p for p in program.program.parameters() if p.requires_grad)]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.manual_seed(1)
        program.loss(whole).backward()

    try:
        for _ in range(steps):  # a program with a graph break has several graphs, too
            step()
        gradients = [torch.empty(0) if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        with tempfile.TemporaryDirectory() as folder:
            peak = most_allocated(step, Path(folder))
        return Measured(peak, *_predicted(program, one), gradients, _means(program, one))
    finally:
        for part in program.calls:
            part._compiled_call_impl = None
        if checkpointed and not isinstance(program.program, Model):
            program.program.gradient_checkpointing_disable()
        for leaf in leaves:
            leaf.grad = None


def _plans(program: Made, one: Any) -> list[Any]:
    """The plan of each call. Blocks that share a graph have its plan once, at the first of them."""
    if one is not None:
        return list(aot_hooks.last_plans(one))
    found: list[Any] = []
    for part in program.calls:
        own = aot_hooks.last_plans(part)
        found.append(own[-1] if own else found[-1])
    return found


def _predicted(program: Made, one: Any) -> tuple[float | None, int]:
    plans = _plans(program, one)
    sends = any(plan.transfers for plan in plans) and not any(plan.in_step for plan in plans)
    return None if sends else sum(plan.after_ms for plan in plans), max(plan.peak_bytes for plan in plans)


def _means(program: Made, one: Any) -> str:
    reasons = {d.reason.split(";")[0] for plan in _plans(program, one) for d in plan.decisions}
    return " | ".join(sorted(reason[8:] for reason in reasons if reason.startswith("budget: ")))[:200]


# --- ways and budgets -------------------------------------------------------------------------------------------------


def ways_of(program: Made) -> list[str]:
    hooks = [hook for hook in HOOKS if not program.one or "offload" not in hook]
    return [*hooks, *(f"{hook}, again" for hook in hooks), "checkpoint"]


def drawn(program: Made, seed: int, count: int) -> list[str]:
    """`count` ways, half of them exact: those cost least time where nothing fuses what packs."""
    draw = random.Random(seed)
    names = ways_of(program)
    exact = [way for way in names if way and way.partition(", ")[0] not in ERRORS]
    found = [draw.choice(exact if draw.random() < 0.5 else names) for _ in range(count)]
    return list(dict.fromkeys(names if count >= len(names) else found))


def typed(program: Made, way: str) -> Measured:
    """A way that a user can type: "float8", "offload(float8), again", "checkpoint"; "" keeps all."""
    if way == "checkpoint":
        return run(program, aot_hooks.KEEP, checkpointed=True)
    hook, _, again = way.partition(", ")
    return run(program, HOOKS[hook](), steps=3, recompute_pointwise=bool(again))


@dataclass
class Row:
    """A way, and the budget at its peak. `wrong`: what is wrong with the budget; "" if nothing is.

    Plans of a CPU count upper bounds of what convolutions take inside. So `peak_bytes` is what was predicted of the way
    where that is more than `measured_bytes`.
    """

    seed: int
    program: str
    way: str
    peak_bytes: int
    ms: float | None
    measured_bytes: int = 0
    budget_peak_bytes: int = 0
    budget_ms: float | None = None
    budget_predicted_bytes: int = 0
    error: float = 0.0
    means: str = ""
    wrong: str = ""


def compared(program: Made, seed: int, ways: Sequence[str]) -> Iterator[Row]:
    """A row for each of `ways`, and what is not monotone among the budgets."""
    stock = typed(program, "")
    found: list[tuple[float, int, Row]] = []
    for way in ways:
        hand = stock if not way else typed(program, way)
        max_error = ERRORS.get(way.partition(", ")[0], 0.0)
        row = Row(seed, program.named, way, max(hand.peak_bytes, hand.predicted_peak_bytes), hand.ms, hand.peak_bytes)
        try:
            budget = aot_hooks.budget(f"{row.peak_bytes}B", max_error=max_error)
            ours = run(program, budget)
        except Exception as e:
            row.wrong = f"raises {str(e).strip().splitlines()[0][:400]}"
            yield row
            continue
        row.budget_peak_bytes, row.budget_ms, row.means = ours.peak_bytes, ours.ms, ours.means
        row.budget_predicted_bytes = ours.predicted_peak_bytes
        row.error = _distance(ours.gradients, stock.gradients)
        row.wrong = "; ".join(_wrong(row, max_error, exact=_equal(ours.gradients, stock.gradients)))
        for error, peak, other in found:
            lower, higher = (row, other) if row.peak_bytes < peak else (other, row)
            if error == max_error and lower.budget_ms and (higher.budget_ms or 0.0) > SLOWER * lower.budget_ms:
                row.wrong += f"; slower at {higher.peak_bytes} than at {lower.peak_bytes}: {higher.budget_ms:.5f} ms"
        found.append((max_error, row.peak_bytes, row))
        yield row


def _wrong(row: Row, max_error: float, *, exact: bool) -> Iterator[str]:
    if row.budget_peak_bytes > row.peak_bytes + OF_A_THREAD:
        yield f"over the peak by {row.budget_peak_bytes - row.peak_bytes}"
    if row.ms is not None and (row.budget_ms is None or row.budget_ms > SLOWER * row.ms):
        yield f"slower: {row.budget_ms} ms in place of {row.ms:.5f}"
    if not max_error and not exact:
        yield f"other gradients, by {row.error:.2g}"
    if row.error > max(max_error, 0.0) and max_error:
        yield f"an error of {row.error:.3f}"


def _equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    f, e = (torch.cat([t.float().flatten() for t in each]) for each in (found, expected))
    return float((f - e).norm() / e.norm())


def as_on_an_h200() -> None:
    """From now on a CPU counts as fast as an H200, with copies beside the compute. Its clock ticks with each event.

    Not for the copies that stand in a graph, those of inputs of blocks: on a CPU they free nothing. A step was planned
    with 13,300,401 bytes and took 13,512,712.
    """
    speeds.INSTANT = H200
    candidates._link = lambda graphs: H200
    candidates._MIN_BYTES = 0
    ways = candidates.ways
    candidates.ways = lambda *means: [way for way in ways(*means) if not (way.sends and way.again == candidates.BLOCKS)]
    clock = itertools.count(0.0, 2e-5)
    at_run_time._mark = lambda device: next(clock)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--ways", type=int, default=2, help="of each program; drawn by its seed")
    parser.add_argument("--models", action="store_true", help="models of transformers in place of random programs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    as_on_an_h200()
    last = min(options.first + options.count, len(MODELS) if options.models else sys.maxsize)
    rows: list[Row] = []
    for seed in range(options.first, last):
        program = model(MODELS[seed]) if options.models else made(seed)
        try:
            for row in compared(program, seed, drawn(program, seed, options.ways)):
                rows.append(row)
                print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
        except Exception:
            rows.append(Row(seed, program.named, "", 0, None, wrong=f"the way raises {traceback.format_exc()[-600:]}"))
            print(rows[-1].wrong, file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(result(rows), indent=1) + "\n")
    wrong = sorted({row.seed for row in rows if row.wrong})
    print(f"{len(rows)} budgets, wrong ones of seeds {wrong}")
    return bool(wrong)


def result(rows: Sequence[Row]) -> dict[str, Any]:
    faster = [row.budget_ms / row.ms for row in rows if row.ms and row.budget_ms]
    return {
        "header": conditions(torch.device("cpu")),
        "programs": len({row.seed for row in rows}),
        "budgets": len(rows),
        "failing_seeds": sorted({row.seed for row in rows if row.wrong}),
        "time_over_the_way": {"median": statistics.median(faster), "most": max(faster)} if faster else {},
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
