"""Models whose backwards decide, divide or take logarithms: each is a module that gives its loss.

PROGRAMS[name]() -> (module, inputs)      float inputs take gradients, as all parameters do

maxima         pooled CNNs, maxima over tokens, L-inf norms and clipping, maxout, hard negatives
routers        top-1 by max and argmax, top-2 by topk, a mixture of experts with dynamic shapes, hard Gumbel softmax
quantizers     straight-through round and floor, fake quantization, vector quantization, top-k activations

Losses, and models of several layers, are in decision_losses.py, which adds them to PROGRAMS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DYNAMIC", "PROGRAMS", "make"]

ROWS, WIDTH, CLASSES, EXPERTS = 32, 64, 16, 4
DYNAMIC = {"mixture_of_experts_dynamic"}  # need torch._dynamo.config.capture_dynamic_output_shape_ops
Inputs = list[Tensor]
PROGRAMS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {}


def make(name: str) -> tuple[nn.Module, Inputs, list[Tensor]]:
    """The module, its inputs, and what gradients are taken with regard to."""
    torch.manual_seed(0)
    module, inputs = PROGRAMS[name]()
    floats = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    return module.train(), inputs, [*module.parameters(), *floats]


class Model(nn.Module):
    """`layers`, then `loss(self, layers(x), *rest)`."""

    def __init__(self, layers: nn.Module, loss: Callable[..., Tensor], dtype: torch.dtype | None = None, **more: Any):
        super().__init__()
        self.layers, self.loss, self.dtype = layers, loss, dtype
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return self.loss(self, self.layers(x), *rest)


def program(build: Callable[[], tuple[nn.Module, Inputs]]) -> Callable[[], tuple[nn.Module, Inputs]]:
    PROGRAMS[build.__name__] = build
    return build


def mlp(out: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, out))


def gelu() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def labels() -> Tensor:
    return torch.randint(CLASSES, (ROWS,))


def images() -> Tensor:
    return torch.randn(4, 3, 16, 16)


def weights() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def on_rows(layers: nn.Module, loss: Callable[..., Tensor], *rest: Tensor, **more: Any) -> tuple[nn.Module, Inputs]:
    return Model(layers, loss, **more), [rows(), *rest]


def weighted(fn: Callable[[Tensor], Tensor], layers: nn.Module | None = None) -> tuple[nn.Module, Inputs]:
    """`(fn(h) * weights).sum()` of `h` that `layers` made."""
    return on_rows(layers or gelu(), lambda self, h, w: (fn(h) * w).sum(), weights())


# maxima


@program
def gelu_amax() -> tuple[nn.Module, Inputs]:
    return on_rows(gelu(), lambda self, h: h.amax(1).sum())


@program
def cnn_amax() -> tuple[nn.Module, Inputs]:
    layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.Conv2d(16, CLASSES, 3), nn.SiLU())
    return Model(layers, lambda self, h, y: F.cross_entropy(h.amax((2, 3)), y)), [images(), torch.arange(4)]


@program
def cnn_max_pool() -> tuple[nn.Module, Inputs]:
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.GELU(), nn.MaxPool2d(3, 2),
        nn.Flatten(), nn.Linear(144, CLASSES),
    )  # fmt: skip
    return Model(layers, lambda self, h, y: F.cross_entropy(h, y)), [images(), torch.arange(4)]


@program
def cnn_adaptive_max_pool() -> tuple[nn.Module, Inputs]:
    layers = nn.Sequential(nn.Conv2d(3, CLASSES, 3), nn.GELU(), nn.AdaptiveMaxPool2d(1), nn.Flatten())
    return Model(layers, lambda self, h, y: F.cross_entropy(h, y)), [images(), torch.arange(4)]


@program
def max_over_tokens() -> tuple[nn.Module, Inputs]:
    head = nn.Linear(WIDTH, CLASSES)
    loss = lambda self, h, y: F.cross_entropy(self.head(h.max(1).values), y)  # noqa: E731
    return Model(gelu(), loss, head=head), [torch.randn(8, 12, WIDTH), torch.arange(8)]


@program
def amax_over_tokens() -> tuple[nn.Module, Inputs]:
    loss = lambda self, h: h.amax(1).square().sum()  # noqa: E731
    return Model(nn.Sequential(gelu(), nn.Linear(WIDTH, WIDTH), nn.GELU()), loss), [torch.randn(8, 12, WIDTH)]


@program
def l_inf_norm() -> tuple[nn.Module, Inputs]:
    return on_rows(gelu(), lambda self, h: torch.linalg.vector_norm(h, ord=math.inf, dim=1).sum())


@program
def divided_by_its_maximum() -> tuple[nn.Module, Inputs]:
    return weighted(lambda h: h / h.abs().max())


@program
def l_inf_clipping() -> tuple[nn.Module, Inputs]:
    def clip(h: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(h, ord=math.inf, dim=1, keepdim=True)
        return h * (1.5 / (norm + 1e-6)).clamp(max=1.0)

    return weighted(clip, mlp())


@program
def l2_clipping() -> tuple[nn.Module, Inputs]:
    return weighted(lambda h: h * (2.0 / (h.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0), mlp())


@program
def l1_normalized() -> tuple[nn.Module, Inputs]:
    return weighted(lambda h: F.normalize(h, p=1.0, dim=1))


@program
def maxout() -> tuple[nn.Module, Inputs]:
    def out(self: Any, h: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(h.view(ROWS, WIDTH // 4, 4).amax(-1)), y)

    return on_rows(gelu(), out, labels(), head=nn.Linear(WIDTH // 4, CLASSES))


@program
def hardest_negative() -> tuple[nn.Module, Inputs]:
    def triplet(self: Any, h: Tensor, y: Tensor) -> Tensor:
        distance = torch.cdist(h, h)
        same = y[:, None] == y[None]
        positive = distance.masked_fill(~same, 0.0).amax(1)
        negative = distance.masked_fill(same, 1e4).amin(1)
        return (positive - negative + 0.5).clamp(min=0.0).mean()

    return on_rows(mlp(), triplet, torch.arange(ROWS) % 8)


# routers


def experts() -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(EXPERTS))


def by_expert(self: Any, h: Tensor) -> Tensor:
    return torch.stack([F.gelu(h @ w) for w in self.experts], 1)  # [rows, experts, width]


def route(choose: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Inputs]:
    """`choose`: logits [rows, experts] to weights of the same shape, most of them zero."""

    def loss(self: Any, h: Tensor, w: Tensor) -> Tensor:
        gates = choose(self.router(h))
        return (torch.einsum("ne,new->nw", gates, by_expert(self, h)) * w).sum()

    return on_rows(
        gelu(),
        loss,
        weights(),
        router=nn.Linear(WIDTH, EXPERTS * 2),
        experts=nn.ParameterList([*experts(), *experts()]),
    )


def softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits, -1)


@program
def router_by_max() -> tuple[nn.Module, Inputs]:
    def choose(logits: Tensor) -> Tensor:
        value, index = softmax(logits).max(-1)
        return F.one_hot(index, EXPERTS * 2).to(logits.dtype) * value[:, None]

    return route(choose)


@program
def router_by_argmax() -> tuple[nn.Module, Inputs]:
    def choose(logits: Tensor) -> Tensor:
        p = softmax(logits)
        return p * F.one_hot(p.argmax(-1), EXPERTS * 2).to(p.dtype)

    return route(choose)


@program
def router_by_equality() -> tuple[nn.Module, Inputs]:
    def choose(logits: Tensor) -> Tensor:
        p = softmax(logits)
        return p * (p == p.amax(-1, keepdim=True)).to(p.dtype)

    return route(choose)


@program
def router_by_topk() -> tuple[nn.Module, Inputs]:
    def choose(logits: Tensor) -> Tensor:
        value, index = softmax(logits).topk(2, -1)
        value = value / value.sum(-1, keepdim=True)
        return torch.zeros_like(logits).scatter(1, index, value)

    return route(choose)


@program
def router_by_threshold() -> tuple[nn.Module, Inputs]:
    def choose(logits: Tensor) -> Tensor:
        p = softmax(logits)
        kept = torch.where(p >= p.kthvalue(EXPERTS * 2 - 1, -1, keepdim=True).values, p, 0.0)
        return kept / kept.sum(-1, keepdim=True)

    return route(choose)


@program
def top1_gather() -> tuple[nn.Module, Inputs]:
    def loss(self: Any, h: Tensor, w: Tensor) -> Tensor:
        value, index = self.router(h).softmax(-1).max(-1)
        chosen = by_expert(self, h)[torch.arange(ROWS), index]
        return (chosen * value[:, None] * w).sum()

    return on_rows(gelu(), loss, weights(), router=nn.Linear(WIDTH, EXPERTS), experts=experts())


@program
def hard_gumbel_softmax() -> tuple[nn.Module, Inputs]:
    noise = -torch.log(-torch.log(torch.rand(ROWS, EXPERTS * 2).clamp(1e-3, 1 - 1e-3)))

    def choose(logits: Tensor) -> Tensor:
        soft = softmax(logits + noise)
        hard = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
        return straight_through(soft, lambda soft: hard)

    return route(choose)


@program
def mixture_of_experts_dynamic() -> tuple[nn.Module, Inputs]:
    def loss(self: Any, h: Tensor, w: Tensor) -> Tensor:
        value, index = self.router(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            chosen = (index == e).nonzero().squeeze(1)
            out = out.index_add(0, chosen, F.gelu(h[chosen] @ expert) * value[chosen, None])
        return (out * w).sum()

    return on_rows(gelu(), loss, weights(), router=nn.Linear(WIDTH, EXPERTS), experts=experts())


# quantizers


def straight_through(h: Tensor, hard: Callable[[Tensor], Tensor]) -> Tensor:
    """`hard(h)`, with the gradient of `h`. Under `no_grad`, not by `detach`, which the partitioner never recomputes."""
    with torch.no_grad():
        difference = hard(h) - h
    return h + difference


@program
def where_threshold() -> tuple[nn.Module, Inputs]:
    return weighted(lambda h: torch.where(h > 0.5, h * h, 0.1 * h))


@program
def ste_round() -> tuple[nn.Module, Inputs]:
    return weighted(lambda h: straight_through(h * 2, torch.round).square())


@program
def ste_round_by_detach() -> tuple[nn.Module, Inputs]:
    return weighted(lambda h: (h + (h.round() - h).detach()).square())


@program
def ste_floor() -> tuple[nn.Module, Inputs]:
    return weighted(lambda h: straight_through(h, lambda h: (h * 4).floor() / 4) * h)


@program
def rounded_factor() -> tuple[nn.Module, Inputs]:
    return weighted(lambda h: (h * 2).round() * h)


@program
def ste_sign() -> tuple[nn.Module, Inputs]:
    return weighted(lambda h: straight_through((h - 0.2).clamp(-1, 1), torch.sign) * h)


def fake_quantize(x: Tensor) -> Tensor:
    scale = x.detach().abs().amax() / 7
    return straight_through(x, lambda x: (x / scale).round().clamp(-7, 7) * scale)


@program
def fake_quantization() -> tuple[nn.Module, Inputs]:
    class Quantized(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(fake_quantize(F.gelu(x)), fake_quantize(self.weight), self.bias)

    return weighted(lambda h: fake_quantize(h) * h, nn.Sequential(*(Quantized(WIDTH, WIDTH) for _ in range(3))))


@program
def learned_step_size() -> tuple[nn.Module, Inputs]:
    def loss(self: Any, h: Tensor, w: Tensor) -> Tensor:
        rounded = straight_through((h / self.step).clamp(-7, 7), torch.round)
        return (rounded * self.step * w).sum()

    return on_rows(gelu(), loss, weights(), step=nn.Parameter(torch.tensor(0.2)))


@program
def vector_quantization() -> tuple[nn.Module, Inputs]:
    def loss(self: Any, h: Tensor, target: Tensor) -> Tensor:
        z = h.view(-1, 16)
        distance = z.square().sum(1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.square().sum(1)
        code = F.embedding(distance.argmin(1), self.codes)
        commitment = F.mse_loss(z, code.detach()) * 0.25 + F.mse_loss(code, z.detach())
        out = self.decoder(F.gelu(straight_through(z, lambda z: code).view(ROWS, WIDTH)))
        return F.mse_loss(out, target) + commitment

    return on_rows(mlp(), loss, weights(), codes=nn.Parameter(torch.randn(32, 16)), decoder=mlp())


@program
def topk_activations() -> tuple[nn.Module, Inputs]:
    def sparse(h: Tensor) -> Tensor:
        value, index = h.topk(8, -1)
        return torch.zeros_like(h).scatter(-1, index, F.relu(value))

    return weighted(sparse, mlp())
