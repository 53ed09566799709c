"""Rounded numbers get the mean and the variance back that they had, for norms that read them.

      x' = unpack(...)                                  with mean m' and variance v'
      x" = (x' - m') * sqrt(v / v') + m                 with the mean m and the variance v of x

It is one tensor function for both: eager code keeps m and v (eager/norms.py), and in graphs they follow from what the
norm saves for its own backward (passes/norm_inputs.py, which says why it is needed).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .read_tables import NOISE

# Roundings of rstd's dtype to which `1 - eps * rstd**2` is known: rstd's own counts twice; the product and the sum.
_ROUNDINGS = 4


class Statistics(NamedTuple):
    """Of each group of numbers, with size 1 for the dimensions of a group; at least in single precision."""

    variance: torch.Tensor
    mean: torch.Tensor


def rescaled(y: torch.Tensor, found: Statistics, wanted: Statistics) -> torch.Tensor:
    """Shift and scale the groups of `y`. Their statistics were `found`; those of the result are `wanted`."""
    ratio = (wanted.variance / found.variance).sqrt()
    ratio = torch.where(ratio < math.inf, ratio, 1.0)  # a variance that overflows says nothing of the spread
    # numbers that came back equal differ from their mean by its rounding
    ratio = torch.where(found.variance > (found.mean * NOISE).square(), ratio, 0.0)
    return y * ratio + (wanted.mean - found.mean * ratio)


def saved_by_norm(
    mean: torch.Tensor, rstd: torch.Tensor, eps: float, variance: torch.Tensor, precision: float
) -> Statistics:
    """The statistics from which a norm has made `rstd` = 1 / sqrt(variance + eps).

    They are known to some roundings of `rstd`, as a difference. Within these the `variance` of the rounded numbers
    counts.

    Args:
        precision: of the dtype in which the norm saved both.
    """
    total = rstd.reciprocal().square()  # of the variance and eps
    off = total * (_ROUNDINGS * precision)
    return Statistics(torch.clamp(variance, total - eps - off, total - eps + off), mean)


def is_as_saved(found: Statistics, wanted: Statistics, precision: float) -> torch.Tensor:
    """Which groups have the statistics that a norm saved, so that no hook has rounded their numbers.

    Means may differ by the roundings of a sum. In a group of equal numbers they differ by one rounding at most.
    """
    difference = (found.mean - wanted.mean).abs()
    is_mean = difference <= (found.mean.abs() + found.variance.sqrt()) * max(NOISE, _ROUNDINGS * precision)
    is_spread = found.variance > (found.mean * NOISE).square()
    is_same_number = difference <= found.mean.abs() * max(NOISE, precision)
    return torch.where(is_spread, is_mean & (found.variance == wanted.variance), is_same_number)
