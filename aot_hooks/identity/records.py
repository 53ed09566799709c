"""What a compiled graph was made of, to tell on entering a context, and at a call, whether that is so still.

with recording() as seen:      the compilation: policies say what they are asked, traces of hooks what they saw
    compile
record = seen.record(rule)     for each row that was asked: the answer; for each hook: examples, and its token
record.matches(rule)           asks and probes again: True if all answers and tokens are the same
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..errors import AotHooksError, HookTraceError
from ..torch_private.dynamo_guards import own_scope
from .frozen import code_of, described, number_of
from .probes import Example, Probe, Token, Untraceable, example_of

__all__ = ["Record", "Recording", "note_answer", "note_trace", "recording"]

Choose = Callable[[Any, Any], Any]  # rule, row -> the hook that the rule has for the row

_FAMILIES = 256
_probes: collections.OrderedDict[tuple[int, ...], list[Probe]] = collections.OrderedDict()  # by code


def _probe_for(hook: Any, examples: frozenset[Example]) -> Probe:
    """A probe that traces the functions of `hook` on `examples`, and maybe on others."""
    scope = own_scope(hook.pack)
    key = (*_codes(hook), id(scope))  # a probe holds its scope
    family = _probes.setdefault(key, [])
    _probes.move_to_end(key)
    while len(_probes) > _FAMILIES:
        _probes.popitem(last=False)
    found = next((probe for probe in family if examples <= probe.examples), None)
    if found is not None:
        return found
    family.append(probe := Probe(examples, scope))
    return probe


class _Answer(NamedTuple):
    """What a rule has for `row`, None for any row; tokens in the order of `described(hook).hooks`."""

    row: Any
    text: str
    tokens: tuple[Token | None, ...] = ()
    declined: tuple[str | None, ...] = ()


class Record:
    """See the module."""

    def __init__(self, rule: Any, choose: Choose) -> None:
        self.text = described(rule).text
        self.choose: Choose = choose
        self.answers: dict[_Answer, None] = {}

    def matches(self, rule: Any) -> bool:
        """Whether `rule` has the same answers now."""
        found = described(rule)
        if found.frozen or found.text != self.text:
            return found.text == self.text
        known: dict[Any, Any] = {}
        try:
            return all(self._matches(rule, answer, known) for answer in list(self.answers))
        except AotHooksError:  # it can't be asked or traced now
            return False

    def is_pair(self, pack: Any, unpack: Any) -> bool:
        """Whether it is of these two functions, whose code is that of the hook that it is of; in microseconds."""
        try:
            for answer in list(self.answers):
                (token,) = answer.tokens
                if token is None or answer.row is not None or token[0].token(pack, unpack) != token:
                    return False
        except AotHooksError:
            return False
        return bool(self.answers)

    def _matches(self, rule: Any, answer: _Answer, known: dict[Any, Any]) -> bool:
        hook: Any = rule if answer.row is None else self.choose(rule, answer.row)
        if id(hook) not in known:
            known[id(hook)] = (hook, described(hook))
        found = known[id(hook)][1]
        if found.text != answer.text:
            return False
        for own, token in zip(found.hooks, answer.tokens, strict=True):
            if token is not None:
                place = (id(own), token[0])
                if place not in known:
                    known[place] = token[0].token(own.pack, own.unpack)
                if known[place] != token:
                    return False
        return answer.row is None or _declined(hook, found.functions, answer.row) == answer.declined

    def add(self, other: Record) -> None:
        self.answers |= other.answers

    def changed(self, others: list[Record]) -> list[str]:
        """The names of what its hooks read that was otherwise in one of `others`."""
        before = [token for other in others for token in other._tokens()]
        return list(dict.fromkeys(name for token in self._tokens() for name in token[0].changed(token, before)))

    def _tokens(self) -> list[Token]:
        return [token for answer in self.answers for token in answer.tokens if token is not None]


def _declined(hook: Any, functions: tuple[Any, ...], row: Any) -> tuple[str | None, ...]:
    """What the user's own `declines` says of `row`; () if the hook has none."""
    declines: Any = getattr(hook, "declines", None)
    return (declines(row),) if any(fn is declines for fn in functions) else ()


# --- while a graph is compiled ----------------------------------------------------------------------------------------


class Recording:
    """What was asked and traced."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[Any, dict[Any, Any]]] = {}  # id of a rule -> it, and what it had for each row
        # id of a hook -> it, and what it was traced on: the example, and where it is saved
        self.examples: dict[int, tuple[Any, dict[Example, str]]] = {}

    def record(self, rule: Any, choose: Choose) -> Record:
        """What `rule` was in this compilation. Raises what `Probe.token` raises, with the hook and a tensor."""
        record = Record(rule, choose)
        found = described(rule)
        if found.frozen:
            return record
        _, answers = self.answers.get(id(rule), (rule, {}))
        if hasattr(rule, "cache_hash"):  # one hook for all
            answers = dict.fromkeys(answers if found.functions else answers and (None,), rule)
        known = {id(hook): self._answer(hook) for hook in {id(hook): hook for hook in answers.values()}.values()}
        for row, hook in answers.items():
            declined = () if row is None else _declined(hook, described(hook).functions, row)
            record.answers[known[id(hook)]._replace(row=row, declined=declined)] = None
        return record

    def reached(self, rule: Any) -> Iterator[tuple[str, Any, frozenset[str]]]:
        """What the hooks of `rule` reach, see `Probe.reached`."""
        for own in described(rule).hooks:
            if examples := self._examples(rule, own):
                yield from Probe(examples, own_scope(own.pack)).reached(own.pack, own.unpack)

    def _answer(self, hook: Any) -> _Answer:
        found = described(hook)
        tokens: list[Token | None] = []
        for own in found.hooks:
            examples = self._examples(hook, own)
            probe = _probe_for(own, frozenset(examples)) if examples else None
            try:
                tokens.append(None if probe is None else probe.token(own.pack, own.unpack))
            except AotHooksError as e:
                raise _told(e, f"hook '{own.name}' on saved {next(iter(examples.values()))}") from e.__cause__
        return _Answer(None, found.text, tuple(tokens))

    def _examples(self, hook: Any, own: Any) -> dict[Example, str]:
        """What `own`, a hook in `hook`, was traced on. Policies may make hooks anew: then by their code."""
        codes = _codes(hook)
        same = [seen for other, seen in self.examples.values() if other is hook or other is own]
        same = same or [seen for other, seen in self.examples.values() if _codes(other) == codes]
        return {example: where for seen in same for example, where in seen.items()}


def _codes(hook: Any) -> tuple[int, int]:
    return number_of(code_of(hook.pack)), number_of(code_of(hook.unpack))


def _told(e: AotHooksError, at: str) -> AotHooksError:
    """`e` with the hook, a tensor that it was traced on, and the ways out."""
    if not isinstance(e, Untraceable):
        return type(e)(f"{at}: {e}")
    return HookTraceError(
        f"{at} can't be traced by torch.compile, so nothing would tell when it changes; expected functions that Dynamo "
        f"can trace. Dynamo said: {e}. Ways out: let the functions close over the number itself, run them as they are "
        "with Hook(..., eager=True), or answer for them with Hook(..., cache_hash='1'), a text that you change when "
        "they do something else"
    )


class _Local(threading.local):
    recording: Recording | None = None


_local = _Local()


@contextlib.contextmanager
def recording(on: bool = True) -> Iterator[Recording]:
    """What this thread asks and traces inside goes into the recording; nothing if it is not `on`."""
    seen = Recording()
    before, _local.recording = _local.recording, seen if on else None
    try:
        yield seen
    finally:
        _local.recording = before


def note_answer(rule: Any, row: Any, hook: Any) -> None:
    """`rule` was asked about `row`, and has `hook` for it."""
    if _local.recording is not None:
        _local.recording.answers.setdefault(id(rule), (rule, {}))[1][row] = hook


def note_trace(hook: Any, x: torch.Tensor, where: str, size_of: Callable[[Any], int]) -> None:
    """`hook` is traced on `x`, a fake tensor; `where` it is saved, in words."""
    if _local.recording is not None:
        _, examples = _local.recording.examples.setdefault(id(hook), (hook, {}))
        examples.setdefault(example_of(x, size_of), where)
