"""The measurements that README.md and docs/costs.md show are those of the result files that they name."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from results import reads_results

sys.path += [str(Path(__file__).resolve().parents[2] / folder) for folder in ("benchmarks", "examples")]
import train_gpt
from measure import GIB, ROOT

pytestmark = reads_results
README = (ROOT / "README.md").read_text()
COSTS = (ROOT / "docs" / "costs.md").read_text()
COLUMNS = "| | ms | / stock | medians / stock | saved GiB | peak GiB | error of a weight gradient |"
BUDGETS = "| | 4 blocks: peak, GiB | step | 16 blocks: peak, GiB | step |"
VARIANTS = {
    "`torch.compile`": "stock",
    '`backend="aot_hooks"`, no hooks': "ours_no_hooks",
    "`aot_hooks.float8()`": "ours_float8_rowwise",
    "`aot_hooks.int8()`": "ours_int8",
    "`aot_hooks.int8(128, power_of_two=True)`": "ours_int8_128_power",
    "`aot_hooks.int4()`": "ours_int4",
    "`aot_hooks.offload()`": "ours_offload",
    "`aot_hooks.offload(then=aot_hooks.float8())`": "ours_float8_offload",
    "torch's own inlining of the float8 hook": "torch_inlined_float8",
    "Inductor's activation quantization pass": "inductor_float8_pass",
    "the float8 hook as Python functions": "python_hooks_float8",
    "`activation_memory_budget` 0.7": "budget_0.7",
    "`activation_memory_budget` 0.7 + torch's inlining": "budget_0.7_torch_inlined_float8",
    "`activation_memory_budget` 0.7 + `aot_hooks.float8()`": "budget_0.7_ours_float8",
    "checkpoint every block": "checkpoint_blocks",
    "Inductor's activation offloading": "inductor_offload",
    "`save_on_cpu(pin_memory=True)`": "save_on_cpu",
}


def result_before(page: str, text: str) -> dict[str, Any]:
    """The result file that `page` names last before `text`."""
    names = re.findall(r"\((?:\.\./)?(benchmarks/results/\S+\.json)\)", page[: page.index(text)])
    return json.loads((ROOT / names[-1]).read_text())


def shown(row: dict[str, Any]) -> list[str]:
    errors = sorted({f"{row[key]:.3f}" for key in ("w1_error", "q_error")})
    return [
        f"{row['min_ms']:.1f}",
        f"{row['ratio_to_stock']:.3f}",
        f"{row['median_ratio_to_stock']:.3f}",
        f"{row['after_forward_bytes'] / GIB:.2f}",
        f"{row['peak_bytes'] / GIB:.2f}",
        " to ".join(errors),
    ]


def table(page: str) -> dict[str, list[str]]:
    lines = page[page.index(COLUMNS) :].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip().strip("*") for cell in line.strip("|").split(" | ")] for line in lines]
    return {label: cells for label, *cells in rows}


@pytest.mark.parametrize("label", VARIANTS)
def test_what_it_costs(label: str) -> None:
    (measured,) = (row for row in result_before(COSTS, COLUMNS)["rows"] if row["name"] == VARIANTS[label])
    assert table(COSTS)[label] == shown(measured)


@pytest.mark.parametrize(("column", "names"), [(0, ["budget", "budget_4_layers"]), (2, ["budget_16_layers"])])
def test_the_table_of_budgets(column: int, names: list[str]) -> None:
    """Peaks and ratios are those of the results, whichever rows they stand in."""
    before, _, after = COSTS.partition(BUDGETS)
    expected = set()
    for name in names:
        path = f"benchmarks/results/current/{name}.h200.json"
        result = json.loads((ROOT / path).read_text())
        rows = {row["name"]: row for row in result["rows"] if "ratio" in row}
        stock = rows.pop("no hooks")
        assert f"](../{path}), commit {result['header']['commit']})" in before and f"of {stock['rounds']} " in before
        expected.add((f"{stock['peak_bytes'] / GIB:.2f}", f"1 ({stock['min_ms']:.0f} ms)"))
        expected |= {(f"{row['peak_bytes'] / GIB:.2f}", f"{row['ratio']:.3f}") for row in rows.values()}
    lines = after.partition("\n\n")[0].splitlines()[2:]
    assert len(lines) <= 8
    cells = [[cell.strip().strip("*") for cell in line.split("|")[2:-1]] for line in lines]
    found = {tuple(row[column : column + 2]) for row in cells if row[column]}
    assert found <= expected and len(found) >= 5


def result(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / f"benchmarks/results/current/{name}.h200.json").read_text())["rows"]
    return rows


def test_the_table_of_the_readme() -> None:
    """Tokens a second by medians, to the hundred, and peaks to 0.1 GiB."""
    rows = {row["way"]: row for row in result("real_step")}
    expected = [
        (8192 / row["ms"] * 1e3, row["peak_bytes"] / GIB)
        for row in (rows["stock"], rows["checkpointing"], rows["budget as checkpointing"])
    ]
    rows = {row["row"]: row for row in result("distributed_llama")}
    expected += [
        (2 * 8192 / row["median_ms"] * 1e3, row["peak_gib"])
        for row in (rows["stock"], rows["checkpointing"], rows["budget as checkpointing"])
    ]
    rows = {row["name"]: row for row in result("trainers_vocabulary")}
    expected += [
        (row["tokens_per_second"], (row["peak_bytes"] - row["before_bytes"]) / GIB)
        for row in (rows["stock"], rows["checkpointing"], rows["budget"])
    ]
    rows = {row["way"]: row for row in result("real_step_lora_32_blocks")}
    expected += [
        (65536 / row["ms"] * 1e3, row["peak_bytes"] / GIB)
        for row in (rows["chunk_checkpointing"], rows["chunk_tile_offload"])
    ]
    totals = [f"{(row['before_bytes'] + row['peak_bytes']) / GIB:.1f}" for row in rows.values()]
    assert f"it takes {totals[1]} GiB of the GPU in place of {totals[0]}." in README
    rows = {row["name"]: row for row in result("trainers_vocabulary")}
    table = README[README.index("| tokens a second |") :].partition("\n\n")[0].splitlines()[2:]
    found = [tuple(cell.strip().strip("*") for cell in line.split("|")[3:5]) for line in table]
    assert found == [(f"{round(speed, -2):,.0f}", f"{peak:.1f} GiB") for speed, peak in expected]
    first = {name: f"{rows[name]['first_step_ms'] / 1e3:.0f} s" for name in ("budget", "stock")}
    assert (
        f"{first['budget']} with the third budget of the table, where `torch.compile` takes {first['stock']}" in README
    )


def test_what_the_costs_say_of_float8() -> None:
    for name in ("budget", "budget_4_layers"):
        result = json.loads((ROOT / f"benchmarks/results/current/{name}.h200.json").read_text())
        rows = {row["name"]: row for row in result["rows"]}
        stock, float8 = rows["no hooks"], rows["ours_float8_rowwise"]
        gib = [row["peak_bytes"] / GIB for row in (stock, float8)]
        saved = f"{gib[0] - gib[1]:.0f} of {gib[0]:.0f} GiB off the peak"
        assert f"float8 takes {saved} for about 1% of the step" in COSTS
        assert max(float8["ratio"], float8["median_ratio"]) < 1.015


def test_every_row_of_that_table_is_looked_at() -> None:
    assert table(COSTS).keys() == VARIANTS.keys()
    header = result_before(COSTS, COLUMNS)["header"]
    before = COSTS[: COSTS.index(COLUMNS)][-500:]
    assert header["device"] in before and f"{header['rounds']} rounds" in before
    assert header["commit"] in before and header["torch"].partition("+")[0] in before


def test_what_the_demo_prints() -> None:
    printed = "final loss  "
    measured = result_before(COSTS, printed)
    text = train_gpt.format_table(measured["rows"], torch.device("cuda"), "inductor")
    assert f"```\n{text}\n```" in COSTS
    command = f"examples/train_gpt.py --steps {measured['header']['step_count']}"
    assert command in COSTS and measured["header"]["device"] in COSTS[: COSTS.index(printed)]
    step = measured["rows"]["step_median_ms"]
    assert f"it took {100 * step['hooks'] / step['baseline'] - 100:.0f}% instead of" in README
