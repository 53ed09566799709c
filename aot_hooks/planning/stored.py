"""Plans of budgets as data: those that this process made, to be saved, and loaded ones, to be made again.

      compiled graph --noted--> _made --as_data--> JSON ... another process ... --load--> _loaded
      graph to compile --loaded--> its recipe, and what is known of its step: the first step runs the planned versions

A graph is found by its `Program`: operators, inputs, budget and options, with the name of the device but not its
number. A step of many graphs is restored as a whole, with its traces, when its first graph is compiled.
"""

from __future__ import annotations

import threading
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from types import GenericAlias
from typing import Any

from ..errors import CacheWarning, warn_user
from ..passes.plan import Plan
from ..steps.memory import Bytes
from ..steps.moments import Instant
from . import many
from .assignment import Assignment
from .measured import StepTime
from .recipe import Recipe
from .sizes import Product
from .versions import Mode

_lock = threading.Lock()  # of what this module knows


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
class _State:
    """What a `many.Graph` knows, in attributes of the same names."""

    stock: Bytes
    least: Bytes | None
    share: Bytes
    ms: float
    is_nested: bool
    calls: int
    frees_inputs: bool
    sizes: Mapping[Product, int]


@dataclass(frozen=True)
class _Step:
    """A step of many graphs, which its traces name by number. The other attributes are those of `many.Group`.

    `slowness`, `link_share`: those that its plans were made with.
    """

    traces: tuple[tuple[Instant, ...], ...]
    over: int
    planned_peak: int
    counted: bool
    slowness: float
    link_share: float


@dataclass(frozen=True)
class SavedPlan:
    """What was planned for a graph.

    Attributes:
        tight: for calls that hold the least, if some do.
        state: what its `many.Graph` knows; None: it is in none.
        step: the number of its step; None: it has no trace.
    """

    program: Program
    mode: Mode
    recipe: Recipe
    tight: Recipe | None
    state: _State | None = None
    step: int | None = None


@dataclass(eq=False)
class Loaded:
    """A loaded plan of one graph. `graphs`: all those of its step, by number."""

    saved: SavedPlan
    step: _Step | None
    graphs: Mapping[int, SavedPlan]


_made: dict[str, tuple[SavedPlan, many.Graph | None]] = {}
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
        _made[program.digest] = SavedPlan(program, mode, recipes[0], recipes[1] if tight_plans else None), graph


# --- to data ----------------------------------------------------------------------------------------------------------


def as_data() -> tuple[dict[str, Any], list[str]]:
    """All plans of this process for JSON, and why some can't be saved."""
    with _lock:
        graphs = [graph for _, graph in _made.values()]
        groups = list(dict.fromkeys(graph.group for graph in graphs if graph is not None and graph.group.traces))
        steps = [_step_of(group, graphs) for group in groups]
        saved = []
        for one, graph in _made.values():
            if graph is not None:
                state = _State(**{each.name: getattr(graph, each.name) for each in fields(_State)})
                number = groups.index(graph.group) if graph.group in groups else None
                one = replace(one, state=state, step=number)
            saved.append(one)
        return {"graphs": to_json(saved), "steps": to_json(steps)}, sorted(_unsaved.values())


def _step_of(group: many.Group, graphs: Sequence[many.Graph | None]) -> _Step:
    """The step of a group, with its graphs by number. One for smaller sizes counts as the one that replaced it."""
    numbers = {graph: i for i, graph in enumerate(graphs) if graph is not None}
    by_program = {digest: i for i, digest in enumerate(_made)}
    number = lambda graph: numbers.get(graph, by_program.get(graph.program, -1))  # noqa: E731
    traces = [tuple(_with_graphs(each, number) for each in trace) for trace in group.traces]
    known = tuple(trace for trace in traces if all(each.runs is None or each.runs >= 0 for each in trace))
    return _Step(known, group.over, group.planned_peak, group.counted, group.time.slowness, group.time.link_share)


def _with_graphs(instant: Instant, of: Callable[[Any], Any]) -> Instant:
    """`instant` with what `of` returns in place of each graph."""
    holding: Counter[Any] = Counter()
    for graph, count in instant.holding.items():
        holding[of(graph)] += count
    return replace(instant, runs=None if instant.runs is None else of(instant.runs), holding=holding)


def to_json(value: Any) -> Any:
    """A dataclass as a dict, other values of several parts as lists, so that `of_json` makes them again."""
    if is_dataclass(value):
        return {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return [[to_json(key), to_json(each)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [*map(to_json, value)]
    return value.value if isinstance(value, Enum) else value


# --- from data --------------------------------------------------------------------------------------------------------


def of_json(kind: Any, data: Any) -> Any:
    """The value of type `kind` that `to_json` made `data` of.

    Raises `KeyError`, `TypeError` or `ValueError` for data of another form.
    """
    parts, make = typing.get_args(kind), kind
    if type(None) in parts:
        return None if data is None else of_json(parts[0], data)
    if issubclass(typing.get_origin(kind) or object, Mapping):
        return dict(of_json(GenericAlias(tuple, parts), each) for each in data)
    if parts:  # of a tuple
        kinds = [parts[0]] * len(data) if parts[-1] is ... else parts
        return tuple(of_json(each, one) for each, one in zip(kinds, data, strict=True))
    if is_dataclass(kind):
        return make(**{name: of_json(each, data[name]) for name, each in typing.get_type_hints(kind).items()})
    if hasattr(kind, "_fields"):  # a named tuple
        return kind(*of_json(GenericAlias(tuple, (*typing.get_type_hints(kind).values(),)), data))
    return data if kind is Any else kind(data)


def load(data: Mapping[str, Any], programs: Sequence[Program]) -> int:
    """Take the plans of `as_data`, in place of those that were loaded for the same graphs. Returns their number.

    All or nothing: `KeyError`, `IndexError`, `TypeError` or `ValueError` for data of another form.
    """
    steps = of_json(tuple[_Step, ...], data["steps"])
    found = of_json(tuple[SavedPlan, ...], data["graphs"])
    found = [replace(saved, program=program) for saved, program in zip(found, programs, strict=True)]
    loaded = []
    for i, saved in enumerate(found):
        of_step = {i: saved} if saved.step is None else {k: s for k, s in enumerate(found) if s.step == saved.step}
        loaded.append(Loaded(saved, None if saved.step is None else steps[saved.step], of_step))
        if saved.state is not None:
            _restore(many.Group(_ANY), loaded[-1])  # its traces name graphs that are there
    with _lock:
        _loaded.update((one.saved.program.digest, one) for one in loaded)
    return len(loaded)


_ANY = Assignment(0, None, (), 0.0)  # of groups that only show whether data has the right form


def loaded_for(program: Program | None) -> Loaded | None:
    """The loaded plan of a graph; None without one."""
    return None if program is None else _loaded.get(program.digest)


def others() -> list[Program]:
    """The graphs that have loaded plans."""
    return [loaded.saved.program for loaded in _loaded.values()]


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
    if loaded.saved.state is None or (group := many.group_of(rule)) is None:
        return
    begins = not group.traces and not group.restored
    if begins if loaded.step is not None else loaded.saved.program.digest not in group.known_programs():
        _restore(group, loaded)


def _restore(group: many.Group, loaded: Loaded) -> None:
    graphs = {i: _graph_of(group, saved) for i, saved in loaded.graphs.items()}
    group.restored |= {graph.program: graph for graph in graphs.values()}
    if (step := loaded.step) is not None:
        group.traces = [[_with_graphs(each, graphs.__getitem__) for each in trace] for trace in step.traces]
        group.over, group.planned_peak, group.counted = step.over, step.planned_peak, step.counted
        group.time = StepTime(step.slowness, step.link_share, is_known=True)
        group.loss_bytes = max((each.loss_bytes for trace in group.traces for each in trace), default=0)


def _graph_of(group: many.Group, saved: SavedPlan) -> many.Graph:
    known = {each.name: getattr(saved.state, each.name) for each in fields(_State)}
    planned = saved.mode is Mode.PLANNED
    recipes: dict[str, Any] = {"recipe": saved.recipe, "tight_recipe": saved.tight}
    program = saved.program.digest
    return many.Graph(group, saved.mode, program=program, was_planned=planned, is_fixed=planned, **recipes, **known)
