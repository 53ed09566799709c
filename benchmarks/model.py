"""The work that every benchmark here measures: a stack of Llama-3-8B-shaped transformer blocks, without head or loss.

    x [batch, tokens, width] --> (RMSNorm, grouped-query attention with rope, +) --> (RMSNorm, SwiGLU, +) --> ... --> y

At the default sizes and 2 x 8192 tokens in bfloat16, a block saves about 2.4 GiB for the backward.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Block", "Stack", "eager_step", "first_step", "stack_and_input"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [batch, head, token, channel]: the two halves of the channels form the pairs."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, head_count: int, kv_head_count: int) -> None:
        super().__init__()
        self.head_width = width // head_count
        self.queries_per_kv = head_count // kv_head_count
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_head_count * self.head_width, bias=False)
        self.v = nn.Linear(width, kv_head_count * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [batch, head, token, head_width]

        q = rotate(heads(self.q(x)), cos, sin)
        k = rotate(heads(self.k(x)), cos, sin).repeat_interleave(self.queries_per_kv, dim=1)
        v = heads(self.v(x)).repeat_interleave(self.queries_per_kv, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, head_count: int, kv_head_count: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, head_count, kv_head_count)
        self.mlp_norm = nn.RMSNorm(width)
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Stack(nn.Module):
    """`layer_count` blocks. `forward(x, checkpointed=True)` recomputes each block in the backward instead of saving."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        layer_count: int = 4,
        width: int = 4096,
        head_count: int = 32,
        kv_head_count: int = 8,
        hidden: int = 14336,
        token_count: int = 8192,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, head_count, kv_head_count, hidden) for _ in range(layer_count))
        half = width // head_count // 2
        angles = torch.outer(torch.arange(token_count).float(), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos())  # [token, half of the head's width]
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor, checkpointed: bool = False) -> Tensor:
        cos, sin, tokens = self.cos, self.sin, x.shape[1]
        if tokens != len(cos):
            cos, sin = cos[:tokens], sin[:tokens]
        for block in self.blocks:
            if checkpointed:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return x


def stack_and_input(device: torch.device, *, layers: int, width: int, tokens: int, batch: int) -> tuple[Stack, Tensor]:
    """A stack in bfloat16 (heads of 128, or of 32 below width 4096) and x [batch, tokens, width]."""
    head_width = 128 if width >= 4096 else 32
    heads = width // head_width
    with device:
        stack = Stack(layers, width, heads, heads // 4, width * 7 // 2, tokens).to(torch.bfloat16)
        x = torch.randn(batch, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    return stack, x


def eager_step(stack: Stack, x: Tensor) -> None:
    """A forward and a backward that nothing compiles: what a device and its libraries load for them is there then."""
    stack(x).float().pow(2).mean().backward()
    x.grad = None
    stack.zero_grad()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def first_step(
    backend: str, stack: Stack, x: Tensor, context: contextlib.AbstractContextManager[Any], **said: Any
) -> tuple[Any, dict[str, float]]:
    """The compiled stack, and seconds to the end of its first backward, in this process and its children."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    started, cpu_started = time.perf_counter(), sum(os.times()[:4])
    compiled = torch.compile(stack, backend=backend, fullgraph=True, **said)
    with context:
        y = compiled(x)
    y.float().pow(2).mean().backward()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return compiled, {"wall_s": time.perf_counter() - started, "cpu_s": sum(os.times()[:4]) - cpu_started}
