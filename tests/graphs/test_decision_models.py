"""Gradients of every model of decision_models.py and decision_losses.py under lossy hooks: as good as eager mode's."""

from __future__ import annotations

import oracle
import pytest
import torch
from decision_losses import DYNAMIC, PROGRAMS, make

# A few of each kind in decision_models.py and decision_losses.py. The others decide by the same operators.
QUICK = {
    *("gelu_amax", "router_by_topk", "ste_round_by_detach", "softmax_log"),
}
INDUCTOR = ("cnn_amax", "softmax_log")


# nn.LSTM is not compiled; the others round, and the rounded number is read: no bits can answer that, so it stays
NOTHING_PACKED = {"nn_lstm", "ste_round", "ste_floor", "ste_sign", "rounded_factor", "learned_step_size"}


def check(name: str, inner: str, hooks: tuple[str, ...]) -> None:
    module, inputs, wrt = make(name)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=name in DYNAMIC):
        verdicts, without_hooks = oracle.compare(module, inputs, wrt, hooks, inner=inner)
    assert without_hooks < 2.0**-5, f"{name} differs from eager mode without hooks by {without_hooks}"
    assert any(v.packed_count for v in verdicts) or name in NOTHING_PACKED, "nothing was packed"
    assert all(v.ok for v in verdicts), f"{name}\n{oracle.format_failures(verdicts)}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in PROGRAMS]
)
def test_a_hook_costs_a_model_no_more_than_in_eager_mode(name: str) -> None:
    check(name, "aten", oracle.TWO_KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor_obeys_the_same_rule(name: str) -> None:
    """With one hook: which reads may be rounded depends on no hook, and each graph takes 2.4 s to compile."""
    check(name, "inductor", oracle.ONE_KIND)
