"""Gradients of numbers that scale the rows of a product: computed without the product's result, so nothing saves it.

      forward             backward, before               after
        y = h @ w           ds = sum(g * y, -1)            u = g @ w.T
        z = y * s           dy = g * s                     ds = sum(h * u, -1)
                            dh = dy @ w.T                  dh = u * s
                            dw = h.T @ dy                  dw = (h * s).T @ g

`s` has one number a row, as the scores of a mixture of experts. There `y` is the widest tensor that is saved, and `h`,
which the gradient of `w` reads, is narrower. No product is added. Numbers are rounded elsewhere: other last digits.
Where `h` is no narrower than `y`, or `w` has no gradient, less would not be saved. Not in float16, where `g` may be too
large or too small before `s` scales it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from cudagraph.placeholder import nearest_first

from ..graphs.nodes import target_name
from ..graphs.read_tables import CONVERSIONS, MOVES
from ..graphs.rows import shape_of
from ..torch_private.values import same_size
from .edits import call, described_as, run_on_fakes

_aten = torch.ops.aten
_PRODUCTS = ("aten.mm.default", "aten.bmm.default", "aten._grouped_mm.default")
_TRANSPOSES = ("aten.t.default", "aten.transpose.int", "aten.permute.default")
_ALIASES = ("aten.detach.default", "aten.alias.default")
_COPIES = MOVES | CONVERSIONS


class _Product(NamedTuple):
    """A product of matrices, with the operands before they are transposed."""

    left: tuple[Node, bool]  # the operand, and whether the product reads it transposed
    right: tuple[Node, bool]
    more: tuple[Any, ...]  # the ends of groups


class _Scaled(NamedTuple):
    """What the backward computes of a product whose rows are scaled."""

    total: Node  # the sum that is the gradient of the scales
    gradient: Node  # g
    scale: Node  # s
    forward: _Product  # h @ w
    of_input: Node  # dh
    of_weight: Node  # dw


def scale_gradients(joint: GraphModule, *, saves_input: bool) -> None:
    """Have the backward of `joint` compute gradients of rows' scales before the product, in place.

    `saves_input`: h is saved, since the gradient of `w` has read it. Else torch may compute it again from values that
    hooks round, such as the results of a gate and an up projection, and h has the errors of both.
    """
    changed = False
    position: dict[Node, int] = {}
    for total in joint.graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList):
        position = position or {node: i for i, node in enumerate(joint.graph.nodes)}
        scaled = _scaled(total, position)
        if scaled is None:
            continue
        h = scaled.forward.left[0]
        if saves_input and h.op != "placeholder" and h.meta.get("recompute") is None:
            h.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        _replace(joint.graph, scaled)
        position, changed = {}, True  # what one replaces another may read: two products in a row
    if changed:
        joint.graph.eliminate_dead_code()
        joint.recompile()


def _scaled(total: Node, position: dict[Node, int]) -> _Scaled | None:
    """What belongs to `total`, if it sums a product's result times its gradient along rows; None otherwise."""
    terms, dims = cast(Any, total.args[:2])
    if target_name(terms) != "aten.mul.Tensor" or len(terms.all_input_nodes) != 2 or not _is_backward(terms):
        return None
    if list(dims) not in ([-1], [len(shape_of(terms)) - 1]):
        return None
    for gradient, value in (terms.all_input_nodes, terms.all_input_nodes[::-1]):
        y = _origin(value)
        forward = None if _is_backward(y) or not _has_shape(gradient, shape_of(value)) else _product(y)
        if forward is None or not _has_rows(forward, y, gradient) or not _read_only_by(y, terms):
            continue
        for scaled in gradient.users:
            parts = [n for n in scaled.all_input_nodes if n is not gradient]
            is_scaled = target_name(scaled) == "aten.mul.Tensor" and len(parts) == 1 and _is_backward(scaled)
            if not is_scaled or not _has_shape(parts[0], (*shape_of(gradient)[:-1], 1)):
                continue
            of_input, of_weight = _gradients(scaled, forward)
            if of_input is not None and of_weight is not None and position[scaled] < position[total]:
                return _Scaled(total, gradient, parts[0], forward, of_input, of_weight)
    return None


def _gradients(scaled: Node, forward: _Product) -> tuple[Node | None, Node | None]:
    """The gradients of both operands of `forward`, of whose result `scaled` is the gradient."""
    of_input: Node | None = None
    of_weight: Node | None = None
    (weight, weight_turned), (left, _) = forward.right, forward.left
    for user in nearest_first([scaled], lambda n: [u for u in n.users if target_name(u) in (*_COPIES, *_PRODUCTS)]):
        found = _product(user)
        if found is None or found.more != forward.more:
            continue
        if _origin(found.left[0]) is scaled and not found.left[1] and found.right == (weight, not weight_turned):
            of_input = user
        # the gradient of a weight, or that gradient transposed
        elif (found.left, _origin(found.right[0])) == ((left, True), scaled) and not found.right[1]:
            of_weight = user
        elif (_origin(found.left[0]), found.right) == (scaled, (left, False)) and found.left[1]:
            of_weight = user
    return of_input, of_weight


def _replace(graph: Graph, scaled: _Scaled) -> None:
    total, gradient, scale, forward, of_input, of_weight = scaled
    terms: Any = total.args[0]
    h, rows = forward.left[0], shape_of(forward.left[0])[:-1]
    with graph.inserting_before(total), described_as(total):
        g = _formed(graph, gradient, [*rows, _width(gradient)], h.meta["val"].dtype)
        if forward.more and not g.meta["val"].is_contiguous():  # a grouped product refuses other strides
            g = call(graph, _aten.clone.default, g, memory_format=torch.contiguous_format)
        s = _formed(graph, scale, [*rows, 1])
        weight = _turned(graph, forward.right[0], not forward.right[1])
        u = call(graph, of_input.target, g, weight, *forward.more)
        pair = (_formed(graph, n, None, terms.meta["val"].dtype) for n in (h, u))
        product = call(graph, _aten.mul.Tensor, *pair)
        sums = call(graph, _aten.sum.dim_IntList, product, [-1], *total.args[2:], **total.kwargs)
        if forward.more:
            sums = _zero_outside(graph, sums, forward.more[0])
        made = {total: _formed(graph, sums, list(shape_of(total)))}
        made[of_input] = _formed(graph, call(graph, _aten.mul.Tensor, u, s), None, of_input.meta["val"].dtype)
        weighed = _formed(graph, call(graph, _aten.mul.Tensor, h, s), None, h.meta["val"].dtype)
        left, right = (weighed, g) if _untransposed(cast(Any, of_weight.args[0]))[0] is h else (g, weighed)
        made[of_weight] = call(graph, of_weight.target, _turned(graph, left, True), right, *forward.more)
    for old, new in made.items():
        old.replace_all_uses_with(new)
        graph.erase_node(old)


def _zero_outside(graph: Graph, sums: Node, ends: Any) -> Node:
    """`sums` with zeros for rows in no group, which a grouped product leaves as they were in memory."""
    value = sums.meta["val"]
    steps: dict[str, Any] = {"start": 0, "step": 1, "dtype": torch.int64, "requires_grad": False}
    row = graph.call_function(torch.ops.prims.iota.default, (value.shape[0],), {"device": value.device, **steps})
    zero = graph.call_function(_aten.full.default, ([], 0), {"dtype": value.dtype, "device": value.device})
    for node in (row, zero):
        run_on_fakes(node, value.fake_mode)
    inside = call(graph, _aten.lt.Tensor, row, call(graph, _aten.select.int, ends, 0, -1))
    if value.dim() > 1:
        inside = call(graph, _aten.unsqueeze.default, inside, 1)
    return call(graph, _aten.where.self, inside, sums, zero)


# --- graphs -----------------------------------------------------------------------------------------------------------


def _has_rows(forward: _Product, y: Node, gradient: Node) -> bool:
    """Whether `y` and its gradient have a wider row for each of `h`, in the same form or with known sizes."""
    h, turned = forward.left
    if _width(h) >= _width(y) or torch.float16 in (n.meta["val"].dtype for n in (h, y, gradient)):
        return False
    rows = shape_of(h)[:-1]
    if turned or not _has_shape(y, (*rows, _width(y))) or any(not isinstance(n, Node) for n in forward.more):
        return False
    known = all(type(n) is int for n in (*rows, *shape_of(gradient)))
    return known or (not forward.more and _has_shape(gradient, (*rows, _width(y))))


def _is_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _width(node: Node) -> int:
    """Its numbers in a row; one for a tensor without dimensions."""
    return cast(int, [1, *shape_of(node)][-1])


def _has_shape(node: Node, shape: tuple[Any, ...]) -> bool:
    own = shape_of(node)
    return len(own) == len(shape) and all(map(same_size, own, shape))


def _origin(node: Node) -> Node:
    """What `node` is a copy of, with the rows in the same order."""
    while target_name(node) in _COPIES and target_name(node) not in _TRANSPOSES and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        as_many = same_size(source.meta["val"].numel(), node.meta["val"].numel())
        if not as_many or not same_size(_width(source), _width(node)):
            break
        node = source
    return node


def _product(node: Node) -> _Product | None:
    args: Any = node.args
    if target_name(node) not in _PRODUCTS or not all(isinstance(n, Node) for n in args[:2]):
        return None
    return _Product(_untransposed(args[0]), _untransposed(args[1]), args[2:])


def _untransposed(node: Node) -> tuple[Node, bool]:
    """`node` without what exchanges its last two dimensions, and whether that is done an odd number of times."""
    turned = False
    while target_name(node) in _ALIASES or _transposes(node):
        turned ^= _transposes(node)
        (node,) = node.all_input_nodes
    return node, turned


def _transposes(node: Node) -> bool:
    """Whether `node` exchanges the last two dimensions."""
    name, args = target_name(node), cast(Any, node.args)
    if name not in _TRANSPOSES:
        return False
    rank = len(shape_of(node))
    last = [rank - 2, rank - 1]
    if name == "aten.permute.default":
        return rank > 1 and [d % rank for d in args[1]] == [*range(rank - 2), *reversed(last)]
    return name == "aten.t.default" or sorted(d % rank for d in args[1:]) == last


def _turned(graph: Graph, node: Node, turned: bool) -> Node:
    """`node`, with its last two dimensions exchanged if `turned`."""
    rank = len(shape_of(node))
    return call(graph, _aten.permute.default, node, [*range(rank - 2), rank - 1, rank - 2]) if turned else node


def _formed(graph: Graph, node: Node, shape: list[Any] | None, dtype: torch.dtype | None = None) -> Node:
    """`node` with this shape and dtype."""
    if shape is not None and not _has_shape(node, tuple(shape)):
        if not node.meta["val"].is_contiguous():
            node = call(graph, _aten.clone.default, node, memory_format=torch.contiguous_format)
        node = call(graph, _aten.view.default, node, shape)
    if dtype is not None and node.meta["val"].dtype != dtype:
        node = call(graph, torch.ops.prims.convert_element_type.default, node, dtype)
    return node


def _read_only_by(y: Node, terms: Node) -> bool:
    """Whether the backward reads `y`, or a copy of it, for nothing but `terms`."""
    copies = nearest_first([y], lambda n: [u for u in n.users if target_name(u) in _COPIES])
    readers = {u for n in copies for u in n.users if target_name(u) not in _COPIES}
    return not any(u.op == "output" or (_is_backward(u) and u is not terms) for u in readers)
