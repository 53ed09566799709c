"""Inductor's compiled graphs, captured.

    fx graph --analysed--> AnalysedGraph, and Inductor's code --+
    torch's cache, see entry.py: AnalysedGraph, and the code --+--captured--> the callable for AOTAutograd
                                                            in one piece if there are no blockers; else the pieces
                                                            that Inductor's scheduler cut around them

Inductor is told not to make CUDA graphs itself. Mutated inputs, constants and pieces are read off its compiled graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

from torch.fx import GraphModule

from .. import counters
from ..graph.analyse import Kind, prepare_and_analyse, refuse_or_warn, report
from ..graph.blockers import WRITES_TO_CALLER
from ..options import Options
from ..placeholder import PlaceholderInfo
from ..torch_private import compilers
from ..tree import dispatch
from ..tree.driver import CaptureDriver
from ..tree.function import Piece
from .entry import AnalysedGraph, analysed_graph
from .pieces import Boxed, uncaptured


def analysed(gm: GraphModule, kind: Kind, options: Options, device_type: str) -> AnalysedGraph:
    """What can be captured of `gm`. Call it before Inductor's passes change `gm`. Raises `NotCapturableError`."""
    # Inductor moves CPU numbers itself.
    analysis = prepare_and_analyse(gm, kind, options, device_type, numbers=False)
    # Inductor's kernels write to inputs in the middle of the code; the tree finds out whose memory that is.
    blocked = tuple(b for b in analysis.blockers if b.cause != WRITES_TO_CALLER)
    analysis = dataclasses.replace(analysis, blockers=blocked)
    if options.or_error:
        report(analysis, options)  # before compiling in vain
    return analysed_graph(gm, kind, analysis)


def captured(code: Any, found: AnalysedGraph, options: Options, driver: CaptureDriver) -> Any:
    """The callable that AOTAutograd gets for `code`: `code` itself, with its pieces captured. Code in one piece is
    replaced by the tree's own callable, because `code` takes 3 us a call for profilers and metrics."""
    graph = _capturable(code, found, options)
    if graph is not None and not found.verdict.blockers:
        run = dispatch.capture(dataclasses.replace(graph, run=compilers.callable_of(code)), options, driver)
        run.code = code  # type: ignore[attr-defined]  # kept alive with its callable
        compilers.stored_as(run, code)
        return run
    maps = () if graph is None else compilers.partitions_of(code) or ()
    report(found.verdict, options, captured_count=len(maps))
    if graph is not None and maps:
        counters.add("partitions")
        compilers.set_callable(code, capture_partitions(code, graph, maps, options, driver))
    elif not found.verdict.idle:
        compilers.set_callable(code, uncaptured(compilers.callable_of(code)))
    return code


def _capturable(code: Any, found: AnalysedGraph, options: Options) -> Piece | None:
    """The whole graph of `code`, without its `run`. None if there is nothing to capture, or if Inductor has a reason
    against it, which is a warning."""
    if found.piece is None:
        return None
    if (reason := compilers.reason_of_inductor(code)) is not None:
        what = f"{found.piece.name} can't be captured; Inductor says: {reason}"
        refuse_or_warn(what, "it runs as it is", (reason,), options)
        return None
    return dataclasses.replace(
        found.piece, mutated_inputs=compilers.mutated_inputs(code), constants=compilers.constants_of(code)
    )


def capture_partitions(
    code: Any, graph: Piece, maps: Sequence[compilers.PartitionMap], options: Options, driver: CaptureDriver
) -> Boxed:
    """A callable that runs Inductor's `code` with each of its pieces captured. `graph` describes all of it."""

    def capturing(piece: Piece) -> Callable[[Boxed], Boxed]:
        return lambda run: dispatch.capture(dataclasses.replace(piece, run=run), options, driver)

    run = compilers.with_partitions(code, list(map(capturing, pieces_of(graph, maps))))
    return dispatch.in_parts(run, graph.device, driver)


def pieces_of(graph: Piece, maps: Sequence[compilers.PartitionMap]) -> list[Piece]:
    """Descriptions of Inductor's pieces of `graph`; the caller replaces their `run`.

    `maps` say which of a piece's inputs and outputs are the graph's. A piece takes sizes last; no map has them.
    """
    return [_piece_of(graph, part, f"{graph.name}, part {i} of {len(maps)}") for i, part in enumerate(maps, 1)]


def _piece_of(graph: Piece, part: compilers.PartitionMap, name: str) -> Piece:
    def inputs_in(of_graph: Container[int | None]) -> tuple[int, ...]:
        return tuple(i for i, theirs in enumerate(part.inputs) if theirs in of_graph)

    saved = graph.saved_outputs
    if saved is not None:
        saved = tuple(i for i, theirs in enumerate(part.outputs) if not set(theirs).isdisjoint(saved))
    return dataclasses.replace(
        graph,
        name=name,
        static_inputs=inputs_in(graph.static_inputs),
        mutated_inputs=inputs_in(graph.mutated_inputs),
        unread_inputs=inputs_in(graph.unread_inputs),
        reusable_inputs=inputs_in((None,)),
        placeholders=tuple(
            PlaceholderInfo(f"input {i} of {name}") if theirs is None else graph.placeholders[theirs]
            for i, theirs in enumerate(part.inputs)
        ),
        output_traces=tuple(graph.output_traces[theirs[0]] if theirs else None for theirs in part.outputs),
        saved_outputs=saved,
    )
