"""What is stored of a graph's captures with the code that torch's caches hold, so that a warm start says and does what
the cold one did.

    cold   fx graph --inductor.analysed--> Found --Store.keep--> bytes beside the entry of torch's AOTAutograd cache
    warm   entry --Store.take--> Found, told of this program --inductor.captured--> the loaded code, captured

`Found` is plain data: the inputs (`PlaceholderInfo`), which of them are static, what is kept for the backward, and the
blockers. A graph that was renamed or moved to other lines is the same graph, so lines of the user's are stored as
numbers of nodes of Dynamo's graph, and read off the program that takes the entry. The pieces that Inductor cut, inputs
that they write to, constants and Inductor's own reason against a capture are stored with its code and come with it.

Who may take an entry is decided by its key (`key_of`): this package's sources, `or_error`, the kind of device, and what
operators that are not torch's say of themselves. `held_outputs`, the limits and `warmup_steps` are not in it: they act
when a graph runs, on whatever was loaded.
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
from ..torch_private import compilers
from ..torch_private import cuda as torch_cuda
from ..tree.function import Piece
from .pieces import whole_piece

__all__ = ["Found", "Refused", "Store", "found_of", "key_of", "why_not"]

log = logging.getLogger("cudagraph")

_FORMAT = 3
_FRAME = 'File "'  # begins each frame of a stack trace
Operator = tuple[str, str]  # name, what it says of itself
Trace = str | None


class Refused(CudaGraphError):
    """What is stored is not for this program."""


@dataclass(frozen=True, eq=False)
class Found:
    """What is known of a graph before Inductor compiles it.

    Attributes:
        verdict: whether it can be captured, and what is in the way.
        piece: all of it; None if there is nothing to capture. What of it the code knows is to be filled in.
        operators: those that are not torch's own; a program in which they say something else can't take it.
    """

    verdict: Verdict
    piece: Piece | None
    operators: tuple[Operator, ...] = ()

    @property
    def word(self) -> str:
        return self.verdict.kind.word

    def with_traces(self, tell: Callable[[Trace], Trace]) -> Found:
        """With `tell(stack_trace)` in place of each stack trace."""

        def info(given: PlaceholderInfo) -> PlaceholderInfo:
            return PlaceholderInfo(
                given.name, tell(given.stack_trace), tuple(map(info, given.users)), tell(given.mutating_use_stack_trace)
            )

        def blocker(given: Blocker) -> Blocker:
            return dataclasses.replace(given, stack_trace=tell(given.stack_trace))

        verdict = dataclasses.replace(self.verdict, blockers=tuple(map(blocker, self.verdict.blockers)))
        if self.piece is None:
            return dataclasses.replace(self, verdict=verdict)
        piece = dataclasses.replace(
            self.piece,
            placeholders=tuple(map(info, self.piece.placeholders)),
            output_traces=tuple(map(tell, self.piece.output_traces)),
        )
        return dataclasses.replace(self, verdict=verdict, piece=piece)

    def named(self, name: str) -> Found:
        """As the graph that is called `name` here."""
        verdict = dataclasses.replace(self.verdict, kind=dataclasses.replace(self.verdict.kind, name=name))
        piece = None if self.piece is None else dataclasses.replace(self.piece, name=name)
        return dataclasses.replace(self, verdict=verdict, piece=piece)


def found_of(gm: GraphModule, kind: Kind, analysis: Analysis) -> Found:
    """To be called before Inductor's passes change `gm`: names and lines are read now."""
    piece = None
    if analysis.device is not None and not analysis.rebinds:
        piece = dataclasses.replace(whole_piece(gm, kind, analysis.device), run=_comes_with_the_code, constants=())
    return Found(analysis.verdict, piece, operators_of(gm))


def _comes_with_the_code(inputs: list[Any]) -> Any:
    raise AssertionError("a piece was run before its code was filled in")


def operators_of(gm: GraphModule) -> tuple[Operator, ...]:
    """The operators in `gm` and the graphs in it that torch itself does not bring: its version says nothing of them."""
    found = {}
    for node in _nodes(gm):
        for each in torch_cuda.overloads_of(node.target):
            if not str(each).startswith(("aten.", "prims.")):
                found[str(each)] = _said_by(each)
    return tuple(sorted(found.items()))


def _said_by(operator: Any) -> str:
    """All that a verdict goes by."""
    return f"{torch_cuda.schema_of(operator)} {sorted(map(str, operator.tags))} host {is_host_operator(operator)}"


def _nodes(gm: GraphModule) -> list[torch.fx.Node]:
    return [node for module in gm.modules() if isinstance(module, GraphModule) for node in module.graph.nodes]


def key_of(gm: GraphModule, options: Options, device_type: str) -> str:
    """What stands in the key of an entry besides torch's own part, for Dynamo's graph `gm`; text that tells it."""
    said = f"or_error {options.or_error}, for {device_type}, operators {dict(operators_of(gm))}"
    return f"format {_FORMAT} of {_sources()}, {said}"


@functools.cache
def _sources() -> str:
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def why_not(options: Options) -> str:
    """Why graphs compiled now can't be stored together with what is known of them; "" if they can."""
    if options.inner != "inductor":
        return f"inner {options.inner!r} compiles nothing that could be stored"
    return compilers.why_not_cached()


class Store:
    """The captures of the graphs that one graph of Dynamo becomes, on their way into torch's entry or out of it.

    Attributes:
        refused: why an entry that was there was not taken, "" if it was or there was none.
        cannot: why what is kept can't be taken by any program, "" if it can.
    """

    def __init__(self, gm: GraphModule, options: Options, device_type: str) -> None:
        self.key = key_of(gm, options, device_type)
        self.traces: list[Trace] = [node.meta.get("stack_trace") for node in _nodes(gm)]
        self.kept: dict[str, Found] = {}
        self.refused = ""
        self.cannot = ""
        self._beside: Callable[[bytes], None] | None = None

    def keep(self, found: Found) -> None:
        """To be called while AOTAutograd compiles what `found` is of, a backward maybe long after its forward."""
        self.kept[found.word] = found.with_traces(self._to_number)
        if self._beside is None:
            self._beside = compilers.beside_entry()
        if self._beside is not None:
            self._beside(pickle.dumps((_FORMAT, self.cannot, tuple(self.kept.values()))))

    def take(self, attached: bytes | None, words: tuple[str, ...]) -> tuple[Found, ...]:
        """The graphs called `words` of an entry beside which `attached` is stored.

        Raises `Refused` if it can't be. Nothing is stored in its place: it would be found again, and refused again.
        """
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
            for name, said in found.operators:
                operator = torch_cuda.operator_called(name)
                now = None if operator is None else _said_by(operator)
                if now != said:
                    raise Refused(f"operator {name} is '{now or 'unknown'}' here; it was '{said}' when it was stored")
        return tuple(by_word[word].with_traces(self._from_number) for word in words)

    def _to_number(self, trace: Trace) -> Trace:
        if trace is None:
            return None
        of, added = trace, ""
        if trace not in self._number:  # torch adds a remark where it adds up the gradients of a tensor's readers
            of = max((t for t in self._number if t and trace.startswith(t)), key=len, default=trace)
            added = trace.removeprefix(of)
        if of not in self._number or _FRAME in added:  # where it is in the program that takes the entry, nobody knows
            self.cannot = f"a line of its messages is of no operator that Dynamo traced: {source_line(trace)}"
            return None
        return f"{self._number[of]} {added}"

    @functools.cached_property
    def _number(self) -> dict[Trace, int]:
        return {trace: i for i, trace in reversed(list(enumerate(self.traces)))}

    def _from_number(self, number: Trace) -> Trace:
        if number is None:
            return None
        node, _, added = number.partition(" ")
        if int(node) >= len(self.traces):
            raise Refused("it names nodes that this graph does not have")
        trace = self.traces[int(node)]
        return None if trace is None else trace + added

    @contextlib.contextmanager
    def through_cache(self, finish: Callable[[Any, Found], Any]) -> Iterator[None]:
        """What Inductor compiles inside, on this thread, goes through torch's AOTAutograd cache by a key of its own;
        `finish(code, found)` makes of code that was found there what is to be called."""
        with compilers.captures_in_cache(self.key, self.take, Refused, finish):
            yield


# what the pickle of another version, or one that is damaged, may raise
_UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError),
    UnicodeDecodeError,
)
