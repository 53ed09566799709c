"""What fuzz_chunk.py and fuzz_tile.py share: how a random program is computed, judged and reported.

      case --> computed(...), compiled with the option            --> judged(...) --> Outcome --> summary(...)
           \\-> traced(...), then the pass alone in the fuzzer   -/

Gradients are compared with those of the same module in eager mode, by the distance of both to float64.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._decomp import get_decompositions
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import aot_hooks
from aot_hooks.errors import UnusedWarning

DECOMPOSED = get_decompositions([torch.ops.aten.t, torch.ops.aten.embedding_dense_backward])
EPS = {torch.float32: 8e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ROWS = {"chunk": "chunked", "tile": "tiled"}  # attributes of a plan, by the option


@dataclass(frozen=True)
class Case:
    """What a random program is made of. Each fuzzer adds its own parts."""

    seed: int
    shape: tuple[int, ...]  # of the tokens
    dtype: torch.dtype
    autocast: bool
    dynamic: bool


Run = Callable[[Any, Any, Any, bool], list[torch.Tensor]]  # of program, callable, case, autocast: its results


class Computed(NamedTuple):
    """`results`: outputs, then gradients. `rows`: those of the plans. `said`: the warnings that concern the option."""

    results: list[torch.Tensor]
    rows: list[Any]
    said: list[str]


@dataclass(frozen=True)
class Outcome:
    """`done`: a part is in chunks or tiles. `why`: the reasons why one is not. `wrong`: what is wrong, or ""."""

    case: Any
    done: bool
    why: str
    wrong: str
    ratio: float  # the distance of its gradients to float64 over eager mode's


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / (exact.double().norm() + 1e-9))


def tangent_of(out: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """A gradient of `out` whose elements differ."""
    return (torch.linspace(0.5, 1.5, out.numel()).view(out.shape) * scale).to(out.dtype)


def computed(program: nn.Module, run: Run, case: Case, inner: str, option: tuple[str, Any]) -> Computed:
    """What `run` finds with the compiled program. `option`: "chunk" or "tile", and its value."""
    torch._dynamo.reset()
    name, value = option
    options = {"inner": inner, name: value, "policy": aot_hooks.KEEP}
    compiled = torch.compile(program, backend="aot_hooks", options=options, dynamic=case.dynamic or None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnusedWarning)
        found = run(program, compiled, case, case.autocast)
    rows = [row for plan in aot_hooks.last_plans(compiled) for row in getattr(plan, ROWS[name])]
    return Computed(found, rows, [str(w.message) for w in caught if f"options[{name!r}]" in str(w.message)])


def state_of(program: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The parameters, and the names of those that are trained."""
    parameters = dict(program.named_parameters())
    return {name: p.detach() for name, p in parameters.items()}, [n for n, p in parameters.items() if p.requires_grad]


def traced(joint: Callable[..., Any], *args: Any, tangents: int, table: Any = None) -> GraphModule:
    """The joint graph, as AOTAutograd would hand it over. The last `tangents` inputs are gradients of outputs.

    `table`: decompositions; None takes a few, as for `inner="aten"`.
    """
    gm = make_fx(joint, decomposition_table=table or DECOMPOSED, tracing_mode="fake")(*args)
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")[-tangents:]):
        node.name = node.target = f"tangents_{i + 1}"  # AOTAutograd's name
    gm.recompile()
    return gm


def judged(
    program: nn.Module, run: Run, case: Case, found: Computed, *, expected: Collection[bool], needs_reason: bool = True
) -> Outcome:
    """`expected`: which values `Outcome.done` may have. `needs_reason`: whether a row or a warning must say why."""
    wrong, ratio = compared(program, run, case, found.results)
    done = any(row.done for row in found.rows)
    if needs_reason and not found.rows and not found.said:
        wrong = wrong or "left alone without a reason"
    if done not in expected:
        wrong = wrong or f"{'not ' if done else ''}left alone, expected otherwise"
    why = "; ".join(str(row) for row in found.rows if not row.done) or "; ".join(found.said)
    return Outcome(case, done, why, wrong, ratio)


def compared(program: nn.Module, run: Run, case: Case, found: list[torch.Tensor]) -> tuple[str, float]:
    """What is wrong with the results, and the distance of the gradients to float64 over eager mode's."""
    exact = run(wide := copy.deepcopy(program).double(), wide, case, False)
    eager = run(same := copy.deepcopy(program), same, case, case.autocast)
    wrong = "" if len(found) == len(exact) else f"{len(found)} results, expected {len(exact)}"
    eps = EPS[torch.bfloat16 if case.autocast else case.dtype]
    total = [0.0, 0.0]
    for i, (a, b, c) in enumerate(zip(found, eager, exact, strict=False)):
        if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
            wrong = wrong or f"result {i}: {a.dtype}{[*a.shape]}, expected {b.dtype}{[*b.shape]}"
            continue
        mine, theirs = distance(a, c), distance(b, c)
        if i >= len(exact) - sum(p.requires_grad for p in program.parameters()):
            total[0], total[1] = total[0] + mine, total[1] + theirs
        if not mine <= 1.5 * theirs + eps / 2:  # two or three roundings: biases are sums of eight rounded numbers
            wrong = wrong or f"result {i}: {mine:.2e} from float64, eager mode {theirs:.2e}"
    return wrong, total[0] / total[1] if total[1] else 1.0


def main(generate: Callable[[int], Any], outcomes_of: Callable[..., list[Outcome]], parts: str, by: str) -> None:
    """Run the cases that the command line names, and print their summary.

    Args:
        outcomes_of: makes outcomes of a case, and of the options `joint`, `decomposed` and `inner` of the command line.
        parts, by: see `summary`.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--inner", default="aten")
    parser.add_argument("--joint", action="store_true")
    parser.add_argument("--decomposed", action="store_true", help="joint graphs for Inductor on CUDA; of chunks alone")
    parser.add_argument("--out", help="a file for the result")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    for case in map(generate, range(options.first, options.first + options.count)):
        try:
            found = outcomes_of(case, options)
        except Exception as e:
            found = [Outcome(case, False, "", f"{type(e).__name__}: {str(e)[:300]}", 1.0)]
        for outcome in found:
            if outcome.wrong or options.verbose:
                print(outcome, flush=True)
        outcomes += found
    text = json.dumps({"first": options.first, **summary(outcomes, parts, by)}, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(f"{text}\n")


def summary(outcomes: list[Outcome], parts: str, by: str) -> dict[str, Any]:
    """What is reported of the outcomes. `parts`: "chunks" or "tiles". `by`: an attribute of cases, to count by."""
    done = [o for o in outcomes if o.done]
    ratios = sorted(o.ratio for o in done)
    counted = {
        value: [o.done for o in outcomes if getattr(o.case, by) == value]
        for value in sorted({getattr(o.case, by) for o in outcomes})
    }
    return {
        "programs": len(outcomes),
        f"in_{parts}": len(done),
        "left_alone": len(outcomes) - len(done),
        "failing_seeds": sorted({o.case.seed for o in outcomes if o.wrong}),
        "distance_to_float64_over_eager": {
            "median": round(ratios[len(ratios) // 2], 3) if ratios else None,
            "most": round(max(ratios, default=0), 3),
        },
        f"by_{by}": {value: [sum(each), len(each)] for value, each in counted.items()},
    }
