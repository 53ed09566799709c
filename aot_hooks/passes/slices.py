"""Slices in place of `aten.split`, whose result is no tensor.

      split(x, 8, -1)   getitem(., 1)    -->    slice(x, -1, 8, 16)

So products of several weights in one, such as gate and up of an MLP, are followed like any other value.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import GraphModule

from ..graphs.nodes import target_name
from ..graphs.rows import shape_of
from .edits import call


def slice_for_split(gm: GraphModule) -> None:
    """Have slices in place of `split` along the last dimension, in place."""
    for node in list(gm.graph.nodes):
        if target_name(node) not in ("aten.split.Tensor", "aten.split_with_sizes.default"):
            continue
        source, sizes, *rest = node.args
        dim, shape = (rest[0] if rest else 0), shape_of(source)
        width = shape[-1]
        known = all(isinstance(n, int) for n in (width, *(sizes if isinstance(sizes, list | tuple) else (sizes,))))
        if dim % len(shape) != len(shape) - 1 or not known:
            continue
        ends = [*range(sizes, width, sizes), width] if isinstance(sizes, int) else [*itertools.accumulate(sizes)]
        for user in list(node.users):
            i: Any = user.args[1]
            with gm.graph.inserting_before(user):
                made = call(gm.graph, torch.ops.aten.slice.Tensor, source, dim, ends[i - 1] if i else 0, ends[i])
            made.meta |= {k: v for k, v in user.meta.items() if k not in made.meta}
            user.replace_all_uses_with(made)
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
