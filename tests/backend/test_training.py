"""Twenty steps of training, packed: compiled and eager parts agree, and losses stay by those without hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import BITS, HALF, compiled, packed_count
from torch import nn

import aot_hooks
from aot_hooks import Hook, saved_tensors_hooks

INNER = [pytest.param("aten", marks=pytest.mark.core), pytest.param("inductor", marks=pytest.mark.slow)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 32)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(32, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ((tokens * 3 + 1) % 17).flatten())


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - x[:, :4].sin()).square().mean()


def batch(model: nn.Module, i: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(i)
    size = (8, 6, 8, 11, 3)[i % 5]
    if isinstance(model, Mlp):
        return torch.randn(size, 16, generator=generator)
    return torch.randint(0, 17, (size, 9), generator=generator)


def train(make: Any, hook: Hook | None, inner: str | None, steps: int = 20) -> list[float]:
    """Losses of a training run; `inner` None is eager."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    call = model if inner is None else compiled(model, inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for i in range(steps):
        x = batch(model, i)
        if hook is None:
            loss = call(x)
        else:
            with saved_tensors_hooks(hook):
                loss = call(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if hook is not None and inner is not None:
        assert packed_count(call) > 0
    return losses


@pytest.mark.parametrize(
    ("make", "inner"),
    [
        (Mlp, "aten"),
        pytest.param(Transformer, "aten", marks=pytest.mark.core),
        pytest.param(Transformer, "inductor", marks=pytest.mark.slow),
    ],
)
def test_exactly_packed_training_is_training(make: Any, inner: str) -> None:
    exact, plain = train(make, BITS, inner), train(make, None, None)
    assert plain[-1] < plain[0]
    torch.testing.assert_close(torch.tensor(exact), torch.tensor(plain), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "hook"),
    [
        pytest.param(Mlp, HALF, marks=pytest.mark.core),
        pytest.param(Mlp, aot_hooks.float8(), marks=pytest.mark.core),
        pytest.param(Mlp, aot_hooks.float8(torch.float8_e5m2, "tensorwise"), marks=pytest.mark.core),
        (Transformer, aot_hooks.float8()),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else str(each),
)
def test_compiled_and_eager_follow_the_same_hooks(make: Any, hook: Hook) -> None:
    """A graph saves less than eager code does, so the two are not equal; both stay by what is trained without hooks."""
    losses = {inner: torch.tensor(train(make, hook, inner)) for inner in (None, "aten")}
    plain = torch.tensor(train(make, None, None))
    for packed in losses.values():
        assert (packed - plain).abs().max() < 0.03 * plain[0]
        assert packed[-1] < packed[0]
    assert (losses[None] - losses["aten"]).abs().max() < 0.03 * plain[0]


def test_a_hook_that_spoils_gradients_shows() -> None:
    """That the comparison above can fail."""
    plain = torch.tensor(train(Transformer, None, None))
    spoiled = torch.tensor(
        train(Transformer, Hook("negated", lambda x: -x if x.is_floating_point() else x, lambda p: p * 1), "aten")
    )
    assert (spoiled - plain).abs().max() > 0.03 * plain[0]


@pytest.mark.core
def test_a_policy_for_a_graph_and_for_eager_code() -> None:
    """Each part of a graph-broken model follows the same policy."""

    class Broken(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layers[:2](x)
            torch._dynamo.graph_break()
            return (self.layers[2:](h) - x[:, :4].sin()).square().mean()

    exact, plain = train(Broken, BITS, "aten"), train(Broken, None, None)
    torch.testing.assert_close(torch.tensor(exact), torch.tensor(plain), rtol=2e-3, atol=1e-4)
