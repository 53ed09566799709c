"""Finds which parts of one graph of AOTAutograd can be captured.

fx graph --prepare_and_analyse--> Analysis: device, parts, blockers --report--> log, or `NotCapturableError`
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import REBINDS, NotCapturableError
from ..options import Options
from ..placeholder import trace_of, written_nodes
from .blockers import (
    CPU,
    REBINDS_INPUT,
    WRITES_TO_CALLER,
    Blocker,
    blocker_of,
    capture_device,
    is_free,
    is_host_operator,
    reason_against,
    rebinds,
    source_of,
    tensors_of,
)
from .cpu_values import prepare
from .partition import CAPTURE, EAGER, FREE, Part, split

log = logging.getLogger("cudagraph")

reported: set[tuple[str, ...]] = set()  # causes that were logged


@dataclass(frozen=True)
class Kind:
    """Which graph of a compiled function this is. Inputs and outputs are named by position."""

    phase: str  # "forward", "backward" or "inference"
    number: int  # of the compiled function
    static_inputs: tuple[int, ...] = ()  # parameters and buffers
    # How many of the first outputs the user gets; the others are saved for the backward. None if unknown.
    returned_count: int | None = None
    rebound_inputs: tuple[int, ...] = ()  # those that get an output's memory from AOTAutograd after the graph has run

    @property
    def name(self) -> str:
        """For messages, such as "backward 3"."""
        return f"{self.phase} {self.number}"


def phase_of(is_backward: bool, is_inference: bool) -> str:
    return "backward" if is_backward else "inference" if is_inference else "forward"


@dataclass(frozen=True)
class Analysis:
    """Which parts of a graph can be captured."""

    kind: Kind
    device: torch.device | None  # the device to capture on; None if there is nothing to capture
    parts: tuple[Part, ...]  # in the order they run. A graph without blockers is one captured part
    blockers: tuple[Blocker, ...]  # why there are several parts, or none is captured

    @property
    def whole(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].captured

    @property
    def idle(self) -> bool:
        """Whether the graph launches nothing on any device, so that not capturing it loses nothing."""
        return all(part.kernel_count == 0 for part in self.parts)

    @property
    def captured_count(self) -> int:
        return sum(part.captured for part in self.parts)


def prepare_and_analyse(
    gm: GraphModule, kind: Kind, options: Options, device_type: str, *, numbers: bool = True
) -> Analysis:
    """Move CPU values of `gm` to the device (see `prepare`), then find the parts that can be captured."""
    device = capture_device(gm, device_type)
    if device is not None:
        prepare(gm, device, numbers=numbers)
    return analyse(gm, kind, options, device_type)


def analyse(gm: GraphModule, kind: Kind, options: Options, device_type: str) -> Analysis:
    """Find the parts of `gm` that can be captured. `gm` is a functional graph with fake values; it is not changed."""
    device = capture_device(gm, device_type)
    found = _rebinding(gm, kind)
    if device is None:  # the reasons are its host reads, or else its first operator
        operators = [node for node in gm.graph.nodes if not is_free(node)]
        reads = [blocker_of(node, reason) for node in operators if (reason := reason_against(node, CPU))]
        found += reads or [blocker_of(node, "runs on the CPU") for node in operators[:1]]
    if device is None or found:
        parts = split(gm.graph, lambda node: FREE if is_free(node) else EAGER)
        return Analysis(kind, device, parts, tuple(found))
    static = static_nodes(gm.graph, kind)

    def colour(node: Node) -> str:
        if is_free(node):
            return EAGER if is_on_another_device(node, device) else FREE
        reason, cause = reason_against(node, device), ""
        if reason is None and not options.or_error:  # with it the tree decides: it knows where an input comes from
            # If the next call brought other memory for it, the tree would run the whole graph uncaptured.
            targets = (n for n in map(source_of, written_nodes(node)) if n.op == "placeholder" and n not in static)
            reason = next((f"writes to '{n.name}', an input that is the caller's own" for n in targets), None)
            cause = WRITES_TO_CALLER
        if reason is None:
            return CAPTURE
        found.append(blocker_of(node, reason, cause))
        return EAGER

    parts = split(gm.graph, colour)
    if len(parts) > 1:
        # A host operator may wait for a copy that one in another part started: neither is captured in a cut graph.
        found.clear()
        parts = split(gm.graph, lambda node: EAGER if is_host_operator(node) else colour(node))
    return Analysis(kind, device, parts, tuple(found))


def _rebinding(gm: GraphModule, kind: Kind) -> list[Blocker]:
    """The operators that give an input other memory or another shape: no part of such a graph is captured."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    by_node = {node: source for node in gm.graph.nodes if (source := rebinds(node)) is not None}
    reason = f"gives an input {REBINDS}"
    found = [blocker_of(node, reason, REBINDS_INPUT) for node in by_node]
    for i in kind.rebound_inputs:  # AOTAutograd rebinds these after the graph has run
        source = placeholders[i] if i < len(placeholders) else None
        if source is None or source not in by_node.values():
            name, nodes = ("", ()) if source is None else (source.name, (source, *source.users))
            trace = next(filter(None, map(trace_of, nodes)), None)
            found.append(Blocker(reason, "set_", name, trace, cause=REBINDS_INPUT))
    return found


def is_on_another_device(node: Node, device: torch.device) -> bool:
    """Whether `node` is a view of memory on another device, which can't be an input of a captured part."""
    return any(t.device not in (device, CPU) and t.device.type != "meta" for t in tensors_of(node))


def static_nodes(graph: Graph, kind: Kind) -> set[Node]:
    """The inputs that are parameters or buffers."""
    placeholders = graph.find_nodes(op="placeholder")
    return {placeholders[i] for i in kind.static_inputs}


def report(analysis: Analysis, options: Options, captured_count: int | None = None) -> None:
    """Log what is not captured and why, once for each cause. Raises `NotCapturableError` with `options.or_error`.

    `captured_count`: how many parts were captured in the end, if not as `analysis` says.
    """
    name, blockers = analysis.kind.name, analysis.blockers
    if analysis.idle:
        return
    lines = "".join(f"\n  {blocker}" for blocker in blockers)
    if analysis.device is None:
        # a machine without CUDA gets one line in all
        causes = sorted(map(str, blockers)) if torch.cuda.is_available() else []
        refuse_or_warn(
            f"{name}: nothing to capture, all of it runs on the CPU{lines}",
            "CUDA graphs need tensors on a CUDA device; it runs as it is",
            ("nothing to capture", *causes),
            options,
        )
    elif not analysis.whole and blockers:
        count = analysis.captured_count if captured_count is None else captured_count
        what = f"{count} part{'s' if count > 1 else ''} of it captured" if count else "nothing of it is captured"
        refuse_or_warn(
            f"{name} can't be captured whole, {what}, because:{lines}",
            "move these operators out of the compiled function, or give them what they need on the device",
            tuple(sorted({f"{b.op} {b.reason} {b.source_line}" for b in blockers})),
            options,
        )


def refuse_or_warn(what: str, way_out: str, cause: tuple[str, ...], options: Options) -> None:
    """Raise `NotCapturableError` with `options.or_error`; else warn, once for each `cause`."""
    if options.or_error:
        raise NotCapturableError(f"{what}\n{way_out}; or leave options['or_error'] and CUDAGRAPH_OR_ERROR unset")
    if cause not in reported:
        reported.add(cause)
        log.warning("%s\n%s", what, way_out)
