"""What is stored of a graph's captures in torch's caches, so that a warm start captures what the cold one did.

    cold   fx graph --inductor.analysed--> Found --Store.keep--> bytes in the entry of torch's AOTAutograd cache
    warm   entry --Store.take--> Found, with this program's lines --inductor.captured--> the loaded code, captured

`Found` is plain data: the inputs (`PlaceholderInfo`), which of them are static, the saved outputs, and the blockers.
A graph that was renamed or moved to other lines is the same graph. So lines of the user's are stored as numbers of
nodes of Dynamo's graph; the program that takes the entry has the lines. Inductor's code brings the rest: the pieces
that Inductor cut, inputs that they write to, constants, and Inductor's own reason against a capture.

The key (`key_of`) decides who may take an entry: this package's sources, `or_error`, the kind of device, and the
schemas and tags of operators that are not torch's. `held_outputs`, the limits and `warmup_steps` are not in it: they
act when a graph runs, on whatever was loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import CudaGraphError
from ..graph.analyse import Analysis, Kind, Verdict
from ..graph.blockers import Blocker, is_host_operator
from ..options import Options
from ..placeholder import PlaceholderInfo, source_line
from ..torch_private import autograd_cache
from ..torch_private import cuda as torch_cuda
from ..tree.function import Piece
from .pieces import whole_piece

__all__ = ["Found", "Refused", "Store", "found_of", "key_of", "why_not"]

log = logging.getLogger("cudagraph")

_FORMAT = 3
_NAME = "cudagraph"  # of what is attached to an entry
_FRAME = 'File "'  # begins each frame of a stack trace
Operator = tuple[str, str]  # name, description
Trace = str | None


class Refused(CudaGraphError):
    """The entry is for another program; the message says why."""


@dataclass(frozen=True, eq=False)
class Found:
    """A graph as it was analysed before Inductor compiled it.

    Attributes:
        verdict: whether it can be captured, and the blockers.
        piece: the whole graph; None if there is nothing to capture. `run`, `mutated_inputs` and `constants` come with
            the code.
        operators: those that are not torch's own; a program in which they have another schema can't take the entry.
    """

    verdict: Verdict
    piece: Piece | None
    operators: tuple[Operator, ...] = ()

    @property
    def word(self) -> str:
        return self.verdict.kind.word

    def with_traces(self, renamed: Callable[[Trace], Trace]) -> Found:
        """With `renamed(stack_trace)` in place of each stack trace."""

        def info(given: PlaceholderInfo) -> PlaceholderInfo:
            return PlaceholderInfo(
                given.name,
                renamed(given.stack_trace),
                tuple(map(info, given.users)),
                renamed(given.mutating_use_stack_trace),
            )

        def blocker(given: Blocker) -> Blocker:
            return dataclasses.replace(given, stack_trace=renamed(given.stack_trace))

        verdict = dataclasses.replace(self.verdict, blockers=tuple(map(blocker, self.verdict.blockers)))
        if self.piece is None:
            return dataclasses.replace(self, verdict=verdict)
        piece = dataclasses.replace(
            self.piece,
            placeholders=tuple(map(info, self.piece.placeholders)),
            output_traces=tuple(map(renamed, self.piece.output_traces)),
        )
        return dataclasses.replace(self, verdict=verdict, piece=piece)

    def named(self, name: str) -> Found:
        verdict = dataclasses.replace(self.verdict, kind=dataclasses.replace(self.verdict.kind, name=name))
        piece = None if self.piece is None else dataclasses.replace(self.piece, name=name)
        return dataclasses.replace(self, verdict=verdict, piece=piece)


def found_of(gm: GraphModule, kind: Kind, analysis: Analysis) -> Found:
    """Call it before Inductor's passes change `gm`: names and lines are read now."""
    piece = None
    if analysis.device is not None and not analysis.rebinds:
        piece = dataclasses.replace(whole_piece(gm, kind, analysis.device), run=_comes_with_the_code, constants=())
    return Found(analysis.verdict, piece, operators_of(gm))


def _comes_with_the_code(inputs: list[Any]) -> Any:
    raise AssertionError("a piece was run before its code was filled in")


def _not_taken(code: Any, found: Found) -> Any:
    raise AssertionError("an entry was taken outside of `through_cache`")


def operators_of(gm: GraphModule) -> tuple[Operator, ...]:
    """The operators in `gm` and its subgraphs that are not torch's: torch's version does not cover them."""
    found = {}
    for node in _nodes(gm):
        for each in torch_cuda.overloads_of(node.target):
            if not str(each).startswith(("aten.", "prims.")):
                found[str(each)] = _description(each)
    return tuple(sorted(found.items()))


def _description(operator: Any) -> str:
    """All properties of an operator that a verdict depends on."""
    return f"{torch_cuda.schema_of(operator)} {sorted(map(str, operator.tags))} host {is_host_operator(operator)}"


def _nodes(gm: GraphModule) -> list[torch.fx.Node]:
    return [node for module in gm.modules() if isinstance(module, GraphModule) for node in module.graph.nodes]


def key_of(gm: GraphModule, options: Options, device_type: str) -> str:
    """This package's part of the key of Dynamo's graph `gm`."""
    options_and_operators = f"or_error {options.or_error}, for {device_type}, operators {dict(operators_of(gm))}"
    return f"format {_FORMAT} of {_sources()}, {options_and_operators}"


@functools.cache
def _sources() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def why_not(options: Options) -> str:
    """Why graphs that are compiled now can't be stored with their captures; "" if they can."""
    if options.inner != "inductor":
        return f"inner {options.inner!r} compiles nothing that could be stored"
    return autograd_cache.why_captures_are_not_cached()


class Store(autograd_cache.Extension):
    """The captures of the graphs that one graph of Dynamo becomes: into an entry of torch's cache, or out of it.

    Attributes:
        refused: why an entry that was found was not taken; "" if it was, or none was found.
        cannot: why no program can take what is stored; "" if one can.
    """

    def __init__(self, gm: GraphModule, options: Options, device_type: str) -> None:
        super().__init__(key_of(gm, options, device_type))
        self.traces: list[Trace] = [node.meta.get("stack_trace") for node in _nodes(gm)]
        self.stored: dict[str, Found] = {}
        self.refused = ""
        self.cannot = ""
        self._finish: Callable[[Any, Found], Any] = _not_taken
        self._attach: Callable[[bytes], None] | None = None

    def keep(self, found: Found) -> None:
        """Store `found`. Call it while AOTAutograd compiles that graph, a backward maybe long after its forward."""
        self.stored[found.word] = found.with_traces(self._to_number)
        if self._attach is None:
            self._attach = autograd_cache.attacher(_NAME)
        if self._attach is not None:
            self._attach(pickle.dumps((_FORMAT, self.cannot, tuple(self.stored.values()))))

    @contextlib.contextmanager
    def through_cache(self, finish: Callable[[Any, Found], Any]) -> Iterator[None]:
        """What Inductor compiles inside, on this thread, goes through torch's AOTAutograd cache by a key of its own.

        `finish(code, found)` returns what replaces code that was loaded from the cache.
        """
        self._finish = finish
        with autograd_cache.extended(self):
            yield

    def accept(self, stored: autograd_cache.Entry) -> None:
        """Take the captures of `stored`, or bypass the cache. A new entry would not replace a refused one."""
        words = ("forward", "backward") if stored.has_backward else ("inference",)
        try:
            graphs = self.take(stored.attached(_NAME), words)
        except Refused as e:
            autograd_cache.bypass(str(e))
        stored.finish_with(self._finish, graphs)

    def take(self, attached: bytes | None, words: tuple[str, ...]) -> tuple[Found, ...]:
        """The graphs called `words` of the entry that holds `attached`. Raises `Refused`."""
        try:
            return self._read(attached, words)
        except Refused as e:
            self.refused = str(e)
            log.info("an entry of torch's cache is not taken: %s", e)
            raise

    def _read(self, attached: bytes | None, words: tuple[str, ...]) -> tuple[Found, ...]:
        if attached is None:
            raise Refused("nothing of its captures is stored beside it")
        try:
            version, *rest = pickle.loads(attached)
        except _UNREADABLE as e:
            raise Refused(f"what is stored of its captures cannot be read ({type(e).__name__}: {e})") from e
        if version != _FORMAT:
            raise Refused(f"what is stored of its captures has format {version}; expected {_FORMAT}")
        cannot, stored = rest
        if cannot:
            raise Refused(cannot)
        by_word = {found.word: found for found in stored}
        if set(by_word) != set(words):
            raise Refused(f"it is of {' and '.join(words)}; stored of captures: {' and '.join(by_word)}")
        for found in stored:
            for name, before in found.operators:
                operator = torch_cuda.operator_called(name)
                now = None if operator is None else _description(operator)
                if now != before:
                    raise Refused(f"operator {name} is '{now or 'unknown'}' here; it was '{before}' when it was stored")
        return tuple(by_word[word].with_traces(self._from_number) for word in words)

    def _to_number(self, trace: Trace) -> Trace:
        if trace is None:
            return None
        known, remark = trace, ""
        if trace not in self._number:  # torch adds a remark where it adds up the gradients of a tensor's readers
            known = max((t for t in self._number if t and trace.startswith(t)), key=len, default=trace)
            remark = trace.removeprefix(known)
        if known not in self._number or _FRAME in remark:  # the program that takes the entry could not find the line
            self.cannot = f"a line of its messages is of no operator that Dynamo traced: {source_line(trace)}"
            return None
        return f"{self._number[known]} {remark}"

    @functools.cached_property
    def _number(self) -> dict[Trace, int]:
        return {trace: i for i, trace in reversed(list(enumerate(self.traces)))}

    def _from_number(self, number: Trace) -> Trace:
        if number is None:
            return None
        node, _, remark = number.partition(" ")
        if int(node) >= len(self.traces):
            raise Refused("it names nodes that this graph does not have")
        trace = self.traces[int(node)]
        return None if trace is None else trace + remark


# what the pickle of another version, or one that is damaged, may raise
_UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError),
    UnicodeDecodeError,
)
