"""`frontier`: plans that nothing beats, for a function and for a script; budgets in warm starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import aot_hooks
from aot_hooks.__main__ import main
from aot_hooks.errors import OptionError
from aot_hooks.report import dry_run
from aot_hooks.torch_private import aot

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))).tanh())

torch.manual_seed(0)
model = nn.Sequential(Block(), Block())
x = torch.randn(256, 32)
"""
TRAIN = (
    MODEL
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
WARM = (
    MODEL
    + """
import json, aot_hooks
torch._functorch.config.bundled_autograd_cache = True
compiled = torch.compile(model, backend="aot_hooks", options={"inner": "aten", "policy": aot_hooks.budget("0.8MiB")})
compiled(x).square().mean().backward()
(plan,) = aot_hooks.last_plans(compiled)
print(json.dumps({
    "stats": aot_hooks.cache_stats(), "hooks": [d.hook.name for d in plan.decisions],
    "peak": plan.peak_bytes, "ratio": plan.step_ratio, "packed": plan.packed_bytes,
    "gradient": [p.grad.norm().item() for p in model.parameters()],
}))
"""
)


@pytest.fixture
def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    names: dict[str, object] = {}
    exec(MODEL, names)
    return names["model"], names["x"]  # type: ignore[return-value]


@pytest.mark.core
def test_no_point_beats_another_and_the_policy_of_a_point_gives_its_plan(model_and_input, monkeypatch):
    model, x = model_and_input
    graphs, splits = [], Counter[object]()
    plan_graph, partition = dry_run.plan_graph, aot.min_cut_partition

    def split(joint, *args, **kwargs):
        splits[aot.partition_marks(joint)] += 1
        return partition(joint, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(dry_run, "plan_graph", lambda *args: graphs.append(args) or plan_graph(*args))
        patch.setattr(aot, "min_cut_partition", split)
        found = aot_hooks.frontier(model, x, inner="aten", max_error=0)
    # traced once, and split once in each way: without marks for the plan without hooks, and for budgets
    assert len(graphs) == 1 and len(splits) > 2 and sum(splits.values()) == len(splits) + 1
    peaks, ratios = [p.peak_bytes for p in found], [p.step_ratio for p in found]
    assert len(found) >= 3 and peaks == sorted(peaks) and ratios == sorted(ratios, reverse=True)
    assert len(set(peaks)) == len(peaks) and ratios[-1] == 1.0
    stock = aot_hooks.plan(model, x, policy=aot_hooks.KEEP, inner="aten")
    assert peaks[-1] <= stock.peak_bytes and peaks[0] < 0.8 * stock.peak_bytes
    for point in found:
        assert point.plan.peak_bytes == point.peak_bytes
        if point.policy is not None and point.policy.peak is not None:
            assert point.peak_bytes <= point.policy.peak
    lines = str(found).splitlines()
    assert len(lines) == len(found) + 1 and "recompute" in lines[1] and "keep 100%" in lines[-1]
    point = next(p for p in found if p.policy is not None)
    again = aot_hooks.plan(model, x, policy=point.policy, inner="aten")
    assert again.decisions == point.plan.decisions


class Widened(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.core
@pytest.mark.slow
def test_of_several_graphs_each_holds_the_least_between_forward_and_backward() -> None:
    model, x = nn.ModuleList(map(Widened, (128, 132, 136, 140))), torch.randn(256, 32)

    def in_parts(x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = block(x)
            torch._dynamo.graph_break()
        return x

    found = aot_hooks.frontier(in_parts, x, inner="aten", max_error=0, allow=["recompute"])
    alone = aot_hooks.budget(max_slowdown=float("inf"), max_error=0, allow=["recompute"])
    each = aot_hooks.plan(in_parts, x, policy=alone, inner="aten")
    assert found.in_parts and found.points[0].peak_bytes < 0.9 * each.peak_bytes
    again = aot_hooks.plan(in_parts, x, policy=found.points[0].policy, inner="aten")
    assert again.peak_bytes == found.points[0].peak_bytes
    assert "several compiled calls, which are planned one by one" in str(found)


def test_of_what_saves_nothing():
    with pytest.raises(OptionError, match="saves none"):
        aot_hooks.frontier(lambda x: x + 1, torch.randn(4, 4, requires_grad=True), inner="aten")


@pytest.mark.slow
def test_of_a_script(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    assert main(["frontier", "--inner", "aten", "--max-error", "0", "--allow", "recompute", str(script)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert "peak MiB" in lines[0] and "keep 100%" in lines[-1]


@pytest.mark.slow
def test_a_report_under_a_budget(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    assert main(["report", "--inner", "aten", "--budget", "0.8MiB", str(script)]) == 0
    assert "recompute" in capsys.readouterr().out
    assert main(["report", "--inner", "aten", "--budget", "1KiB", str(script)]) == 1
    error = capsys.readouterr().err
    assert "expected a step under" in error and "Traceback" not in error


def test_the_traceback_of_a_script_that_fails_is_shown(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('mine\\nand more')")
    assert main(["frontier", str(script)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f'Traceback (most recent call last):\n  File "{script}", line 1, in <module>\n')
    assert shown.endswith(f"\nand more\naot_hooks frontier: {script} raised ValueError: mine\n")


def test_means_that_there_are_not(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    assert main(["report", "--budget", "1GiB", "--allow", "magic", str(script)]) == 1
    assert "allow must be some of" in capsys.readouterr().err


@pytest.mark.slow
def test_a_second_process_finds_the_plan_in_the_cache(tmp_path):
    script = tmp_path / "warm.py"
    script.write_text(WARM)
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    runs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = runs
    assert cold.pop("stats")["misses"] == 1 and warm.pop("stats")["hits"] == 1
    assert cold == warm and "recompute" in cold["hooks"] and 0 < cold["peak"] <= 0.8 * 2**20
