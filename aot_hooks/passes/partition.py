"""torch's partition into forward and backward, or a user's, with what it gets wrong put right.

joint --split--> fw, bw --> random numbers are drawn once             repeats.py
                        --> buffers are read once, where asked for    repeats.py
                        --> saved inputs are not written to before    cudagraph/graph/snapshots.py
                        --> no gradient is whole in float32 as well   row_sums.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cudagraph.graph.snapshots import save_what_was_read

from ..graphs.nodes import storages
from ..graphs.repeats import draw_counts
from .repeats import save_what_is_computed_from, save_what_was_drawn
from .row_sums import sum_rows_in_slices

Split = Callable[[], tuple[GraphModule, GraphModule]]


def partitioned(
    joint: GraphModule, split: Split, num_fwd_outputs: int, state: Collection[int] = ()
) -> tuple[GraphModule, GraphModule]:
    """What `split()` makes of `joint`, mended. `state`: inputs of the forward that the program may write to by then.

    Raises `UnsupportedGraphError` if the backward would draw other random numbers than the forward.
    """
    counts = draw_counts(joint, with_state=True)
    fw, bw = split()
    save_what_was_drawn(fw, bw, num_fwd_outputs, counts)
    copied: set[Node] = set()
    if state:
        inputs = fw.graph.find_nodes(op="placeholder")
        copied = save_what_is_computed_from(fw, bw, num_fwd_outputs, storages(inputs[i] for i in state))
    save_what_was_read(fw, bw, num_fwd_outputs, copied)
    sum_rows_in_slices(bw)
    return fw, bw


def parameters_among(inputs: Sequence[Any]) -> frozenset[int]:
    """The positions of parameters among the `inputs` of Dynamo's graph.

    A partition function lives as long as the compiled code. So it may hold these, but not the inputs, which are the
    activations of the first call.
    """
    return frozenset(i for i, x in enumerate(inputs) if isinstance(x, torch.nn.Parameter))


def state_of(joint: GraphModule, static: Collection[int], parameters: Collection[int]) -> list[int]:
    """The indices of `static`, parameters and buffers among the inputs of `joint`, that are buffers.

    `parameters`: positions among the inputs of Dynamo's graph.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    return [i for i in static if not _is_parameter(placeholders[i], parameters)]


def parameters_of(fw: GraphModule, static: Collection[int], parameters: Collection[int]) -> list[Node]:
    """The inputs of `fw` that are parameters, or parts of one.

    A program may write to a buffer between forward and backward, so buffers are none.

    Args:
        static: indices of inputs that are parameters or buffers.
        parameters: positions among the inputs of Dynamo's graph.
    """
    placeholders = fw.graph.find_nodes(op="placeholder")
    return [placeholders[i] for i in static if i < len(placeholders) and _is_parameter(placeholders[i], parameters)]


def _is_parameter(placeholder: Node, parameters: Collection[int]) -> bool:
    """AOTAutograd's inputs have no class. Its description of one has a position among the inputs of Dynamo's graph,
    or says itself that it is a parameter."""
    description = placeholder.meta.get("desc")
    while (base := getattr(description, "base", None)) is not None:  # a part of a tensor subclass
        description = base
    lifted = getattr(description, "is_param", None)
    if lifted is not None and lifted():
        return True
    return getattr(description, "idx", None) in parameters
