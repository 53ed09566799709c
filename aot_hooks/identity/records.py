"""The dependence of a compiled graph on a hook or policy, compared on entering a context and at a call.

with recording() as seen:      while compiling: policies note the hooks that they choose, traces note their examples
    compile
record = seen.record(rule)     for each saved tensor the chosen hook, and the token of its probe on the examples
record.matches(rule)           calls policies and probes again: True if all choices and tokens are the same
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..errors import AotHooksError, HookTraceError
from ..torch_private.dynamo_guards import own_scope
from .frozen import Description, code_of, described, number_of
from .probes import Example, Probe, Token, Untraceable, example_of

Choose = Callable[[Any, Any], Any]  # rule, row -> the hook that the rule has for the row


@functools.lru_cache(maxsize=256)
def _family(*codes: int) -> list[Probe]:
    """The probes for functions of the same code."""
    return []


def _probe_for(hook: Any, examples: frozenset[Example]) -> Probe:
    """The probe for the code of `hook` whose examples include `examples`; a new one if there is none."""
    scope = own_scope(hook.pack)
    family = _family(*_codes(hook), id(scope))  # a probe keeps its scope alive
    found = next((probe for probe in family if examples <= probe.examples), None)
    if found is None:
        family.append(found := Probe(examples, scope))
    return found


class _ChosenHook(NamedTuple):
    """The hook that a rule chose for `row` (None: any row), as its text and the tokens of `described(hook).hooks`."""

    row: Any
    text: str
    tokens: tuple[Token | None, ...] = ()
    declined: tuple[str | None, ...] = ()


class _Now(NamedTuple):
    """What a comparison has found so far, each once, because many choices have the same hook."""

    descriptions: dict[int, tuple[Any, Description]]  # by the id of a hook: it, so that it keeps its id
    tokens: dict[tuple[int, Probe], Token]  # by the id of a hook and the probe


class Record:
    """All choices of a rule that graphs depend on."""

    def __init__(self, rule: Any, choose: Choose) -> None:
        self.text = described(rule).text
        self.choose = choose
        self.choices: dict[_ChosenHook, None] = {}

    def matches(self, rule: Any) -> bool:
        """Whether `rule` makes the same choices now."""
        description = described(rule)
        if description.frozen or description.text != self.text:
            return description.text == self.text
        now = _Now({}, {})
        try:
            return all(self._repeats(choice, rule, now) for choice in list(self.choices))
        except AotHooksError:  # it can't be called or traced now
            return False

    def is_pair(self, pack: Any, unpack: Any) -> bool:
        """Whether these functions, with the code of the recorded hook, also have its values. Takes microseconds."""
        try:
            for choice in list(self.choices):
                (token,) = choice.tokens
                if token is None or choice.row is not None or token[0].token(pack, unpack) != token:
                    return False
        except AotHooksError:
            return False
        return bool(self.choices)

    def _repeats(self, choice: _ChosenHook, rule: Any, now: _Now) -> bool:
        """Whether `rule` makes `choice` again."""
        hook: Any = rule if choice.row is None else self.choose(rule, choice.row)
        if id(hook) not in now.descriptions:
            now.descriptions[id(hook)] = hook, described(hook)
        description = now.descriptions[id(hook)][1]
        if description.text != choice.text:
            return False
        for inner, token in zip(description.hooks, choice.tokens, strict=True):
            if token is not None:
                probe = token[0]
                if (id(inner), probe) not in now.tokens:
                    now.tokens[id(inner), probe] = probe.token(inner.pack, inner.unpack)
                if now.tokens[id(inner), probe] != token:
                    return False
        return choice.row is None or _declined(hook, description.functions, choice.row) == choice.declined

    @property
    def is_forgotten(self) -> bool:
        """Whether Dynamo was reset since, and so has none of the graphs and tokens any more."""
        return any(token[0].is_forgotten(token) for token in self._tokens())

    def add(self, other: Record) -> None:
        self.choices |= other.choices

    def changed(self, others: list[Record]) -> list[str]:
        """The names of values that its hooks read and that differed in one of `others`."""
        before = [token for other in others for token in other._tokens()]
        return list(dict.fromkeys(name for token in self._tokens() for name in token[0].changed(token, before)))

    def _tokens(self) -> list[Token]:
        return [token for choice in self.choices for token in choice.tokens if token is not None]


def _declined(hook: Any, functions: tuple[Any, ...], row: Any) -> tuple[str | None, ...]:
    """The result of the user's `declines` for `row`; () if the hook has none."""
    declines: Any = getattr(hook, "declines", None)
    return (declines(row),) if any(fn is declines for fn in functions) else ()


class Recording:
    """Choices of rules and examples of hooks in one compilation."""

    def __init__(self) -> None:
        self.choices: dict[int, tuple[Any, dict[Any, Any]]] = {}  # id of a rule -> it, and its hook for each row
        # id of a hook -> it, and its examples with the place where each is saved
        self.examples: dict[int, tuple[Any, dict[Example, str]]] = {}

    def record(self, rule: Any, choose: Choose) -> Record:
        """The record of `rule` in this compilation. Raises as `Probe.token`, with the hook and a tensor."""
        record = Record(rule, choose)
        description = described(rule)
        if description.frozen:
            return record
        _, hooks = self.choices.get(id(rule), (rule, {}))  # by row
        if hasattr(rule, "cache_hash") and hooks and not description.functions:
            hooks = {None: rule}  # a hook whose `declines` reads no row: one choice for all
        if getattr(rule, "decides_for_graph", False):
            hooks = {None: rule}  # a budget chooses among all of its means
        choices = {at: self._chosen_hook(hook) for at, hook in {id(hook): hook for hook in hooks.values()}.items()}
        for row, hook in hooks.items():
            declined = () if row is None else _declined(hook, described(hook).functions, row)
            record.choices[choices[id(hook)]._replace(row=row, declined=declined)] = None
        return record

    def reached(self, rule: Any) -> Iterator[tuple[str, Any, frozenset[str]]]:
        """The objects that the hooks of `rule` reach, see `Probe.reached`."""
        for inner in described(rule).hooks:
            if examples := self._examples(rule, inner):
                yield from Probe(examples, own_scope(inner.pack)).reached(inner.pack, inner.unpack)

    def _chosen_hook(self, hook: Any) -> _ChosenHook:
        """The choice of `hook` for any row, with new tokens."""
        description = described(hook)
        tokens: list[Token | None] = []
        for inner in description.hooks:
            examples = self._examples(hook, inner)
            probe = _probe_for(inner, frozenset(examples)) if examples else None
            try:
                tokens.append(None if probe is None else probe.token(inner.pack, inner.unpack))
            except AotHooksError as e:
                raise _located(e, f"hook '{inner.name}' on saved {next(iter(examples.values()))}") from e.__cause__
        return _ChosenHook(None, description.text, tuple(tokens))

    def _examples(self, hook: Any, inner: Any) -> dict[Example, str]:
        """The examples on which `inner`, a hook in `hook`, was traced so far, each with where it was saved.

        A policy may make its hook anew in each call. Then the examples are those of hooks with the same code.
        """
        codes = {_codes(each) for each in (inner, hook) if hasattr(each, "pack")}  # a policy has no functions
        same = [seen for other, seen in self.examples.values() if other is hook or other is inner]
        same = same or [seen for other, seen in self.examples.values() if _codes(other) in codes]
        return {example: where for seen in same for example, where in seen.items()}


def _codes(hook: Any) -> tuple[int, int]:
    return number_of(code_of(hook.pack)), number_of(code_of(hook.unpack))


def _located(e: AotHooksError, at: str) -> AotHooksError:
    """`e` with the hook and tensor, and the ways out."""
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
    """Records this thread's choices and traces inside; nothing if not `on`."""
    seen = Recording()
    before, _local.recording = _local.recording, seen if on else None
    try:
        yield seen
    finally:
        _local.recording = before


def note_choice(rule: Any, row: Any, hook: Any) -> None:
    if _local.recording is not None:
        _local.recording.choices.setdefault(id(rule), (rule, {}))[1][row] = hook


def note_trace(hook: Any, x: torch.Tensor, where: str, size_of: Callable[[Any], int]) -> None:
    """Note that `hook` is traced on `x`, a fake tensor. `where` is the place that saves it, for messages."""
    if _local.recording is not None:
        _, examples = _local.recording.examples.setdefault(id(hook), (hook, {}))
        examples.setdefault(example_of(x, size_of), where)
