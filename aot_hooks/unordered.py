"""The members of a set in an order that their content decides; their own is another in each process.

      {Cfg(2), "a", Cfg(1)}  --kind, atoms-->  "a", [Cfg(2), Cfg(1)]  --content-->  "a", Cfg(1), Cfg(2)

A set is then read as a list is, so what its members reach counts and is watched as everywhere, and a member that
reaches the set that holds it is met again. To put them in order takes as little of them as tells them apart: of sets
that they hold in turn the atoms, then one more level. What is alike to that depth is left as it comes, and two equal
sets may be read as different, which costs a recompile; never two that differ as equal, as all of each is written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .kinds import ATOMS

__all__ = ["in_order", "labels"]

_LEVELS_OF_SETS = 2


def in_order(members: Iterable[Any], met: Mapping[int, int], sketch: Callable[[int, Any], str]) -> list[Any]:
    """`members` of a set.

    Args:
        met: by id, numbers of what was written before; such a member is written as its number.
        sketch: `sketch(sets, value)` is the content of a value, with sets to that depth.
    """
    groups = _apart([*members], _label)
    groups = [part for group in groups for part in _apart(group, lambda value: met.get(id(value), len(met)))]
    for sets in range(_LEVELS_OF_SETS):
        groups = [part for group in groups for part in _apart(group, functools.partial(sketch, sets))]
    return [value for group in groups for value in group]


def labels(members: Iterable[Any]) -> list[str]:
    """What can be said of each member of a set at a glance."""
    return sorted(map(_label, members))


def _apart(group: list[Any], say: Callable[[Any], Any]) -> list[list[Any]]:
    """`group` in parts that say the same, in the order of what they say."""
    if len(group) < 2:
        return [group]
    parts: dict[Any, list[Any]] = {}
    for value in group:
        parts.setdefault(say(value), []).append(value)
    return [parts[said] for said in sorted(parts)]


def _label(value: Any) -> str:
    kind = type(value)
    if kind in ATOMS:
        return f"{kind.__name__}:{value!r}"
    items = [x for x in tuple.__iter__(value) if type(x) in ATOMS] if isinstance(value, tuple) else ""
    return f"{kind.__module__}.{kind.__qualname__}:{items}"
