"""Norms of eager code read their rounded input with the mean and the variance that it had before it was rounded.

      x   --pack-->   codes of x, and for each group the mean m and the variance v   8 bytes a row or channel
      x' = unpack(codes), with mean m' and variance v'
      x" = (x' - m') * sqrt(v / v') + m                                              what the norm's backward reads

In graphs v follows from the norm's own `rstd` and `eps`, see graphs/norms.py. The node of a layer norm has no `eps`, so
here v is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..graphs import norms
from ..graphs.norms import Statistics
from ..torch_private import autograd


class Groups(NamedTuple):
    """A norm's input in groups, each of which has a mean of its own."""

    shape: tuple[int, ...]  # of the input, so that a group is whole dimensions
    dims: tuple[int, ...]  # the dimensions of a group


def groups_read_by(node: Any, shape: torch.Size) -> Groups | None:
    """The groups in which `node`, of autograd's graph, reads its input; None if it is no norm that subtracts a mean."""
    found = autograd.norm_groups(node, shape)
    return None if found is None else Groups(*found)


def statistics_of(x: torch.Tensor, groups: Groups) -> Statistics:
    """Variance and mean of each group of `x`."""
    return _statistics_of(_grouped(x, groups), groups)


def with_statistics(x: torch.Tensor, groups: Groups, exact: Statistics) -> torch.Tensor:
    """`x`, which was rounded, with the `exact` statistics of each group."""
    grouped = _grouped(x, groups)
    made = norms.rescaled(grouped, _statistics_of(grouped, groups), exact)
    return made.reshape(x.shape).to(x.dtype)


def _grouped(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    wide = x if x.dtype is torch.float64 else x.float()
    return wide.reshape(groups.shape)


def _statistics_of(grouped: torch.Tensor, groups: Groups) -> Statistics:
    # `var_mean` takes ten times as long on a CPU; the second sum makes the mean of equal numbers exact
    mean = grouped.mean(groups.dims, keepdim=True)
    deviations = grouped - mean
    mean = mean + deviations.mean(groups.dims, keepdim=True)
    return Statistics(deviations.square().mean(groups.dims, keepdim=True), mean)
