"""`save_plans` and `load_plans`: plans of budgets in a file, for other ranks and other hosts.

      process that has planned --save_plans--> JSON, a checksum --load_plans--> process that plans nothing

A file has what each graph depends on as lines of its key (key.py), without names and without numbers of devices, and
its recipe (planning/recipe.py). It has no code and no pickles.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import PlanFileError, names_arguments
from ..planning import stored
from ..planning.assignment import Assignment
from ..planning.stored import Program
from ..settings.setting import Setting
from . import sealed
from .key import PACKAGE_DIGEST, Line, key_of

_VERSIONS = ("aot_hooks", "python", "torch")  # Lines of a key that the head of a file has, or that no plan depends on.
_SHOWN = 2  # lines that differ, in messages
_CUT = 160  # characters of such a line


@names_arguments
def save_plans(path: str | os.PathLike[str]) -> int:
    """Save the plans of all graphs that this process compiled under a budget; returns their number.

    Call it when the steps that matter have run: those of blocks that are compiled one by one are planned in the second
    or third step. A warm start has the plans of its cache, and saves them as well.

    Raises:
        PlanFileError: there is no plan, one that can't be saved, or the file can't be written.
    """
    data, unsaved = stored.as_data()
    if unsaved:
        raise PlanFileError(
            f"save_plans: expected one plan for each graph, got others: {'; '.join(unsaved)}. Compile the parts of "
            "such a function one by one"
        )
    if not data["graphs"]:
        raise PlanFileError(
            "save_plans: expected graphs that were compiled under a budget, got none. Run a step first: "
            'options={"policy": aot_hooks.budget(...)}'
        )
    devices = sorted({name for graph in data["graphs"] for name in graph["program"]["devices"]})
    head = {"aot_hooks": PACKAGE_DIGEST, "torch": torch.__version__, "devices": devices}
    try:
        sealed.write(Path(path), head | data)
    except OSError as e:
        raise PlanFileError(f"save_plans: {os.fspath(path)!r} can't be written: {e}") from e
    return len(data["graphs"])


@names_arguments
def load_plans(path: str | os.PathLike[str]) -> int:
    """Load the plans that `save_plans` wrote; returns their number. Graphs that are compiled later take them.

    Call it before the first step. A graph with a loaded plan is compiled to it without a search, in its first step. A
    graph under a budget without one is planned, with a `CacheWarning` that says what differs.

    Raises:
        PlanFileError: the file is damaged, or was saved by another torch, another version of this package, or for
            devices that this process does not have. Then nothing is loaded.
    """
    where = f"load_plans: {os.fspath(path)!r}"
    try:
        data = sealed.read(Path(path))
        saved_by, torch_version, devices = str(data["aot_hooks"]), str(data["torch"]), [*map(str, data["devices"])]
    except OSError as e:
        raise PlanFileError(f"{where} can't be read: {e}") from e
    except (ValueError, TypeError, KeyError) as e:
        raise PlanFileError(f"{where} is damaged: {e}. Save the plans again") from e
    own = _names_of_all() if any(not name.startswith("cpu ") for name in devices) else [_name_of(torch.device("cpu"))]
    for what, saved, found in (
        ("torch", torch_version, torch.__version__),
        ("aot_hooks", saved_by, PACKAGE_DIGEST),
        *(("a device", name, ", ".join(own)) for name in devices if name not in own),
    ):
        if saved != found:
            raise PlanFileError(
                f"{where} is for {what} {saved!r}, and this process has {found!r}. Plans depend on it: save them again "
                "in a process like this one, or load none, and they are made anew"
            )
    try:
        of_graphs = [graph["program"] for graph in data["graphs"]]
        programs = [_program(each["lines"], each["budget"], each["devices"]) for each in of_graphs]
        return stored.load(data, programs)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
        raise PlanFileError(f"{where} is damaged: {type(e).__name__}: {e}. Save the plans again") from e


def program_of(
    gm: GraphModule,
    inputs: Sequence[Any],
    asked: Setting | None,
    regions: Mapping[str, Setting],
    *,
    options: Mapping[str, Any],
    roots: Mapping[str, str],
) -> Program | None:
    """What the plan of `gm` depends on; None if `asked` is no budget of a user's."""
    rule = None if asked is None else asked.rule
    if asked is None or not isinstance(rule, Assignment) or rule.around is not None:
        return None
    as_typed = Setting(replace(rule, free=None), asked.scope)
    key = key_of(gm, inputs, as_typed, regions, options=options, roots=roots)
    found = {x.device for x in inputs if isinstance(x, torch.Tensor)}
    devices = sorted({_name_of(device) for device in found if device.type != "cpu"} or {_CPU})
    lines = [(what, _without_numbers(text)) for what, text in key.lines if what not in _VERSIONS]
    return _program([*lines, *(("device", name) for name in devices)], repr(rule), devices)


def why_not_loaded(program: Program | None) -> str:
    """Why no loaded plan is for `program`: what the nearest one differs in. "" if no plan was loaded at all."""
    others = stored.others()
    if program is None or not others:
        return ""
    own = dict(program.lines)
    nearest = max(others, key=lambda other: len(own.items() & dict(other.lines).items()))
    theirs = dict(nearest.lines)
    differing = [what for what in (own | theirs) if own.get(what) != theirs.get(what)]
    if all(what.startswith("ambient ") for what in differing):
        return f"the nearest plan is for {nearest.budget}, and this graph has {program.budget}"
    shown = (f"{what} is {_cut(theirs.get(what))} there and {_cut(own.get(what))} here" for what in differing[:_SHOWN])
    return f"the nearest plan is for a program that differs in {len(differing)} of {len(own)} lines: {'; '.join(shown)}"


def _program(lines: Iterable[Sequence[Any]], budget: Any, devices: Iterable[Any]) -> Program:
    found: tuple[Line, ...] = tuple((str(what), str(text)) for what, text in lines)
    return Program(hashlib.sha256(repr(found).encode()).hexdigest(), found, str(budget), tuple(map(str, devices)))


def _without_numbers(text: str) -> str:
    """`text` without the numbers of devices: ranks of one host run on different ones."""
    return re.sub(r"(device\(type='\w+'), index=\d+\)", r"\1)", re.sub(r"\b(cuda|xpu):\d+", r"\1", text))


_CPU = f"cpu {platform.machine()}"


def _name_of(device: torch.device) -> str:
    """The name of a device, with its memory: plans depend on both."""
    if device.type != "cuda":
        return _CPU if device.type == "cpu" else device.type
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.total_memory >> 20} MiB"


def _names_of_all() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return list(dict.fromkeys([_CPU, *(_name_of(torch.device("cuda", i)) for i in range(count))]))


def _cut(text: str | None) -> str:
    if text is None:
        return "not"
    return repr(text if len(text) <= _CUT else f"{text[:_CUT]}...")
