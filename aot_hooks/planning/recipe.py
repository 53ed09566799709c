"""What a plan chose, by name, so that the same plan is made again without a search.

      search --> Plan.recipe --save_plans--> file ... another process ... --load_plans--> Recipe --> the same plan

A recipe has no numbers of a solver. Whoever follows it reads the bytes and times of the graphs anew, and compares the
peak that results with the budget: so a recipe of another program is refused, and can't break a budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import AotHooksError, CacheWarning, warn_user
from .solver import Solution
from .step import KEPT, Apart, Option, Step, Value


class Refused(AotHooksError):
    """A recipe can't be followed in these graphs; the message says why."""


def warn_of_refused(budget: Any, why: Refused) -> None:
    warn_user(
        f"aot_hooks: {budget!r}: the loaded plan of a graph is not used, because {why}. The graph is planned anew",
        CacheWarning,
    )


class Pick(NamedTuple):
    """The option of one value of a step."""

    value: int  # its number
    name: str  # of the value, to check the number
    option_name: str
    option: int  # its number among the options of that name: with fewer means there are fewer of other names


@dataclass(frozen=True)
class Recipe:
    """How a plan is made again.

    Attributes:
        partition: the options that say what is computed again, of the step as torch partitions it.
        hooks: the options of the step that is left then.
        typed: a way that a user can type, in place of both: what it computes again and its name, see candidates.py.
        across_graphs: that way is for a graph that many calls of a step run, and its copies hide in the whole step.
        apart: how many calls of the step hold the least, if not all are alike.
        drops_others: outputs beside the loss count as dropped before the backward.
        finer: the loss is in chunks of the usual size divided by this, see chunks.py; 0 if it is not in chunks.
        tiles: how layers are in tiles, see chunks.py; "" if they are not.
    """

    partition: tuple[Pick, ...] = ()
    hooks: tuple[Pick, ...] = ()
    typed: tuple[str, str] | None = None
    across_graphs: bool = False
    apart: Apart | None = None
    drops_others: bool = False
    finer: int = 0
    tiles: str = ""


def _named(value: Value, name: str) -> list[Option]:
    return [option for option in value.options if option.name == name]


def picks_of(step: Step, solution: Solution) -> tuple[Pick, ...]:
    """The options that `solution` chose for the values of `step`, without those that it keeps."""
    found = []
    for v, (value, chosen) in enumerate(zip(step.values, solution.options, strict=True)):
        if chosen is not KEPT:
            number = next(i for i, option in enumerate(_named(value, chosen.name)) if option is chosen)
            found.append(Pick(v, value.names[0], chosen.name, number))
    return tuple(found)


def chosen_again(step: Step, picks: Iterable[Pick]) -> Solution:
    """The choice of `picks` among the options of `step`. Raises `Refused` if a value or an option isn't there."""
    options = [KEPT] * len(step.values)
    for pick in picks:
        value = step.values[pick.value] if pick.value < len(step.values) else None
        if value is None or value.names[0] != pick.name:
            raise Refused(f"it stores a tensor '{pick.name}', which the backward of this graph does not read there")
        named = _named(value, pick.option_name)
        if pick.option >= len(named):
            raise Refused(f"it stores '{pick.name}' by {pick.option_name}, which can't take that tensor here")
        options[pick.value] = named[pick.option]
    return Solution(tuple(options), step.live, step.peak_bytes, step.ms, 0.0)
