"""Train under a budget of memory: a small transformer on the source of Python's standard library.

    frontier(model, batch)          what memory a step can do without, and what that costs
    budget(half way)                the fastest step under a peak half way between the least and that without hooks
    train with it, and without      the same batches: losses, the gradient's error, the peak that the profiler sees

python examples/fit.py                        # about a minute on a CPU
python examples/fit.py --exact                # exact means only: the gradients are the same to the last bit
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aot_hooks

WIDTH, HEADS, LAYERS, TOKENS, BATCH, STEPS = 128, 4, 4, 128, 8, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.first_norm(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        h = self.embedding(text[:, :-1]) + self.position(torch.arange(TOKENS, device=text.device))
        return F.cross_entropy(self.head(self.blocks(h)).flatten(0, 1), text[:, 1:].flatten())


def batches() -> list[Tensor]:
    source = pathlib.Path(argparse.__file__).read_bytes()
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - TOKENS - 1, (STEPS, BATCH), generator=generator)
    return [torch.stack([text[i : i + TOKENS + 1] for i in row]) for row in starts.tolist()]


def train(policy: Any) -> tuple[list[float], list[Tensor], tuple[aot_hooks.Plan, ...]]:
    """Losses of the steps, gradients of the first one, and the plan, if there is a policy."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    compiled = torch.compile(model, backend="aot_hooks", options={"inner": "aten", "policy": policy})
    losses, first = [], []
    for text in batches():
        loss = compiled(text)
        loss.backward()
        first = first or [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, aot_hooks.last_plans(compiled)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a small transformer under a budget of memory.")
    parser.add_argument("--exact", action="store_true", help="only means that change no bit")
    options = parser.parse_args(arguments)
    max_error = 0.0 if options.exact else 0.05
    torch.manual_seed(0)
    found = aot_hooks.frontier(Model(), batches()[0], inner="aten", max_error=max_error)
    print(found)
    least, most = found.points[0].peak_bytes, found.points[-1].peak_bytes
    policy = aot_hooks.budget(f"{(least + most) // 2}B", max_error=max_error)
    print(f"\ntraining under {policy!r}")
    plain, expected, _ = train(None)
    losses, gradients, (plan,) = train(policy)
    apart = sum((g - e).square().sum() for g, e in zip(gradients, expected, strict=True))
    error = (apart / sum(e.square().sum() for e in expected)).sqrt().item()
    print(f"predicted peak      {most / 2**20:7.1f} MiB -> {plan.peak_bytes / 2**20:.1f} MiB")
    print(f"predicted step      {plan.step_ratio:7.3f} of that without hooks")
    print(f"gradient error      {error:7.4f} (at most {max_error})")
    print(f"loss, first and last {plain[0]:.3f} {plain[-1]:.3f} without hooks, {losses[0]:.3f} {losses[-1]:.3f} with")
    return 0 if plan.peak_bytes <= policy.peak and error <= max_error else 1


if __name__ == "__main__":
    sys.exit(main())
