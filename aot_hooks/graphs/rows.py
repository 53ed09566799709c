"""What an operator does to the tokens of a tensor, so that it can run on some of the tokens.

      mm(h, w)                 [N, D] x [D, V]     tokens in dimension 0      rows of h give rows of the result
      view(., [B, T, V])                           tokens in dimensions 0, 1
      amax(., [-1])                                each token by itself
      mm(t(grad), h)           [V, N] x [N, D]     summed over the tokens     sums of parts are added
      slice(., 1, 0, -1)       [B, T, V]           some of the tokens         the others are left out of all chunks

`token_step` answers for one node: where its result has the tokens, which inputs are cut along with them, and the call
that computes it for some tokens. In that call the dimensions of tokens are one: [B, T, V] becomes [n, V]. Operators go
by name. One that no table has is not known to treat tokens alike, and has no step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from ..torch_private.values import difference, same_size
from .nodes import argument_called, has_tag, is_tensor

_aten = torch.ops.aten
_ELEMENTWISE = frozenset(
    "aten._to_copy.default aten.detach.default aten.alias.default aten.lift_fresh_copy.default aten.full_like.default "
    "aten.zeros_like.default aten.ones_like.default aten.tanh_backward.default aten.sigmoid_backward.default "
    "aten.clamp_min.default aten.clamp_max.default".split()
)  # without torch's tag "pointwise"
VIEWS = frozenset(
    "aten.view.default aten._unsafe_view.default aten.reshape.default aten.unsqueeze.default aten.squeeze.dim "
    "aten.squeeze.dims aten.squeeze.default".split()
)
PERMUTES = frozenset("aten.permute.default aten.t.default aten.transpose.int".split())
SOFTMAX = frozenset("aten._log_softmax.default aten._softmax.default".split())
REDUCTIONS = frozenset(  # the second argument is a dimension, or a list of them
    "aten.sum.dim_IntList aten.mean.dim aten.amax.default aten.amin.default aten.logsumexp.default aten.argmax.default "
    "aten.argmin.default aten.any.dim aten.all.dim aten.prod.dim_int".split()
)
_SUMS = frozenset("aten.sum.default aten.sum.dim_IntList".split())
ALONG = {  # the argument that is the dimension along which they work
    **dict.fromkeys(SOFTMAX | {"aten.cumsum.default", "aten.gather.default", "aten.slice.Tensor"}, 1),
    **dict.fromkeys("aten.scatter.value aten.scatter.src aten.scatter_add.default aten.cat.default".split(), 1),
    **dict.fromkeys("aten._log_softmax_backward_data.default aten._softmax_backward_data.default".split(), 2),
    "aten.slice_scatter.default": 2,
    "aten.slice_backward.default": 2,
}
_UNSLICES = {"aten.slice_backward.default": 2, "aten.slice_scatter.default": 2}  # the argument that is the dimension
_ALL = 1 << 62  # The end of a slice that has none is at least this.
_CONSTANTS = frozenset("aten.full.default aten.zeros.default aten.ones.default".split())
# operators whose result has as many times the gradient as their first argument
_LINEAR = frozenset(
    "aten.neg.default aten.expand.default aten.clone.default aten._to_copy.default aten.detach.default "
    "aten.alias.default aten.sum.default aten.sum.dim_IntList aten.mean.dim aten.mean.default aten.slice.Tensor "
    "aten.slice_backward.default aten.gather.default aten.tanh_backward.default aten.sigmoid_backward.default "
    "aten._log_softmax_backward_data.default aten._softmax_backward_data.default aten.cumsum.default "
    "prims.convert_element_type.default".split()
)


@dataclass(frozen=True)
class TokenSlice:
    """A slice of tokens: `x[:, 1:-1]` drops one at both ends of dimension 1.

    Attributes:
        dim: among the tokens' dimensions.
        before, after: how many are dropped there.
        text: the sizes of the tokens' dimensions before the slice, in words, so that equal slices are equal.
        sizes: the same sizes.
    """

    dim: int
    before: int
    after: int
    text: str
    sizes: tuple[Any, ...] = field(compare=False)

    def kept_sizes(self) -> tuple[Any, ...]:
        return tuple(s - self.before - self.after if d == self.dim else s for d, s in enumerate(self.sizes))


@dataclass(frozen=True)
class Rows:
    """The dimensions of a tensor that are its tokens: `count` of them from `first` on.

    `kept`: the slices by which these tokens are fewer than those of the layer.
    """

    first: int
    count: int = 1
    kept: tuple[TokenSlice, ...] = ()

    def at(self, first: int, count: int | None = None) -> Rows:
        """The same tokens in other dimensions."""
        return Rows(first, self.count if count is None else count, self.kept)

    def is_at(self, first: int) -> bool:
        return (self.first, self.count) == (first, 1)

    def dims(self) -> range:
        return range(self.first, self.first + self.count)

    def flat(self, shape: Sequence[Any], tokens: Any) -> list[Any]:
        """`shape` with `tokens` as the one size of these dimensions."""
        return [*shape[: self.first], tokens, *shape[self.first + self.count :]]

    def moved(self, dim: int, ndim: int) -> int | None:
        """Dimension `dim` once the tokens are one dimension; None if it is one of the tokens'."""
        dim %= ndim
        return None if dim in self.dims() else dim if dim < self.first else dim - self.count + 1


@dataclass(frozen=True)
class TokenRead:
    """An input: where its tokens would be; `cut` along them, or the same for all tokens, with sizes of 1 there.

    `like`: sizes of the tokens' dimensions, to which an input that lacks some of them is expanded.
    """

    rows: Rows
    cut: bool = True
    like: tuple[Any, ...] = ()


_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
_Get = Callable[[Any], Any]  # from the arguments of a node to those of its call for some tokens


@dataclass(frozen=True)
class TokenStep:
    """How a node is computed for some tokens.

    Attributes:
        out: where the result has the tokens; None if it is a sum over them.
        reads: the inputs that are cut or reshaped. All others are read as they are.
        build: from `(get, number of tokens)` to the call.
    """

    out: Rows | None
    reads: Mapping[Node, TokenRead]
    build: Callable[[_Get, Any], _Call]


def shape_of(node: Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def trimmed(rows: Rows, shape: Sequence[Any]) -> Rows:
    """`rows` without sizes of 1 at its ends, so that equal tokens have equal dimensions."""
    first, end = rows.first, rows.first + rows.count
    while end - first > 1 and same_size(shape[first], 1):
        first += 1
    while end - first > 1 and same_size(shape[end - 1], 1):
        end -= 1
    return rows.at(first, end - first)


def token_step(
    node: Node, rows: Mapping[Node, Rows], wanted: Rows | None = None, *, sliced: bool = False
) -> TokenStep | None:
    """The step of `node`; None if its operator is not known to treat tokens alike.

    Args:
        rows: where inputs have the tokens, as far as known.
        wanted: where the result must have them, if no input says it.
        sliced: operators that leave tokens out, and those that put zeros in their place, have steps, too.
    """
    if node.op != "call_function" or not is_tensor(node):
        return None
    name = str(node.target)
    if has_tag(node, torch.Tag.nondeterministic_seeded):
        return None
    known = {n: rows[n] for n in node.all_input_nodes if n in rows}
    if name in _CONSTANTS:
        return _constant(node, wanted)
    if name in VIEWS:
        return _view(node, known, wanted)
    if name == "aten.expand.default":
        return _expand(node, known, wanted)
    if name in PERMUTES:
        return _permute(node, known, wanted)
    if name in ("aten.mm.default", "aten.addmm.default"):
        return _product(node, known, wanted)
    if name in _SUMS and known and (found := _sum(node, known)) is not None:
        return found
    if name in REDUCTIONS:
        return _reduce(node, known)
    if sliced and name == "aten.slice.Tensor" and (found := _slice(node, known, wanted)) is not None:
        return found
    if sliced and name in _UNSLICES and (found := _unslice(node, known, wanted)) is not None:
        return found
    if name in ALONG:
        return _along(node, known, wanted, ALONG[name])
    if is_elementwise(node):
        return _elementwise(node, known, wanted)
    return None


def is_elementwise(node: Node) -> bool:
    return str(node.target) in _ELEMENTWISE or has_tag(node, torch.Tag.pointwise)


def order_of(node: Node) -> list[int]:
    """The dimensions of its input, in the order in which a permutation has them."""
    arguments: Any = node.args
    ndim = len(shape_of(arguments[0]))
    if str(node.target) == "aten.permute.default":
        return [d % ndim for d in arguments[1]]
    order = list(range(ndim))
    if ndim > 1:
        a, b = (0, 1) if str(node.target) == "aten.t.default" else (d % ndim for d in arguments[1:])
        order[a], order[b] = b, a
    return order


def _same(node: Node) -> Callable[[_Get, Any], _Call]:
    return lambda get, _: (node.target, get(node.args), get(dict(node.kwargs)))


def _of_one(source: Node, rows: Rows, out: Rows | None, call: Callable[[Any, Any], _Call]) -> TokenStep:
    """The step of an operator with tokens in one input: `call(that input for some tokens, number of tokens)`."""
    return TokenStep(out, {source: TokenRead(rows)}, lambda get, n: call(get(source), n))


def _constant(node: Node, wanted: Rows | None) -> TokenStep | None:
    """A tensor of constants, for some tokens, where what reads it wants tokens."""
    if wanted is None:
        return None
    size = shape_of(node)
    return TokenStep(
        wanted, {}, lambda get, n: (node.target, (wanted.flat(size, n), *get(node.args[1:])), get(dict(node.kwargs)))
    )


def carried(rows: Rows, source: Sequence[Any], target: Sequence[Any]) -> Rows | None:
    """Where a view, from shape `source` to `target`, has the tokens; None if it mixes them with other dimensions."""

    def size(of: Sequence[Any]) -> Any:
        return math.prod(of)

    before, tokens = size(source[: rows.first]), size([source[d] for d in rows.dims()])
    after = size(source[rows.first + rows.count :])
    for first in range(len(target)):
        if not same_size(size(target[:first]), before):
            continue
        for end in range(first + 1, len(target) + 1):
            if same_size(size(target[first:end]), tokens) and same_size(size(target[end:]), after):
                return trimmed(rows.at(first, end - first), target)
    return None


def _view(node: Node, known: Mapping[Node, Rows], wanted: Rows | None) -> TokenStep | None:
    """A view, such as `reshape`, that does not mix tokens with other dimensions."""
    source: Any = node.args[0]
    shape = shape_of(node)
    inside = known.get(source)
    if inside is None:
        if wanted is None or (inside := carried(wanted, shape, shape_of(source))) is None:
            return None
    out = carried(inside, shape_of(source), shape)
    if out is None:
        return None
    return _of_one(source, inside, out, lambda x, n: (_aten.reshape.default, (x, out.flat(shape, n)), {}))


def _expand(node: Node, known: Mapping[Node, Rows], wanted: Rows | None) -> TokenStep | None:
    """`expand` along dimensions that have no tokens, or from 1 to the tokens."""
    source: Any = node.args[0]
    shape = shape_of(node)
    aligned = _aligned(node, {**known}, wanted)
    if aligned is None:
        return None
    out, reads = aligned
    return TokenStep(out, reads, lambda get, n: (node.target, (get(source), out.flat(shape, n)), {}))


def _aligned(node: Node, known: Mapping[Node, Rows], wanted: Rows | None) -> tuple[Rows, dict[Node, TokenRead]] | None:
    """The tokens of a result against which inputs are broadcast, and the inputs' reads."""
    shape = shape_of(node)
    out = wanted
    for source, rows in known.items():
        offset = len(shape) - len(shape_of(source))
        found = rows.at(rows.first + offset)
        if out is not None and out != found:
            return None
        if not all(same_size(shape[d], shape_of(source)[d - offset]) for d in found.dims()):
            return None
        out = found
    if out is None:
        return None
    sizes = tuple(shape[d] for d in out.dims())
    reads: dict[Node, TokenRead] = {}
    for source in node.all_input_nodes:
        if not is_tensor(source) or source in known:
            if source in known:
                reads[source] = TokenRead(known[source])
            continue
        own = shape_of(source)
        offset = len(shape) - len(own)
        inside = [d - offset for d in out.dims() if d >= offset]
        if not inside:
            continue
        rows = out.at(max(0, out.first - offset), len(inside))
        if all(same_size(own[d], 1) for d in inside):
            if len(inside) > 1:
                reads[source] = TokenRead(rows, cut=False)
        elif len(inside) == out.count and all(same_size(own[d], s) for d, s in zip(inside, sizes, strict=True)):
            reads[source] = TokenRead(rows)
        else:
            reads[source] = TokenRead(rows, like=sizes)
    return out, reads


def _elementwise(node: Node, known: Mapping[Node, Rows], wanted: Rows | None) -> TokenStep | None:
    """An elementwise operator, with its inputs broadcast."""
    aligned = _aligned(node, known, wanted)
    return None if aligned is None else TokenStep(*aligned, _same(node))


def _permute(node: Node, known: Mapping[Node, Rows], wanted: Rows | None) -> TokenStep | None:
    """A permutation that leaves the dimensions of tokens together and in their order."""
    source: Any = node.args[0]
    order, ndim = order_of(node), len(shape_of(source))
    inside = known.get(source)
    if inside is None:
        if wanted is None:
            return None
        inside = wanted.at(order[wanted.first])
    if inside.first not in order:
        return None
    out = inside.at(order.index(inside.first))
    if [order[d] for d in out.dims() if d < ndim] != list(inside.dims()):
        return None
    small = [inside.moved(d, ndim) if d != inside.first else inside.first for d in order]
    flat = [d for d in small if d is not None]
    return _of_one(source, inside, out, lambda x, _: (_aten.permute.default, (x, flat), {}))


def _product(node: Node, known: Mapping[Node, Rows], wanted: Rows | None) -> TokenStep | None:
    """A product, with tokens in the rows of its left factor or the columns of its right one; a sum over tokens, if both
    factors have them in the dimension that is summed."""
    *bias, a, b = node.args[: 3 if "addmm" in str(node.target) else 2]
    if a is b or not is_tensor(a) or not is_tensor(b):
        return None
    left, right = known.get(a), known.get(b)  # type: ignore[arg-type]
    if left is None and right is None and wanted is not None:
        left, right = (wanted, None) if wanted.is_at(0) else (None, wanted.at(1, 1))
    reads: dict[Node, TokenRead] = {}
    out: Rows | None
    known_rows: Any = left or right
    if left is not None and right is not None and left.kept != right.kept:
        return None
    if (left is not None and left.is_at(1)) or (right is not None and right.is_at(0)):
        if bias:  # each token contributes to each number of the result
            return None
        out = None
        reads = {a: TokenRead(known_rows.at(1)), b: TokenRead(known_rows.at(0))}  # type: ignore[dict-item]
    elif left is not None and left.is_at(0) and right is None:
        out, reads = left, {a: TokenRead(left)}  # type: ignore[dict-item]
    elif right is not None and right.is_at(1) and left is None:
        out, reads = right, {b: TokenRead(right)}  # type: ignore[dict-item]
    else:
        return None
    if bias:
        aligned = _aligned_to(bias[0], node, out)
        if aligned is None:
            return None
        reads |= aligned
    return TokenStep(out, reads, _same(node))


def _aligned_to(bias: Any, node: Node, out: Rows | None) -> dict[Node, TokenRead] | None:
    """How a bias is read. Its own tokens, if it has them, are those of the result."""
    if out is None or not is_tensor(bias):
        return None
    own, shape = shape_of(bias), shape_of(node)
    dim = out.first - (len(shape) - len(own))
    return {bias: TokenRead(out.at(dim, 1))} if dim >= 0 and not same_size(own[dim], 1) else {}


def reduced_dims(node: Node) -> list[int] | None:
    """The dimensions that a reduction takes away or leaves with size 1; None for all."""
    ndim = len(shape_of(node.args[0]))  # type: ignore[arg-type]
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dims is None or dims == []:
        return None
    return [d % ndim for d in (dims if isinstance(dims, list | tuple) else [dims])]


def _sum(node: Node, known: Mapping[Node, Rows]) -> TokenStep | None:
    """A sum over all tokens; None if it sums over none of them, or some."""
    source: Any = node.args[0]
    rows = known[source]
    dims = list(range(len(shape_of(source)))) if str(node.target) == "aten.sum.default" else reduced_dims(node)
    if dims is None or not set(rows.dims()) <= set(dims):
        return None
    ndim = len(shape_of(source))
    flat = [rows.first, *(d for d in (rows.moved(d, ndim) for d in dims) if d is not None)]
    keep = bool(argument_called("keepdim", node)) if str(node.target) != "aten.sum.default" else False
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    return _of_one(source, rows, None, lambda x, _: (_aten.sum.dim_IntList, (x, sorted(flat), keep), {"dtype": wide}))


def _reduce(node: Node, known: Mapping[Node, Rows]) -> TokenStep | None:
    """A reduction of each token by itself; None if it reduces tokens. Its dimensions count as of merged tokens."""
    source: Any = node.args[0]
    rows, dims = known.get(source), reduced_dims(node)
    if rows is None or dims is None or set(rows.dims()) & set(dims):
        return None
    ndim = len(shape_of(source))
    flat = [rows.moved(d, ndim) for d in dims]
    keep = bool(argument_called("keepdim", node))
    out = rows.at(rows.first if keep else rows.first - sum(d < rows.first for d in dims))
    single = not isinstance(node.args[1], list | tuple)
    where = flat[0] if single else flat
    return _of_one(source, rows, out, lambda x, _: (node.target, (x, where, *node.args[2:]), dict(node.kwargs)))


def _along(node: Node, known: Mapping[Node, Rows], wanted: Rows | None, position: int) -> TokenStep | None:
    """Operators along one dimension that is no token's. All tensors have the same number of dimensions."""
    shape = shape_of(node)
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    found = {*known.values(), *(() if wanted is None else (wanted,))}
    if len(found) != 1 or not isinstance(dim, int):
        return None
    (rows,) = found
    moved = rows.moved(dim, len(shape))
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    if moved is None or any(len(shape_of(n)) != len(shape) for n in tensors):
        return None
    if any(not same_size(shape_of(n)[d], shape[d]) for n in tensors for d in rows.dims()):
        return None
    is_slice = str(node.target) == "aten.slice_backward.default"
    sizes: Any = node.args[1] if is_slice else ()  # `build` makes them anew
    of_words = [size for d, size in enumerate(sizes) if d not in rows.dims()]
    inputs = {*tensors, *(n for n in sizes if isinstance(n, Node) and n not in of_words)}
    if any(n not in inputs for n in node.all_input_nodes):  # a symbolic size of what is no token
        return None

    def build(get: _Get, tokens: Any) -> _Call:
        args = list(get(node.args))
        while len(args) <= position:
            args.append(0)
        args[position] = moved
        if is_slice:
            args[1] = rows.flat(shape, tokens)
        return node.target, tuple(args), get(dict(node.kwargs))

    return TokenStep(rows, {n: TokenRead(rows) for n in tensors}, build)


def _dropped(node: Node, at: int, size: Any) -> tuple[int, int] | None:
    """How many numbers a slice of `size` drops at both ends. None if that is not known, or others are dropped.

    `at`: the argument that is the dimension. Start, end and step follow.
    """
    given: list[Any] = list(node.args[at + 1 :])
    start, end, step = given + [None, None, 1][len(given) :]  # the defaults of those that are left out
    start, end = 0 if start is None else start, _ALL if end is None else end
    if step != 1 or not isinstance(start, int) or (start < 0 and not isinstance(size, int)):
        return None
    before = start if start >= 0 else max(0, size + start)
    if not isinstance(end, int):
        after = difference(size, end.meta["val"]) if isinstance(end, Node) else None
    elif end < 0 or end >= _ALL:
        after = max(0, -end)
    else:
        after = max(0, size - end) if isinstance(size, int) else None
    return None if after is None else (before, after)


def _left_of(node: Node, at: int, rows: Rows, whole: Sequence[Any], sliced: Sequence[Any]) -> Rows | None:
    """The tokens that are left by the slice that `node` is, or whose gradient it is; None if it takes no tokens out.

    `at`: the argument that is the slice's dimension. `rows`, `whole`: tokens and shape before the slice. `sliced`: the
    shape after it. Also None for a slice whose ends are not known.
    """
    dim: Any = node.args[at] if len(node.args) > at else 0
    dim = dim % len(whole) - rows.first
    if not 0 <= dim < rows.count or (dropped := _dropped(node, at, whole[dim + rows.first])) is None:
        return None
    sizes = tuple(whole[d] for d in rows.dims())
    kept = TokenSlice(dim, *dropped, ", ".join(map(str, sizes)), sizes)
    return trimmed(replace(rows, kept=(*rows.kept, kept)), sliced)


def _slice(node: Node, known: Mapping[Node, Rows], wanted: Rows | None) -> TokenStep | None:
    """A slice that leaves tokens out. The loop runs over those that are left, so it has nothing to do there."""
    source: Any = node.args[0]
    rows, shape = known.get(source), shape_of(source)
    if rows is None:
        if wanted is None or not wanted.kept:
            return None
        rows = Rows(wanted.first, wanted.count, wanted.kept[:-1])
    out = _left_of(node, 1, rows, shape, shape_of(node))
    if out is None or (wanted is not None and out != wanted):
        return None
    return _of_one(source, rows, out, lambda x, _: (_aten.alias.default, (x,), {}))


def _unslice(node: Node, known: Mapping[Node, Rows], wanted: Rows | None) -> TokenStep | None:
    """The gradient of such a slice: zero for all tokens that it leaves out."""
    source: Any = node.args[0]
    if str(node.target) == "aten.slice_scatter.default":
        if not is_zero(source):
            return None
        source = node.args[1]
    if not is_tensor(source):
        return None
    rows, shape = known.get(source), shape_of(node)
    if rows is not None:
        if not rows.kept:
            return None
        count = len(rows.kept[-1].sizes)
        dim: Any = node.args[2]
        whole = Rows(dim % len(shape) - rows.kept[-1].dim, count, rows.kept[:-1])
    elif wanted is not None:
        whole = wanted
    else:
        return None
    if whole.first < 0 or whole.first + whole.count > len(shape):
        return None
    inside = _left_of(node, 2, whole, shape, shape_of(source))
    if inside is None or (rows is not None and inside != rows):
        return None
    return _of_one(source, inside, whole, lambda x, _: (_aten.alias.default, (x,), {}))


def restores(step: TokenStep) -> Node | None:
    """The input of a step that puts zeros in the place of tokens; None for any other."""
    for source, read in step.reads.items():
        if step.out is not None and len(read.rows.kept) > len(step.out.kept):
            return source
    return None


def is_zero(value: Any) -> bool:
    """Whether `value` is a constant of zeros."""
    if isinstance(value, int | float):
        return value == 0
    if not isinstance(value, Node):
        return False
    name = str(value.target)
    if name in ("aten.full.default", "aten.full_like.default", "aten.scalar_tensor.default"):
        return bool(value.args[0 if "scalar" in name else 1] == 0)
    if name in VIEWS or name in PERMUTES or name == "aten.expand.default":
        return is_zero(value.args[0])
    return name in ("aten.zeros.default", "aten.zeros_like.default")


# The arguments whose numbers, or sums of them, are the result. The others say which numbers come where.
_MADE_OF = dict.fromkeys(("aten.add.Tensor", "aten.sub.Tensor", "aten.slice_scatter.default"), (0, 1))
_MADE_OF |= {"aten.where.self": (1, 2), "aten.scatter.src": (0, 3), "aten.scatter_add.default": (0, 3)}
_FILLED = {"aten.masked_fill.Scalar": 2, "aten.scatter.value": 3}  # the argument that is put into the first one


def is_linear(node: Node, factors: Callable[[Node], bool]) -> bool:
    """Whether `node` has a factor that its inputs with `factors(input)` have: twice these, twice the result."""
    name, args = str(node.target), node.args

    def scaled(value: Any) -> bool:
        return isinstance(value, Node) and factors(value)

    if name == "aten.cat.default":
        return all(scaled(a) or is_zero(a) for a in args[0])  # type: ignore[union-attr]
    if (positions := _MADE_OF.get(name)) is not None:
        return all(scaled(a) or is_zero(a) if i in positions else not scaled(a) for i, a in enumerate(args))
    if sum(map(scaled, args)) != 1:
        return False
    if name in ("aten.mul.Tensor", "aten.mul.Scalar", "aten.mm.default"):
        return True
    if name in ("aten.div.Tensor", "aten.div.Scalar"):
        return scaled(args[0]) and not node.kwargs.get("rounding_mode")
    if name in _FILLED:
        return scaled(args[0]) and is_zero(args[_FILLED[name]])
    moves = name in _LINEAR or name in VIEWS or name in PERMUTES
    return moves and scaled(args[0]) and is_tensor(node) and node.meta["val"].is_floating_point()
