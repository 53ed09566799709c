"""One graph of AOTAutograd, turned into a callable whose capturable parts are captured.

fx graph --look--> Analysis: device, parts, blockers --callable_of--> boxed callable
                      |                                   captured parts: tree.capture(Piece)
                      +--> log, explain, or_error         the others: generated Python

`look` decides, before anything runs. All that says or does something about a graph calls it: the backend with either
inner compiler, and `explain`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import counters
from ..errors import NotCapturableError
from ..options import Options
from ..placeholder import info_of, output_traces, placeholder_info, written_nodes
from ..torch_private import cuda as torch_cuda
from ..tree import dispatch
from ..tree.driver import CaptureDriver
from .blockers import (
    CPU,
    REBINDS,
    Blocker,
    attribute_of,
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
from .partition import CAPTURE, EAGER, FREE, Part, assemble, part_module, split

__all__ = ["Analysis", "Boxed", "Kind", "Verdict", "analyse", "callable_of", "forget_reports", "look", "report"]

Boxed = Callable[[list[Any]], Sequence[Any]]

log = logging.getLogger("cudagraph")

_reported: set[tuple[str, ...]] = set()


@dataclass(frozen=True)
class Kind:
    """Which graph of a compiled function it is.

    Attributes:
        name: for messages, such as "backward 3".
        is_backward, is_inference: a backward; a graph that has no backward.
        static_inputs: its inputs that are parameters or buffers.
        returned_count: how many of its first outputs are not kept for a backward; None if that is not known.
        rebound_inputs: inputs that AOTAutograd gives an output's memory when the graph has run.
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
        """Which of `count` outputs are kept for a backward."""
        if self.is_backward or self.is_inference:
            return ()
        return None if self.returned_count is None else tuple(range(self.returned_count, count))


@dataclass(frozen=True)
class Verdict:
    """What came of an `Analysis`, as plain data: its attributes are called the same."""

    kind: Kind
    device: torch.device | None
    whole: bool
    idle: bool
    captured_count: int
    blockers: tuple[Blocker, ...]


@dataclass(frozen=True, eq=False)
class Analysis:
    """What of a graph can be captured.

    Attributes:
        kind: which graph it is.
        device: what it would be captured on; None if there is nothing to capture.
        parts: in the order they run; one that is captured if nothing is in the way.
        blockers: why it is more than one, or not captured.
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
        """Whether it launches nothing on any device: there is nothing to capture, and nothing is lost."""
        return all(part.kernel_count == 0 for part in self.parts)

    @property
    def rebinds(self) -> bool:
        """Whether an input is given other memory or another shape, so that no part is captured."""
        return any(REBINDS in blocker.reason for blocker in self.blockers)

    @property
    def captured_count(self) -> int:
        return sum(part.captured for part in self.parts)

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.kind, self.device, self.whole, self.idle, self.captured_count, self.blockers)


def look(gm: GraphModule, kind: Kind, options: Options, device_type: str, *, numbers: bool = True) -> Analysis:
    """Prepare `gm` for capture (see `prepare`), and say which parts of it can be captured."""
    device = capture_device(gm, device_type)
    if device is not None:
        prepare(gm, device, numbers=numbers)
    return analyse(gm, kind, options, device_type)


def analyse(gm: GraphModule, kind: Kind, options: Options, device_type: str) -> Analysis:
    """Which parts of `gm`, a functional graph with fake values, can be captured. Changes nothing."""
    device = capture_device(gm, device_type)
    whole_reasons = _rebinding(gm, kind)
    if device is None:
        whole_reasons += _on_the_cpu(gm)
    if device is None or whole_reasons:
        parts = split(gm.graph, lambda node: FREE if is_free(node) else EAGER)
        return Analysis(kind, device, parts, tuple(whole_reasons))
    static = _static_nodes(gm, kind)
    found: list[Blocker] = []

    def colour(node: Node) -> str:
        if is_free(node):
            return EAGER if _elsewhere(node, device) else FREE
        reason = reason_against(node, device)
        if reason is None and not options.or_error:
            reason = _writes_to_caller(node, static)
        if reason is None:
            return CAPTURE
        found.append(blocker_of(node, reason))
        return EAGER

    parts = split(gm.graph, colour)
    if len(parts) > 1:
        # what one part of a cut graph starts another may wait for: a recording of half of it means nothing
        found.clear()
        parts = split(gm.graph, lambda node: EAGER if is_host_operator(node) else colour(node))
    return Analysis(kind, device, parts, tuple(found))


def _on_the_cpu(gm: GraphModule) -> list[Blocker]:
    """Why a graph without tensors on a device stays out: what reads results on the host; else its first operator."""
    operators = [node for node in gm.graph.nodes if not is_free(node)]
    found = [blocker_of(node, reason) for node in operators if (reason := reason_against(node, CPU))]
    return found or [blocker_of(node, "runs on the CPU") for node in operators[:1]]


def _rebinding(gm: GraphModule, kind: Kind) -> list[Blocker]:
    """What of `gm` gives inputs other memory or another shape: no part of such a graph is captured."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    by_node = {node: source for node in gm.graph.nodes if (source := rebinds(node)) is not None}
    reason = f"gives an input {REBINDS}"
    found = [blocker_of(node, reason) for node in by_node]
    for i in kind.rebound_inputs:  # AOTAutograd does, when the graph has run
        if i < len(placeholders) and placeholders[i] in by_node.values():
            continue
        info = info_of(placeholders[i]) if i < len(placeholders) else None
        traces = [] if info is None else [info.stack_trace, *(user.stack_trace for user in info.users)]
        found.append(Blocker(reason, "set_", "" if info is None else info.name, next(filter(None, traces), None)))
    return found


def _elsewhere(node: Node, device: torch.device) -> bool:
    """Whether `node` is a view on another device: of an input that a captured part could not be given."""
    return any(t.device not in (device, CPU) and t.device.type != "meta" for t in tensors_in(value_of(node)))


def _static_nodes(gm: GraphModule, kind: Kind) -> set[Node]:
    placeholders = gm.graph.find_nodes(op="placeholder")
    return {placeholders[i] for i in kind.static_inputs}


def _writes_to_caller(node: Node, static: set[Node]) -> str | None:
    """Writing to an input whose memory may be another in the next call; the tree would have to run all of the graph as
    it is for that. With `or_error` the tree decides, which knows where the input comes from."""
    for written in written_nodes(node):
        source = source_of(written)
        if source.op == "placeholder" and source not in static:
            return f"writes to '{source.name}', an input that is the caller's own"
    return None


def report(analysis: Analysis | Verdict, options: Options, captured_count: int | None = None) -> None:
    """Log, once for each cause, what is not captured and why; `captured_count` says how many parts were in the end, if
    not as in `analysis`. Raises `NotCapturableError` with `options.or_error`."""
    kind = analysis.kind
    if analysis.idle:
        return
    if analysis.device is None:
        lines = [f"\n  {blocker}" for blocker in analysis.blockers]
        tell(
            f"{kind.name}: nothing to capture, all of it runs on the CPU" + "".join(lines),
            "CUDA graphs need tensors on a CUDA device; it runs as it is",
            # without any device there is one line in all
            ("nothing to capture", *(sorted(map(str, analysis.blockers)) if torch.cuda.is_available() else ())),
            options,
        )
    elif not analysis.whole and analysis.blockers:
        count = analysis.captured_count if captured_count is None else captured_count
        what = f"{count} part{'s' if count > 1 else ''} of it captured" if count else "nothing of it is captured"
        lines = [f"  {blocker}" for blocker in analysis.blockers]
        tell(
            f"{kind.name} can't be captured whole, {what}, because:\n" + "\n".join(lines),
            "move these operators out of the compiled function, or give them what they need on the device",
            tuple(sorted({f"{b.op} {b.reason} {b.source_line}" for b in analysis.blockers})),
            options,
        )


def tell(what: str, way_out: str, cause: tuple[str, ...], options: Options) -> None:
    if options.or_error:
        raise NotCapturableError(f"{what}\n{way_out}; or leave options['or_error'] and CUDAGRAPH_OR_ERROR unset")
    if cause not in _reported:
        _reported.add(cause)
        log.warning("%s\n%s", what, way_out)


def forget_reports() -> None:
    """Tell of each cause again."""
    _reported.clear()


def callable_of(gm: GraphModule, kind: Kind, options: Options, driver: CaptureDriver | None, device_type: str) -> Boxed:
    """What runs `gm`, with its capturable parts captured.

    Raises `NotCapturableError` with `options.or_error`, if it isn't captured whole.
    """
    analysis = look(gm, kind, options, device_type)
    report(analysis, options)
    if analysis.idle:
        return boxed(gm)
    if analysis.captured_count == 0:
        return uncaptured(boxed(gm))
    if analysis.whole:
        piece = whole_piece(gm, kind, analysis.device)
        torch_cuda.set_boxed(gm)
        return dispatch.capture(dataclasses.replace(piece, run=gm.forward), options, driver)
    counters.add("partitions")
    static = _static_nodes(gm, kind)
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


def boxed(gm: GraphModule) -> Boxed:
    """`gm` as it is, taking a list that it empties."""
    torch_cuda.set_boxed(gm)
    forward = gm.forward

    def call(inputs: list[Any]) -> Any:
        return forward(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def uncaptured(run: Callable[[list[Any]], Any]) -> Boxed:
    """`run`, each call counted as one without a graph."""

    def call(inputs: list[Any]) -> Any:
        counters.add("skips")
        return run(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def host_inputs(nodes: Sequence[Node], device: torch.device) -> set[int]:
    """Inputs on the CPU of a captured part: memory that only operators declared for it touch, and that stays put."""
    if device == CPU:
        return set()
    return {i for i, node in enumerate(nodes) if any(t.device == CPU for t in tensors_in(value_of(node)))}


def whole_piece(gm: GraphModule, kind: Kind, device: torch.device | None) -> dispatch.Piece:
    """All of `gm` as a piece whose `run` is to be filled in."""
    assert device is not None
    placeholders = gm.graph.find_nodes(op="placeholder")
    traces = output_traces(gm.graph)
    return dispatch.Piece(
        name=kind.name,
        run=gm.forward,
        device=device,
        static_inputs=tuple(sorted({*kind.static_inputs, *host_inputs(placeholders, device)})),
        mutated_inputs=_written_inputs(placeholders, list(gm.graph.nodes)),
        unread_inputs=tuple(i for i, n in enumerate(placeholders) if not n.users and _elsewhere(n, device)),
        placeholders=placeholder_info(gm.graph),
        output_traces=traces,
        constants=_constants(list(gm.graph.nodes)),
        is_backward=kind.is_backward,
        is_inference=kind.is_inference,
        saved_outputs=kind.saved_outputs(len(traces)),
    )


def _piece_of(
    part: Part, module: GraphModule, kind: Kind, analysis: Analysis, static: set[Node], number: int
) -> dispatch.Piece:
    assert analysis.device is not None
    (results,) = part.nodes[0].graph.output_node().args
    assert isinstance(results, (list, tuple))
    saved = kind.saved_outputs(len(results))
    kept = None if saved is None else {results[i] for i in saved}
    given = part.arguments
    fixed = {i for i, node in enumerate(given) if node in static}
    return dispatch.Piece(
        name=f"{kind.name}, part {number} of {analysis.captured_count}",
        run=module.forward,
        device=analysis.device,
        static_inputs=tuple(sorted(fixed | host_inputs(given, analysis.device))),
        mutated_inputs=_written_inputs(given, part.nodes),
        written_later=tuple(i for i, node in enumerate(given) if node in part.written_later),
        unread_inputs=tuple(range(len(part.inputs), len(given))),
        placeholders=tuple(map(info_of, given)),
        output_traces=tuple(node.meta.get("stack_trace") for node in part.outputs),
        constants=_constants([n for node in part.nodes for n in node.all_input_nodes]),
        is_backward=kind.is_backward,
        is_inference=kind.is_inference,
        saved_outputs=None if kept is None else tuple(i for i, node in enumerate(part.outputs) if node in kept),
    )


def _written_inputs(inputs: Sequence[Node], nodes: Sequence[Node]) -> tuple[int, ...]:
    """Which of `inputs` an operator of `nodes` writes to, itself or another view of its memory."""
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
