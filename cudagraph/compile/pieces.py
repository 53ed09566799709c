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
from ..graph.analyse import Kind, is_on_another_device, prepare_and_analyse, report, static_nodes
from ..graph.blockers import CPU, attribute_of, has_collectives, tensors_of
from ..graph.partition import Part, assemble, part_module, storages_of
from ..options import Options
from ..placeholder import info_of, results_of, trace_of, written_nodes
from ..torch_private import cuda as torch_cuda
from ..tree import dispatch
from ..tree.driver import CaptureDriver
from ..tree.function import Piece

Boxed = Callable[[list[Any]], Sequence[Any]]


def callable_of(gm: GraphModule, kind: Kind, options: Options, driver: CaptureDriver) -> Boxed:
    """A callable that runs `gm` with its capturable parts captured.

    Raises `NotCapturableError` with `options.or_error` if `gm` can't be captured whole.
    """
    analysis = prepare_and_analyse(gm, kind, options, driver.device_type)
    report(analysis, options)
    if analysis.idle:
        return torch_cuda.boxed(gm)
    if analysis.captured_count == 0:
        return uncaptured(torch_cuda.boxed(gm))
    assert analysis.device is not None
    if analysis.whole:
        return dispatch.capture(whole_piece(gm, kind, analysis.device, torch_cuda.boxed(gm)), options, driver)
    counters.add("partitions")
    captured = [part for part in analysis.parts if part.captured]
    runs: list[Boxed] = []
    for part in analysis.parts:
        run = part_module(gm, part).forward
        if part.captured:
            name = f"{kind.name}, part {captured.index(part) + 1} of {len(captured)}"
            run = dispatch.capture(_piece_of(part, name, run, kind, analysis.device), options, driver)
        runs.append(run)
    run = assemble(gm, analysis.parts, runs)
    return dispatch.in_parts(run, analysis.device, driver)


def uncaptured(run: Callable[[list[Any]], Any]) -> Boxed:
    """`run`, with each call counted as a skip."""

    def call(inputs: list[Any]) -> Any:
        counters.add("skips")
        return run(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def host_inputs(nodes: Sequence[Node], device: torch.device) -> set[int]:
    """Positions of a captured part's inputs on the CPU. They are static inputs: only host operators touch their memory,
    which is pinned and does not move."""
    if device == CPU:
        return set()
    return {i for i, node in enumerate(nodes) if any(t.device == CPU for t in tensors_of(node))}


def whole_piece(gm: GraphModule, kind: Kind, device: torch.device, run: Boxed) -> Piece:
    """All of `gm` as one piece; `run` runs it."""
    inputs, results = gm.graph.find_nodes(op="placeholder"), results_of(gm.graph)
    whole = Part(True, 0, nodes=tuple(gm.graph.nodes), inputs=tuple(inputs), outputs=tuple(results))
    return dataclasses.replace(
        _piece_of(whole, kind.name, run, kind, device),
        unread_inputs=tuple(i for i, n in enumerate(inputs) if not n.users and is_on_another_device(n, device)),
    )


def _piece_of(part: Part, name: str, run: Callable[..., Any], kind: Kind, device: torch.device) -> Piece:
    """What a tree has to know of `part`, read off its nodes; `run` runs it."""
    graph, arguments = part.nodes[0].graph, part.inputs
    saved: tuple[int, ...] | None = None if kind.phase == "forward" else ()
    if kind.phase == "forward" and kind.returned_count is not None:
        saved_nodes = set(results_of(graph)[kind.returned_count :])
        saved = tuple(i for i, node in enumerate(part.outputs) if node in saved_nodes)
    static = static_nodes(graph, kind)
    fixed = {i for i, node in enumerate(arguments) if node in static}
    targets = {target for node in part.nodes for target in written_nodes(node)}
    written = set().union(*map(storages_of, targets))
    constants = {n: attribute_of(n) for node in part.nodes for n in node.all_input_nodes if n.op == "get_attr"}
    return Piece(
        name=name,
        run=run,
        device=device,
        static_inputs=tuple(sorted(fixed | host_inputs(arguments, device))),
        # Those that an operator writes to, directly or through another view of their memory.
        mutated_inputs=tuple(i for i, n in enumerate(arguments) if n in targets or storages_of(n) & written),
        placeholders=tuple(map(info_of, arguments)),
        output_traces=tuple(map(trace_of, part.outputs)),
        constants=tuple(value for value in constants.values() if isinstance(value, torch.Tensor)),
        is_backward=kind.phase == "backward",
        is_inference=kind.phase == "inference",
        saved_outputs=saved,
        has_collectives=has_collectives(part.nodes),
        compiled=kind.number,
    )
