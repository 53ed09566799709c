"""Numbers whose absolute error counts: angles of rotary embeddings, step sizes, gates, Fourier features."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracle import HOOKS, gradients, relative_error

import aot_hooks

LIMITS = {"float8": 0.06, "int8": 0.02}  # of a gradient
TOKENS, WIDTH = 512, 32


def rotary(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Queries and keys turned by angles of up to 511, which the backward reads by their sine and cosine."""
    angles = given[:, None] / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = (f(torch.cat((angles, angles), -1)) for f in (torch.cos, torch.sin))

    def turned(h: torch.Tensor) -> torch.Tensor:
        a, b = h.chunk(2, -1)
        return h * cos + torch.cat((-b, a), -1) * sin

    q, k = (turned(x @ p)[None, None] for p in (w, v))
    return F.scaled_dot_product_attention(q, k, x[None, None], is_causal=True)[0, 0]


def step_sizes(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """A state-space model's: softplus of numbers from -7 to -2, 0.001 to 0.1."""
    delta = F.softplus(x @ w / 8 - 2 - 5 * given[:WIDTH] / WIDTH)
    return torch.exp(-delta * (x @ v)) + delta * x


def features(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """A sine of trained frequencies, as in a network of sines."""
    return torch.sin(30 * (x @ w)) @ v


def open_gates(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Gates of 0.95 to 0.999, whose slope is y * (1 - y)."""
    return torch.sigmoid(x @ w / 8 + 3 + 4 * given[:WIDTH] / WIDTH) * (x @ v)


def near_the_target(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """A loss of predictions that are 1% off."""
    h = x @ w
    return F.mse_loss(h, h.detach() * 1.01 + 1e-3 * (x @ v).detach()) * TOKENS + 1e-6 * (x @ v)


Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.mark.core
@pytest.mark.parametrize("program", [rotary, step_sizes, features, open_gates, near_the_target])
def test_what_no_relative_rounding_bounds_is_left_alone(program: Program) -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH)
    w, v = ((torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH)).requires_grad_() for _ in range(2))
    weights = torch.randn(TOKENS, WIDTH)

    def loss(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return (program(x, w, v, given) * weights).sum()

    inputs = (x, w, v, torch.arange(TOKENS).float())
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_hooks", options={"inner": "aten"})
    exact = gradients(compiled, inputs, (w, v))
    for name, limit in LIMITS.items():
        found = gradients(compiled, inputs, (w, v), HOOKS[name])
        assert relative_error(found, exact) <= limit, aot_hooks.last_plans(compiled)
        assert relative_error(gradients(loss, inputs, (w, v), HOOKS[name]), exact) <= limit, "in eager code"
