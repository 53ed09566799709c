"""Plans of budgets as data: those that this process made, to be saved, and loaded ones, to be made again.

      compiled graph --noted--> _made --as_data--> JSON ... another process ... --load--> _loaded
      graph to compile --loaded--> its recipe, and what is known of its step: the first step runs the planned versions

A graph is found by its `Program`: operators, inputs, budget and options, with the name of the device but not its
number. A step of many graphs is restored as a whole, with its traces, when its first graph is compiled.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CacheWarning, warn_user
from ..passes.plan import Plan
from ..steps.memory import Bytes
from ..steps.moments import Instant
from . import many
from .assignment import Assignment
from .measured import StepTime
from .recipe import Recipe
from .versions import Mode

_lock = threading.Lock()  # of what this module knows
_BYTES = ("stock", "share")


@dataclass(frozen=True)
class Program:
    """A graph of Dynamo with all that its plan depends on, as text.

    Attributes:
        digest: equal for equal `lines`.
        lines: what each line is about, and its content.
        budget: the budget as a user writes it.
        devices: names of the devices that the graph runs on.
    """

    digest: str
    lines: tuple[tuple[str, str], ...]
    budget: str
    devices: tuple[str, ...]


@dataclass(frozen=True)
class _Made:
    """What was planned for a graph: `tight` is for calls that hold the least, if some do. `graph` knows its step."""

    program: Program
    mode: Mode
    recipe: Recipe
    tight: Recipe | None
    graph: many.Graph | None


@dataclass(eq=False)
class _Step:
    """A loaded step of many graphs: its traces, and its graphs by the numbers that these name."""

    data: Mapping[str, Any]
    graphs: dict[int, Loaded] = field(default_factory=dict)


@dataclass(eq=False)
class Loaded:
    """A loaded plan of one graph."""

    program: Program
    mode: Mode
    recipe: Recipe
    tight: Recipe | None
    state: Mapping[str, Any] | None  # of its `many.Graph`
    step: _Step | None


_made: dict[str, _Made] = {}
_unsaved: dict[str, str] = {}  # by a program's digest: why its plan can't be saved
_loaded: dict[str, Loaded] = {}
_warned: set[str] = set()


def forget() -> None:
    """Forget what was made, and what was loaded."""
    for known in (_made, _unsaved, _loaded, _warned):
        known.clear()


def note(
    program: Program, plans: Sequence[Plan], tight_plans: Sequence[Plan], graph: many.Graph | None, mode: Mode
) -> None:
    """A graph was compiled with these plans."""
    with _lock:
        _unsaved.pop(program.digest, None)
        recipes = [plan.recipe for plan in (*plans, *tight_plans)]
        if not plans:
            return
        if len(plans) > 1 or None in recipes:
            _unsaved[program.digest] = f"a graph under {program.budget} has {len(plans)} plans, or a nested one"
            return
        _made[program.digest] = _Made(program, mode, recipes[0], recipes[1] if tight_plans else None, graph)


# --- to data ----------------------------------------------------------------------------------------------------------


def as_data() -> tuple[dict[str, Any], list[str]]:
    """All plans of this process for JSON, and why some can't be saved."""
    with _lock:
        made = list(_made.values())
        numbers = {one.graph: i for i, one in enumerate(made) if one.graph is not None}
        groups = list(dict.fromkeys(graph.group for graph in numbers if graph.group.traces))
        by_program = {one.program.digest: i for i, one in enumerate(made)}
        steps = [_step_data(group, numbers, by_program) for group in groups]
        graphs = [_graph_data(one, groups) for one in made]
        return {"graphs": graphs, "steps": steps}, sorted(_unsaved.values())


def _graph_data(one: _Made, groups: Sequence[many.Group]) -> dict[str, Any]:
    program, graph = one.program, one.graph
    return {
        "budget": program.budget,
        "devices": program.devices,
        "lines": program.lines,
        "mode": one.mode.value,
        "recipe": one.recipe.as_data(),
        "tight": None if one.tight is None else one.tight.as_data(),
        "step": groups.index(graph.group) if graph is not None and graph.group in groups else None,
        "state": None if graph is None else _state_data(graph),
    }


def _state_data(graph: many.Graph) -> dict[str, Any]:
    return {
        **{name: list(getattr(graph, name)) for name in _BYTES},
        "least": None if graph.least is None else list(graph.least),
        "ms": graph.ms,
        "is_nested": graph.is_nested,
        "frees_inputs": graph.frees_inputs,
        "slowness": graph.group.time.slowness,
        "calls": graph.calls,
        "sizes": [[[list(power) for power in product], n] for product, n in graph.sizes.items()],
    }


def _step_data(group: many.Group, numbers: Mapping[many.Graph, int], by_program: Mapping[str, int]) -> dict[str, Any]:
    """A step with its graphs by number. One for smaller sizes counts as the one that replaced it."""

    def number(graph: many.Graph) -> int:
        return numbers[graph] if graph in numbers else by_program.get(graph.program, -1)

    def instant(each: Instant) -> dict[str, Any]:
        holding: Counter[int] = Counter()
        for graph, count in each.holding.items():
            holding[number(graph)] += count
        return {
            "phase": each.phase,
            "runs": number(each.runs),
            "holding": sorted(holding.items()),
            "gradient_bytes": each.gradient_bytes,
            "gathered_bytes": each.gathered_bytes,
        }

    traces = [[instant(each) for each in trace] for trace in group.traces]
    return {
        "over": group.over,
        "planned_peak": group.planned_peak,
        "counted": group.counted,
        "traces": [trace for trace in traces if all(each["runs"] >= 0 for each in trace)],  # all graphs are known
    }


# --- from data --------------------------------------------------------------------------------------------------------


def load(data: Mapping[str, Any], programs: Sequence[Program]) -> int:
    """Take the plans of `as_data`, in place of those that were loaded for the same graphs. Returns their number.

    All or nothing: `KeyError`, `TypeError` or `ValueError` for data of another form.
    """
    steps = [_Step(step) for step in data["steps"]]
    found = []
    for i, (one, program) in enumerate(zip(data["graphs"], programs, strict=True)):
        step = None if one["step"] is None else steps[one["step"]]
        tight = None if one["tight"] is None else Recipe.of_data(one["tight"])
        loaded = Loaded(program, Mode(one["mode"]), Recipe.of_data(one["recipe"]), tight, one["state"], step)
        if loaded.state is not None:
            _restore_state(many.Graph(many.Group(_ANY)), loaded)
        if step is not None:
            step.graphs[i] = loaded
        found.append(loaded)
    for step in steps:
        _restore_step(many.Group(_ANY), step)
    with _lock:
        _loaded.update((loaded.program.digest, loaded) for loaded in found)
    return len(found)


_ANY = Assignment(0, None, (), 0.0)  # of groups that only show whether data has the right form


def loaded_for(program: Program | None) -> Loaded | None:
    """The loaded plan of a graph; None without one."""
    return None if program is None else _loaded.get(program.digest)


def others() -> list[Program]:
    """The graphs that have loaded plans."""
    return [loaded.program for loaded in _loaded.values()]


def warn_once(program: Program, why: str) -> None:
    """Say why a graph with a backward is planned although plans were loaded."""
    if program.digest in _warned:
        return
    _warned.add(program.digest)
    warn_user(
        f"aot_hooks: {program.budget}: plans were loaded, but a graph is planned anew: {why}. Save plans in a process "
        "that runs the same program, or call load_plans only where they are wanted",
        CacheWarning,
    )


def restore(rule: Assignment, loaded: Loaded) -> None:
    """Let the steps under `rule` begin as those of the process that saved `loaded`, if none has begun yet."""
    if loaded.state is None or (group := many.group_of(rule)) is None:
        return
    if loaded.step is not None and not group.traces and not group.restored:
        _restore_step(group, loaded.step)
    elif loaded.step is None and loaded.program.digest not in group.known_programs():
        group.restored[loaded.program.digest] = _restore_state(many.Graph(group), loaded)


def _restore_step(group: many.Group, step: _Step) -> None:
    graphs = {i: _restore_state(many.Graph(group), loaded) for i, loaded in step.graphs.items()}
    traces: list[Sequence[Instant]] = [
        [
            Instant(
                str(each["phase"]),
                graphs[each["runs"]],
                {graphs[number]: int(count) for number, count in each["holding"]},
                int(each["gradient_bytes"]),
                int(each["gathered_bytes"]),
            )
            for each in trace
        ]
        for trace in step.data["traces"]
    ]
    group.traces, group.over = traces, int(step.data["over"])
    group.planned_peak, group.counted = int(step.data["planned_peak"]), bool(step.data["counted"])
    group.restored = {graph.program: graph for graph in graphs.values()}


def _restore_state(graph: many.Graph, loaded: Loaded) -> many.Graph:
    state: Any = loaded.state
    for name in _BYTES:
        setattr(graph, name, _bytes(state[name]))
    graph.least = None if state["least"] is None else _bytes(state["least"])
    graph.mode, graph.program = loaded.mode, loaded.program.digest
    graph.ms, graph.is_nested, graph.calls = float(state["ms"]), bool(state["is_nested"]), int(state["calls"])
    graph.frees_inputs = bool(state["frees_inputs"])
    graph.group.time = StepTime(float(state["slowness"]), is_known=True)  # that the recipe was made with
    graph.sizes = {tuple((int(i), int(p)) for i, p in product): int(n) for product, n in state["sizes"]}
    graph.was_planned = graph.is_fixed = loaded.mode is Mode.PLANNED
    graph.recipe, graph.tight_recipe = loaded.recipe, loaded.tight
    return graph


def _bytes(numbers: Sequence[Any]) -> Bytes:
    forward, held, backward = map(int, numbers)
    return Bytes(forward, held, backward)
