"""The compiled versions of a graph under a budget, of which each call of a step runs one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..hook import KEEP
from ..offloading.at_run_time import holds
from ..passes.plan import Plan
from ..steps.memory import Bytes
from ..steps.recorder import Call, Step


class Mode(Enum):
    """What a graph is compiled for."""

    ALONE = "alone"
    """As if it were the whole step. Right if it is; nobody knows before calls hold a part of the budget."""
    LEAST = "least"
    """To hold the least that its means allow: it is one of many calls, and nobody knows yet how many there are."""
    PLANNED = "planned"
    """For its share of the budget, in a step whose calls are known."""


@dataclass(eq=False)
class Version:
    """A compiled version of a graph, with the bytes of a call of it.

    Attributes:
        tight: a version that holds less, which the first `tight_calls` calls of the graph in a step run.
        loose_calls: how many may run this one at the same time, if there is a tight one.
        is_tight: it is such a version.
        ms: the predicted time of a call, in milliseconds.
        freed_inputs: how many inputs of a call count as gone between its forward and its backward.
        drops_others: its bytes count outputs beside the loss as dropped before the backward.
        sizes: the symbolic sizes that its forward saves for its backward, in order.
        has_hooks: it is not as without the budget.
    """

    graph: Any
    mode: Mode
    nbytes: Bytes
    tight: Version | None = None
    tight_calls: int = 0
    loose_calls: int = 0
    is_tight: bool = False
    ms: float = 0.0
    freed_inputs: int = 0
    drops_others: bool = False
    sizes: tuple[str, ...] = ()
    has_hooks: bool = True

    def keeps_inputs(self, call: Call) -> bool:
        """Whether the program holds an input of `call`, whose backward begins, that counts as gone."""
        if not self.freed_inputs or not call.inputs or not call.is_chained:
            return False
        gone = [memory for memory in call.inputs if memory.expired() or holds(memory)]
        return len(gone) < self.freed_inputs

    def for_next_call(self, step: Step) -> Version:
        """The version for the next call in `step`: the tight one, until all planned tight calls hold saved tensors.

        So at most `loose_calls` calls hold as much as this version, in whatever order calls come.
        """
        if self.tight is None:
            return self
        versions = (call.what for call in step.holding.values())
        holding = Counter(version.is_tight for version in versions if version.graph is self.graph)
        fits = holding[True] == self.tight_calls and holding[False] < self.loose_calls
        return self if fits else self.tight


def held_bytes(step: Step) -> int:
    """What the calls of a step hold now."""
    return sum(call.what.nbytes.held for call in step.holding.values())


def freed_inputs(plan: Plan) -> int:
    """How many inputs of a graph `plan` stores elsewhere in each call of a step: see `Whole.frees_inputs`."""
    typed = plan.recipe is not None and plan.recipe.across_graphs
    return sum(typed and d.saved.is_input and not d.saved.is_static and d.hook is not KEEP for d in plan.decisions)
