"""Explains which parts of a function would be captured, and which operators block a capture.

fn, args --Dynamo, AOTAutograd--> forward, backward or inference graphs --prepare_and_analyse--> Explanation

The backend calls the same function, so what is explained is what happens. A whole step is explained by step/waits.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch.fx import GraphModule

from .compile.compilation import Compilation
from .compile.pieces import Boxed
from .graph.analyse import Analysis, prepare_and_analyse
from .graph.blockers import Blocker
from .graph.partition import Part
from .graph.snapshots import partition
from .options import Options
from .placeholder import source_line, trace_of
from .step.waits import StepExplanation, explain_step
from .step.whole import WholeStep
from .torch_private import compilers
from .torch_private.cuda import boxed
from .tree.driver import CaptureDriver, cuda_driver


@dataclass(frozen=True)
class ExplainedPart:
    """One part of a graph.

    Attributes:
        graph: its graph's name: "forward 0", "backward 0", "inference 1"; numbered in the order of compilation.
        captured: whether it would be a CUDA graph.
        op_count: how many of its operators launch something.
        input_count, output_count: how many tensors and numbers go in and come out.
        first_line, last_line: the user's lines of its first and last operator, "" if unknown.
    """

    graph: str
    captured: bool
    op_count: int
    input_count: int
    output_count: int
    first_line: str
    last_line: str


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str()` gives text for people.

    Attributes:
        parts: the parts of all graphs, in the order they run. A graph that is captured whole has one part.
        blockers: the operators that can't be captured, with their reasons and lines.
    """

    parts: tuple[ExplainedPart, ...]
    blockers: tuple[Blocker, ...]

    @property
    def captured_whole(self) -> bool:
        """Whether every graph is one part, captured."""
        names = [part.graph for part in self.parts]
        return bool(names) and len(names) == len(set(names)) and all(part.captured for part in self.parts)

    def __str__(self) -> str:
        """Text with one line for each part, under its graph, then one line for each blocker."""
        lines: list[str] = []
        for name in dict.fromkeys(part.graph for part in self.parts):
            parts = [part for part in self.parts if part.graph == name]
            captured = sum(part.captured for part in parts)
            whole = captured == len(parts) == 1
            lines.append(f"{name}: captured whole" if whole else f"{name}: {captured} of {len(parts)} parts captured")
            lines += map(_line, parts)
            lines += [f"  blocked: {blocker}" for blocker in self.blockers if blocker.graph == name]
        return "\n".join(lines) or "no graph was compiled: nothing to capture"


def _line(part: ExplainedPart) -> str:
    where = part.first_line if part.first_line == part.last_line else f"{part.first_line} ... {part.last_line}"
    kind = "captured " if part.captured else "as it is "
    return f"  {kind} {part.op_count:4} operator{'' if part.op_count == 1 else 's'}  {where}".rstrip()


@overload
def explain(fn: WholeStep, *args: Any, **kwargs: Any) -> StepExplanation: ...
@overload
def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation: ...
def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation | StepExplanation:
    """Explain which parts of `fn(*args, **kwargs)` `torch.compile(fn, backend="cudagraph_tree")` would capture.

    Forward and backward graphs are analysed, and each blocker comes with its reason. `fn` runs once, uncaptured, with
    its side effects; no backward runs. With Inductor the parts may differ, because it cuts its own code. The blockers
    are the same.

    If `fn` is a whole step, it is called once as it is, which is a real step, and what is explained is how long the
    device waited for the host, and in which lines. Call it a few times before: first calls compile and warm up.
    """
    if isinstance(fn, WholeStep):
        return explain_step(fn, args, kwargs)
    return explain_with(cuda_driver(), fn, args, kwargs)


def explain_with(
    driver: CaptureDriver, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Explanation:
    """`explain` for captures by `driver`."""
    found: list[Analysis] = []
    options = Options()
    fn = compilers.uncompiled(fn)
    numbers = itertools.count()

    def explaining(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compilation = Compilation(options, driver, number=next(numbers))
        backwards: list[GraphModule] = []

        def partitioned(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
            fw, bw = partition(joint, joint_inputs, **kwargs)
            backwards.append(bw)  # AOTAutograd may not compile it before a backward runs
            return fw, bw

        def compiling(*phases: str) -> Callable[[GraphModule, Any], Boxed]:
            def analyse(graph: GraphModule, _: Any) -> Boxed:
                for phase in phases:
                    of = backwards[-1] if phase == "backward" else graph
                    kind = compilation.kind(of, phase)
                    found.append(prepare_and_analyse(of, kind, options, driver.device_type))
                return boxed(graph)

            return analyse

        forward, backward, inference = compiling("forward", "backward"), compiling(), compiling("inference")
        return compilers.compile_aten(
            gm, inputs, forward=forward, backward=backward, inference=inference, partition=partitioned
        )

    def program(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    # A new code object each time: Dynamo keeps its caches and limits by code object.
    program.__code__ = program.__code__.replace(co_name="explained")
    torch.compile(program, backend=explaining)(*args, **kwargs)
    to_capture = [analysis for analysis in found if analysis.captured_count]
    refusal = driver.why_not() if to_capture else None
    blockers = [dataclasses.replace(b, graph=a.kind.name) for a in found for b in a.blockers]
    if refusal is not None:
        blockers += [Blocker(refusal, "", "", graph=a.kind.name) for a in to_capture]
    parts = tuple(_explained(part, a.kind.name, refusal is None) for a in found for part in a.parts)
    return Explanation(parts, tuple(blockers))


def _explained(part: Part, graph: str, captures: bool) -> ExplainedPart:
    lines = list(filter(None, (source_line(trace_of(node)) for node in part.nodes))) or [""]
    counts = part.kernel_count, len(part.inputs), len(part.outputs)
    return ExplainedPart(graph, part.captured and captures, *counts, lines[0], lines[-1])
