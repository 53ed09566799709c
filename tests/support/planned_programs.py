"""Random programs, planned by budgets and by hand, for a CPU or for an H200 that is not there.

    python tests/support/planned_programs.py cuda 0 20 1     seeds 0 to 19, a way of each

      seed --> blocks of products, norms, activations, attention, a loss   each with a residual sum, as fake tensors
      planned(program, policy, recompute_pointwise=...)                    the plan; nothing runs
      budget_at(plan)                                                      a peak that leaves no room beside that plan

A CUDA device is made up as in code_peak.py, in a process of its own: the joint graph gets fake CUDA tensors before it
is planned. Prints a list of [seed, way, its peak, its milliseconds, the peak of a budget there, its milliseconds].
"""

from __future__ import annotations

import json
import random
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
from code_peak import H200, on_cuda, pretend_cuda
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks import partitioner
from aot_hooks.graphs import speeds
from aot_hooks.passes.plan import Plan
from aot_hooks.planning.assignment import UNSEEN

HOOKS = {
    "float8": aot_hooks.float8,
    "int8": aot_hooks.int8,
    "int4": aot_hooks.int4,
    "lossless": aot_hooks.lossless,
    "offload": aot_hooks.offload,
    "offload(float8)": lambda: aot_hooks.offload(then=aot_hooks.float8()),
    "offload(int8)": lambda: aot_hooks.offload(then=aot_hooks.int8()),
}


class Part(nn.Module):
    """One part of a block: `kind` says what it computes."""

    def __init__(self, kind: str, width: int, wide: int) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(width) if "layer" in kind else nn.RMSNorm(width)
        gated = "gated" in kind
        attends = "attention" in kind
        self.up = nn.Linear(width, 3 * width if attends else wide, bias=False)
        self.gate = nn.Linear(width, wide, bias=False) if gated else None
        self.down = nn.Linear(width if attends else wide, width, bias=False)
        self.dropout = nn.Dropout(0.1 if "dropout" in kind else 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        if "attention" in self.kind:
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in y.chunk(3, dim=-1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        elif self.gate is not None:
            y = nn.functional.silu(self.gate(self.norm(x))) * y
        else:
            y = nn.functional.relu(y) if "relu" in self.kind else nn.functional.gelu(y)
        return x + self.dropout(self.down(y))


class Program(nn.Module):
    """Blocks of parts, and a loss over words. `checkpointed`: each block computes all again but its input."""

    def __init__(self, seed: int, small: bool) -> None:
        super().__init__()
        choose = random.Random(seed)
        width, words = choose.choice([256, 512]), choose.choice([64, 4096])
        kinds = ["gated", "gelu", "relu layer", "gelu dropout"]
        if not torch.cuda.is_available():  # hooks copy its results, which fake CUDA tensors can't
            kinds += ["attention", "attention layer dropout"]
        parts = [choose.choice(kinds) for _ in range(1 if small else choose.choice([1, 2, 2]))]
        self.checkpointed = False
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Part(kind, width, choose.choice([2, 4]) * width) for kind in parts))
            for _ in range(2 if small else choose.choice([2, 3]))
        )
        self.words = nn.Linear(width, words, bias=False)
        self.shape = choose.choice([2, 8]), choose.choice([512, 1024]), width

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return nn.functional.cross_entropy(self.words(x).float().flatten(0, 1), labels)


@dataclass(frozen=True)
class Made:
    program: Program
    inputs: tuple[torch.Tensor, torch.Tensor]


def made(seed: int, *, small: bool = False) -> Made:
    """The program of `seed`. `small`: with as few parts as there can be."""
    program = Program(seed, small).to(torch.bfloat16)
    batch, length, width = program.shape
    with FakeTensorMode():
        x = torch.empty(batch, length, width, dtype=torch.bfloat16)
        return Made(program, (x, torch.empty(batch * length, dtype=torch.int64)))


def as_on_an_h200() -> None:
    """From now on plans of this process are made as for an H200, see code_peak.py."""
    carry_names = partitioner.carry_names

    def moved(graph: torch.fx.Graph) -> None:
        on_cuda(types.SimpleNamespace(graph=graph, recompile=lambda: None))  # type: ignore[arg-type]
        carry_names(graph)

    pretend_cuda()
    partitioner.carry_names = moved
    speeds._measured = lambda _: H200  # type: ignore[assignment]


def planned(program: Made, policy: Any, *, checkpointed: bool = False, **options: Any) -> Plan:
    """The plan of a step of `program`. It raises `BudgetError` if `policy` is a budget that can't be met."""
    program.program.checkpointed = checkpointed
    torch._dynamo.reset()
    compiled = torch.compile(program.program, backend="aot_hooks", options={"policy": policy, **options})
    return aot_hooks.plan(compiled, *program.inputs)


def by_hand(program: Made, way: str, **options: Any) -> Plan:
    """The plan of a way that a user can type: "float8", "offload(int8), again", "checkpoint"."""
    if way == "checkpoint":
        return planned(program, aot_hooks.KEEP, checkpointed=True, **options)
    hook, _, again = way.partition(", ")
    return planned(program, HOOKS[hook](), recompute_pointwise=bool(again), **options)


def ways(*, sends: bool) -> list[str]:
    hooks = [hook for hook in HOOKS if sends or "offload" not in hook]
    return [*hooks, *(f"{hook}, again" for hook in hooks), "checkpoint"]


def budget_at(plan: Plan, **named: Any) -> Any:
    """A budget of the peak of `plan`, with what a budget leaves free for the allocator."""
    return aot_hooks.budget(f"{int(plan.peak_bytes * (1 + 1.01 * UNSEEN)) + 1}B", **named)


def main(device: str, first: int, last: int, count: int) -> None:
    if device == "cuda":
        as_on_an_h200()
    rows = []
    for seed in range(first, last):
        program = made(seed)
        for way in random.Random(seed).sample(ways(sends=device == "cuda"), count):
            hand = by_hand(program, way)
            max_error = 0.2 if "int4" in way else 0.05
            found = planned(program, budget_at(hand, max_error=max_error))
            rows.append([seed, way, hand.peak_bytes, hand.after_ms, found.peak_bytes, found.after_ms])
            print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
