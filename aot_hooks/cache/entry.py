"""What is stored beside a compiled graph, so that a warm start says and does what the cold one did.

      plans, key, places --pack_up--> bytes, in torch's entry ... another process ... --unpack--> plans, or `Refused`

Rows hold no place of the program that made them, but the number of a node of Dynamo's graph, and no names of its sizes,
but their numbers: the program that reads them may call its modules and arguments otherwise. Hooks are stored as "what
the setting's rule says for this row", or pickled where the package made them itself. Both are checked when they are
read: a policy of the user's must say for each row what it said then, and a hook of the user's must trace to the same
program for it. An entry that is for another hook is passed over, whatever its key says.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import AotHooksError, PolicyError
from ..graphs.saved import Dim, SavedTensor
from ..hook import KEEP, Hook, compiling_for
from ..identity import described
from ..offloading.schedule import Transfer
from ..passes.plan import Decision, Plan
from ..passes.trace import canonical, trace_hook
from ..settings.setting import out_of_scope
from ..torch_private import values as torch_values
from .key import Key, foreign_operator

__all__ = ["Checks", "ForAnother", "Refused", "Unusable", "pack_up", "unpack"]

_FORMAT = 1
Place = tuple[str, str]
# where in a hook's row it comes from: (kind, number of the setting or pickled hook)
_Hook = tuple[str, Any]


class Refused(AotHooksError):
    """A stored plan is not one for this program; the message says why."""


class ForAnother(Refused):
    """A hook or policy does not do what it did: the entry is another's."""


class Unusable(Refused):
    """What would have to be checked cannot be, in this entry or any other of its graph; the message says what."""


@dataclass(frozen=True)
class _Row:
    saved: SavedTensor  # without its place
    module_at: int | None
    line_at: int | None
    asked: tuple[int, ...]  # numbers of the settings that chose
    hook: _Hook
    reason: str
    packed_bytes: int
    saved_bytes: int
    answers: tuple[str, ...]  # digests of what the rules of those settings say for the row, "" where it needs no check
    traces_to: str  # digest of the hook's programs on a tensor of the row's shape, "" where it needs no check


@dataclass(frozen=True)
class _Stored:
    """The whole."""

    plans: tuple[tuple[tuple[_Row, ...], tuple[Transfer, ...]], ...]
    cannot: str  # why the entry must not be used, "" if it may


def pack_up(plans: Sequence[Plan], check: Checks, places: Callable[[], Sequence[Place]]) -> bytes:
    """The plans of one compilation as bytes.

    Args:
        check: made for the key of the graph they are for, whose settings chose the hooks.
        places: module and line of each node of Dynamo's graph; asked once.
    """
    found = list(places())
    modules = {module: i for i, (module, _) in reversed(list(enumerate(found)))}
    lines = {line: i for i, (_, line) in reversed(list(enumerate(found)))}
    both = {place: i for i, place in reversed(list(enumerate(found)))}
    numbered = _renamed({name: f"size{i}" for i, name in enumerate(check.key.sizes)})
    rows: list[tuple[tuple[_Row, ...], tuple[Transfer, ...]]] = []
    cannot = ""
    for plan in plans:
        of_plan = []
        for d in plan.decisions:
            row = d.saved
            at = both.get((row.module_path, row.source_line))
            try:
                asked = check.asked(d.settings)
                stored = _Row(
                    saved=dataclasses.replace(row, shape=numbered(row.shape), module_path="", source_line=""),
                    module_at=modules.get(row.module_path) if at is None else at,
                    line_at=lines.get(row.source_line) if at is None else at,
                    asked=asked,
                    hook=check.reference(d.hook, row, asked),
                    reason=d.reason,
                    packed_bytes=d.packed_bytes,
                    saved_bytes=d.saved_bytes,
                    answers=check.answers(row, asked),
                    traces_to=check.programs(d.hook, row, asked),
                )
            except Refused as e:
                cannot = cannot or str(e)
            else:
                of_plan.append(stored)
        rows.append((tuple(of_plan), plan.transfers))
    data = pickle.dumps((_FORMAT, _Stored(() if cannot else tuple(rows), cannot)))
    return hashlib.sha256(data).digest() + data


def unpack(data: bytes, check: Checks, places: Callable[[], Sequence[Place]]) -> list[Plan]:
    """The plans that `pack_up` stored, with the hooks and places of this program.

    Raises:
        Refused: they are damaged, from another version, or a hook or policy does not do what it did.
        Unusable: no entry of this graph may be used.
    """
    stored = _read(data)
    if stored.cannot:
        raise Unusable(stored.cannot)
    named = _renamed({f"size{i}": name for i, name in enumerate(check.key.sizes)})
    found: Sequence[Place] = ()
    if any(row.module_at is not None or row.line_at is not None for rows, _ in stored.plans for row in rows):
        found = places()
    plans = []
    for rows, transfers in stored.plans:
        decisions = []
        for row in rows:
            try:
                module = "" if row.module_at is None else found[row.module_at][0]
                line = "" if row.line_at is None else found[row.line_at][1]
            except IndexError:
                raise Refused("its rows name nodes that this graph does not have") from None
            shape = named(row.saved.shape)
            saved = dataclasses.replace(row.saved, shape=shape, module_path=module, source_line=line)
            hook = check.resolve(row.hook, saved)
            if check.answers(saved, row.asked) != row.answers:
                raise ForAnother(f"the policy chooses otherwise for {saved.describe()} than when the entry was made")
            try:
                traces_to = check.programs(hook, saved, row.asked)
            except Unusable as e:  # what made the entry could be checked
                raise Refused(str(e)) from e
            if row.traces_to != traces_to:
                raise ForAnother(
                    f"hook '{hook.name}' traces to another program on {saved.describe()} than when the entry was made"
                )
            settings = check.keys(row.asked)
            decisions.append(Decision(saved, hook, row.reason, row.packed_bytes, row.saved_bytes, settings))
        plans.append(Plan(tuple(decisions), transfers))
    return plans


def _renamed(names: Mapping[str, str]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """Shapes with the symbols in them called by `names`."""

    def one(size: int) -> int:
        if not isinstance(size, Dim):
            return size
        return Dim(int(size), re.sub(r"\w+", lambda word: names.get(word[0], word[0]), size.expression))

    return lambda shape: tuple(map(one, shape))


def _read(data: bytes) -> _Stored:
    checksum, data = data[:32], data[32:]
    if hashlib.sha256(data).digest() != checksum:
        raise Refused("what is stored beside it is damaged")
    try:
        version, stored = pickle.loads(data)
    except _UNREADABLE as e:
        raise Refused(f"what is stored beside it cannot be read ({type(e).__name__}: {e})") from e
    if version != _FORMAT or not isinstance(stored, _Stored):
        raise Refused(f"what is stored beside it has format {version}; expected {_FORMAT}")
    return stored


# what the pickle of another version may raise
_UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError),
    UnicodeDecodeError,
)


class Checks:
    """What rules say and hooks do, asked once for each row or shape of a compilation."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.hooks: dict[int, Hook] = {}  # alive, so that ids stay their own
        self.known: dict[Any, str] = {}

    def asked(self, settings: tuple[str, ...]) -> tuple[int, ...]:
        numbers = {s.key: number for number, s in reversed(list(enumerate(self.key.settings))) if s is not None}
        return tuple(numbers[key] for key in settings)

    def keys(self, asked: tuple[int, ...]) -> tuple[str, ...]:
        settings = self.key.settings
        if any(number >= len(settings) or settings[number] is None for number in asked):
            raise Refused("a row names a setting that this graph does not have")
        return tuple(s.key for s in (settings[number] for number in asked) if s is not None)

    def chosen(self, number: int, row: SavedTensor) -> Hook:
        setting = self.key.settings[number]
        if setting is None or out_of_scope(row, setting.scope):
            return KEEP
        try:
            return setting.choose(row)
        except PolicyError as e:
            raise Refused(str(e)) from e

    def reference(self, hook: Hook, row: SavedTensor, asked: tuple[int, ...]) -> _Hook:
        if hook is KEEP:
            return "keep", 0
        chosen = {number: self.chosen(number, row) for number in asked}
        for same in (lambda a: a == hook, lambda a: described(a).text == described(hook).text):
            for number, each in chosen.items():
                if same(each):
                    return "rule", number
        try:
            return "value", pickle.dumps(hook)
        except (pickle.PicklingError, TypeError, AttributeError) as e:
            raise Refused(f"hook '{hook.name}' cannot be stored ({e})") from e

    def resolve(self, hook: _Hook, row: SavedTensor) -> Hook:
        kind, value = hook
        if kind == "rule" and value < len(self.key.settings):
            return self.chosen(value, row)
        if kind == "value":
            try:
                found = pickle.loads(value)
            except _UNREADABLE as e:
                raise Refused(f"a stored hook cannot be read ({type(e).__name__}: {e})") from e
            if isinstance(found, Hook):
                return found
        if kind == "keep":
            return KEEP
        raise Refused(f"a row names its hook by {hook!r}")

    def answers(self, row: SavedTensor, asked: tuple[int, ...]) -> tuple[str, ...]:
        said = []
        for number in asked:
            setting = self.key.settings[number]
            needless = setting is None or isinstance(setting.rule, Hook) or not described(setting.rule).own
            said.append("" if needless else described(self.chosen(number, row)).portable)
        return tuple(said)

    def programs(self, hook: Hook, row: SavedTensor, asked: tuple[int, ...]) -> str:
        """What `hook`, and those that the settings have for the row, are on a dense tensor of its shape; symbolic sizes
        at their example values. Hooks of this package need none: their arguments are in the key.

        Raises `Unusable` if one cannot be traced on such a tensor: the saved one may have another order in memory.
        """
        found = []
        for each in (hook, *(self.chosen(number, row) for number in asked)):
            if described(each).own:  # also where it declined, or gave the tensor back as it is: it may do otherwise now
                declined = each.declines(row) if each.declines is not None else None
                if declined:
                    found.append(f"declines: {declined}")
                    continue
                self.hooks[id(each)] = each
                place = (id(each), tuple(int(size) for size in row.shape), row.dtype, row.device)
                if place not in self.known:
                    self.known[place] = _program(each, row)
                found.append(self.known[place])
        return " ".join(dict.fromkeys(found))


def _program(hook: Hook, row: SavedTensor) -> str:
    shape = [int(size) for size in row.shape]
    with compiling_for("inductor"), torch_values.fake_tensor(shape, row.dtype, row.device) as value:
        try:
            traced = trace_hook(hook, value, row.describe(), decompositions=None)
        except (AotHooksError, RuntimeError) as e:
            raise Unusable(
                f"hook '{hook.name}' cannot be traced on a dense tensor like {row.describe()}, so that what it does "
                f"cannot be checked later ({str(e).splitlines()[0] if str(e) else type(e).__name__})"
            ) from e
    operator = foreign_operator(traced.pack) or foreign_operator(traced.unpack)
    if operator is not None and hook.cache_hash is None:
        raise Unusable(
            f"hook '{hook.name}' calls operator {operator}, and what that does is in no graph. Give the hook "
            "Hook(..., cache_hash='1'), a text that you change whenever the operator does something else"
        )
    programs = f"{hook.cache_hash}\n{canonical(traced.pack)}\n\n{canonical(traced.unpack)}"
    return hashlib.sha256(programs.encode()).hexdigest()
