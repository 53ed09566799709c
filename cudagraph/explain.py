"""What would be captured of a function, and what is in the way, as data.

fn, args --Dynamo, AOTAutograd--> forward, backward or inference graphs --graphs.look--> Explanation

`graphs.look` is what the backend goes by, too: what is said here is what happens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from .backend import Compilation
from .graph import analyse
from .graph.analyse import Analysis, Boxed, Kind, boxed
from .graph.blockers import Blocker
from .options import Options
from .placeholder import source_line
from .torch_private import compilers
from .tree.driver import CaptureDriver, cuda_driver

__all__ = ["ExplainedPart", "Explanation", "explain"]


@dataclass(frozen=True)
class ExplainedPart:
    """A part of a graph, in the order they run.

    Attributes:
        graph: the graph it is of: "forward 0", "backward 0", "inference 1"; numbered in the order they are compiled.
        captured: whether it would be a CUDA graph.
        op_count: how many operators it has that launch something.
        input_count, output_count: tensors and numbers that go in and come out.
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
    """What `explain` found; `str()` of it is for people.

    Attributes:
        parts: of all graphs, in order. A graph that is captured whole has one.
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
        return format_explanation(self)


def format_explanation(found: Explanation) -> str:
    """Text: a line a part under each graph, then a line a blocker."""
    if not found.parts:
        return "no graph was compiled: nothing to capture"
    lines: list[str] = []
    for name in dict.fromkeys(part.graph for part in found.parts):
        parts = [part for part in found.parts if part.graph == name]
        captured = sum(part.captured for part in parts)
        blockers = [blocker for blocker in found.blockers if blocker.graph == name]
        if captured == len(parts) == 1:
            told = "captured whole"
        else:
            told = f"{captured} of {len(parts)} parts captured"
        lines.append(f"{name}: {told}")
        for part in parts:
            where = part.first_line if part.first_line == part.last_line else f"{part.first_line} ... {part.last_line}"
            kind = "captured " if part.captured else "as it is "
            plural = "" if part.op_count == 1 else "s"
            lines.append(f"  {kind} {part.op_count:4} operator{plural}  {where}".rstrip())
        lines += [f"  blocked: {blocker}" for blocker in blockers]
    return "\n".join(lines)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What of `fn(*args, **kwargs)` would be captured under `torch.compile(fn, backend="cudagraph_tree")`, and why not
    the rest. Its backward graphs are looked at too.

    `fn` runs once, as its compiled graphs without captures would: what it writes to is written to. No backward runs.
    With Inductor the parts may be others, because it cuts its own code; the blockers are the same.
    """
    return explain_with(None, fn, args, kwargs)


def explain_with(
    driver: CaptureDriver | None, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Explanation:
    """`explain` for another driver than CUDA's."""
    found: list[Analysis] = []
    options = Options()
    fn = compilers.uncompiled(fn)
    graph_count = 0

    def look(gm: GraphModule, kind: Kind, device_type: str) -> None:
        found.append(analyse.look(gm, kind, options, device_type))

    def explaining(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal graph_count
        compilation = Compilation(options, driver, number=graph_count)
        graph_count += 1

        def as_it_is(graph: GraphModule, _: Any) -> Boxed:
            return boxed(graph)

        def inference(graph: GraphModule, given: Any) -> Boxed:
            look(graph, compilation.kind(graph, is_inference=True), compilation.device_type)
            return as_it_is(graph, given)

        backwards: list[GraphModule] = []

        def partition(joint: GraphModule, given: Any, **said: Any) -> tuple[GraphModule, GraphModule]:
            fw, bw = compilers.min_cut_partition(joint, given, **said)
            backwards.append(bw)  # AOTAutograd may not compile it before a backward runs
            return fw, bw

        def forward(graph: GraphModule, _: Any) -> Boxed:
            look(graph, compilation.kind(graph), compilation.device_type)
            look(backwards[-1], compilation.kind(backwards[-1], is_backward=True), compilation.device_type)
            return as_it_is(graph, _)

        return compilers.compile_aten(
            gm, inputs, forward=forward, backward=as_it_is, inference=inference, partition=partition
        )

    def program(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    # a code object of its own each time: what Dynamo stores for it counts for no other function
    program.__code__ = program.__code__.replace(co_name="explained")
    torch.compile(program, backend=explaining)(*args, **kwargs)
    refusal = None
    if any(analysis.captured_count for analysis in found):
        refusal = (driver or cuda_driver()).why_not()
    blockers = [dataclasses.replace(b, graph=a.kind.name) for a in found for b in a.blockers]
    if refusal is not None:
        blockers += [Blocker(refusal, "", "", graph=a.kind.name) for a in found if a.captured_count]
    return Explanation(
        parts=tuple(part for analysis in found for part in _parts(analysis, captures=refusal is None)),
        blockers=tuple(blockers),
    )


def _parts(analysis: Analysis, *, captures: bool) -> list[ExplainedPart]:
    parts = []
    for part in analysis.parts:
        lines = list(filter(None, (source_line(node.meta.get("stack_trace")) for node in part.nodes))) or [""]
        parts.append(
            ExplainedPart(
                graph=analysis.kind.name,
                captured=part.captured and captures,
                op_count=part.kernel_count,
                input_count=len(part.inputs),
                output_count=len(part.outputs),
                first_line=lines[0],
                last_line=lines[-1],
            )
        )
    return parts
