"""What torch's caches store about a graph's captures, so that a warm start captures what the cold one did.

    cold   fx graph --inductor.analysed--> AnalysedGraph --Store.add--> bytes in the entry of torch's AOTAutograd cache
    warm   entry --Store.load--> AnalysedGraph, with this program's lines --inductor.captured--> the captured code

`AnalysedGraph` is plain data: the inputs, which of them are static, the saved outputs, and the blockers. The rest comes
with Inductor's code: its pieces, inputs that they write to, constants, and Inductor's own reason against a capture.

A graph that was renamed or moved to other lines is the same graph. So a stack trace is stored as the number of a node
of Dynamo's graph: the program that takes the entry has the lines.

The key (`key_of`) decides who may take an entry. `held_outputs`, the limits and `warmup_steps` are not in it: they act
when a graph runs, on whatever was loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import CudaGraphError
from ..graph.analyse import Analysis, Kind
from ..graph.blockers import REBINDS_INPUT, is_host_operator
from ..graph.partition import Part
from ..options import Options
from ..placeholder import source_line, trace_of
from ..torch_private import autograd_cache
from ..torch_private import cuda as torch_cuda
from ..tree.function import Piece
from .pieces import whole_piece

log = logging.getLogger("cudagraph")

_NAME = "cudagraph"  # of the data attached to an entry
_FRAME = 'File "'  # begins each frame of a stack trace
# Errors that a damaged pickle, or one of another version, may raise
_UNREADABLE = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError)


class Refused(CudaGraphError):
    """The entry is for another program; the message says why."""


@dataclass(frozen=True, eq=False)
class AnalysedGraph:
    """A graph as it was analysed before Inductor compiled it."""

    verdict: Analysis  # what can be captured, and the blockers. Its parts have no nodes
    # The whole graph; None if there is nothing to capture. `run`, `mutated_inputs`, `constants` come with the code.
    piece: Piece | None
    # Operators that are not torch's own: name, description. If a description differs, the entry is refused.
    operators: tuple[tuple[str, str], ...] = ()

    @property
    def phase(self) -> str:
        return self.verdict.kind.phase

    def numbered(self, number: int) -> AnalysedGraph:
        kind = dataclasses.replace(self.verdict.kind, number=number)
        verdict = dataclasses.replace(self.verdict, kind=kind)
        piece = None if self.piece is None else dataclasses.replace(self.piece, name=kind.name, compiled=number)
        return dataclasses.replace(self, verdict=verdict, piece=piece)


def analysed_graph(gm: GraphModule, kind: Kind, analysis: Analysis) -> AnalysedGraph:
    """The `AnalysedGraph` of `gm`. Call it before Inductor's passes change `gm`: names and lines are read now."""
    piece = None
    rebinds = any(blocker.cause == REBINDS_INPUT for blocker in analysis.blockers)  # then no part is captured
    if analysis.device is not None and not rebinds:
        piece = whole_piece(gm, kind, analysis.device, _comes_with_the_code)
        piece = dataclasses.replace(piece, constants=())
    # Without nodes: parts can be pickled and compared.
    parts = tuple(Part(part.captured, part.kernel_count) for part in analysis.parts)
    return AnalysedGraph(dataclasses.replace(analysis, parts=parts), piece, operators_of(gm))


def _comes_with_the_code(inputs: list[Any]) -> Any:
    raise AssertionError("a piece was run before its code was filled in")


def operators_of(gm: GraphModule) -> tuple[tuple[str, str], ...]:
    """Names and descriptions of the operators in `gm` and its subgraphs that torch's version does not cover."""
    operators = {str(each): each for node in _nodes(gm) for each in torch_cuda.overloads_of(node.target)}
    others = {name: _description(each) for name, each in operators.items() if not name.startswith(("aten.", "prims."))}
    return tuple(sorted(others.items()))


def _description(operator: Any) -> str:
    """All properties of an operator that a verdict depends on."""
    return f"{torch_cuda.schema_of(operator)} {sorted(map(str, operator.tags))} host {is_host_operator(operator)}"


def _nodes(gm: GraphModule) -> list[torch.fx.Node]:
    return [node for module in gm.modules() if isinstance(module, GraphModule) for node in module.graph.nodes]


def key_of(gm: GraphModule, options: Options, device_type: str) -> str:
    """This package's part of the key of Dynamo's graph `gm`."""
    operators = dict(operators_of(gm))
    return f"captures by {sources()}, or_error {options.or_error}, for {device_type}, operators {operators}"


@functools.cache
def sources() -> str:
    """A digest of this package's sources."""
    return autograd_cache.sources_digest(Path(__file__).parents[1])


class Store(autograd_cache.Extension):
    """Stores the captures of one graph of Dynamo in an entry of torch's cache, or takes them from one."""

    def __init__(
        self, gm: GraphModule, options: Options, device_type: str, finish: Callable[[Any, AnalysedGraph], Any]
    ) -> None:
        super().__init__(key_of(gm, options, device_type))
        self.finish = finish  # `finish(code, found)` returns what replaces code that was loaded from the cache
        self.traces = list(map(trace_of, _nodes(gm)))
        self.stored: dict[str, AnalysedGraph] = {}
        self.refused = ""  # why an entry was found but not taken; "" if it was taken, or none was found
        self.cannot = ""  # why no program can use the stored captures; "" if one can
        self._attach: Callable[[bytes], None] | None = None

    def add(self, found: AnalysedGraph) -> None:
        """Add `found` to the entry. Call it while AOTAutograd compiles that graph, maybe long after its forward."""
        self.stored[found.phase] = found
        self._attach = self._attach or autograd_cache.attacher(_NAME)
        if self._attach is not None:
            graphs = self._dumped(tuple(self.stored.values()))
            self._attach(pickle.dumps((self.cannot, graphs)))

    def accept(self, stored: autograd_cache.Entry) -> None:
        """Take the captures of `stored`, or bypass the cache. A new entry would not replace a refused one."""
        phases = ("forward", "backward") if stored.has_backward else ("inference",)
        try:
            graphs = self.load(stored.attached(_NAME), phases)
        except Refused as e:
            self.refused = str(e)
            log.info("an entry of torch's cache is not taken: %s", e)
            autograd_cache.bypass(str(e))
        stored.finish_with(self.finish, graphs)

    def load(self, attached: bytes | None, phases: tuple[str, ...]) -> tuple[AnalysedGraph, ...]:
        """The stored graphs of these kinds ("forward", "backward", "inference"), from an entry's attached bytes. Raises
        `Refused` if they are missing, or not of this program."""
        if attached is None:
            raise Refused("nothing of its captures is stored beside it")
        try:
            cannot, graphs = pickle.loads(attached)
            if cannot:
                raise Refused(cannot)
            by_phase = {found.phase: found for found in self._loaded(graphs)}
        except _UNREADABLE as e:
            raise Refused(f"what is stored of its captures cannot be read ({type(e).__name__}: {e})") from e
        if set(by_phase) != set(phases):
            raise Refused(f"it is of {' and '.join(phases)}; stored of captures: {' and '.join(by_phase)}")
        for name, before in (pair for found in by_phase.values() for pair in found.operators):
            operator = torch_cuda.operator_called(name)
            now = None if operator is None else _description(operator)
            if now != before:
                raise Refused(f"operator {name} is '{now or 'unknown'}' here; it was '{before}' when it was stored")
        return tuple(by_phase[phase] for phase in phases)

    def _dumped(self, graphs: tuple[AnalysedGraph, ...]) -> bytes:
        """Pickles `graphs`, with a node's number and torch's remark in place of each stack trace. May set `cannot`."""
        number = {trace: i for i, trace in reversed(list(enumerate(self.traces)))}

        def number_and_remark(value: Any) -> tuple[int, str] | None:
            if not isinstance(value, str) or _FRAME not in value:
                return None  # no stack trace
            known, remark = value, ""
            if value not in number:  # torch adds a remark where it adds up the gradients of a tensor's readers
                known = max((t for t in number if t and value.startswith(t)), key=len, default=value)
                remark = value.removeprefix(known)
            if known in number and _FRAME not in remark:
                return number[known], remark
            # the program that takes the entry could not find the line
            self.cannot = f"a line of its messages is of no operator that Dynamo traced: {source_line(value)}"
            return None

        class Pickler(pickle.Pickler):
            persistent_id = staticmethod(number_and_remark)

        Pickler(file := io.BytesIO()).dump(graphs)
        return file.getvalue()

    def _loaded(self, graphs: bytes) -> tuple[AnalysedGraph, ...]:
        """The graphs that `_dumped` pickled, with the stack traces of this program."""

        def trace_of_node(stored: tuple[int, str]) -> str | None:
            number, remark = stored
            trace = self.traces[number]
            return None if trace is None else trace + remark

        class Unpickler(pickle.Unpickler):
            persistent_load = staticmethod(trace_of_node)

        loaded: tuple[AnalysedGraph, ...] = Unpickler(io.BytesIO(graphs)).load()
        return loaded
