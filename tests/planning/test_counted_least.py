"""A step of few calls: what holds the least of many calls may take too much while one of them runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aot_hooks
from aot_hooks.steps.memory import Bytes
from aot_hooks.steps.moments import Instant, shares


def test_a_least_that_takes_more_than_the_peak_while_it_runs_has_no_share() -> None:
    trace = [Instant("backward", "g", Counter())]
    assert shares(trace, {"g": Bytes(5, 1, 11)}, {"g": Bytes(9, 9, 9)}, peak=10) < 0
    assert shares(trace, {"g": Bytes(5, 1, 9)}, {"g": Bytes(9, 9, 9)}, peak=10) == 1


@pytest.mark.slow
def test_a_budget_that_exact_means_meet_is_met_with_more_means_allowed() -> None:
    """A generator and a discriminator, which has two calls at a time: with rounding the generator alone can hold less
    than exactly, but then takes more than the budget in its backward."""
    budget_bytes = 105_000

    def trained(policy: aot_hooks.policies.Policy | None) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        makes = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Linear(64, 32))
        judges = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(64, 1))
        options = {"inner": "aten", "policy": policy}
        g, d = (torch.compile(m, backend="aot_hooks", options=options) for m in (makes, judges))
        for _ in range(5):
            fake = g(torch.randn(64, 16))
            loss = F.softplus(-d(torch.randn(64, 32))).mean() + F.softplus(d(fake.detach())).mean()
            judges.zero_grad()
            loss.backward()
            makes.zero_grad()
            judges.zero_grad()
            F.softplus(-d(fake)).mean().backward()
        if policy is not None:
            assert all(p.peak_bytes <= budget_bytes for c in (g, d) for p in aot_hooks.last_plans(c))
        return [p.grad for m in (makes, judges) for p in m.parameters()]

    expected = trained(None)
    for max_error in (0.0, 0.05):
        found = trained(aot_hooks.budget(f"{budget_bytes}B", max_error=max_error))
        difference = torch.cat([(a - b).flatten() for a, b in zip(found, expected, strict=True)]).norm()
        assert difference <= max(1e-5, 2 * max_error) * torch.cat([g.flatten() for g in expected]).norm()
