"""Finds which parts of one graph of AOTAutograd can be captured.

fx graph --prepare_and_analyse--> Analysis: device, parts, blockers --report--> log, or `NotCapturableError`
                                     +--> compile/pieces.py captures the parts; `explain` prints them

The backend with either inner compiler and `explain` call the same function, so they agree.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ..errors import REBINDS, NotCapturableError
from ..options import Options
from ..placeholder import info_of, written_nodes
from .blockers import (
    CPU,
    Blocker,
    blocker_of,
    capture_device,
    is_free,
    is_host_operator,
    reason_against,
    rebinds,
    source_of,
    tensors_in,
    value_of,
)
from .cpu_values import prepare
from .partition import CAPTURE, EAGER, FREE, Part, split

__all__ = ["Analysis", "Kind", "Verdict", "analyse", "forget_reports", "prepare_and_analyse", "report", "warn_once"]

log = logging.getLogger("cudagraph")

_reported: set[tuple[str, ...]] = set()


@dataclass(frozen=True)
class Kind:
    """Which graph of a compiled function this is: its forward, its backward, or an inference graph.

    Attributes:
        name: for messages, such as "backward 3".
        static_inputs: positions of the inputs that are parameters or buffers.
        returned_count: how many of the first outputs the user gets; the others are saved for the backward. None if
            unknown.
        rebound_inputs: inputs that get an output's memory from AOTAutograd after the graph has run.
    """

    name: str
    is_backward: bool = False
    is_inference: bool = False
    static_inputs: tuple[int, ...] = ()
    returned_count: int | None = None
    rebound_inputs: tuple[int, ...] = ()

    @property
    def word(self) -> str:
        return "backward" if self.is_backward else "inference" if self.is_inference else "forward"

    def saved_outputs(self, count: int) -> tuple[int, ...] | None:
        """Positions, among `count` outputs, that are saved for a backward; None if unknown."""
        if self.is_backward or self.is_inference:
            return ()
        return None if self.returned_count is None else tuple(range(self.returned_count, count))


@dataclass(frozen=True)
class Verdict:
    """The result of an `Analysis` as plain data, with the same attribute names."""

    kind: Kind
    device: torch.device | None
    whole: bool
    idle: bool
    captured_count: int
    blockers: tuple[Blocker, ...]


@dataclass(frozen=True, eq=False)
class Analysis:
    """Which parts of a graph can be captured.

    Attributes:
        device: the device to capture on; None if there is nothing to capture.
        parts: in the order they run. A graph without blockers is one captured part.
        blockers: why there are several parts, or none is captured.
    """

    kind: Kind
    device: torch.device | None
    parts: tuple[Part, ...]
    blockers: tuple[Blocker, ...]

    @property
    def whole(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].captured

    @property
    def idle(self) -> bool:
        """Whether the graph launches nothing on any device, so that not capturing it loses nothing."""
        return all(part.kernel_count == 0 for part in self.parts)

    @property
    def rebinds(self) -> bool:
        """Whether an input gets other memory or another shape, so that no part is captured."""
        return any(REBINDS in blocker.reason for blocker in self.blockers)

    @property
    def captured_count(self) -> int:
        return sum(part.captured for part in self.parts)

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.kind, self.device, self.whole, self.idle, self.captured_count, self.blockers)


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
    whole_reasons = _rebinding(gm, kind)
    if device is None:
        whole_reasons += _on_the_cpu(gm)
    if device is None or whole_reasons:
        parts = split(gm.graph, lambda node: FREE if is_free(node) else EAGER)
        return Analysis(kind, device, parts, tuple(whole_reasons))
    static = static_nodes(gm, kind)
    found: list[Blocker] = []

    def colour(node: Node) -> str:
        if is_free(node):
            return EAGER if is_on_another_device(node, device) else FREE
        reason = reason_against(node, device)
        if reason is None and not options.or_error:
            reason = _writes_to_caller(node, static)
        if reason is None:
            return CAPTURE
        found.append(blocker_of(node, reason))
        return EAGER

    parts = split(gm.graph, colour)
    if len(parts) > 1:
        # A host operator may wait for a copy that one in another part started: neither is captured in a cut graph.
        found.clear()
        parts = split(gm.graph, lambda node: EAGER if is_host_operator(node) else colour(node))
    return Analysis(kind, device, parts, tuple(found))


def _on_the_cpu(gm: GraphModule) -> list[Blocker]:
    """Why a graph without tensors on a device is not captured: its host reads, or else its first operator."""
    operators = [node for node in gm.graph.nodes if not is_free(node)]
    found = [blocker_of(node, reason) for node in operators if (reason := reason_against(node, CPU))]
    return found or [blocker_of(node, "runs on the CPU") for node in operators[:1]]


def _rebinding(gm: GraphModule, kind: Kind) -> list[Blocker]:
    """The operators that give an input other memory or another shape: no part of such a graph is captured."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    by_node = {node: source for node in gm.graph.nodes if (source := rebinds(node)) is not None}
    reason = f"gives an input {REBINDS}"
    found = [blocker_of(node, reason) for node in by_node]
    for i in kind.rebound_inputs:  # AOTAutograd rebinds these after the graph has run
        if i < len(placeholders) and placeholders[i] in by_node.values():
            continue
        info = info_of(placeholders[i]) if i < len(placeholders) else None
        traces = [] if info is None else [info.stack_trace, *(user.stack_trace for user in info.users)]
        found.append(Blocker(reason, "set_", "" if info is None else info.name, next(filter(None, traces), None)))
    return found


def is_on_another_device(node: Node, device: torch.device) -> bool:
    """Whether `node` is a view of memory on another device, which can't be an input of a captured part."""
    return any(t.device not in (device, CPU) and t.device.type != "meta" for t in tensors_in(value_of(node)))


def static_nodes(gm: GraphModule, kind: Kind) -> set[Node]:
    placeholders = gm.graph.find_nodes(op="placeholder")
    return {placeholders[i] for i in kind.static_inputs}


def _writes_to_caller(node: Node, static: set[Node]) -> str | None:
    """Why writing to an input keeps `node` out of a captured part: the next call may bring other memory.

    The tree would run the whole graph uncaptured for that. With `or_error` the tree decides: it knows where the input
    comes from.
    """
    for written in written_nodes(node):
        source = source_of(written)
        if source.op == "placeholder" and source not in static:
            return f"writes to '{source.name}', an input that is the caller's own"
    return None


def report(analysis: Analysis | Verdict, options: Options, captured_count: int | None = None) -> None:
    """Log what is not captured and why, once for each cause. Raises `NotCapturableError` with `options.or_error`.

    `captured_count`: how many parts were captured in the end, if not as `analysis` says.
    """
    kind = analysis.kind
    if analysis.idle:
        return
    if analysis.device is None:
        lines = [f"\n  {blocker}" for blocker in analysis.blockers]
        warn_once(
            f"{kind.name}: nothing to capture, all of it runs on the CPU" + "".join(lines),
            "CUDA graphs need tensors on a CUDA device; it runs as it is",
            # a machine without CUDA gets one line in all
            ("nothing to capture", *(sorted(map(str, analysis.blockers)) if torch.cuda.is_available() else ())),
            options,
        )
    elif not analysis.whole and analysis.blockers:
        count = analysis.captured_count if captured_count is None else captured_count
        what = f"{count} part{'s' if count > 1 else ''} of it captured" if count else "nothing of it is captured"
        lines = [f"  {blocker}" for blocker in analysis.blockers]
        warn_once(
            f"{kind.name} can't be captured whole, {what}, because:\n" + "\n".join(lines),
            "move these operators out of the compiled function, or give them what they need on the device",
            tuple(sorted({f"{b.op} {b.reason} {b.source_line}" for b in analysis.blockers})),
            options,
        )


def warn_once(what: str, way_out: str, cause: tuple[str, ...], options: Options) -> None:
    if options.or_error:
        raise NotCapturableError(f"{what}\n{way_out}; or leave options['or_error'] and CUDAGRAPH_OR_ERROR unset")
    if cause not in _reported:
        _reported.add(cause)
        log.warning("%s\n%s", what, way_out)


def forget_reports() -> None:
    """Let each cause be logged again."""
    _reported.clear()
