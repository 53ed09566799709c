"""More of decision_models.py: losses, and models of several layers. Imported for all of PROGRAMS.

losses         KL distillation, focal, hinge, sparsemax, label smoothing, contrastive, quantile, Wasserstein
models         LSTM, Mamba-like scan, BatchNorm, attention with a mask, in float32 and under bfloat16 autocast
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from decision_models import (
    CLASSES,
    DYNAMIC,
    PROGRAMS,
    ROWS,
    WIDTH,
    Inputs,
    Model,
    labels,
    make,
    mlp,
    on_rows,
    program,
    rows,
    weighted,
    weights,
)
from torch import Tensor, nn

__all__ = ["DYNAMIC", "PROGRAMS", "make"]

# losses


def classify(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype | None = None) -> tuple[nn.Module, Inputs]:
    return on_rows(mlp(CLASSES), lambda self, h, y: loss(h, y), labels(), dtype=dtype)


@program
def softmax_log() -> tuple[nn.Module, Inputs]:
    return classify(lambda h, y: F.nll_loss((h * 4).softmax(-1).log(), y))


@program
def distillation() -> tuple[nn.Module, Inputs]:
    def loss(self: Any, h: Tensor, t: Tensor) -> Tensor:
        return F.kl_div(F.log_softmax(h / 2, -1), F.softmax(t * 4, -1), reduction="batchmean") * 4

    return on_rows(mlp(CLASSES), loss, torch.randn(ROWS, CLASSES))


@program
def reverse_kl() -> tuple[nn.Module, Inputs]:
    def loss(self: Any, h: Tensor, t: Tensor) -> Tensor:
        p = F.softmax(h * 4, -1)
        return (p * (p.log() - F.log_softmax(t, -1))).sum()

    return on_rows(mlp(CLASSES), loss, torch.randn(ROWS, CLASSES))


@program
def focal_loss() -> tuple[nn.Module, Inputs]:
    def focal(h: Tensor, y: Tensor) -> Tensor:
        log_p = F.log_softmax(h * 3, -1).gather(1, y[:, None]).squeeze(1)
        return (-((1 - log_p.exp()) ** 2) * log_p).mean()

    return classify(focal)


@program
def binary_focal_loss() -> tuple[nn.Module, Inputs]:
    def focal(h: Tensor, y: Tensor) -> Tensor:
        target = F.one_hot(y, CLASSES).to(h.dtype)
        p = torch.sigmoid(h * 3)
        p_t = p * target + (1 - p) * (1 - target)
        return -((1 - p_t) ** 2 * torch.log(p_t.clamp(min=1e-6))).mean()

    return classify(focal)


@program
def hinge() -> tuple[nn.Module, Inputs]:
    return classify(lambda h, y: F.multi_margin_loss(h, y))


@program
def hinge_by_hand() -> tuple[nn.Module, Inputs]:
    def loss(h: Tensor, y: Tensor) -> Tensor:
        margin = (1 + h - h.gather(1, y[:, None])).clamp(min=0.0)
        return (margin * (1 - F.one_hot(y, CLASSES).to(h.dtype))).amax(1).square().mean()

    return classify(loss)


@program
def sparsemax() -> tuple[nn.Module, Inputs]:
    def project(h: Tensor) -> Tensor:
        z, _ = h.sort(-1, descending=True)
        k = torch.arange(1, h.shape[-1] + 1, dtype=h.dtype)
        total = z.cumsum(-1)
        inside = 1 + k * z > total
        count = inside.sum(-1, keepdim=True)
        threshold = (total.gather(-1, count - 1) - 1) / count.to(h.dtype)
        return (h - threshold).clamp(min=0.0)

    return weighted(project, mlp())


@program
def label_smoothing() -> tuple[nn.Module, Inputs]:
    return classify(lambda h, y: F.cross_entropy(h * 3, y, label_smoothing=0.1))


@program
def label_smoothing_autocast() -> tuple[nn.Module, Inputs]:
    return classify(lambda h, y: F.cross_entropy(h * 3, y, label_smoothing=0.1), torch.bfloat16)


@program
def contrastive() -> tuple[nn.Module, Inputs]:
    def loss(self: Any, h: Tensor, other: Tensor) -> Tensor:
        a, b = F.normalize(h, dim=-1), F.normalize(self.layers(other), dim=-1)
        logits = a @ b.t() / 0.1
        y = torch.arange(ROWS)
        return F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y)

    return on_rows(mlp(), loss, rows())


@program
def margin_contrastive() -> tuple[nn.Module, Inputs]:
    def loss(self: Any, h: Tensor, other: Tensor) -> Tensor:
        distance = F.pairwise_distance(h, self.layers(other))
        same = torch.arange(ROWS) % 2 == 0
        return torch.where(same, distance.square(), (1.5 - distance).clamp(min=0.0).square()).mean()

    return on_rows(mlp(), loss, rows())


@program
def quantile_loss() -> tuple[nn.Module, Inputs]:
    def loss(self: Any, h: Tensor, y: Tensor) -> Tensor:
        error = y - h
        return torch.maximum(0.9 * error, -0.1 * error).mean()

    return on_rows(mlp(), loss, weights())


@program
def huber_loss() -> tuple[nn.Module, Inputs]:
    return on_rows(mlp(), lambda self, h, y: F.huber_loss(h, y, delta=0.5), weights())


@program
def l1_loss() -> tuple[nn.Module, Inputs]:
    return on_rows(mlp(), lambda self, h, y: F.l1_loss(h, y), weights())


@program
def sliced_wasserstein() -> tuple[nn.Module, Inputs]:
    def loss(self: Any, h: Tensor, y: Tensor) -> Tensor:
        return (F.gelu(h).sort(0).values - y.sort(0).values).square().mean()

    return on_rows(mlp(), loss, weights())


@program
def bce_of_sigmoid() -> tuple[nn.Module, Inputs]:
    def loss(h: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(torch.sigmoid(h * 4), F.one_hot(y, CLASSES).to(h.dtype))

    return classify(loss)


@program
def entropy_of_attention() -> tuple[nn.Module, Inputs]:
    def loss(self: Any, h: Tensor) -> Tensor:
        p = torch.softmax(h @ h.t() / 4, -1)
        return (torch.special.entr(p).sum(-1) + (p @ h).square().sum(-1) / 64).mean()

    return on_rows(mlp(), loss)


# models


@program
def lstm() -> tuple[nn.Module, Inputs]:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.over = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = c = torch.zeros(x.shape[0], WIDTH)
            for t in range(x.shape[1]):
                i, f, g, o = (self.into(x[:, t]) + self.over(h)).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            return h

    loss = lambda self, h, y: F.cross_entropy(h[:, :CLASSES], y)  # noqa: E731
    return Model(Cells(), loss), [torch.randn(8, 6, WIDTH), torch.arange(8)]


@program
def nn_lstm() -> tuple[nn.Module, Inputs]:
    """Dynamo leaves it to eager mode."""
    loss = lambda self, h, y: F.cross_entropy(h[0][:, -1, :CLASSES], y)  # noqa: E731
    return Model(nn.LSTM(WIDTH, WIDTH, batch_first=True), loss), [torch.randn(8, 6, WIDTH), torch.arange(8)]


def scan(parallel: bool) -> tuple[nn.Module, Inputs]:
    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.log_rate = nn.Parameter(torch.randn(WIDTH) * 0.5)

        def forward(self, x: Tensor) -> Tensor:
            u, gate, step, b = self.into(x).chunk(4, -1)
            step = F.softplus(step - 1)
            decay = -step * self.log_rate.exp()
            v = step * b * F.silu(u)
            if parallel:
                total = decay.cumsum(1)
                h = (v * (-total).exp()).cumsum(1) * total.exp()
            else:
                state, states = torch.zeros_like(v[:, 0]), []
                for t in range(x.shape[1]):
                    state = state * decay[:, t].exp() + v[:, t]
                    states.append(state)
                h = torch.stack(states, 1)
            return self.out(h * F.silu(gate))

    loss = lambda self, h, y: F.mse_loss(h, y)  # noqa: E731
    return Model(Selective(), loss), [torch.randn(4, 8, WIDTH), torch.randn(4, 8, WIDTH)]


@program
def mamba_scan() -> tuple[nn.Module, Inputs]:
    return scan(parallel=False)


@program
def mamba_parallel_scan() -> tuple[nn.Module, Inputs]:
    return scan(parallel=True)


def batch_norm(dtype: torch.dtype | None) -> tuple[nn.Module, Inputs]:
    layers = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.SiLU(), nn.Conv2d(64, CLASSES, 3),
    )  # fmt: skip
    model = Model(layers, lambda self, h, y: F.cross_entropy(h, y), dtype)
    return model, [torch.randn(8, 3, 12, 12), torch.randint(CLASSES, (8, 10, 10))]


@program
def batch_norm_float32() -> tuple[nn.Module, Inputs]:
    return batch_norm(None)


@program
def batch_norm_autocast() -> tuple[nn.Module, Inputs]:
    return batch_norm(torch.bfloat16)


def transformer(dtype: torch.dtype | None) -> tuple[nn.Module, Inputs]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            p = (q @ k.transpose(-1, -2) / 4).masked_fill(~mask, -math.inf).softmax(-1)
            x = x + self.out((p @ v).transpose(1, 2).flatten(2))
            a, b = self.up(self.norm2(x)).chunk(2, -1)
            return x + self.down(F.silu(a) * b)

    loss = lambda self, h, y: F.cross_entropy(h[..., :CLASSES].flatten(0, 1), y)  # noqa: E731
    model = Model(nn.Sequential(Block(), Block()), loss, dtype)
    return model, [torch.randn(4, 16, WIDTH), torch.randint(CLASSES, (64,))]


@program
def transformer_float32() -> tuple[nn.Module, Inputs]:
    return transformer(None)


@program
def transformer_autocast() -> tuple[nn.Module, Inputs]:
    return transformer(torch.bfloat16)


@program
def squared_relu_autocast() -> tuple[nn.Module, Inputs]:
    layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
    return on_rows(layers, lambda self, h, y: (F.relu(h).square() * y).sum(), weights(), dtype=torch.bfloat16)


@program
def dropout_layer_norm() -> tuple[nn.Module, Inputs]:
    layers = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    )
    return on_rows(layers, lambda self, h, y: (h * y).sum(), weights())
