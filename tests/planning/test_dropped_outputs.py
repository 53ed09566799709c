"""Logits beside a loss: a budget counts them to the end of the step, unless that makes it impossible."""

from __future__ import annotations

import pytest
import torch
from profiled import most_allocated
from steps import ATEN
from torch import nn

import aot_hooks
from aot_hooks.errors import BudgetError, error_behind

WORDS, TOKENS = 4096, 256


class Model(nn.Module):
    """A narrow model with many words, which returns its logits beside the loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 64), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.head = nn.Linear(64, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        logits = self.head(x)
        return nn.functional.cross_entropy(logits, ids), logits


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model(), torch.randint(WORDS, (TOKENS,))


def peaks(model, ids, policy, folder, *, keeps):
    """The predicted peak of a compiled step, and the true one if the user keeps the logits, or does not."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy})

    def step():
        outputs = compiled(ids)
        loss = outputs[0]
        if not keeps:
            outputs = None
        loss.backward()
        return outputs

    for _ in range(2):
        step()
        model.zero_grad(set_to_none=True)
    measured = most_allocated(step, folder)
    model.zero_grad(set_to_none=True)
    (plan,) = aot_hooks.last_plans(compiled)
    return plan.peak_bytes, measured


def test_the_peak_of_a_budget_is_that_with_the_logits_kept_or_without_them(model, tmp_path):
    net, ids = model
    stock = aot_hooks.plan(net, ids, policy=aot_hooks.KEEP, inner="aten").peak_bytes
    logits = 4 * WORDS * TOKENS
    planned, true = peaks(net, ids, aot_hooks.budget(stock, max_error=0), tmp_path, keeps=True)
    assert planned == stock and abs(planned - true) < 0.03 * true
    lower = stock - logits  # too little if the logits are kept
    planned, true = peaks(net, ids, aot_hooks.budget(lower, max_error=0, allow=("recompute",)), tmp_path, keeps=False)
    assert planned <= lower and abs(planned - true) < 0.03 * true


def test_a_model_without_a_loss_keeps_its_outputs(model):
    net, ids = model

    class NoLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, ids):
            return self.net(ids)[1]

    stock = aot_hooks.plan(NoLoss(), ids, policy=aot_hooks.KEEP, inner="aten")
    with pytest.raises(Exception, match="the least that was found") as error:
        aot_hooks.plan(
            NoLoss(), ids, policy=aot_hooks.budget(stock.peak_bytes - 4 * WORDS * TOKENS, max_error=0), inner="aten"
        )
    assert error_behind(error.value, BudgetError) is not None
