"""What the backend asks a budget for, in the order in which it asks.

      setting()     the setting to compile a graph with: its share of the budget, in the step that is known
      partition()   forward and backward, split and rewritten so that the step stays within that setting's budget
      compile()     the graph in one version, or in two, if some calls of a step shall hold less than others
      wrap()        the compiled graph with its calls noted, its first steps measured, and larger sizes planned anew

For a setting that is no budget a planner leaves everything as it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from ..passes.plan import Plan
from ..settings.setting import Setting
from ..torch_private import aot
from ..torch_private.values import examples
from . import many, measured, progress, stored
from .assignment import Assignment
from .sizes import NO_SIZES, Sizes, guarded
from .versions import Mode, Version
from .within import partition_within

log = logging.getLogger("aot_hooks")
_LATE = "its sizes are larger than those of its plan, or its step began before plans were loaded"
_Compiled = Callable[..., Any]


def forget() -> None:
    """Forget all steps, which of them were over their budgets, and loaded plans."""
    measured.forget()
    many.forget()
    stored.forget()


def is_budget(setting: Setting | None) -> bool:
    return setting is not None and isinstance(setting.rule, Assignment)


def _may_be_apart(rule: Assignment) -> bool:
    """Whether some calls of a graph may hold less than others."""
    return rule.apart is not None or (rule.recipe is not None and rule.recipe.apart is not None)


class Planner:
    """Plans one graph of Dynamo.

    Args:
        asked: the setting around the call; None: there is none.
        gm, inputs: what Dynamo hands a backend.
        wrapper: what `torch.compile` returned for the function that Dynamo is compiling, None if there is none.
        program: what the plan depends on, to save it and to find a loaded one; None: neither.
        why_not_loaded: called if no plan was loaded for `program`: the reason, "" if none was loaded at all.
    """

    partition = staticmethod(partition_within)

    def __init__(
        self,
        asked: Setting | None,
        gm: GraphModule,
        inputs: Sequence[Any],
        wrapper: Any,
        program: stored.Program | None = None,
        why_not_loaded: Callable[[], str] = lambda: "",
    ) -> None:
        self.asked, self.wrapper, self.program = asked, wrapper, program
        self.sizes = NO_SIZES
        self.tight_plans: list[Plan] = []
        self._budget: Assignment | None = None  # what the plans of a graph that is the whole step are made with
        self._graph: many.Graph | None = None  # in steps of many calls
        self._setting = asked
        self._tight_run: _Compiled | None = None
        self._version: Version | None = None
        self._data: Mapping[str, int] = {}  # what sizes are planned as that only the data give
        self._begun_s = time.perf_counter()
        self._why_not_loaded = ""  # "" if a plan was loaded, or none for any graph
        if asked is not None and isinstance(asked.rule, Assignment):
            self._budget = rule = measured.tightened(asked.rule, wrapper)
            self.sizes = Sizes.of(gm)
            # a step with a loaded plan may have been over its budget: the next plan is searched for
            loaded = stored.loaded_for(program) if rule is asked.rule else None
            if loaded is not None:
                stored.restore(rule, loaded)
            digest = "" if program is None else program.digest
            self._graph = many.graph_of(rule, gm, inputs, self.sizes.hints(), digest, self.sizes.of_data)
            given = rule if self._graph is None else self._graph.rule(rule, self.sizes.hints())
            self._data = self._graph.data_sizes() if self._graph is not None else {}
            recipe = self._graph.recipe if self._graph is not None else loaded and loaded.saved.recipe
            if recipe is None and rule is asked.rule and (self._graph is None or not self._graph.codes):
                self._why_not_loaded = _LATE if loaded is not None else why_not_loaded()
            self._setting = Setting(replace(given, recipe=recipe), asked.scope)

    @property
    def has_budget(self) -> bool:
        """Whether the setting is one."""
        return self._budget is not None

    def setting(self) -> Setting | None:
        """The setting to compile the graph with."""
        return self._setting

    def key(self) -> dict[str, Any]:
        """What cache keys contain beside the setting: a plan is for the sizes that it was made at."""
        return {"sizes": [*self.sizes.hints().values(), *self._data.items()]} if self.has_budget else {}

    def compile(
        self, gm: GraphModule, plans: list[Plan], compile_with: Callable[[GraphModule, Any, list[Plan]], _Compiled]
    ) -> _Compiled:
        """`gm` as `compile_with` compiles it with `setting()`, which appends its plans to `plans`.

        Calls that shall hold less than others get a second version.
        """
        setting: Any = self._setting
        if self._budget is None:
            return compile_with(gm, setting, plans)
        with progress.shown(repr(self._budget)), examples(self._data):
            return self._compile(gm, setting, plans, compile_with)

    def _compile(
        self,
        gm: GraphModule,
        setting: Any,
        plans: list[Plan],
        compile_with: Callable[[GraphModule, Any, list[Plan]], _Compiled],
    ) -> _Compiled:
        if self._graph is None or self._budget is None or not _may_be_apart(setting.rule):
            return compile_with(gm, setting, plans)
        twin = aot.twin(gm)
        run = compile_with(gm, setting, plans)
        if (tight := self._graph.tight_rule(self._budget, plans)) is not None:
            with aot.isolated_compilation():
                self._tight_run = compile_with(twin, Setting(tight, setting.scope), self.tight_plans)
        return run

    def by_call(self, run: _Compiled, plans: list[Plan], listed: list[Plan] | None) -> _Compiled:
        """`run`, or the version that each call of it shall run. Call it once the graph is compiled, to `plans`.

        `listed`: the plans that reports read; those of versions that `plans` replace are taken out.
        """
        self._note(plans)
        if self._graph is None:
            return run
        self._version = self._graph.compiled(plans, listed, self.tight_plans, self.sizes.hints())
        if self._version is None:
            return run
        if self._graph.compiled_count:
            self._log(self._version, plans)
        if self._tight_run is None:
            return run
        return many.by_call(run, self._tight_run, self._version)

    def _note(self, plans: Sequence[Plan]) -> None:
        """Note the plans, so that they can be saved. Warn if they should have been loaded and could not be."""
        if self.program is None or not plans:
            return
        mode = Mode.ALONE if self._graph is None else Mode.PLANNED if plans[0].in_step else self._graph.mode
        stored.note(self.program, plans, self.tight_plans, self._graph, mode)
        if self._why_not_loaded:
            stored.warn_once(self.program, self._why_not_loaded)

    def _log(self, version: Version, plans: Sequence[Plan]) -> None:
        """One line for each compilation that a budget has asked for."""
        step = plans[-1].in_step if plans else None
        calls = "" if step is None else f", for {step.calls} calls, at {plans[-1].step_ratio:.3f} of their time"
        seconds = time.perf_counter() - self._begun_s
        why, mode = version.graph.group.why, version.mode.value
        log.info(
            "%r: %s, as predicted: a graph is compiled again (%s%s), %.0f s", self._budget, why, mode, calls, seconds
        )

    def wrap(self, run: _Compiled, plans: Sequence[Plan]) -> _Compiled:
        """`run` with what a budget does at run time."""
        rule = None if self._setting is None or not plans else self._setting.rule
        if isinstance(rule, Assignment):  # compares the peaks of the first steps with the budget
            group = None if self._graph is None else self._graph.group
            run = measured.checked(run, rule, plans, self.wrapper, lambda: None if group is None else group.step)
        if self._version is not None:  # plans for all calls of a step together, and for larger sizes anew
            run = guarded(run, self._version, plans, self.sizes)
            run = many.noted(run, self._version)
        return run
