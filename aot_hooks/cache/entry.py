"""The plans that an entry of torch's cache stores, so that a warm start reports what the cold one did.

      plans, key, places --pack_up--> bytes, in torch's entry ... another process ... --unpack--> plans, or an error

A program with other names for its modules and arguments may take the entry. So a row stores the number of a node of
Dynamo's graph instead of a module and a line, and numbers of sizes instead of their names. A hook is stored as "the
choice of the setting's rule for this row", or pickled if the package made it. `unpack` checks both: a policy of the
user's must choose as it chose then, and a hook of the user's must trace to the same program.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import AotHooksError, PolicyError
from ..graphs.saved import Dim, SavedTensor
from ..hook import KEEP, Hook, compiling_for
from ..identity.canonical import canonical
from ..identity.frozen import described
from ..passes.live_bytes import LivePoint
from ..passes.plan import Decision, Layout, Plan
from ..passes.trace import trace_hook
from ..settings.setting import out_of_scope
from ..torch_private import values as torch_values
from .key import Key, foreign_operator

Place = tuple[str, str]  # module and line
# ("keep", 0), ("rule", number of the setting), ("means", number of the setting and of the hook in a budget), or
# ("value", the pickled hook)
_Hook = tuple[str, Any]


class EntryRefused(AotHooksError):
    """The entry is for another program, or damaged; the message says why."""


class ForAnother(EntryRefused):
    """A hook or policy does something else than when the entry was made."""


class Unusable(EntryRefused):
    """A hook or policy cannot be checked, in this entry or any other of its graph; the message says why."""


@dataclass(frozen=True)
class _StoredDecision:
    decision: Decision  # without its place, hook and settings
    module_at: int | None
    line_at: int | None
    chosen_by: tuple[int, ...]  # numbers of settings
    hook: _Hook
    choices: tuple[str, ...]  # see `Checks.choices`
    traces_to: str  # digest of the hook's programs on a tensor of the row's shape, "" where no check is needed


@dataclass(frozen=True)
class _Stored:
    plans: tuple[tuple[tuple[_StoredDecision, ...], Plan], ...]  # rows in place of decisions
    cannot: str  # why the entry must not be used, "" if it may


def pack_up(plans: Sequence[Plan], check: Checks, places: Callable[[], Sequence[Place]]) -> bytes:
    """The plans of one compilation as bytes. `places` gives module and line of each node of Dynamo's graph."""
    found = list(places())
    place_at: dict[Any, int] = _first_positions(found)
    module_at: dict[Any, int] = _first_positions(module for module, _ in found)
    line_at: dict[Any, int] = _first_positions(line for _, line in found)
    numbers = _first_positions(setting and setting.key for setting in check.key.settings)
    numbered = _renaming({name: f"size{i}" for i, name in enumerate(check.key.sizes)})

    def stored(d: Decision) -> _StoredDecision:
        row = d.saved
        at = place_at.get((row.module_path, row.source_line))  # else of two nodes: one for the module, one for the line
        chosen_by = tuple(numbers[key] for key in d.settings)
        nameless = dataclasses.replace(row, shape=numbered(row.shape), module_path="", source_line="")
        return _StoredDecision(
            dataclasses.replace(d, saved=nameless, hook=KEEP, settings=()),
            module_at=module_at.get(row.module_path) if at is None else at,
            line_at=line_at.get(row.source_line) if at is None else at,
            chosen_by=chosen_by,
            hook=check.stored_hook(d.hook, row, chosen_by),
            choices=check.choices(row, chosen_by),
            traces_to=check.programs(d.hook, row, d.layout, chosen_by),
        )

    try:
        content = _Stored(tuple((tuple(map(stored, plan.decisions)), _without_rows(plan)) for plan in plans), "")
    except EntryRefused as e:
        content = _Stored((), str(e))
    data = pickle.dumps(content)
    return hashlib.sha256(data).digest() + data


def _without_rows(plan: Plan) -> Plan:
    """`plan` without decisions, and without the names of this program."""

    def nameless(points: Iterable[LivePoint]) -> tuple[LivePoint, ...]:
        return tuple(dataclasses.replace(point, module_path="", source_line="") for point in points)

    before, after = nameless(plan.live_before), nameless(plan.live_after)
    chunked, tiled = (tuple(dataclasses.replace(row, place="") for row in rows) for rows in (plan.chunked, plan.tiled))
    return dataclasses.replace(plan, decisions=(), live_before=before, live_after=after, chunked=chunked, tiled=tiled)


def _first_positions(values: Iterable[Any]) -> dict[Any, int]:
    """The position at which each value comes first."""
    return {value: i for i, value in reversed(list(enumerate(values)))}


def unpack(data: bytes, check: Checks, places: Callable[[], Sequence[Place]]) -> list[Plan]:
    """The plans that `pack_up` stored, with the hooks and places of this program.

    Raises:
        EntryRefused: the data is damaged, or a hook or policy behaves differently now.
        Unusable: no entry of this graph may be used.
    """
    checksum, data = data[:32], data[32:]
    if hashlib.sha256(data).digest() != checksum:
        raise EntryRefused("what is stored beside it is damaged")
    stored: _Stored = pickle.loads(data)  # made by the same sources, which the key holds
    if stored.cannot:
        raise Unusable(stored.cannot)
    named = _renaming({f"size{i}": name for i, name in enumerate(check.key.sizes)})
    placed = any(row.module_at is not None or row.line_at is not None for rows, _ in stored.plans for row in rows)
    found = places() if placed else ()

    def decision(row: _StoredDecision) -> Decision:
        try:
            module = "" if row.module_at is None else found[row.module_at][0]
            line = "" if row.line_at is None else found[row.line_at][1]
        except IndexError:
            raise EntryRefused("its rows name nodes that this graph does not have") from None
        saved = row.decision.saved
        saved = dataclasses.replace(saved, shape=named(saved.shape), module_path=module, source_line=line)
        hook = check.resolve(row.hook, saved)
        if check.choices(saved, row.chosen_by) != row.choices:
            raise ForAnother(f"the policy chooses otherwise for {saved.describe()} than when the entry was made")
        try:
            traces_to = check.programs(hook, saved, row.decision.layout, row.chosen_by)
        except Unusable as e:  # this entry only: the process that made it could trace its hooks
            raise EntryRefused(str(e)) from e
        if row.traces_to != traces_to:
            raise ForAnother(
                f"hook '{hook.name}' traces to another program on {saved.describe()} than when the entry was made"
            )
        return dataclasses.replace(row.decision, saved=saved, hook=hook, settings=check.keys(row.chosen_by))

    return [dataclasses.replace(plan, decisions=tuple(map(decision, rows))) for rows, plan in stored.plans]


def _renaming(names: Mapping[str, str]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """A function that renames the symbols in a shape."""

    def renamed(expression: str) -> str:
        return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), expression)

    return lambda shape: tuple(Dim(int(s), renamed(s.expression)) if isinstance(s, Dim) else s for s in shape)


# what the pickle of a user's hook may raise
_UNREADABLE = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError, ValueError)


class Checks:
    """Choices of rules, and programs of hooks, each found once for a row or shape of a compilation."""

    def __init__(self, key: Key) -> None:
        self.key = key
        # by the id of a hook and an example: the hook, which thus keeps its id, and the digest of its program
        self.known: dict[Any, tuple[Hook, str]] = {}

    def keys(self, chosen_by: tuple[int, ...]) -> tuple[str, ...]:
        """The keys of the settings `chosen_by`."""
        settings = self.key.settings
        if any(number >= len(settings) or settings[number] is None for number in chosen_by):
            raise EntryRefused("a row names a setting that this graph does not have")
        return tuple(s.key for s in (settings[number] for number in chosen_by) if s is not None)

    def means(self, number: int) -> tuple[Hook, ...]:
        """The hooks that a setting chooses from, if it is a budget."""
        setting = self.key.settings[number]
        found: tuple[Hook, ...] = () if setting is None else getattr(setting.rule, "hooks", ())
        return found

    def chosen(self, number: int, row: SavedTensor) -> Hook:
        """The hook that setting `number` chooses for `row`."""
        setting = self.key.settings[number]
        if setting is None or out_of_scope(row, setting.scope):
            return KEEP
        try:
            return setting.choose(row)
        except PolicyError as e:
            raise EntryRefused(str(e)) from e

    def stored_hook(self, hook: Hook, row: SavedTensor, chosen_by: tuple[int, ...]) -> _Hook:
        """The form in which the entry stores `hook`: as the choice of one of the settings `chosen_by`, or pickled."""
        if hook is KEEP:
            return "keep", 0
        chosen = {number: self.chosen(number, row) for number in chosen_by}
        equal = [number for number, each in chosen.items() if each == hook]
        equal = equal or [number for number, each in chosen.items() if described(each).text == described(hook).text]
        if equal:
            return "rule", equal[0]
        for number in chosen_by:
            if hook in (means := self.means(number)):
                return "means", (number, means.index(hook))
        try:
            return "value", pickle.dumps(hook)
        except (pickle.PicklingError, TypeError, AttributeError) as e:
            raise EntryRefused(f"hook '{hook.name}' cannot be stored ({e})") from e

    def resolve(self, hook: _Hook, row: SavedTensor) -> Hook:
        """The hook that the stored `hook` stands for: a setting's choice for `row`, a pickled hook, or `KEEP`."""
        kind, value = hook
        if kind == "rule" and value < len(self.key.settings):
            return self.chosen(value, row)
        if kind == "value":
            try:
                found = pickle.loads(value)
            except _UNREADABLE as e:
                raise EntryRefused(f"a stored hook cannot be read ({type(e).__name__}: {e})") from e
            if isinstance(found, Hook):
                return found
        if kind == "means" and value[0] < len(self.key.settings) and value[1] < len(self.means(value[0])):
            own: Hook = self.means(value[0])[value[1]]
            return own
        if kind == "keep":
            return KEEP
        raise EntryRefused(f"a row names its hook by {hook!r}")

    def choices(self, row: SavedTensor, chosen_by: tuple[int, ...]) -> tuple[str, ...]:
        """Texts of the hooks that the settings `chosen_by` choose for `row`; "" where the key determines the choice."""
        texts = []
        for number in chosen_by:
            setting = self.key.settings[number]
            in_key = setting is None or isinstance(setting.rule, Hook) or not described(setting.rule).own
            texts.append("" if in_key else described(self.chosen(number, row)).portable)
        return tuple(texts)

    def programs(self, hook: Hook, row: SavedTensor, layout: Layout | None, chosen_by: tuple[int, ...]) -> str:
        """Digests of the programs of `hook`, and of the hooks that the settings choose, on a tensor of the row.

        The tensor has the `layout` that the hooks saw, or a dense one if that is unknown. Symbolic sizes have example
        values. Hooks of this package have no digest: their arguments are in the key. Raises `Unusable` if a hook cannot
        be traced on such a tensor.
        """
        shape, strides, dtype = layout or (tuple(map(int, row.shape)), None, row.dtype)
        found = []
        for each in (hook, *(self.chosen(number, row) for number in chosen_by)):
            if described(each).own:  # also a hook that declined: it may accept the tensor now
                if each.declines is not None and (declined := each.declines(row)):
                    found.append(f"declines: {declined}")
                    continue
                example = (id(each), shape, strides, dtype, row.device)
                if example not in self.known:
                    with torch_values.fake_tensor(shape, dtype, row.device, strides) as value:
                        self.known[example] = each, _program(each, row, value)
                found.append(self.known[example][1])
        return " ".join(dict.fromkeys(found))


def _program(hook: Hook, row: SavedTensor, value: torch.Tensor) -> str:
    """A digest of the graphs of `hook` for `value`, a fake tensor like that of `row`. Raises `Unusable`."""
    try:
        with compiling_for("inductor"):
            traced = trace_hook(hook, value, row.describe(), decompositions=None)
    except (AotHooksError, RuntimeError) as e:
        raise Unusable(
            f"hook '{hook.name}' cannot be traced on a tensor like {row.describe()} of static sizes, so that what it "
            f"does cannot be checked later ({str(e).splitlines()[0] if str(e) else type(e).__name__})"
        ) from e
    operator = foreign_operator(traced.pack) or foreign_operator(traced.unpack)
    if operator is not None and hook.cache_hash is None:
        raise Unusable(
            f"hook '{hook.name}' calls operator {operator}, and what that does is in no graph. Give the hook "
            "Hook(..., cache_hash='1'), a text that you change whenever the operator does something else"
        )
    programs = "\n".join([str(hook.cache_hash), *canonical(traced.pack), "", *canonical(traced.unpack)])
    return hashlib.sha256(programs.encode()).hexdigest()
