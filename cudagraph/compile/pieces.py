"""Turns an analysed graph into pieces and captures them.

fx graph --callable_of--> boxed callable      captured parts: dispatch.capture(Piece)
                                              the others: generated Python
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import counters
from ..graph.analyse import Analysis, Kind, is_on_another_device, prepare_and_analyse, report, static_nodes
from ..graph.blockers import CPU, attribute_of, tensors_in, value_of
from ..graph.partition import Part, assemble, part_module
from ..options import Options
from ..placeholder import info_of, output_traces, placeholder_info, written_nodes
from ..torch_private import cuda as torch_cuda
from ..tree import dispatch
from ..tree.driver import CaptureDriver
from ..tree.function import Piece

__all__ = ["Boxed", "callable_of", "uncaptured", "whole_piece"]

Boxed = Callable[[list[Any]], Sequence[Any]]


def callable_of(gm: GraphModule, kind: Kind, options: Options, driver: CaptureDriver | None, device_type: str) -> Boxed:
    """A callable that runs `gm` with its capturable parts captured.

    Raises `NotCapturableError` with `options.or_error` if `gm` can't be captured whole.
    """
    analysis = prepare_and_analyse(gm, kind, options, device_type)
    report(analysis, options)
    if analysis.idle:
        return torch_cuda.boxed(gm)
    if analysis.captured_count == 0:
        return uncaptured(torch_cuda.boxed(gm))
    if analysis.whole:
        piece = whole_piece(gm, kind, analysis.device)
        torch_cuda.set_boxed(gm)
        return dispatch.capture(dataclasses.replace(piece, run=gm.forward), options, driver)
    counters.add("partitions")
    static = static_nodes(gm, kind)
    runs = []
    captured = 0
    for part in analysis.parts:
        module = part_module(gm, part)
        if part.captured:
            captured += 1
            piece = _piece_of(part, module, kind, analysis, static, captured)
            runs.append(dispatch.capture(piece, options, driver))
        else:
            runs.append(module.forward)
    return assemble(gm, analysis.parts, runs)


def uncaptured(run: Callable[[list[Any]], Any]) -> Boxed:
    """`run`, with each call counted as a skip."""

    def call(inputs: list[Any]) -> Any:
        counters.add("skips")
        return run(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def host_inputs(nodes: Sequence[Node], device: torch.device) -> set[int]:
    """Positions of a captured part's inputs on the CPU.

    Only host operators read or write them, and they are pinned memory that does not move, so they are static inputs.
    """
    if device == CPU:
        return set()
    return {i for i, node in enumerate(nodes) if any(t.device == CPU for t in tensors_in(value_of(node)))}


def whole_piece(gm: GraphModule, kind: Kind, device: torch.device | None) -> Piece:
    """All of `gm` as one piece; the caller replaces its `run`."""
    assert device is not None
    placeholders = gm.graph.find_nodes(op="placeholder")
    traces = output_traces(gm.graph)
    return Piece(
        name=kind.name,
        run=gm.forward,
        device=device,
        static_inputs=tuple(sorted({*kind.static_inputs, *host_inputs(placeholders, device)})),
        mutated_inputs=_written_inputs(placeholders, list(gm.graph.nodes)),
        unread_inputs=tuple(i for i, n in enumerate(placeholders) if not n.users and is_on_another_device(n, device)),
        placeholders=placeholder_info(gm.graph),
        output_traces=traces,
        constants=_constants(list(gm.graph.nodes)),
        is_backward=kind.is_backward,
        is_inference=kind.is_inference,
        saved_outputs=kind.saved_outputs(len(traces)),
    )


def _piece_of(part: Part, module: GraphModule, kind: Kind, analysis: Analysis, static: set[Node], number: int) -> Piece:
    assert analysis.device is not None
    (results,) = part.nodes[0].graph.output_node().args
    assert isinstance(results, (list, tuple))
    saved = kind.saved_outputs(len(results))
    if saved is not None:
        saved_nodes = {results[i] for i in saved}
        saved = tuple(i for i, node in enumerate(part.outputs) if node in saved_nodes)
    arguments = part.arguments
    fixed = {i for i, node in enumerate(arguments) if node in static}
    return Piece(
        name=f"{kind.name}, part {number} of {analysis.captured_count}",
        run=module.forward,
        device=analysis.device,
        static_inputs=tuple(sorted(fixed | host_inputs(arguments, analysis.device))),
        mutated_inputs=_written_inputs(arguments, part.nodes),
        written_later=tuple(i for i, node in enumerate(arguments) if node in part.written_later),
        unread_inputs=tuple(range(len(part.inputs), len(arguments))),
        placeholders=tuple(map(info_of, arguments)),
        output_traces=tuple(node.meta.get("stack_trace") for node in part.outputs),
        constants=_constants([n for node in part.nodes for n in node.all_input_nodes]),
        is_backward=kind.is_backward,
        is_inference=kind.is_inference,
        saved_outputs=saved,
    )


def _written_inputs(inputs: Sequence[Node], nodes: Sequence[Node]) -> tuple[int, ...]:
    """Positions of the `inputs` that `nodes` write to, directly or through another view of their memory."""
    storages = [{torch_cuda.storage_key(t) for t in tensors_in(value_of(node))} - {None} for node in inputs]
    written: set[int | None] = set()
    direct: set[Node] = set()
    for node in nodes:
        for target in written_nodes(node):
            direct.add(target)
            written |= {torch_cuda.storage_key(t) for t in tensors_in(value_of(target))}
    return tuple(i for i, node in enumerate(inputs) if node in direct or storages[i] & written)


def _constants(nodes: Sequence[Node]) -> tuple[torch.Tensor, ...]:
    found = {node: attribute_of(node) for node in nodes if node.op == "get_attr"}
    return tuple(value for value in found.values() if isinstance(value, torch.Tensor))
