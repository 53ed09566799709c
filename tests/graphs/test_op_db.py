"""A sample of torch's `op_db`: an operator's gradient under a lossy hook is no worse than in eager mode.

All operators are run by tests/support/op_db.py, with all hooks.
"""

from __future__ import annotations

import json

import op_programs
import oracle
import pytest
import torch
from results import CURRENT, reads_results

# float32 after an activation: the backward computes the operator's input again from a rounded tensor
ACTIVATED = (
    # decide
    "amax", "aminmax", "max_reduction_with_dim", "max_reduction_no_dim", "minimum", "clamp", "cummax", "kthvalue",
    "topk", "sort", "median", "where", "sign", "round", "remainder", "fmod", "copysign", "renorm", "norm_inf",
    "scatter_reduce_amax", "index_reduce_amin", "nn_functional_max_pool2d", "nn_functional_relu",
    "nn_functional_hardswish", "nn_functional_huber_loss", "nn_functional_triplet_margin_loss",
    # are singular
    "log", "log2", "true_divide", "rsqrt", "reciprocal", "pow", "acosh", "atanh", "cumprod", "prod", "addcdiv",
    "nn_functional_binary_cross_entropy", "nn_functional_kl_div", "linalg_inv", "logit", "__rpow__",
    # are neither
    "mul", "matmul", "exp", "tanh", "logsumexp", "softmax", "log_softmax", "nn_functional_gelu", "nn_functional_silu",
    "nn_functional_layer_norm", "nn_functional_rms_norm", "nn_functional_conv2d", "nn_functional_batch_norm",
    "nn_functional_cross_entropy", "nn_functional_scaled_dot_product_attention",
)  # fmt: skip
SMOOTH = {"mul", "nn_functional_gelu", "matmul"}  # what they read is packed
# A few of each kind.
QUICK = {
    *("amax", "kthvalue", "where", "log", "cumprod", "mul", "nn_functional_gelu"),
    *("nn_functional_layer_norm", "nn_functional_scaled_dot_product_attention"),
}
OTHERS = tuple(
    (name, dtype, form)
    for name in ("amax", "log", "mul")
    for dtype, form in (("bfloat16", "activated"), ("bfloat16", "direct"), ("float32", "direct"))
)


def marked(name: str, dtype: str, form: str) -> object:
    is_quick = name in QUICK if form == "activated" and dtype == "float32" else (name, dtype) == ("log", "bfloat16")
    return pytest.param(name, dtype, form, marks=[] if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "dtype", "form"),
    [*(marked(name, "float32", "activated") for name in ACTIVATED), *(marked(*case) for case in OTHERS)],
)
def test_a_hook_costs_an_operator_no_more_than_in_eager_mode(name: str, dtype: str, form: str) -> None:
    if name == "aminmax" and name not in op_programs.operators():  # as in torch 2.11
        with pytest.raises(RuntimeError, match="derivative for aten::aminmax is not implemented"):
            torch.aminmax(torch.ones(2, requires_grad=True)).min.backward()
        return
    kinds = oracle.TWO_KINDS
    (result,) = op_programs.check(name, dtype, form, among=kinds)
    assert not result.reason, result.reason
    assert result.without_hooks < 2.0**-5
    assert result.ok, f"{name} {dtype} {form} {result.shapes}\n{oracle.format_failures(result.verdicts)}"
    if name in SMOOTH and (dtype, form) == ("float32", "activated"):  # else the oracle would have nothing to compare
        assert all(v.packed_count and v.error > 0 for v in result.verdicts), result


@pytest.mark.parametrize(("name", "magnitude"), [("cumprod", 1e-3), ("linalg_solve_triangular", 1e4)])
def test_what_is_divided_or_solved_is_not_rounded(name: str, magnitude: float) -> None:
    """The result is divided by the argument, or cut to a triangle: int4 was 0.3 off of one, float8 0.4 of the other."""
    (result,) = op_programs.check(name, "float32", "direct", magnitudes=(magnitude,), among=oracle.TWO_KINDS)
    assert [v.error for v in result.verdicts] == [0.0, 0.0], result


def test_an_exception_says_why() -> None:
    (name, reason), *_ = op_programs.EXCEPTIONS.items()
    assert op_programs.check(name, "float32", "direct") == [
        op_programs.Result(name, "float32", "direct", reason=reason)
    ]
    assert set(op_programs.EXCEPTIONS) <= set(op_programs.operators())


def test_a_lifted_input_has_the_same_values_and_is_saved_as_an_intermediate() -> None:
    (program,) = op_programs.programs("mul", torch.float32, "direct")
    (activated,) = op_programs.programs("mul", torch.float32, "activated")
    x, y, identity = program.wrt[0], program.wrt[1], torch.eye(64)
    expected = (x.detach() * y.detach() * program.inputs[-1]).sum()
    torch.testing.assert_close(program.run(*program.inputs).detach(), expected)
    assert program.shapes == "[8, 64], [8, 64]" and torch.equal(program.inputs[2], identity)
    assert not torch.equal(activated.run(*activated.inputs), program.run(*program.inputs))


@reads_results
def test_the_committed_run_covers_every_operator_and_none_is_worse_than_the_rule() -> None:
    run = json.loads((CURRENT / "op_db.cpu.json").read_text())
    found = run["summary"]
    assert found["operators_with_something_packed"] >= 450
    assert set(found["operators_by_dtype"]) == {"float32", "bfloat16"}
    assert set(run["rule"]["hooks"]) == {"float8", "int8", "int4", "cast"} == set(oracle.HOOKS)
    assert found["failing_operators"] == run["failures"] == []
    assert found["exceptions"] == op_programs.EXCEPTIONS
