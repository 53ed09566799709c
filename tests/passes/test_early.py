"""What only the backward reads is computed early, in graphs for Inductor that have hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import aot_hooks
from aot_hooks import partitioner
from aot_hooks.graphs.lifetimes import is_packed_alone, random_masks
from aot_hooks.passes import early
from aot_hooks.torch_private.inductor_fusion import pads_no_rows

W = torch.eye(16)
X = torch.randn(16, 16)


def layers(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = (x @ W).sin() @ W
    return x


def relu_and_layers(x: torch.Tensor) -> torch.Tensor:
    return layers((x @ W).relu() @ W)


def shared_input(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = x.relu() @ W
    s, c = h.sigmoid() @ W, x.exp()
    return s, c > 1, c * h


def second_output(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return layers(x), x * 2 + 1


def read_by_the_forward(x: torch.Tensor) -> torch.Tensor:
    for i in range(3):
        x = layers(x) + torch.nn.functional.silu(X * x * (1 + i)) @ W
    return x


def forward_before_and_after(
    monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any], policy: Any
) -> list[tuple[list[str], list[str]]]:
    """The operators of each forward in order, before nodes are moved and after."""
    found = []

    def moved(fw: torch.fx.GraphModule, num_fwd_outputs: int) -> None:
        before = [str(n) for n in fw.graph.nodes]
        early.compute_early(fw, num_fwd_outputs)
        found.append((before, [str(n) for n in fw.graph.nodes]))

    monkeypatch.setattr(partitioner, "compute_early", moved)
    aot_hooks.plan(fn, X.clone().requires_grad_(), policy=policy)
    return found


def test_a_mask_is_computed_behind_what_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ((before, after),) = forward_before_and_after(monkeypatch, relu_and_layers, aot_hooks.float8())
    mask = next(name for name in before if name.startswith("le"))
    assert before.index(mask) > before.index("sin_2")
    assert after.index(mask) < after.index("sin")
    assert sorted(before) == sorted(after)


@pytest.mark.parametrize("fn", [shared_input, second_output, read_by_the_forward])
def test_what_frees_nothing_stays(monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any]) -> None:
    """Outputs of the program, what the forward reads as well, and what is computed of inputs."""
    ((before, after),) = forward_before_and_after(monkeypatch, fn, aot_hooks.float8())
    assert before == after


def test_without_hooks_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forward_before_and_after(monkeypatch, relu_and_layers, aot_hooks.KEEP) == []


@pytest.mark.slow
@pytest.mark.parametrize("hook", [aot_hooks.lossless(), aot_hooks.offload(0, max_stall_ms=float("inf"))])
def test_gradients_stay(hook: Any) -> None:
    def gradient(policy: Any) -> torch.Tensor:
        torch._dynamo.reset()
        x = X.clone().requires_grad_()
        compiled = torch.compile(relu_and_layers, backend="aot_hooks", options={"policy": policy})
        compiled(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(gradient(hook), gradient(aot_hooks.KEEP), rtol=1e-6, atol=1e-6)


def two_results(x: torch.Tensor) -> torch.Tensor:
    a, b = torch.rand_like(x).chunk(2)
    c, d = (torch.randn_like(x) * 2).unbind(1)[:2]
    return (x[:8] * a * b).sin() * c.sum() * d.sum()


@pytest.mark.parametrize("policy", [aot_hooks.float8(), aot_hooks.KEEP, aot_hooks.budget("1GiB")])
def test_random_numbers_with_several_views(policy: Any) -> None:
    assert aot_hooks.plan(two_results, X.clone().requires_grad_(), policy=policy).decisions


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x @ W, 0.5).sin() @ W


def noise_twice(x: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(x)
    return layers(x + noise) * 0.5 + noise


@pytest.mark.parametrize(
    ("fn", "policy", "masks", "packed"),
    [
        (dropped, aot_hooks.lossless(), 1, 1),
        (dropped, aot_hooks.float8(), 1, 1),
        (dropped, aot_hooks.KEEP, 1, 0),
        (noise_twice, aot_hooks.float8(), 0, 0),
    ],
)
def test_masks_of_random_numbers(
    monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any], policy: Any, masks: int, packed: int
) -> None:
    """Numbers that something other than a mask reads are written to memory."""
    seen: list[Any] = []
    rewrite = partitioner.rewrite

    def rewritten(fw: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        plan = rewrite(fw, *args, **kwargs)
        seen.extend(random_masks(fw.graph.nodes))
        return plan

    monkeypatch.setattr(partitioner, "rewrite", rewritten)
    aot_hooks.plan(fn, X.clone().requires_grad_(), policy=policy)
    assert len(seen) == masks
    assert sum(map(is_packed_alone, seen)) == packed
    assert all(("inductor_realize_to_strides" in mask.meta) is is_packed_alone(mask) for mask in seen)


def test_rows_are_not_padded_where_a_mask_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    rewrite = partitioner.rewrite

    def rewritten(fw: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        plan = rewrite(fw, *args, **kwargs)
        seen.append(pads_no_rows(fw))
        return plan

    monkeypatch.setattr(partitioner, "rewrite", rewritten)
    for policy in (aot_hooks.KEEP, aot_hooks.float8(), aot_hooks.lossless()):
        aot_hooks.plan(dropped, X.clone().requires_grad_(), policy=policy)
    assert seen == [False, True, True]
