"""`check_gradients`: what it finds, that it leaves nothing behind, and what it refuses."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from raising import fails, raises
from torch import Tensor, nn

import aot_hooks
from aot_hooks import Hook, check_gradients, policies, saved_tensors_hooks
from aot_hooks.errors import HookTraceError, OptionError

COPY = Hook("copy", lambda x: x.clone(), lambda p: p)
DOUBLE = Hook("double", lambda x: x * 2, lambda p: p)
INFINITE = Hook("infinite", lambda x: x.clone(), lambda p: p / 0)


class Chain(nn.Module):
    """The gradient of `second` is what the first matrix product gave times the cotangent; nothing else reads it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(8, 8))
        self.second = nn.Parameter(torch.randn(8, 4))
        self.unread = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return (x @ self.first) @ self.second * scale


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 16), nn.BatchNorm1d(16)]
        self.body = nn.Sequential(*layers, nn.GELU(), nn.Dropout(0.5))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        return {"out": self.head(h), "loss": h.square().mean()}


X = torch.linspace(-1, 1, 40).view(5, 8)


def check(fn: Any, *args: Any, **kwargs: Any) -> aot_hooks.GradientReport:
    return check_gradients(fn, *args, inner="aten", **kwargs)


@pytest.mark.core
def test_the_error_is_that_of_the_gradient_and_the_worst_stands_first() -> None:
    x = X.clone().requires_grad_()
    report = check(Chain(), x, policy=DOUBLE)
    assert report.rows[0].name == "second"
    errors = {row.name: row.error for row in report.rows}
    assert errors == {"second": 1.0, "first": 0.0, "argument x": 0.0}, "without `unread`, which has no gradient"
    norms = {row.name: row.norm for row in report.rows}
    assert report.error == pytest.approx(norms["second"] / sum(n**2 for n in norms.values()) ** 0.5)
    assert report.finite and report.output_error == 0 and report.same_random_numbers
    assert report.plan.packed_bytes == report.plan.saved_bytes > 0
    text = str(report)
    assert "all finite; 1 of" in text and text.index("second float32[8, 4]") < text.index("first float32[8, 8]")


@pytest.mark.core
def test_what_is_not_finite_stands_first_and_is_told() -> None:
    policy = policies.larger_than(1, INFINITE)
    report = check(Chain(), X.clone().requires_grad_(), policy=policy)
    worst = report.rows[0]
    assert (worst.name, worst.finite, worst.finite_without) == ("second", False, True) and not report.finite
    assert "NOT ALL FINITE" in str(report) and "not finite" in str(report)

    def overflows(x: Tensor) -> Tensor:
        return (x.exp() * 1e38).exp().log()

    report = check(overflows, X.clone().requires_grad_(), policy=COPY)
    assert report.finite and not report.rows[0].finite_without
    assert "not finite, without hooks either" in str(report)


@pytest.mark.parametrize(
    "inner", [pytest.param("aten", marks=pytest.mark.core), pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_dropout_is_the_same_also_where_hooks_draw_random_numbers(inner: str) -> None:
    model, x = Noisy(), torch.randn(32, 16)
    exact = check_gradients(model, x, policy=aot_hooks.lossless(), inner=inner)
    assert exact.error == 0 and exact.output_error == 0
    rounding = ((aot_hooks.float8(), 0.1), (aot_hooks.int4(), 0.4), (aot_hooks.int8(stochastic=True), 0.05))
    # One hook that draws numbers is enough of Inductor's time.
    for policy, most in rounding if inner == "aten" else rounding[1:2]:
        report = check_gradients(model, x, policy=policy, inner=inner)
        assert 0 < report.error < most and report.same_random_numbers and report.output_error < 1e-5
        assert [row.name for row in report.rows if row.vanishes] == ["body.3.bias"], "a bias before a BatchNorm"
        assert report.rows[-1].name == "body.3.bias" and "zero but for rounding" in str(report)


@pytest.mark.core
@pytest.mark.slow
def test_dropout_is_the_same_also_where_a_budget_draws_random_numbers() -> None:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True) for _ in range(2)]
    model, x = nn.Sequential(*layers), torch.randn(4, 16, 32, requires_grad=True)
    stock = aot_hooks.plan(model, x, policy=aot_hooks.KEEP, inner="aten").peak_bytes
    policy = aot_hooks.budget(f"{int(0.59 * stock)}B", allow=["int4", "recompute"], max_error=1)
    report = check(model, x, policy=policy)
    assert {d.hook.name for d in report.plan.decisions} >= {"int4(32, stochastic)", "recompute"}
    assert report.same_random_numbers and report.output_error < 1e-5 and 0 < report.error < 0.2


@pytest.mark.core
def test_everything_is_as_it_was() -> None:
    model, x = Noisy(), torch.randn(32, 16, requires_grad=True)
    model.head.weight.grad = torch.ones(4, 16)
    x.grad = torch.ones(32, 16)

    y = torch.ones(16)
    held = y.clone()

    def lowers(x: Tensor, y: Tensor) -> Tensor:
        random.random()
        out = model(x + y)["out"]
        y.sub_(1)
        return out

    before = {k: v.clone() for k, v in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    state, pythons, values = torch.get_rng_state(), random.getstate(), x.detach().clone()
    policy = aot_hooks.int8(stochastic=True)
    first = check(lowers, x, y, policy=policy)
    assert torch.equal(y, held)
    assert torch.equal(state, torch.get_rng_state()) and random.getstate() == pythons and torch.equal(x, values)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(b is buffers[name] for name, b in model.named_buffers())
    assert torch.equal(model.head.weight.grad, torch.ones(4, 16)) and model.body[0].weight.grad is None
    assert torch.equal(x.grad, torch.ones(32, 16))
    assert str(check(lowers, x, y, policy=policy)) == str(first)
    assert {row.name for row in first.rows} >= {"model.head.weight", "argument x"}


@pytest.mark.core
def test_where_the_hooks_come_from() -> None:
    model, x = Chain(), X.clone()
    with saved_tensors_hooks(DOUBLE):
        assert check(model, x).rows[0].error == 1.0
        assert check(model, x, policy=COPY).rows[0].error == 0.0
    eager = Hook("eager", DOUBLE.pack, DOUBLE.unpack, eager=True)
    assert check(model, x, policy=eager).rows[0].error == 1.0
    compiled = torch.compile(model, backend="aot_hooks", options={"inner": "aten", "policy": DOUBLE})
    assert check_gradients(compiled, x).rows[0].error == 1.0
    assert check_gradients(compiled, x, policy=COPY, scale=3.0).rows[0].error == 0.0
    assert check(lambda x: model(x).sum(), x, policy=DOUBLE).rows[0].error == 1.0
    assert check(model.forward, x, policy=DOUBLE).rows[0].name == "second"
    assert check(lambda m, x: m(x), model, x, policy=DOUBLE).rows[0].error == 1.0
    everywhere = check(model, x, policy=DOUBLE, scope="all")
    assert {row.name: row.error for row in everywhere.rows} == {"second": 1.0, "first": 3.0}


@pytest.mark.core
def test_many_checks_are_none_too_many() -> None:
    """Each compiles anew: none runs eagerly because Dynamo's limit is reached."""
    for i in range(torch._dynamo.config.recompile_limit + 2):
        report = check(lambda x, i=i: (x * (i + 1)).sin().exp(), X.clone().requires_grad_(), policy=COPY, scope="all")
        assert report.plan.decisions and report.error == 0


@pytest.mark.core
def test_refusals() -> None:
    model, x = Chain(), X.clone()
    with raises(OptionError, "no hooks to check", "policy=aot_hooks.float8()"):
        check(model, x)
    with raises(OptionError, "expected a module or function"):
        check(3, policy=COPY)
    with raises(OptionError, "no parameter", "no argument", "requires_grad_()"):
        check(torch.sin, x, policy=COPY)
    with raises(OptionError, "no output of the function requires grad"):
        check(lambda x: model(x).detach(), x, policy=COPY)
    with raises(HookTraceError, "raised KeyError"):
        check(model, x, policy=Hook("culprit", fails, lambda p: p))
    with raises(OptionError, "options['inner']"):
        check_gradients(model, x, policy=COPY, inner="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def steps(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    with raises(OptionError, "steps an optimizer (SGD)"):
        check(steps, x, policy=COPY)
    assert model.second.grad is None

    def writes(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.unread.add_(1)
        return model(x)

    with raises(OptionError, "writes to its parameter 'model.unread'"):
        check(writes, x, policy=COPY)


@pytest.mark.core
def test_without_grad_mode_and_with_long_reports() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
    with torch.no_grad():
        report = check(model, X.clone(), policy=COPY)
    assert len(report.rows) == 60 and "20 more, no worse" in str(report)
