"""More means, or a larger error, never make the lowest peak that is found higher."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import aot_hooks
from aot_hooks.planning import trials
from aot_hooks.planning.search import Found, Limits, search


def model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers), torch.randn(256, 64)


def least(**kwargs: Any) -> int:
    net, x = model()
    policy = aot_hooks.budget(max_slowdown=math.inf, **kwargs)
    return aot_hooks.plan(net, x, inner="aten", policy=policy).peak_bytes


def test_what_exact_means_reach_is_reached_with_all_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the search does with lossy means: here it finds the worst plan that it has tried."""
    exact = least(max_error=0)

    def poor(step: Any, limits: Limits, partitioned: Any, tried: Any) -> Any:
        if not limits.error:
            return search(step, limits, partitioned, tried)
        found: list[Any] = []

        def noted(*args: Any) -> Any:
            found.append(tried(*args))
            return found[-1]

        search(step, limits, partitioned, noted)
        worst = max(found, key=lambda one: one.peak)
        return Found(worst, worst)

    assert least() <= exact
    monkeypatch.setattr(trials, "search", poor)
    assert least(allow=("recompute", "float8", "lossless")) <= exact


def test_the_least_falls_with_means_and_error() -> None:
    means = [("recompute",), ("recompute", "lossless"), ("recompute", "lossless", "float8")]
    by_means = [least(allow=allow) for allow in means]
    assert by_means == sorted(by_means, reverse=True) and by_means[-1] < by_means[0]
    by_error = [by_means[1], by_means[2], least(allow=means[2], max_error=0.2)]
    assert by_error == sorted(by_error, reverse=True)
