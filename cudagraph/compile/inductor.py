"""Inductor's compiled graphs, captured.

    fx graph ----look----> Found, and Inductor's code --+
    torch's cache, see entry.py: Found, and the code ---+--finish--> the callable
                                                            nothing in the way: captured in one piece
                                                            something is: Inductor's scheduler cut the code around it,
                                                              and its pieces are captured
                                                            nothing to capture: as Inductor leaves it

Inductor makes no CUDA graphs itself. The compiled graph has its mutated inputs, its constants, and its pieces, with
the inputs and outputs of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from .. import counters
from ..graph import analyse
from ..graph.analyse import Boxed, Kind, report, tell, uncaptured
from ..options import Options
from ..placeholder import PlaceholderInfo
from ..torch_private import compilers
from ..tree import dispatch
from ..tree.dispatch import Piece
from ..tree.driver import CaptureDriver
from .entry import Found, found_of

if TYPE_CHECKING:
    from ..backend import Compilation

__all__ = ["capture_partitions", "finish", "inner_compile", "pieces_of"]


def inner_compile(compilation: Compilation, inner: Callable[..., Any]) -> Callable[..., Any]:
    """An `inner_compile` for Inductor that compiles with `inner` and captures what comes out."""

    def compile_graph(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        kind = compilation.kind(
            gm,
            is_backward=bool(kwargs.get("is_backward")),
            is_inference=bool(kwargs.get("is_inference")),
            static=kwargs.get("static_input_idxs"),
        )
        found = look(gm, kind, compilation)
        with compilers.inductor_capture_settings(cut=bool(found.verdict.blockers)):
            code = inner(gm, inputs, **{**kwargs, "cudagraphs": compilers.no_cudagraphs()})
        if not compilers.is_compiled_graph(code):
            return code
        if compilation.store is not None:
            compilation.store.keep(found)
        return finish(code, found, compilation)

    return compile_graph


def look(gm: GraphModule, kind: Kind, compilation: Compilation) -> Found:
    """Analyse `gm`, and prepare it for capture. Raises `NotCapturableError` with `or_error`."""
    options = compilation.options
    # Inductor moves numbers itself
    analysis = analyse.look(gm, kind, options, compilation.device_type, numbers=False)
    # Inductor's kernels write to inputs in the middle of the code: the tree finds the owners
    blocked = tuple(b for b in analysis.blockers if "the caller's own" not in b.reason)
    analysis = dataclasses.replace(analysis, blockers=blocked)
    if options.or_error:
        report(analysis, options)  # before it is compiled for nothing
    return found_of(gm, kind, analysis)


def finish(code: Any, found: Found, compilation: Compilation) -> Any:
    """The callable for AOTAutograd: `code`, compiled now or loaded from a cache, with its pieces captured.

    For one piece it is the tree itself: each call saves the 3 us that `code` takes to look for a profiler and to close
    its metrics.
    """
    options, driver, verdict = compilation.options, compilation.driver, found.verdict
    if found.piece is None:
        report(verdict, options)
        if not verdict.idle:
            compilers.set_callable(code, uncaptured(compilers.callable_of(code)))
        return code
    about = dataclasses.replace(
        found.piece, mutated_inputs=compilers.mutated_inputs(code), constants=compilers.constants_of(code)
    )
    said = compilers.reason_of_inductor(code)
    if not verdict.blockers and said is None:
        run = dispatch.capture(dataclasses.replace(about, run=compilers.callable_of(code)), options, driver)
        run.code = code  # type: ignore[attr-defined]  # lives as long
        compilers.stored_as(run, code)
        if about.is_inference:
            compilation.inference = run
        return run
    maps = (compilers.partitions_of(code) or []) if said is None else []
    if said is not None:
        tell(f"{about.name} can't be captured; Inductor says: {said}", "it runs as it is", (said,), options)
    report(verdict, options, captured_count=len(maps))
    if maps:
        counters.add("partitions")
        compilers.set_callable(code, capture_partitions(code, about, maps, options, driver))
    else:
        compilers.set_callable(code, uncaptured(compilers.callable_of(code)))
    return code


def capture_partitions(
    code: Any,
    graph: Piece,
    maps: Sequence[compilers.PartitionMap],
    options: Options,
    driver: CaptureDriver | None,
) -> Boxed:
    """A call of Inductor's `code` in which each piece is captured; `graph` describes the whole graph."""
    pieces = pieces_of(graph, maps)
    return compilers.with_partitions(code, [_capturing(piece, options, driver) for piece in pieces])


def _capturing(piece: Piece, options: Options, driver: CaptureDriver | None) -> Callable[[Boxed], Boxed]:
    return lambda run: dispatch.capture(dataclasses.replace(piece, run=run), options, driver)


def pieces_of(graph: Piece, maps: Sequence[compilers.PartitionMap]) -> list[Piece]:
    """A `Piece` for each of Inductor's pieces of `graph`, without `run`.

    `maps` name the graph's inputs and outputs among those of a piece. Sizes that a piece takes come last, in no map.
    """
    pieces = []
    saved_of_graph = set(graph.saved_outputs or ())
    for number, part in enumerate(maps, 1):
        name = f"{graph.name}, part {number} of {len(maps)}"
        saved = graph.saved_outputs
        if saved is not None:
            saved = tuple(i for i, given in enumerate(part.outputs) if not saved_of_graph.isdisjoint(given))
        pieces.append(
            dataclasses.replace(
                graph,
                name=name,
                static_inputs=tuple(i for i, given in enumerate(part.inputs) if given in graph.static_inputs),
                mutated_inputs=tuple(i for i, given in enumerate(part.inputs) if given in graph.mutated_inputs),
                placeholders=tuple(
                    PlaceholderInfo(f"input {i} of {name}") if given is None else graph.placeholders[given]
                    for i, given in enumerate(part.inputs)
                ),
                output_traces=tuple(graph.output_traces[given[0]] if given else None for given in part.outputs),
                saved_outputs=saved,
            )
        )
    return pieces
