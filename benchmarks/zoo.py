"""The models of `bench_models.py`: one of each kind that people train, with random weights, at two sizes.

MODELS[name].make(size, device) -> Work(module, inputs)        module(*inputs) is a loss, inputs are random

resnet   convolutions, BatchNorm, ReLU, max pooling, dropout    what is saved is compared, or summed over again
gpt      LayerNorm, causal attention, GELU, dropout             the head's weight is the embedding's
llama    RMSNorm, grouped-query attention with rope, SwiGLU     the blocks of model.py
vit      a convolution cuts patches, attention without mask     channels last
lstm     nn.LSTM, which Dynamo leaves to eager                  autograd saves what no graph shows
ssm      a diagonal state-space recurrence, log2(T) steps       plain torch, all in one graph
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from model import Stack
from torch import Tensor, nn

__all__ = ["MODELS", "Model", "Work"]


@dataclasses.dataclass(frozen=True)
class Work:
    module: nn.Module
    inputs: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Model:
    """Attributes:
    build: `sizes -> Work`, on the CPU.
    small, large: the sizes, for a CPU in seconds and for a CUDA device.
    int8_error: what the 8-bit policy's gradient may be off, relative to the exact one; about twice what was seen.
    compiles: False if Dynamo leaves the whole forward to eager, so that no plan is made.
    """

    build: Callable[..., Work]
    small: dict[str, int]
    large: dict[str, int]
    int8_error: float
    compiles: bool = True

    def make(self, size: str, device: torch.device) -> Work:
        torch.manual_seed(0)
        work = self.build(**(self.large if size == "large" else self.small))
        return Work(work.module.to(device).train(), tuple(x.to(device) for x in work.inputs))


class Residual(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        same = stride == 1 and into == out
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(into, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width: int, stage_count: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))
        widths = [width << i for i in range(stage_count)]
        pairs = zip([width, *widths], widths, strict=False)
        self.stages = nn.Sequential(*(Residual(a, b, 1 if i == 0 else 2) for i, (a, b) in enumerate(pairs)))
        self.head = nn.Sequential(nn.Linear(widths[-1], 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stages(self.stem(images)).mean((2, 3))), labels)


class Attending(nn.Module):
    """A pre-norm transformer block of LayerNorm, fused q, k, v, and an MLP with GELU; dropout where GPT-2 has it."""

    def __init__(self, width: int, head_count: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.head_count, self.causal, self.dropout = head_count, causal, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.head_count, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout)


class GPT(nn.Module):
    def __init__(self, width: int, head_count: int, layer_count: int, tokens: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Attending(width, head_count, True, 0.1) for _ in range(layer_count)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.embedding, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        logits = F.linear(self.norm(self.blocks(F.dropout(x, 0.1))), self.embedding.weight)  # tied
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Llama(nn.Module):
    def __init__(self, width: int, head_count: int, layer_count: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.stack = Stack(layer_count, width, head_count, max(1, head_count // 4), 7 * width // 2, tokens)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(self.norm(self.stack(self.embedding(tokens)))).flatten(0, 1), targets.flatten()
        )


class ViT(nn.Module):
    def __init__(self, width: int, head_count: int, layer_count: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Attending(width, head_count, False, 0.1) for _ in range(layer_count)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), 1) + self.position
        return F.cross_entropy(self.head(self.norm(self.blocks(x))[:, 0]), labels)


class LSTM(nn.Module):
    def __init__(self, width: int, layer_count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, layer_count, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(F.relu(states)).flatten(0, 1), targets.flatten())


class Recurrence(nn.Module):
    """h[t] = a[t] h[t-1] + b[t], with a and b made from x[t]; gated. [batch, token, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        decay, drive, gate = self.into(self.norm(x)).chunk(3, -1)
        a = torch.sigmoid(decay + 2)
        b = (1 - a) * drive
        reach = 1
        while reach < x.shape[1]:  # b[t] has the sum of the last `reach` steps, a[t] the product of their decays
            b = b + a * F.pad(b, (0, 0, reach, 0))[:, :-reach]
            a = a * F.pad(a, (0, 0, reach, 0))[:, :-reach]
            reach *= 2
        return x + self.out(b * F.silu(gate))


class SSM(nn.Module):
    def __init__(self, width: int, layer_count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.Sequential(*(Recurrence(width) for _ in range(layer_count)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.layers(self.embedding(tokens)))
        return F.cross_entropy(self.head(F.dropout(x, 0.1)).flatten(0, 1), targets.flatten())


def on_images(make: Callable[..., nn.Module], channels_last: bool = False) -> Callable[..., Work]:
    def build(batch: int, image: int, **sizes: int) -> Work:
        module = make(**sizes, image=image) if make is ViT else make(**sizes)
        images = torch.randn(batch, 3, image, image)
        if channels_last:
            module, images = module.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
        return Work(module, (images, torch.randint(10, (batch,))))

    return build


def on_tokens(make: Callable[..., nn.Module], **fixed: Any) -> Callable[..., Work]:
    def build(batch: int, tokens: int, **sizes: int) -> Work:
        module = make(**sizes, tokens=tokens) if make in (GPT, Llama) else make(**sizes)
        drawn = torch.randint(256, (batch, tokens + 1))
        return Work(module, (drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()))

    return build


_TEXT = {"batch": 4, "tokens": 64, "width": 64, "layer_count": 2}
_LONG = {"batch": 16, "tokens": 1024, "width": 1024, "layer_count": 8}
_IMAGES = {"batch": 4, "image": 32}

MODELS = {
    "resnet": Model(
        on_images(ResNet),
        _IMAGES | {"width": 16, "stage_count": 2},
        {"batch": 128, "image": 128, "width": 64, "stage_count": 4},
        int8_error=0.02,
    ),
    "gpt": Model(on_tokens(GPT), _TEXT | {"head_count": 4}, _LONG | {"head_count": 16}, int8_error=0.015),
    "llama": Model(on_tokens(Llama), _TEXT | {"head_count": 4}, _LONG | {"head_count": 16}, int8_error=0.015),
    "vit": Model(
        on_images(ViT, channels_last=True),
        _IMAGES | {"width": 64, "head_count": 4, "layer_count": 2, "patch": 8},
        {"batch": 128, "image": 224, "width": 768, "head_count": 12, "layer_count": 8, "patch": 16},
        int8_error=0.02,
    ),
    "lstm": Model(
        on_tokens(LSTM),
        _TEXT | {"batch": 8, "tokens": 32},
        {"batch": 64, "tokens": 256, "width": 1024, "layer_count": 2},
        int8_error=0.06,
        compiles=False,
    ),
    "ssm": Model(on_tokens(SSM), _TEXT, _LONG, int8_error=0.015),
}
