"""`options["recompute_pointwise"]`: less is saved, exact hooks stay exact, and nothing else is changed."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aot_hooks
from aot_hooks import errors, partitioner

ATEN = {"inner": "aten"}
AGAIN = ATEN | {"recompute_pointwise": True}
PRODUCT_BYTES = 64 * 96 * 4  # of silu(gate) * up, float32
NORM_BYTES = 64 * 32 * 4


class GatedBlock(nn.Module):
    """A product reads the norm's result, and another silu(gate) * up: torch's partition saves both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.gate, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(GatedBlock(), GatedBlock())


def rows() -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def gradients(module: nn.Module, run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = run(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def saved_bytes(options: dict[str, Any], policy: Any) -> int:
    torch._dynamo.reset()
    compiled = torch.compile(model(), backend="aot_hooks", options=options | {"policy": policy})
    compiled(rows()).sum().backward()
    return sum(plan.saved_bytes for plan in aot_hooks.last_plans(compiled))


@pytest.mark.core
def test_what_a_product_reads_is_not_saved() -> None:
    fewer = saved_bytes(ATEN, aot_hooks.float8()) - saved_bytes(AGAIN, aot_hooks.float8())
    assert fewer == 2 * (PRODUCT_BYTES + NORM_BYTES)


@pytest.mark.core
@pytest.mark.parametrize("policy", [None, aot_hooks.lossless(), aot_hooks.offload(min_bytes=0)], ids=repr)
def test_exact_policies_and_none_stay_bitwise_exact(policy: Any) -> None:
    module, x = model(), rows()
    expected = gradients(module, module, x)
    for size in (64, 48):
        compiled = torch.compile(copy.deepcopy(module), backend="aot_hooks", options=AGAIN | {"policy": policy})
        if size != 64:
            expected = gradients(module, module, x[:size])
        for a, b in zip(gradients(compiled, compiled, x[:size]), expected, strict=True):
            assert torch.equal(a, b)


def test_without_hooks_less_is_saved_too() -> None:
    def saved(options: dict[str, Any]) -> int:
        torch._dynamo.reset()
        module = model()
        y = torch.compile(module, backend="aot_hooks", options=options)(rows())
        parameters = {p.data_ptr() for p in module.parameters()}
        return sum(x.nbytes for x in y.grad_fn.saved_tensors if x.data_ptr() not in parameters)

    assert saved(ATEN) - saved(AGAIN) == 2 * (PRODUCT_BYTES + NORM_BYTES)


class ThreeFactors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.down = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.a(x)) * torch.sigmoid(self.b(x)) * self.c(x))


@pytest.mark.parametrize("make", [model, ThreeFactors])
@pytest.mark.parametrize("hook", [aot_hooks.float8(), aot_hooks.int8()], ids=repr)
def test_the_error_is_that_of_its_sources(hook: aot_hooks.Hook, make: Any) -> None:
    def errors_of(found: list[torch.Tensor]) -> list[float]:
        return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    torch.manual_seed(0)
    module, x = make(), rows()
    exact = gradients(module, module, x)
    # as asked: eager code would keep what its last operators read until the backward, and so round less
    with aot_hooks.saved_tensors_hooks(dataclasses.replace(hook, lossy=False)):
        eager = errors_of(gradients(module, module, x))
    compiled = torch.compile(module, backend="aot_hooks", options=AGAIN | {"policy": hook})
    found = errors_of(gradients(module, compiled, x))
    assert sum(found) <= 1.5 * sum(eager)
    # a gradient of `down` has the errors of gate and up, where in eager mode it has that of their product
    assert all(a <= 2 * b for a, b in zip(found, eager, strict=True))


def test_enable_and_plan_follow_it() -> None:
    module = model()
    with aot_hooks.enable(aot_hooks.float8(), options=AGAIN) as hooks:
        torch.compile(module)(rows()).sum().backward()
        ((plan, _),) = hooks.runs()
    assert plan.saved_bytes == saved_bytes(AGAIN, aot_hooks.float8())
    options = AGAIN | {"policy": aot_hooks.float8()}
    assert aot_hooks.plan(torch.compile(model(), backend="aot_hooks", options=options), rows()) == plan


def test_a_budget_decides_itself() -> None:
    policy = aot_hooks.budget(max_slowdown=0.05)
    assert saved_bytes(AGAIN, policy) == saved_bytes(ATEN, policy)


def test_stored_graphs_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._functorch.config.patch(bundled_autograd_cache=True):
        seen = []
        for options in (ATEN, AGAIN, ATEN, AGAIN):
            seen.append((saved_bytes(options, aot_hooks.float8()), aot_hooks.cache_stats()["hits"]))
    assert [hits for _, hits in seen] == [0, 0, 1, 1]
    assert seen[0][0] == seen[2][0] > seen[1][0] == seen[3][0]


def test_torchs_setting_is_left_as_it_was() -> None:
    def fail(saved: Any) -> Any:
        assert not torch._functorch.config.ban_recompute_materialized_backward
        raise ValueError("half-way")

    for was in (True, False):
        with torch._functorch.config.patch(ban_recompute_materialized_backward=was):
            with pytest.raises(Exception, match="half-way"):
                saved_bytes(AGAIN, fail)
            assert torch._functorch.config.ban_recompute_materialized_backward is was
            # without the option torch's own setting counts
            assert (saved_bytes(ATEN, aot_hooks.float8()) == saved_bytes(AGAIN, aot_hooks.float8())) is not was


@pytest.mark.core
def test_it_is_true_or_false() -> None:
    with pytest.raises(Exception, match=r"'recompute_pointwise'.* must be True or False, got 'norms'") as caught:
        saved_bytes(ATEN | {"recompute_pointwise": "norms"}, None)
    assert isinstance(caught.value.__cause__ or getattr(caught.value, "inner_exception", None), errors.OptionError)


@pytest.mark.parametrize(
    ("options", "count"),
    [({"recompute_pointwise": True}, 1), ({}, 0), ({"recompute_pointwise": True, "inner": "aten"}, 0)],
)
def test_kernels_are_split_for_inductor_under_the_option_only(monkeypatch, options, count) -> None:
    split: list[Any] = []
    monkeypatch.setattr(partitioner, "split_and_hold", lambda *graphs, **_: split.append(graphs))
    compiled = torch.compile(model(), backend="aot_hooks", options={"policy": aot_hooks.float8(), **options})
    aot_hooks.plan(compiled, rows().requires_grad_())
    assert len(split) == count
