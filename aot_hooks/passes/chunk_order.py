"""In which order a chunk is computed, and operators that compilers can't move work across.

    logits_1 = mm(wait_for(h_1, [grad_w_0]), w)       the second chunk's logits, when the first chunk's are done with

Chunks have no data in common but small things, so a compiler may compute their parts in any order, or fuse parts of two
chunks into one kernel. Then the logits of several chunks are alive. It can do neither across an operator that it does
not know and whose result it needs. The operator copies a chunk of hidden states: thousands of times less than logits.

Within a chunk, all that is one number for each token is computed before gradients of logits:

    most, total, loss = ... logits ...                             a kernel that reads logits
    most, total, label = wait_for_all([most, total, label], [loss])
    grad = exp(logits - most) / total ...                          one that writes over them

In one kernel, which reads each row twice, gradients would need memory of their own. They also would if the second
kernel computed the label of a token anew: Inductor cuts what has more than 30 operations into two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..graphs.lifetimes import CONSTANTS, fuses
from ..graphs.nodes import is_tensor, target_name
from ..graphs.rows import TokenRead, TokenStep
from ..torch_private.inductor_lowering import new_operator
from ..torch_private.values import hint
from .regions import PRODUCTS, ancestors, depends_on

wait_for = new_operator("wait_for(Tensor x, Tensor[] done) -> Tensor", lambda x, done: x.clone())
wait_for_all = new_operator(
    "wait_for_all(Tensor[] xs, Tensor[] done) -> Tensor[]", lambda xs, done: [x.clone() for x in xs]
)
# `torch.cat` of rows, into memory that is taken when all parts are there. Inductor takes it before the first is made.
join_rows = new_operator("join_rows(Tensor[] parts) -> Tensor", torch.cat)


@dataclass(frozen=True)
class OntoLogits:
    """The nodes of a chunk, in order, so that gradients of logits are written over logits.

    Attributes:
        before: what is computed first: logits, and all that has a number for each token.
        numbers: those that gradients of logits are computed from.
        outside: inputs of the region that have numbers for each token, and how gradients of logits read them.
        results: results of the chunk that must be there before any gradient, beside `numbers`.
        after: gradients of logits, and what is computed from them. Some of it is in `before` as well: what lies between
            logits and their gradients is computed twice.
    """

    before: Sequence[Node]
    numbers: Sequence[Node]
    outside: Sequence[tuple[Node, TokenRead]]
    results: Sequence[Node]
    after: Sequence[Node]


def onto_logits(steps: Mapping[Node, TokenStep], nodes: Sequence[Node], outputs: Iterable[Node]) -> OntoLogits | None:
    """The order of `nodes`, which are in `steps`; None if nothing would be written over logits.

    All between logits and their gradients must be what a compiler computes in the kernel that reads it.
    """
    inside = set(nodes)
    products = [n for n in nodes if str(n.target) in PRODUCTS]
    tokens = [n for n in products if steps[n].out is not None]
    size = max((_count(n) for n in tokens), default=0) // 2
    logits = {n for n in tokens if _count(n) >= size}
    ends = [n for n in products if n not in logits]
    gradients = {n for end in ends for n in end.all_input_nodes if n in inside and _count(n) >= size}
    value = next((n.meta["val"] for n in logits), None)
    if value is None or not gradients or any(n.meta["val"].dtype != value.dtype for n in gradients):
        return None
    if _rounds_nothing(value):
        return None
    chain = ancestors(gradients, inside, lambda n: n not in products and _count(n) >= size)
    summed, of_gradients, of_ends = (depends_on(nodes, group) for group in (logits | chain, gradients, ends))
    numbers = [n for n in nodes if n not in chain | logits and not chain.isdisjoint(n.users)]
    if summed.isdisjoint(numbers) or not all(fuses(n) or target_name(n) in CONSTANTS for n in chain):
        return None
    reads = [(n, read) for node in nodes if node in chain for n, read in steps[node].reads.items()]
    outside = [(n, read) for n, read in dict.fromkeys(reads) if n not in inside and read.cut and _count(n) < size]
    results = [n for n in outputs if n in inside - of_gradients and n not in numbers]
    before = ancestors([*numbers, *results, *logits], inside)
    if not before.isdisjoint(of_ends):
        return None
    first, second = ([n for n in nodes if n in group] for group in (before, chain | (inside - before)))
    return OntoLogits(first, numbers, outside, results, second)


def _rounds_nothing(logits: torch.Tensor) -> bool:
    """Whether products of their gradients read these in float32: on a CPU, for want of products of low precision."""
    return logits.device.type == "cpu" and logits.dtype in (torch.bfloat16, torch.float16)


def _count(node: Node) -> int:
    return hint(node.meta["val"].numel()) if is_tensor(node) else 0
