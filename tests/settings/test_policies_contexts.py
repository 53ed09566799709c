"""Policies as context, as option and in a region: which wins, what compiles again, what a bad one raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sentinel import DOUBLE, TRIPLE, Chain, assert_same, compiled, gradients, graph_count, hand_gradients, scale
from torch import Tensor, nn

from aot_hooks import KEEP, Hook, SavedTensor, policies, saved_tensors_hooks, saved_tensors_policy
from aot_hooks.errors import PolicyError

aten = torch.ops.aten

# --- contexts, options, regions --------------------------------------------------------------------------------------

H1, H2 = 6 * 5 * 4, 6 * 4 * 4  # bytes of the two intermediates of the chain

MAKERS = {
    "everything": (lambda: policies.everything(DOUBLE), {"h": 2}),
    "larger_than": (lambda: policies.larger_than(H2, DOUBLE), {"h1": 2}),
    "only_these_ops": (lambda: policies.only_these_ops({aten.mm.default: DOUBLE}), {"h": 2}),
    "only_these_modules": (lambda: policies.only_these_modules({"**": DOUBLE}), {"h": 2}),
    "only_these_names": (lambda: policies.only_these_names({"h": DOUBLE}), {}),
    "only_these_dtypes": (lambda: policies.only_these_dtypes({torch.float32: DOUBLE}), {"h": 2}),
    "first_match": (lambda: policies.first_match(policies.larger_than(H2, DOUBLE), TRIPLE), {"h1": 2, "h2": 3}),
}
ON_THE_CHAIN = {name: (make(), factors) for name, (make, factors) in MAKERS.items()}
ON_THE_CHAIN["function"] = (lambda saved: DOUBLE if saved.nbytes > H2 else TRIPLE, {"h1": 2, "h2": 3})


@pytest.mark.core
@pytest.mark.parametrize("name", ON_THE_CHAIN)
def test_as_context_as_option_and_in_a_region(model: Chain, x: Tensor, name: str) -> None:
    policy, factors = ON_THE_CHAIN[name]

    def region(x: Tensor) -> Tensor:
        with saved_tensors_policy(policy):
            return model(x)

    expected = hand_gradients(model, x, **factors)
    assert_same(gradients(compiled(model, policy=policy), model, x), expected)
    assert_same(gradients(compiled(region), model, x), expected)
    for call in (compiled(model), model):
        with saved_tensors_policy(policy):
            assert_same(gradients(call, model, x), expected)


@pytest.mark.core
def test_innermost_wins_and_any_context_wins_over_options(model: Chain, x: Tensor) -> None:
    call = compiled(model, policy=policies.everything(Hook("five", *scale(5))))
    with saved_tensors_policy(policies.everything(DOUBLE)):
        with saved_tensors_policy(policies.larger_than(H2, TRIPLE)):
            assert_same(
                gradients(call, model, x), hand_gradients(model, x, h1=3)
            )  # not 2 for h2: contexts don't add up
        with saved_tensors_hooks(KEEP):
            assert_same(gradients(call, model, x), hand_gradients(model, x))
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))
    assert_same(gradients(call, model, x), hand_gradients(model, x, h=5))


@pytest.mark.parametrize("scope", ["donated", "no_static", "all"])
def test_scopes(model: Chain, x: Tensor, scope: str, wrap: Any) -> None:
    factors = {"donated": {"h": 2}, "no_static": {"h": 2, "x": 2}, "all": {"h": 2, "x": 2, "w": 2}}[scope]
    with saved_tensors_policy(policies.everything(DOUBLE), scope=scope):
        assert_same(gradients(wrap(model), model, x), hand_gradients(model, x, **factors))


@pytest.mark.core
def test_equal_policies_made_anew_are_one_graph_and_a_change_is_one_more(model: Chain, x: Tensor) -> None:
    call, before = compiled(model), graph_count()
    for n in (H2, H2, H1, H1, H2):
        with saved_tensors_policy(policies.larger_than(n, Hook("double", *scale(2)))):
            got = gradients(call, model, x)
        assert_same(got, hand_gradients(model, x, **({"h1": 2} if n == H2 else {})))
    assert graph_count() - before == 2


# --- errors ----------------------------------------------------------------------------------------------------------


def raises(saved: SavedTensor) -> Hook:
    raise KeyError("size")


@pytest.mark.core
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (raises, "policy 'raises' raised KeyError: 'size' (test_policies_contexts.py:"),
        (lambda saved: None, "answered None for saved"),
        (lambda saved: "float8", "answered 'float8' for saved"),
        (policies.first_match(policies.larger_than(1, lambda saved: None)), "answered None for saved"),
    ],
    ids=["raises", "none", "string", "inside another"],
)
def test_a_bad_policy_is_named_with_the_tensor_and_the_line(policy: Any, message: str, wrap: Any) -> None:
    lin = nn.Linear(4, 4)

    def f(x: Tensor) -> Tensor:
        return lin(lin(x).sigmoid()).sum()  # here

    with pytest.raises(Exception) as error, saved_tensors_policy(policy):
        wrap(f)(torch.randn(3, 4, requires_grad=True))
    ours = getattr(error.value, "inner_exception", error.value)
    assert isinstance(ours, PolicyError)
    assert message in str(ours) and "float32[3, 4]" in str(ours)
    assert "test_policies_contexts.py:" in str(ours) and "# here" in str(ours)


# --- made inside a compiled function ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_made_inside_a_compiled_function(model: Chain, x: Tensor, name: str) -> None:
    make, factors = MAKERS[name]

    def region(x: Tensor) -> Tensor:
        with saved_tensors_policy(make()):
            return model(x)

    assert_same(gradients(compiled(region), model, x), hand_gradients(model, x, **factors))
