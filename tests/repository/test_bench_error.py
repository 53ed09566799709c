"""benchmarks/bench_error.py: that its errors are those of the hooks, and its other schemes what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import bench_error
import schemes

import aot_hooks

CANDIDATES = schemes.candidates()


@pytest.mark.slow
def test_smallest_run(tmp_path, capsys):
    path = tmp_path / "errors.json"
    names = ["int8(64)", "int4(32)", "nf4(32)"]
    bench_error.main(["--layers", "1", "--seeds", "1", "--data", "normal", "--hooks", *names, "--json", str(path)])
    found = json.loads(path.read_text())
    assert list(found["results"]) == names
    # the operator that stands for all hooks gives what the hooks give when they are inlined
    assert found["inlined_difference"].keys() == {"int8(64)", "int4(32)"}
    assert max(found["inlined_difference"].values()) < 1e-5
    int8, int4, nf4 = found["results"].values()
    assert 0.001 < int8["errors"]["normal"][0] < 0.02 < int4["errors"]["normal"][0] < 0.2
    assert 1 + 2 / 64 <= int8["bytes_per_element"] < 1.05
    assert nf4["bytes_per_element"] == 0.5 + 2 / 32
    # errors of tensors packed alone are independent of each other: their squares add up to that of all at once
    for result in (int8, int4):
        together = sum(e**2 for e in result["alone"]["normal"].values()) ** 0.5
        assert together == pytest.approx(result["errors"]["normal"][0], rel=0.35)
    assert set(int8["alone"]["normal"]) == {
        "norm output", "value", "attention output", "residual", "w1 output", "w3 output", "silu(w1) * w3",
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert f"{int8['errors']['normal'][0]:.4f}" in printed


def test_the_docs_have_the_table_of_the_result(capsys):
    root = Path(__file__).resolve().parents[2]
    bench_error.main(["--markdown", str(root / "benchmarks/results/current/errors.cpu.json")])
    assert capsys.readouterr().out in (root / "docs/hooks.md").read_text()


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


@pytest.mark.parametrize("name", CANDIDATES)
def test_candidates_hold_what_they_are_given(name):
    hook = CANDIDATES[name]
    x = torch.randn(64, 128)
    x[:, 7] *= 50
    x[3, :64] = 0
    packed = hook.pack(x)
    y = hook.unpack(packed)
    blocks, off = (t.unflatten(-1, (-1, 32)) for t in (x, y - x))
    amax = blocks.abs().amax(-1, keepdim=True)
    # the widest gap of each: nf4's is at the lower end, minmax has 15 steps in blocks of 64, fitted cuts off a third
    assert (off.abs() <= amax * 0.36 + 1e-6).all() or "minmax" in name
    assert (y[3, :64] == 0).all()
    assert sum(t.nbytes for t in packed) == 64 * 128 * 9 // 16
    again = hook.unpack(hook.pack(x))
    assert torch.equal(again, y) is ("stochastic" not in name)


@pytest.mark.parametrize("name", [name for name in CANDIDATES if "stochastic" in name])
def test_rounding_at_random_is_right_on_average(name):
    hook, x = CANDIDATES[name], torch.randn(1, 64).expand(4000, 64)
    off = hook.unpack(hook.pack(x)).mean(0) - x[0]
    assert off.abs().max() < 0.05 and off.mean().abs() < 0.01
    nearest = CANDIDATES[name.replace(", stochastic", "")]
    assert (nearest.unpack(nearest.pack(x)).mean(0) - x[0]).abs().max() > 0.05  # which is what this would find


def test_fitted_is_never_worse_than_the_whole_scale():
    x = torch.distributions.StudentT(3.0).sample((64, 128))

    def error(hook: aot_hooks.Hook) -> torch.Tensor:
        return (hook.unpack(hook.pack(x)) - x).unflatten(-1, (-1, 32)).square().sum(-1)

    fitted, whole = error(CANDIDATES["fitted(32)"]), error(CANDIDATES["symmetric(32)"])
    assert (fitted <= whole * (1 + 1e-3)).all() and fitted.sum() < 0.97 * whole.sum()
