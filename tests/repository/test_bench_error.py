"""benchmarks/bench_error.py: that its errors are those of the hooks, and the docs have its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from results import CURRENT, reads_results

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import bench_error

import aot_hooks


@pytest.mark.slow
def test_smallest_run(tmp_path, capsys):
    path = tmp_path / "errors.json"
    names = ["int8(64)", "int4(32)"]
    bench_error.main(["--layers", "1", "--seeds", "1", "--data", "normal", "--hooks", *names, "--json", str(path)])
    found = json.loads(path.read_text())
    assert list(found["results"]) == names
    # the operator that stands for all hooks gives what the hooks give when they are inlined
    assert found["inlined_difference"].keys() == {"int8(64)", "int4(32)"}
    assert max(found["inlined_difference"].values()) < 1e-5
    int8, int4 = found["results"].values()
    assert 0.001 < int8["errors"]["normal"][0] < 0.02 < int4["errors"]["normal"][0] < 0.2
    assert 1 + 2 / 64 <= int8["bytes_per_element"] < 1.05
    # errors of tensors packed alone are independent of each other: their squares add up to that of all at once
    for result in (int8, int4):
        together = sum(e**2 for e in result["alone"]["normal"].values()) ** 0.5
        assert together == pytest.approx(result["errors"]["normal"][0], rel=0.35)
    assert set(int8["alone"]["normal"]) == {
        "norm output", "value", "attention output", "residual", "w1 output", "w3 output", "silu(w1) * w3",
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert f"{int8['errors']['normal'][0]:.4f}" in printed


@reads_results
def test_the_docs_have_the_table_of_the_result(capsys):
    bench_error.main(["--markdown", str(CURRENT / "errors.cpu.json")])
    assert capsys.readouterr().out in (Path(__file__).resolve().parents[2] / "docs/hooks.md").read_text()


def test_an_unknown_hook_is_named(capsys):
    with pytest.raises(SystemExit):
        bench_error.main(["--hooks", "int3(32)"])
    assert "no hook 'int3(32)'; there are: cast(bfloat16), float8(e4m3fn, tensorwise)" in capsys.readouterr().err


def test_a_tensor_of_no_known_kind_is_an_error():
    saved = aot_hooks.SavedTensor(
        "exp", "aten.exp.default", (4, 64), torch.float32, torch.device("cpu"), 1024, 0, "blocks.0", "", (),
        is_input=False, is_output=False, is_static=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"saved 'exp' float32\[4, 64\], made by aten.exp.default in 'blocks.0'"):
        bench_error.kind_of(saved)
