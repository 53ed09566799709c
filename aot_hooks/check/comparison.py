"""How far gradients are from those without hooks. Sums of squares are taken on the device, piece by piece.

gradients, references --deviations--> one of each --Error.of--> all parameters together, all others together, the worst
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

ONE = 5  # limits that one parameter may be off by: at 0.1 half of its gradient, as small gradients are mostly rounding
_PIECE = 1 << 23  # elements that are compared at once: 64 MiB of float64 beside gradients that fill the device
# Smallest norm of a gradient that means something, as a share of the norm of all: what is below it is rounding of
# numbers in this dtype. Keys' biases of attention, whose gradients are zero but for that, had up to 1.5e-7 in float32
# and 8e-4 in bfloat16, the more the sharper the attention.
_VANISHING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-4, torch.bfloat16: 1e-3}


@dataclass(frozen=True)
class Deviation:
    """The gradient of one tensor: squares of its norm without hooks, and of the norm of its difference with hooks.

    `is_leaf`: of a parameter, or another tensor that the user gets the gradient of. Others are passed on by autograd.
    `smallest`: norm below which it is rounding, as a share of the norm of all gradients.
    """

    name: str
    is_leaf: bool
    smallest: float
    norm2: float
    off2: float

    @property
    def error(self) -> float:
        return relative_error([self])


@dataclass(frozen=True)
class Error:
    """Relative errors.

    Attributes:
        leaves: of the gradients of all parameters together, without those that are not finite without hooks either.
        passed_on: likewise of gradients that autograd passes on to what ran before.
        worst: the gradient that is off most, without those that vanish; None if there is none.
    """

    leaves: float
    passed_on: float
    worst: Deviation | None

    @staticmethod
    def of(found: Iterable[Deviation]) -> Error:
        known = [each for each in found if math.isfinite(each.norm2)]
        leaves = [each for each in known if each.is_leaf]
        total = math.sqrt(sum(each.norm2 for each in known))
        named = [each for each in leaves or known if math.sqrt(each.norm2) > each.smallest * total]
        passed_on = [each for each in known if not each.is_leaf]
        return Error(
            relative_error(leaves), relative_error(passed_on), max(named, key=lambda each: each.error, default=None)
        )

    @property
    def most(self) -> float:
        return max(self.leaves, self.passed_on)

    @property
    def of_one(self) -> float:
        return 0.0 if self.worst is None else self.worst.error

    @property
    def severity(self) -> float:
        """The limit that the error just meets: for all gradients together, and for one alone, which may be off more."""
        return max(self.most, self.of_one / ONE)

    def above(self, limit: float) -> bool:
        return self.severity > limit


def relative_error(found: Iterable[Deviation]) -> float:
    """The error of all tensors of `found` together; infinite if one with hooks is not finite, or none has a norm."""
    found = list(found)
    off2, norm2 = sum(each.off2 for each in found), sum(each.norm2 for each in found)
    if math.isnan(off2):
        return math.inf
    return math.sqrt(off2 / norm2) if norm2 else math.inf if off2 else 0.0


def deviations(
    names: Sequence[tuple[str, bool]],
    without: Sequence[torch.Tensor | None],
    found: Sequence[torch.Tensor | None],
    dtypes: Iterable[torch.dtype] = (),
) -> list[Deviation]:
    """The errors of the gradients `found`, beside those `without` hooks. A missing gradient counts as zeros.

    Args:
        names: of each gradient, and whether it is a leaf's.
        dtypes: in which the step computes, beside those of the gradients: under autocast these are wider.
    """
    smallest = max((_VANISHING.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    launched: list[tuple[str, bool, float, torch.Tensor]] = []  # all are launched before the host reads the first
    for (name, is_leaf), g0, g in zip(names, without, found, strict=True):
        if (either := g if g0 is None else g0) is not None:
            vanishing = max(smallest, _VANISHING.get(either.dtype, 0.0))
            launched.append((name, is_leaf, vanishing, _squares(g0, g)))
    return [Deviation(name, is_leaf, least, *squares.tolist()) for name, is_leaf, least, squares in launched]


@torch.no_grad()
def _squares(without: torch.Tensor | None, found: torch.Tensor | None) -> torch.Tensor:
    """f64[2]: squares of the norm of `without`, and of that of the difference."""
    either = without if without is not None else found
    assert either is not None
    pairs = zip(_pieces(either, without), _pieces(either, found), strict=True)
    squares = [torch.stack([_square(a), _square(b - a)]) for a, b in pairs]
    return torch.stack(squares).sum(0) if squares else torch.zeros(2, dtype=torch.float64)


def _pieces(like: torch.Tensor, gradient: torch.Tensor | None) -> Iterable[torch.Tensor]:
    """The numbers of a gradient, as float64, in pieces along its first dimension."""
    local = getattr(like, "to_local", None)  # each process of a DTensor looks at its own part
    like = like if local is None else local()
    rows = like.shape[0] if like.dim() else 1
    step = max(1, _PIECE * rows // max(1, like.numel()))
    if gradient is not None and local is not None:
        gradient = gradient.to_local()  # type: ignore[attr-defined]
    for begin in range(0, rows, step):
        if gradient is None:
            yield torch.zeros(1, dtype=torch.float64, device=like.device)
            continue
        part = gradient[begin : begin + step] if gradient.dim() else gradient
        part = part.to_dense() if part.layout is not torch.strided else part
        yield (torch.view_as_real(part.resolve_conj()) if part.is_complex() else part).double()


def _square(x: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(x)
    return norm.square()
