"""`aot_hooks.integrations.torchao`: float8 training that also saves in float8, against float8 training alone."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from oracle import total_error
from torch import nn

pytest.importorskip("torchao")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from trained import ATEN

import aot_hooks
from aot_hooks import budget, enable, errors, float8, last_plans, lossless, offload
from aot_hooks.integrations.torchao import float8_training


class Gated(nn.Module):
    def __init__(self, act: Any = nn.functional.silu, width: int = 128) -> None:
        super().__init__()
        self.norm, self.act = nn.RMSNorm(width), act
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(self.act(self.gate(h)) * self.up(h))


def net(recipe: str, act: Any = nn.functional.silu, *, emulated: bool = True, blocks: int = 2) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated(act) for _ in range(blocks))).bfloat16()
    config = Float8LinearConfig.from_recipe_name(recipe)
    # the products of float8 tensors need a GPU; emulated ones round the same
    return convert_to_float8_training(model, config=dataclasses.replace(config, emulate=emulated))


def gradients(fn: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    fn(x).float().square().mean().backward()
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("emulated", [True, False], ids=["emulated", "real products"])
def test_float8_training_saves_half(recipe: str, emulated: bool) -> None:
    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    plan = aot_hooks.plan(net(recipe, emulated=emulated), x, policy=float8_training())
    assert plan.packed_bytes <= 0.55 * plan.saved_bytes


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_nearly_those_of_float8_training(recipe: str) -> None:
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    model, full = net(recipe), nn.Sequential(Gated(), Gated()).bfloat16()
    full.load_state_dict(model.state_dict())
    exact = gradients(full, full, x)
    of_torchao = total_error(gradients(model, model, x), exact)
    compiled = torch.compile(lambda x: model(x))
    with enable(float8_training(), options=ATEN):
        ours = total_error(gradients(compiled, model, x), exact)
    assert 0 < of_torchao < 0.1
    assert ours < 1.5 * of_torchao + 0.02
    assert sum(p.packed_bytes for p in last_plans(compiled)) < 0.55 * sum(p.saved_bytes for p in last_plans(compiled))


def test_losses_follow_those_of_float8_training() -> None:
    def losses(policy: Any) -> list[float]:
        torch._dynamo.reset()
        model = net("rowwise")
        compiled = torch.compile(lambda x: model(x))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(1)
        x, y = torch.randn(64, 128, dtype=torch.bfloat16), torch.randn(64, 128, dtype=torch.bfloat16)
        found = []
        with enable(policy, options=ATEN):
            for _ in range(12):
                loss = (compiled(x) - y).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss.detach()))
        return found

    stock, ours = losses(aot_hooks.KEEP), losses(float8_training())
    assert stock[-1] < 0.97 * stock[0]
    assert ours == pytest.approx(stock, rel=0.01)


def test_offload_sends_the_packed_bytes() -> None:
    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    plan = aot_hooks.plan(net("rowwise"), x, policy=float8_training(offload(min_bytes=0, then=float8())))
    hooks = {str(d.hook) for d in plan.decisions}
    assert any("offload" in name for name in hooks)


def test_other_reads_are_protected_as_ever() -> None:
    """A mask of ReLU beside torchao's cast: the sign of the tensor decides, so the plain lossy hook is asked."""

    def exponential(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x.relu())

    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    plan = aot_hooks.plan(net("rowwise", exponential), x, policy=float8_training(), inner="aten")
    plain = aot_hooks.plan(net("rowwise", exponential), x, policy=float8(), inner="aten")
    for ours, theirs in zip(plan.decisions, plain.decisions, strict=True):
        only_scales = all("float8_linear.py" in read.line for read in ours.saved.backward_reads)
        assert only_scales or str(ours.hook) == str(theirs.hook)


def test_the_policy_is_a_value() -> None:
    assert float8_training() == float8_training(float8())
    assert hash(float8_training()) == hash(float8_training())
    assert pickle.loads(pickle.dumps(float8_training())) == float8_training()
    assert repr(float8_training(offload(then=float8()))) == "float8_training(offload(then=float8()))"


@pytest.mark.parametrize("wrong", [lossless(), offload(), 3, aot_hooks.Hook("own", abs, abs, lossy=True)], ids=repr)
def test_other_hooks_are_refused(wrong: Any) -> None:
    with pytest.raises(errors.OptionError, match="expected a hook of aot_hooks that rounds"):
        float8_training(wrong)


def test_a_budget_takes_it() -> None:
    x = torch.randn(256, 128, dtype=torch.bfloat16, requires_grad=True)
    model = net("rowwise", blocks=6)
    exact = gradients(model, model, x.detach())
    least = [
        aot_hooks.plan(model, x, policy=budget(max_slowdown=math.inf, allow=("float8", *more)), inner="aten").peak_bytes
        for more in ((), (float8_training(),))
    ]
    assert least[1] < 0.9 * least[0]
    policy = budget(f"{int(0.93 * least[0])}B", allow=["float8", float8_training()])
    compiled = torch.compile(lambda x: model(x))
    with enable(policy, options=ATEN):
        assert total_error(gradients(compiled, model, x.detach()), exact) < 0.05
    (plan,) = last_plans(compiled)
    assert plan.peak_bytes <= policy.peak
    assert any(d.reason.startswith("budget: float8_training(float8()) frees") for d in plan.decisions)
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_files_of_the_user_that_are_named_like_torchaos(tmp_path: Any) -> None:
    """`float8_utils.py` of torchao finds scales; a quotient in another one is protected as everywhere."""
    file = tmp_path / "float8_utils.py"
    file.write_text("def normalized(x):\n    return x / x.abs().amax(-1, keepdim=True)\n")
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    torch.manual_seed(0)
    linear = nn.Linear(256, 256)
    compiled = torch.compile(lambda x: scope["normalized"](torch.sin(linear(x))))
    with enable(float8_training(), options=ATEN):
        (compiled(torch.randn(64, 256)) ** 3).sum().backward()
    assert linear.weight.grad.isfinite().all()
    reasons = [d.reason for plan in last_plans(compiled) for d in plan.decisions]
    assert not any("float8 linear layers" in reason for reason in reasons)
