"""Plans that one process saves and another loads: made again without a search, or refused with the reason."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import many_blocks
import pytest
import torch
from many_blocks import WIDTH, Block, Other, assert_equal, compile_blocks, gradients, measured, model_of, peak_of, train
from small_budgets import budget
from steps import ATEN
from torch import nn

import aot_hooks
from aot_hooks.cache import plan_files, sealed
from aot_hooks.errors import AotHooksError, CacheWarning, PlanFileError
from aot_hooks.offloading import at_run_time
from aot_hooks.planning import apart, candidates, many, search, stored, trials
from aot_hooks.planning.recipe import Pick, Recipe
from aot_hooks.planning.step import Apart, Moment

x, compiled_kinds = many_blocks.x, many_blocks.compiled_kinds  # fixtures


@pytest.fixture
def searches(monkeypatch) -> list[str]:
    """The solver's runs, and the searches."""
    found: list[str] = []

    def noted(module: Any, name: str) -> None:
        function = getattr(module, name)

        def run(*args: Any, **named: Any) -> Any:
            found.append(name)
            return function(*args, **named)

        monkeypatch.setattr(module, name, run)

    for module, name in ((search, "solve"), (apart, "solve"), (trials, "search")):
        noted(module, name)
    return found


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "plans.json"


def whole(model: nn.Module, policy: Any, **named: Any) -> Any:
    return torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy}, **named)


def anew(searches: list[str], *compiled_kinds: list[str]) -> None:
    """Forget all that this process has planned."""
    torch._dynamo.reset()
    aot_hooks.reset()
    for found in (searches, *compiled_kinds):
        found.clear()


def rows(plans: tuple[aot_hooks.Plan, ...]) -> list[Any]:
    return [dataclasses.replace(d, settings=()) for plan in plans for d in plan.decisions]


def saved(
    model: nn.Module, x: torch.Tensor, policy: Any, path: Path
) -> tuple[tuple[aot_hooks.Plan, ...], list[torch.Tensor]]:
    """Plan the step of a model in one graph, and save it; returns the plans and the gradients."""
    compiled = whole(model, policy)
    found = train(compiled, x)
    assert aot_hooks.save_plans(path) == 1
    return aot_hooks.last_plans(compiled), found


def edited(path: Path, change: Callable[[Any], None]) -> None:
    """The file with another content, and the right checksum."""
    data = sealed.read(path)
    change(data)
    sealed.write(path, data)


# --- loaded -----------------------------------------------------------------------------------------------------------

LOSSY = {"max_error": 0.05, "allow": ("int8", "float8", "lossless")}


@pytest.mark.core
@pytest.mark.filterwarnings("error:aot_hooks")
@pytest.mark.parametrize("arguments", [{"max_error": 0}, LOSSY, {"max_slowdown": 0.1}], ids=["exact", "lossy", "time"])
def test_a_loaded_plan_of_one_graph_is_made_without_a_search(x, arguments, searches, path):
    model = model_of(*[Block] * 2)
    peak = None if "max_slowdown" in arguments else peak_of(model, x, 0.85)
    policy = budget(peak, **arguments)
    plans, expected = saved(model, x, policy, path)
    assert searches and plans[0].packed_bytes < plans[0].saved_bytes

    anew(searches)
    assert aot_hooks.load_plans(path) == 1
    compiled = whole(model, policy)
    assert_equal(train(compiled, x), expected)
    assert searches == []
    again = aot_hooks.last_plans(compiled)
    assert rows(again) == rows(plans) and again[0].peak_bytes == plans[0].peak_bytes
    assert aot_hooks.save_plans(path) == 1  # what was loaded can be saved
    assert again[0].recipe == plans[0].recipe


@pytest.mark.core
@pytest.mark.filterwarnings("error:aot_hooks")
def test_a_loaded_step_of_many_graphs_is_planned_from_its_first_step_on(x, searches, compiled_kinds, path, tmp_path):
    model = model_of(*[Block] * 5, Other)
    expected, peak = gradients(model, x), peak_of(model, x, 0.6)
    compile_blocks(model, budget(peak, max_error=0))
    for _ in range(3):
        assert_equal(train(model, x), expected)
    plans = aot_hooks.last_plans(model)
    assert aot_hooks.save_plans(path) == 2
    assert searches and compiled_kinds.count("planned") == 2 and len(compiled_kinds) > 3

    anew(searches, compiled_kinds)
    aot_hooks.load_plans(path)
    compile_blocks(model, budget(peak, max_error=0))
    assert measured(model, x, tmp_path) <= peak  # the first step
    assert_equal([p.grad for p in model.parameters()], expected)
    for _ in range(3):
        assert_equal(train(model, x), expected)
    assert searches == [] and compiled_kinds == ["planned", "planned"]
    again = aot_hooks.last_plans(model)
    assert rows(again) == rows(plans) and [p.in_step for p in again] == [p.in_step for p in plans]
    assert [p.peak_bytes for p in again] == [p.peak_bytes for p in plans]


@pytest.mark.slow
def test_calls_that_hold_the_least_are_loaded_too(x, searches, compiled_kinds, path, tmp_path):
    model = model_of(*[Block] * 8)
    expected, peak = gradients(model, x), peak_of(model, x, 0.45)
    compile_blocks(model, budget(peak, max_error=0))
    for _ in range(3):
        assert_equal(train(model, x), expected)
    (plan,) = aot_hooks.last_plans(model)
    assert plan.in_step is not None and plan.in_step.tight_calls
    aot_hooks.save_plans(path)

    anew(searches, compiled_kinds)
    aot_hooks.load_plans(path)
    compile_blocks(model, budget(peak, max_error=0))
    for _ in range(2):
        assert_equal(train(model, x), expected)
    assert searches == [] and compiled_kinds == ["planned"]
    (again,) = aot_hooks.last_plans(model)
    assert again.in_step == plan.in_step and again.step_ratio == plan.step_ratio
    assert measured(model, x, tmp_path) <= peak


@pytest.mark.slow
@pytest.mark.parametrize(("link", "again"), [(3e10, candidates.POINTWISE), (1e9, candidates._WITH_MORE)])
def test_copies_of_a_whole_step_are_loaded_too(x, searches, compiled_kinds, path, monkeypatch, link, again):
    rates = aot_hooks.Rates(to_host=link, to_device=link, memory=2e10, operations=1e11, operations32=1e11)
    fastest = candidates.Simulation.fastest
    monkeypatch.setattr(candidates.Simulation, "fastest", lambda self, most_ms, only: fastest(self, math.inf, only))
    way = candidates.Way(candidates.POINTWISE, sends=True)
    monkeypatch.setattr(candidates, "ways", lambda *_: [way])
    monkeypatch.setattr(candidates, "_link", lambda graphs: rates)
    monkeypatch.setattr(candidates, "_MIN_BYTES", 0)
    clock = itertools.count(0.0, 0.25e-3)
    monkeypatch.setattr(at_run_time, "_mark", lambda device: next(clock))
    model = model_of(*[Block] * 16)
    expected, policy = gradients(model, x), budget(peak_of(model, x, 0.25), max_error=0, allow=("recompute", "offload"))
    compile_blocks(model, policy)
    for _ in range(3):
        assert_equal(train(model, x), expected)
    (plan,) = aot_hooks.last_plans(model)
    assert plan.recipe.across_graphs and plan.recipe.typed[1] == "offload()" and plan.transfers
    assert plan.recipe.typed[0].startswith(again)
    aot_hooks.save_plans(path)

    anew(searches, compiled_kinds)
    aot_hooks.load_plans(path)
    compile_blocks(model, policy)
    for _ in range(3):
        assert_equal(train(model, x), expected)
    assert searches == [] and compiled_kinds == ["planned"]
    (again,) = aot_hooks.last_plans(model)
    assert again.recipe == plan.recipe and rows((again,)) == rows((plan,))


@pytest.mark.slow
def test_more_calls_than_were_loaded_are_planned_once(x, searches, compiled_kinds, path, tmp_path):
    model = model_of(*[Block] * 4)
    peak = peak_of(model_of(*[Block] * 6), x, 0.5)
    compile_blocks(model, budget(peak, max_error=0))
    for _ in range(3):
        train(model, x)
    aot_hooks.save_plans(path)

    anew(searches, compiled_kinds)
    aot_hooks.load_plans(path)
    more = model_of(*[Block] * 7)
    compile_blocks(more, budget(peak, max_error=0))
    for _ in range(4):
        assert_equal(train(more, x), gradients(model_of(*[Block] * 7), x))
    assert measured(more, x, tmp_path) <= peak
    assert searches and compiled_kinds[-1] == "planned" and len(compiled_kinds) <= 4


@pytest.mark.slow
def test_smaller_sizes_take_a_loaded_plan_and_larger_ones_are_planned(x, searches, path):
    model = model_of(*[Block] * 3)
    policy = budget(peak_of(model, x, 0.7), max_error=0)
    train(whole(model, policy, dynamic=True), x)
    aot_hooks.save_plans(path)
    small, large = x[:300].detach().requires_grad_(), torch.cat([x, x]).detach().requires_grad_()

    anew(searches)
    aot_hooks.load_plans(path)
    assert_equal(train(whole(model, policy, dynamic=True), small), gradients(model, small))
    assert searches == []

    anew(searches)
    aot_hooks.load_plans(path)
    compiled = whole(model, budget(2 * peak_of(model, x, 0.7), max_error=0), dynamic=True)
    with pytest.warns(CacheWarning, match="the nearest plan is for budget"):
        train(compiled, large)
    assert searches


CHILD = """
import sys
import torch, aot_hooks
from many_blocks import Block, Other, compile_blocks, model_of, train
from aot_hooks.planning import apart, candidates, many, search, stored, trials
from test_plan_files import digest
from small_budgets import budget

def refuses(*args, **named):
    raise AssertionError("the solver runs")

search.solve = refuses
aot_hooks.load_plans(sys.argv[1])
model = model_of(Block, Block, Block, Other)
compile_blocks(model, budget(int(sys.argv[2]), max_error=0))
x = torch.linspace(-2, 2, 512 * 32).view(512, 32).requires_grad_()
print([digest(train(model, x)) for _ in range(3)])
"""


def digest(gradients: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(g.numpy().tobytes() for g in gradients)).hexdigest()


def test_another_process_loads_the_plans(path):
    model = model_of(Block, Block, Block, Other)
    x = torch.linspace(-2, 2, 512 * 32).view(512, 32).requires_grad_()
    peak = peak_of(model, x, 0.6)
    compile_blocks(model, budget(peak, max_error=0))
    for _ in range(3):
        expected = digest(train(model, x))
    aot_hooks.save_plans(path)
    folders = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1] / "support"), *sys.path])
    command = [sys.executable, "-W", "error::aot_hooks.errors.CacheWarning", "-c", CHILD, str(path), str(peak)]
    command[1:3] = []  # the filter needs the package; CHILD would warn on stderr
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": folders}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([expected] * 3)
    assert "CacheWarning" not in done.stderr


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("what", ["program", "size", "budget"])
def test_a_graph_with_another_plan_is_planned_anew_with_the_reason(x, what, searches, plans_file, path):
    path.write_text(plans_file)
    aot_hooks.load_plans(path)
    model = model_of(*SMALL)
    peak, why = peak_of(model, x, 0.85), r"differs in \d+ of \d+ lines: .* is .* there and .* here"
    policy = budget(peak, max_error=0)
    if what == "program":
        model = nn.Sequential(*model, nn.Tanh())
    elif what == "size":
        x = x[:-8].detach().requires_grad_()
    elif what == "budget":
        policy = budget(peak + 4096, max_error=0)
        why = r"the nearest plan is for budget\(.*, and this graph has budget\("
    compiled = whole(model, policy)
    with pytest.warns(CacheWarning, match=why):
        found = train(compiled, x)
    assert_equal(found, gradients(model, x))
    assert searches and aot_hooks.last_plans(compiled)[0].peak_bytes <= peak + 4096


def torch_of(monkeypatch: Any, path: Path) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")


def package_of(monkeypatch: Any, path: Path) -> None:
    monkeypatch.setattr(plan_files, "PACKAGE_DIGEST", "another")


def device_of(monkeypatch: Any, path: Path) -> None:
    edited(path, lambda data: data.update(devices=["NVIDIA H200, 143167 MiB"]))


def byte_of(monkeypatch: Any, path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace("recompute", "recomputf", 1))


def end_of(monkeypatch: Any, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def pickle_in(monkeypatch: Any, path: Path) -> None:
    path.write_bytes(b"\x80\x04K\x01.")


def form_of(monkeypatch: Any, path: Path) -> None:
    edited(path, lambda data: data["graphs"][0]["recipe"].pop("hooks"))


def state_of(monkeypatch: Any, path: Path) -> None:
    edited(path, lambda data: data["graphs"][0]["state"].update(stock=[1, 2]))


def missing(monkeypatch: Any, path: Path) -> None:
    path.unlink()


@pytest.fixture(scope="module")
def plans_file(tmp_path_factory) -> str:
    """What is in the file of a plan for `SMALL`."""
    anew([])
    x = torch.randn(many_blocks.ROWS, WIDTH, requires_grad=True)
    path = tmp_path_factory.mktemp("plans") / "plans.json"
    saved(model_of(*SMALL), x, budget(peak_of(model_of(*SMALL), x, 0.85), max_error=0), path)
    anew([])
    return path.read_text()


SMALL = (Other,)


@pytest.mark.core
@pytest.mark.filterwarnings("error:aot_hooks")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (torch_of, r"is for torch '2\.\d.*', and this process has '2.99.0'"),
        (package_of, "is for aot_hooks .* and this process has 'another'"),
        (device_of, "is for a device 'NVIDIA H200, 143167 MiB', and this process has 'cpu"),
        (byte_of, "is damaged: its checksum"),
        (end_of, "is damaged: it is no file"),
        (pickle_in, "is damaged: it is no file"),
        (form_of, "is damaged: KeyError: 'hooks'"),
        (state_of, "is damaged: ValueError"),
        (missing, "can't be read"),
    ],
)
def test_a_file_for_another_process_is_refused_and_changes_nothing(change, why, plans_file, path, monkeypatch):
    path.write_text(plans_file)
    change(monkeypatch, path)
    with pytest.raises(PlanFileError, match=why) as refused:
        aot_hooks.load_plans(path)
    assert isinstance(refused.value, AotHooksError)
    assert stored.others() == [] and not many._groups


@pytest.mark.filterwarnings("error:aot_hooks")
def test_after_a_refused_file_a_budget_plans(x, searches, plans_file, path, monkeypatch):
    path.write_text(plans_file)
    model = model_of(*SMALL)
    device_of(monkeypatch, path)
    with pytest.raises(PlanFileError):
        aot_hooks.load_plans(path)
    assert_equal(train(whole(model, budget(peak_of(model, x, 0.85), max_error=0)), x), gradients(model, x))
    assert searches


def other_tensor(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, partition=(Pick(10_000, "mm", "recompute", 0),))


def other_option(recipe: Recipe) -> Recipe:
    first = recipe.partition[0]
    return dataclasses.replace(recipe, partition=(first._replace(option_name="int3()"),))


def nothing_stored(recipe: Recipe) -> Recipe:
    return Recipe()


def unknown_way(recipe: Recipe) -> Recipe:
    return Recipe(typed=("recompute_pointwise", "int3()"))


@pytest.mark.core
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_tensor, "it stores a tensor 'mm', which the backward of this graph does not read there"),
        (other_option, r"by int3\(\), which can't take that tensor here"),
        (nothing_stored, r"it takes [\d.]+ MiB here, more than the [\d.]+ MiB that there are"),
        (unknown_way, r"it has int3\(\) with recompute_pointwise computed again, which is no way here"),
    ],
)
def test_a_plan_that_cannot_be_made_here_is_searched_for(x, change, why, searches, plans_file, path):
    path.write_text(plans_file)
    model = model_of(*SMALL)
    peak = peak_of(model, x, 0.85)

    def changed(data: Any) -> None:
        recipe = stored.of_json(Recipe, data["graphs"][0]["recipe"])
        data["graphs"][0]["recipe"] = stored.to_json(change(recipe))

    edited(path, changed)
    aot_hooks.load_plans(path)
    compiled = whole(model, budget(peak, max_error=0))
    with pytest.warns(CacheWarning, match=why):
        found = train(compiled, x)
    assert_equal(found, gradients(model, x))
    assert searches and aot_hooks.last_plans(compiled)[0].peak_bytes <= peak


@pytest.mark.filterwarnings("error:aot_hooks")
def test_a_reset_forgets_loaded_plans_and_graphs_without_a_budget_take_none(x, searches, plans_file, path):
    path.write_text(plans_file)
    model = model_of(*SMALL)
    policy = budget(peak_of(model, x, 0.85), max_error=0)
    aot_hooks.load_plans(path)
    train(torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": aot_hooks.int8()}), x)
    with torch.no_grad():
        whole(model_of(Other), policy)(x)  # no backward, so nothing to plan
    anew(searches)
    train(whole(model, policy), x)
    assert searches


@pytest.mark.filterwarnings("error:aot_hooks")
def test_nothing_to_save_is_an_error(x, path, tmp_path):
    with pytest.raises(PlanFileError, match="expected graphs that were compiled under a budget, got none"):
        aot_hooks.save_plans(path)
    saved(model_of(*SMALL), x, budget("1GiB"), path)
    with pytest.raises(PlanFileError, match="can't be written"):
        aot_hooks.save_plans(tmp_path / "no folder" / "plans.json")
    assert [file.name for file in tmp_path.iterdir()] == ["plans.json"]


# --- what a file holds ------------------------------------------------------------------------------------------------


def test_a_recipe_comes_back_from_json():
    moments = (Moment("forward", 3, 5), Moment("", 1, 7))
    recipe = Recipe(
        (Pick(1, "a", "recompute", 2),), (Pick(0, "b", "int8()", 0),), apart=Apart(moments, 2, 4, 1.5, 1.25)
    )
    for each in (
        recipe,
        Recipe(typed=("", "float8()"), drops_others=True),
        Recipe(typed=("", "offload()"), across_graphs=True),
    ):
        assert stored.of_json(Recipe, json.loads(json.dumps(stored.to_json(each)))) == each


def test_the_number_of_a_device_is_in_no_program():
    lines = ["x cuda:3 float32", "full (2,) {'device': device(type='cuda', index=1)}", "cuda:12", "mycuda:1 s1"]
    expected = ["x cuda float32", "full (2,) {'device': device(type='cuda')}", "cuda", "mycuda:1 s1"]
    assert [plan_files._without_numbers(line) for line in lines] == expected


def test_a_file_has_no_names_and_no_code_of_the_program(x, path):
    class Confidential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classified = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.classified(x).tanh().sin().exp()

    saved(Confidential(), x, budget("1GiB"), path)
    text = path.read_text().lower()
    assert "confidential" not in text and "classified" not in text
    assert math.isfinite(json.loads(json.loads(text)["content"])["graphs"][0]["state"]["ms"])
    assert stored.others() == [] and many._groups
