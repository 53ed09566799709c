"""The report: columns that add up, layers folded, places named; and the same as data and as a picture."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import ATEN, HALF
from torch import nn

import aot_hooks
from aot_hooks import KEEP, Decision, Hook, Plan, SavedTensor, format_report, print_report
from aot_hooks.passes.live_bytes import LivePoint
from aot_hooks.report.plot import MissingExtraError, plot_report
from aot_hooks.report.text import fold, report_as_data

ROW = re.compile(r"^ *(\d+\.\d\d) +(\d+\.\d\d) +(\d+)  ")


def decision(path: str, name: str = "gelu", hook: Hook = HALF, **changes: Any) -> Decision:
    """A saved float32[256, 1024]: 1 MiB, half of it packed."""
    fields: dict[str, Any] = {
        "name": name,
        "op": f"aten.{re.sub('_[0-9]+$', '', name)}.default",
        "shape": (256, 1024),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "nbytes": 1 << 20,
        "storage": 0,
        "module_path": path,
        "source_line": "model.py:31: h = gelu(x)",
        "backward_ops": ("aten.mm.default",),
        "is_input": False,
        "is_output": False,
        "is_static": False,
        "checkpoint_names": (),
    }
    amounts = {"reason": "scope 'donated'", "packed_bytes": 1 << 20 if hook is KEEP else 1 << 19}
    amounts |= {"saved_bytes": 1 << 20} | {k: v for k, v in changes.items() if k not in fields}
    return Decision(SavedTensor(**fields | {k: v for k, v in changes.items() if k in fields}), hook, **amounts)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def blocks(count: int = 4, width: int = 24) -> nn.Module:
    return nn.ModuleDict({"layers": nn.Sequential(*(Block(width) for _ in range(count)))})["layers"]


def totals(text: str) -> tuple[float, float, int]:
    found = re.search(r"saved for backward: ([\d.]+) -> ([\d.]+) .*; \d+ of (\d+) tensors packed", text)
    assert found
    return float(found[1]), float(found[2]), int(found[3])


def columns(text: str) -> tuple[float, float, int]:
    rows = [m for m in map(ROW.match, text.splitlines()) if m]
    return (
        round(sum(float(m[1]) for m in rows), 2),
        round(sum(float(m[2]) for m in rows), 2),
        sum(int(m[3]) for m in rows),
    )


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("inner", ["aten", "inductor"])
def test_rows_add_up_to_the_header(inner: str) -> None:
    plan = aot_hooks.plan(blocks(), torch.randn(37, 24), policy=aot_hooks.float8(), inner=inner)
    text = format_report(plan)
    assert columns(text) == totals(text)
    assert totals(text)[:2] == (round(plan.saved_bytes / 1024, 2), round(plan.packed_bytes / 1024, 2))
    assert totals(text)[2] == len(plan.decisions)
    assert max(map(len, text.splitlines())) <= 110


def test_columns_that_do_not_add_up_are_seen() -> None:
    text = format_report(Plan((decision("a"), decision("b.c", hook=KEEP, reason="no"))))
    assert columns(text) == totals(text) == (2.0, 1.5, 2)
    broken = text.replace("      1.00        0.50", "      1.00        0.51")
    assert broken != text and columns(broken) != totals(broken)


def test_rounding_is_spread_over_rows() -> None:
    thirds = [decision(f"m{c}", saved_bytes=(1 << 20) // 3 + 7, packed_bytes=(1 << 20) // 7) for c in "abcdefg"]
    text = format_report(Plan(tuple(thirds)))
    assert columns(text) == totals(text)


def test_report_reads_like_this() -> None:
    layers = tuple(decision(f"layers.{i}.mlp", f"gelu_{i}") for i in range(3))
    kept = decision("head", "mm", KEEP, reason="an output of the graph", source_line="", backward_ops=())
    weight = decision("head", "t", KEEP, reason="a parameter or buffer", saved_bytes=0, packed_bytes=0)
    point = LivePoint("backward", "mm_7", 6 << 20, "layers.2.mlp", "model.py:32: y = f(h)")
    after = LivePoint("forward", "mm", 4 << 20, "head", "")
    text = format_report(Plan((*layers, kept, weight), live_before=(point,), live_after=(after,)))
    assert text.splitlines() == [
        "saved for backward: 4.00 -> 2.50 MiB (0.625); 3 of 5 tensors packed, 1.50 MiB back",
        "predicted peak of the step, over parameters and inputs: 6.00 -> 4.00 MiB",
        "  it stands in the backward at 'mm_7': layers.2.mlp  model.py:32: y = f(h)",
        "  with hooks in the forward at 'mm': head",
        "",
        " saved_MiB  packed_MiB  tensors  what, where / how and why",
        "packed:",
        "      3.00        1.50        3  gelu float32[256, 1024]  layers.0-2.mlp  model.py:31: h = gelu(x)",
        "            half: scope 'donated'; read by mm",
        "stays:",
        "      1.00        1.00        1  mm float32[256, 1024]  head",
        "            keep: an output of the graph",
        "counts nothing, because it is alive anyway or counted above:",
        "      0.00        0.00        1  keep: a parameter or buffer",
    ]


def test_every_row_has_its_hook_and_reason() -> None:
    plan = aot_hooks.plan(blocks(), torch.randn(37, 24), policy=aot_hooks.float8())
    lines = format_report(plan).splitlines()
    for hook, reason in {(d.hook.name, d.reason) for d in plan.decisions}:
        assert any(f"{hook}: {reason}"[:60] in line for line in lines), (hook, reason)


def test_several_plans_are_one_report(capsys: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        h = x.sin().exp()
        torch._dynamo.graph_break()
        return h.cos().exp()

    compiled = torch.compile(f, backend="aot_hooks", options={**ATEN, "policy": HALF, "scope": "all"})
    compiled(torch.randn(64, requires_grad=True)).sum().backward()
    plans = aot_hooks.last_plans(compiled)
    assert len(plans) == 2
    print_report(plans)
    printed = capsys.readouterr().out
    assert totals(printed)[2] == sum(len(p.decisions) for p in plans)
    assert columns(printed) == totals(printed)
    assert "predicted" not in printed


def test_a_peak_that_cannot_fall_is_said_to_stand_elsewhere() -> None:
    """A wide input's gradient is made when all that was saved is gone."""
    model, x = nn.Sequential(nn.Linear(8000, 24), blocks(2)), torch.randn(64, 8000, requires_grad=True)
    text = format_report(aot_hooks.plan(model, x, policy=aot_hooks.float8(), inner="aten"))
    assert re.search(r"it stands in the backward at '\w+'", text) and "it falls by 0.00 of the" in text
    assert "other tensors are alive than saved ones" in text
    deep = format_report(aot_hooks.plan(blocks(8), torch.randn(64, 24), policy=aot_hooks.float8(), inner="aten"))
    assert "other tensors are alive" not in deep


def test_a_peak_that_rises_is_said_to() -> None:
    before, after = (LivePoint("backward", "mm", n << 20, "", "") for n in (8, 10))
    text = format_report(Plan((decision("layers.0"),), live_before=(before,), live_after=(after,)))
    assert "it rises by 2.00 in spite of the 0.50 MiB that come back" in text


def test_measured_bytes_stand_beside_predicted_ones() -> None:
    point = LivePoint("backward", "mm", 4 << 20, "", "")
    plan = Plan((decision("a"),), live_before=(point,), live_after=(point,))
    assert "measured" not in format_report(plan)
    text = format_report(plan, measured_peak_bytes=4 << 20)
    assert "measured peak of forward and backward, over what was allocated before: 4.00 MiB" in text
    assert "more than predicted" not in text
    assert "more than predicted" in format_report(plan, measured_peak_bytes=6 << 20)
    text = format_report(plan, measured_peak_bytes=4 << 20, measured_optimizer_bytes=9 << 20)
    assert "stands in the optimizer, 9.00" in text


def test_nothing_saved_says_so() -> None:
    assert "nothing is saved for backward" in format_report(Plan(()))
    assert "nothing is saved for backward" in format_report([])


@pytest.mark.parametrize("count, unit", [(1, "MiB"), (1 << 11, "GiB"), (1 << 23, "GiB")])
def test_units_fit(count: int, unit: str) -> None:
    plan = Plan((decision("a", saved_bytes=count << 20, packed_bytes=count << 19),))
    assert f"saved_{unit}" in format_report(plan)


# --- folding ----------------------------------------------------------------------------------------------------------


def paths(*decisions: Decision) -> list[tuple[str, int]]:
    return sorted((r.module_path, r.tensor_count) for r in fold(decisions))


def test_a_name_of_digits_that_are_no_number_is_a_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"²": nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["²"](x)

    plan = aot_hooks.plan(Named(), torch.randn(32, 64), policy=aot_hooks.float8(), inner="aten")
    assert "parts.²" in aot_hooks.format_report(plan)


def test_equal_layers_fold() -> None:
    assert paths(*(decision(f"layers.{i}.mlp", f"gelu_{i}") for i in range(32))) == [("layers.0-31.mlp", 32)]


def test_nested_layers_fold() -> None:
    one = [decision(f"stages.1.blocks.{i}.attn") for i in range(6)]
    assert paths(*one) == [("stages.1.blocks.0-5.attn", 6)]
    two = [decision(f"stages.{s}.blocks.{i}.attn") for s in range(2) for i in range(6)]
    assert paths(*two) == [("stages.0-1.blocks.0-5.attn", 12)]
    uneven = [*one, *(decision(f"stages.2.blocks.{i}.attn") for i in range(3))]
    assert paths(*uneven) == [("stages.1.blocks.0-5.attn", 6), ("stages.2.blocks.0-2.attn", 3)]


def test_gaps_are_shown() -> None:
    assert paths(*(decision(f"layers.{i}") for i in (0, 1, 2, 5))) == [("layers.0-2,5", 4)]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (1024, 256)},
        {"dtype": torch.int32},
        {"hook": KEEP},
        {"reason": "another"},
        {"packed_bytes": 7},
        {"source_line": "model.py:32: h = relu(x)"},
        {"backward_ops": ("aten.mul.Tensor",)},
        {"checkpoint_names": ("qkv",)},
    ],
)
def test_unequal_rows_do_not_fold(change: Any) -> None:
    assert len(fold([decision("layers.0"), decision("layers.1")])) == 1
    assert len(fold([decision("layers.0"), decision("layers.1", **change)])) == 2


def test_names_given_by_the_program_are_shown() -> None:
    plan = Plan((decision("layers.0", checkpoint_names=("qkv", "heads")), decision("layers.1")))
    named, plain = format_report(plan).splitlines()[4::2]
    assert "gelu float32[256, 1024]  named 'qkv', 'heads'  layers.0 " in named and "named" not in plain
    assert [row["checkpoint_names"] for row in report_as_data(plan)["rows"]] == [["qkv", "heads"], []]


def test_reasons_that_name_a_tensor_fold_and_those_that_name_a_hook_do_not() -> None:
    views = [decision(f"layers.{i}", reason=f"a view of 'gelu_{i}'") for i in range(3)]
    (row,) = fold(views)
    assert row.reason == "a view of 'gelu'"
    hooks = [Hook(f"h_{i}", HALF.pack, HALF.unpack) for i in range(2)]
    assert len(fold([decision(f"layers.{i}", hook=h, reason=f"'h_{i}' takes it") for i, h in enumerate(hooks)])) == 2


@pytest.mark.core
def test_a_models_layers_fold() -> None:
    plan = aot_hooks.plan(blocks(5), torch.randn(37, 24), policy=aot_hooks.float8(), inner="aten")
    assert any(r.module_path == "0-4.up" and r.tensor_count == 5 for r in fold(plan.decisions))


def test_largest_rows_come_first() -> None:
    rows = fold([decision("a", saved_bytes=5, packed_bytes=1), decision("b"), decision("c", saved_bytes=50)])
    assert [r.saved_bytes for r in rows] == sorted((r.saved_bytes for r in rows), reverse=True)


# --- data and picture -------------------------------------------------------------------------------------------------


def test_data_is_json_and_adds_up() -> None:
    plan = aot_hooks.plan(blocks(), torch.randn(37, 24), policy=aot_hooks.float8())
    data = json.loads(json.dumps(report_as_data(plan)))
    assert data["version"] == 1
    assert data["totals"]["saved_bytes"] == sum(r["saved_bytes"] for r in data["rows"]) == plan.saved_bytes
    assert data["totals"]["packed_bytes"] == sum(r["packed_bytes"] for r in data["rows"]) == plan.packed_bytes
    assert data["totals"]["packed_tensor_count"] == sum(r["hook"] != "keep" for r in data["rows"]) > 0
    assert data["totals"]["predicted_peak_after_bytes"] == max(p["live_bytes"] for p in data["live_after"])
    assert set(data["rows"][0]) == {
        *("name", "op", "shape", "dtype", "device", "storage", "storage_bytes", "module_path", "source_line"),
        *(
            "checkpoint_names",
            "backward_ops",
            "is_input",
            "is_output",
            "is_static",
            "hook",
            "reason",
            "saved_bytes",
            "packed_bytes",
        ),
    }


def test_plot_has_bars_and_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = aot_hooks.plan(blocks(), torch.randn(37, 24), policy=aot_hooks.float8(), inner="aten")
    plot_report(plan, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    plot_report(plan, tmp_path / "out.svg")
    assert (tmp_path / "out.svg").read_text().count("without hooks") >= 2


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: Any, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install \"aot-hooks\[plot\]\""):
        plot_report(Plan((decision("a"),)), tmp_path / "out.png")
