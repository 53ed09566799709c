"""Random parts of layers: `options["tile"]` computes them right in tiles, or leaves them alone and says why.

      python tests/support/fuzz_tile.py --first 0 --count 2000
      python tests/support/fuzz_tile.py --first 17 --count 1 --verbose
      python tests/support/fuzz_tile.py --joint --first 0 --count 2000

A case is drawn from parts: shape of the tokens, dtype, kind of the part, what the layer does around it, the loss, and
in which way it is computed. fuzz_parts.py compares its gradients with those of eager mode. With `--joint` neither
Dynamo nor a partition runs, see fuzz_chunk.py.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import fuzz_parts
import torch
import torch.nn.functional as F
from fuzz_parts import Computed, Outcome, computed, judged, main, state_of, tangent_of, traced
from torch import nn

from aot_hooks.passes.tile import tiled

__all__ = ["Case", "check", "check_joint", "generate"]

WIDTH, WIDE = 8, 28
KINDS = (
    *("gated", "gated", "gated", "gelu", "gelu", "tanh_gelu", "relu_squared", "fused", "clamped", "three", "normed"),
    *("tied", "lora", "frozen", "by_head", "softmax", "scaled", "masked", "wide_input", "lower", "two_uses"),
    *("returned", "global", "mixed", "one_product"),
)
ALONE = ("returned", "global", "mixed", "one_product")  # can't be in tiles
SILENT = ("one_product",)  # is no part, so there is no reason to give
AROUND = ("residual", "residual", "plain", "post_norm", "attention", "parallel", "reused")
LOSSES = ("mean", "output", "two_outputs")


@dataclass(frozen=True)
class Case(fuzz_parts.Case):
    kind: str
    around: str
    loss: str
    bias: bool
    layers: int
    tile: int | str  # tokens of a tile, or "backward" (by `tiled(..., again=False)` where nothing is compiled)


def generate(seed: int) -> Case:
    draw = random.Random(seed)
    dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    return Case(
        seed,
        shape=draw.choice(((24,), (37,), (2, 15), (1, 29), (3, 8), (2, 1, 12))),
        dtype=dtype,
        kind=draw.choice(KINDS),
        around=draw.choice(AROUND),
        loss=draw.choice(LOSSES),
        bias=draw.random() < 0.5,
        layers=draw.choice((1, 1, 2)),
        tile=draw.choice((5, 7, 8, 16)),
        autocast=dtype == torch.float32 and draw.random() < 0.3,
        dynamic=draw.random() < 0.3,
    )


class Part(nn.Module):
    """Products that make tokens wide, and narrow again."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        wide = 2 * WIDE if case.kind == "fused" else WIDE
        self.up, self.down = nn.Linear(WIDTH, wide, bias=case.bias), nn.Linear(WIDE, WIDTH, bias=case.bias)
        if case.kind in ("gated", "lora", "returned", "clamped", "mixed"):
            self.gate = nn.Linear(WIDTH, WIDE, bias=case.bias)
        if case.kind == "three":
            self.middle = nn.Linear(WIDE, WIDE, bias=case.bias)
        if case.kind in ("normed", "by_head", "scaled"):
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4 if case.kind == "by_head" else WIDE))
        if case.kind == "lora":
            self.a, self.b = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDE, bias=False)
        if case.kind == "frozen":
            self.up.requires_grad_(False)
        if case.kind == "lower":
            self.side = nn.Linear(WIDE, 5, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The part's result, and what else of it is returned."""
        kind = self.case.kind
        h = self.up(x)
        if kind == "one_product":
            return x, h.float().logsumexp(-1)
        extra = None
        if kind in ("gated", "returned", "mixed"):
            h = F.silu(h) * self.gate(x)
        elif kind == "lora":
            h = F.silu(h + self.b(self.a(x))) * self.gate(x)
        elif kind == "clamped":
            h = h.clamp(max=0.7).sigmoid() * self.gate(x).clamp(-1, 1)
        elif kind == "fused":
            a, b = h.chunk(2, -1)
            h = F.silu(a) * b
        elif kind == "relu_squared":
            h = F.relu(h).square()
        elif kind == "three":
            h = F.gelu(self.middle(F.gelu(h)))
        elif kind == "normed":
            h = F.gelu(h)
            wide = h.float()
            h = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-2)).to(h.dtype) * self.scale.to(h.dtype)
        elif kind == "by_head":
            heads = h.unflatten(-1, (4, WIDE // 4))
            h = (heads.tanh() * self.scale.to(h.dtype)[:, None]).flatten(-2)
        elif kind == "softmax":
            h = h.softmax(-1)
        elif kind == "scaled":
            h = F.gelu(h) * self.scale.to(h.dtype)
        elif kind == "masked":
            mask = x.detach().sum(-1, keepdim=True) > 0
            h = torch.where(mask, F.gelu(h), 0)
        elif kind == "wide_input":
            h = F.gelu(h) * self.noise(h)
        elif kind == "global":
            h = F.gelu(h) - h.mean()
        elif kind in ("lower", "two_uses"):
            h = F.gelu(h)
            extra = self.side(h) if kind == "lower" else h.amax(-1)
        else:
            h = F.gelu(h, approximate="tanh" if kind == "tanh_gelu" else "none")
        if kind == "mixed":
            h = h.cumsum(-2)
        if kind == "returned":
            extra = h
        if kind == "tied":
            return F.linear(h, self.up.weight.t(), self.down.bias), extra
        return self.down(h), extra

    @staticmethod
    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.linspace(0.5, 1.5, like.shape[-1], dtype=like.dtype).expand_as(like)


class Program(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.parts = nn.ModuleList(Part(case) for _ in range(case.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(case.layers))
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        extras = []
        for part, norm in zip(self.parts, self.norms, strict=True):
            x, extra = self.layer(part, norm, x)
            extras += [] if extra is None else [extra]
        if self.case.loss == "mean":
            return (x.float().square().mean(), *extras)
        if self.case.loss == "two_outputs":
            return (x, x.float().sum(-1), *extras)
        return (x, *extras)

    def layer(self, part: Part, norm: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        around = self.case.around
        if around == "plain":
            return part(x)
        if around == "attention":
            y = norm(x).flatten(0, -2)
            x = x + torch.softmax(y @ y.t() / 9, -1).mm(y).view(x.shape).to(x.dtype)
        out, extra = part(norm(x) if around != "post_norm" else x)
        if around == "post_norm":
            return x + norm(out), extra
        if around == "parallel":
            return x + out + self.other(norm(x)), extra
        if around == "reused":
            return x + out * norm(x).sigmoid(), extra
        return x + out, extra


def _input(case: Case, step: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(100 * case.seed + step)
    shape = case.shape if step == 0 else (*case.shape[:-1], case.shape[-1] + 3)
    return torch.randn(*shape, WIDTH, generator=make)


def _run(program: Program, run: Any, case: Case, autocast: bool) -> list[torch.Tensor]:
    """Results of all steps, then the gradients."""
    program.zero_grad()
    results, inputs = [], []
    dtype = next(program.parameters()).dtype
    for step in range(2 if case.dynamic else 1):
        x = _input(case, step).to(case.dtype).to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outs = run(x)
        results += [o.detach() for o in outs]
        torch.autograd.backward(outs, [tangent_of(o) for o in outs])
        inputs.append(x)
    return results + [t.grad for t in (*inputs, *program.parameters()) if t.grad is not None]


def check(case: Case, inner: str = "aten") -> Outcome:
    torch.manual_seed(case.seed)
    program = Program(case).to(case.dtype)
    return _judged(case, program, computed(program, _run, case, inner, ("tile", case.tile)))


def check_joint(case: Case, *, again: bool = True) -> Outcome:
    """`check` of the pass alone."""
    case = dataclasses.replace(case, dynamic=False)
    torch.manual_seed(case.seed)
    program = Program(case).to(case.dtype)
    state, trained = state_of(program)
    x = _input(case, 0).to(case.dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        tangents = [tangent_of(o) for o in program(x)]

    def joint(state: dict[str, torch.Tensor], x: torch.Tensor, *tangents: torch.Tensor) -> Any:
        leaves = {name: p.detach().requires_grad_(name in trained) for name, p in state.items()}
        x = x.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            outs = torch.func.functional_call(program, leaves, (x,))
        wanted = [x, *(leaves[name] for name in trained)]
        return outs, torch.autograd.grad(outs, wanted, tangents, allow_unused=True)

    gm = traced(joint, state, x, *tangents, tangents=len(tangents))
    tiles, rows = tiled(gm, int(case.tile), again=again)
    outs, gradients = tiles(state, x, *tangents)
    found = [o.detach() for o in outs] + [g for g in gradients if g is not None]
    return _judged(case, program, Computed(found, rows, []), again=again)


def _judged(case: Case, program: Program, found: Computed, *, again: bool = True) -> Outcome:
    # attention itself may be in tiles, and what is returned stays as it is if the backward alone is in tiles
    may_be_done = case.kind not in ALONE or case.around == "attention" or not again
    expected = {case.kind not in ALONE, may_be_done}
    return judged(program, _run, case, found, expected=expected, needs_reason=case.kind not in SILENT)


def _outcomes(case: Case, options: Any) -> list[Outcome]:
    if options.joint:
        return [check_joint(case, again=again) for again in (True, False)]
    return [check(case, options.inner)]


if __name__ == "__main__":
    main(generate, _outcomes, "tiles", by="kind")
