"""Operators in parts that treat each token alike: losses, means, and products of several weights in one.

      nll_loss_forward(logp, target, weight, mean, ignored)  -->  -gather(logp, 1, target), where, sum, / sum of weights
      split(x, 8, -1)   getitem(., 1)                        -->  slice(x, -1, 8, 16)

Inductor's graphs have losses in parts already. Graphs that run as they are (`inner="aten"`) have them whole. The parts
are tensor code, which is traced on the node's fake values.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from ..torch_private import values as torch_values

_aten = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)
_NONE, _MEAN = 0, 1  # torch's numbers of reductions; 2 is a sum


def _classes(target: Any, ignored: int) -> tuple[Any, Any]:
    """Which tokens count, and the class of each, 0 for the others."""
    valid = target != ignored
    return valid, target * valid


def _weights(valid: Any, classes: Any, weight: Any, dtype: torch.dtype) -> Any:
    """The weight of each token: its class's, or 1; 0 for those that don't count."""
    if weight is None:
        return valid.to(dtype)
    chosen = weight.index_select(0, classes.reshape(-1)).view_as(classes)
    return torch.where(valid, chosen, 0).to(dtype)


def _nll_forward(logp: Any, target: Any, weight: Any, reduction: int, ignored: int) -> Any:
    if logp.dim() < 2:
        return NotImplemented
    valid, classes = _classes(target, ignored)
    picked = logp.gather(1, classes.unsqueeze(1)).squeeze(1)
    loss = -(picked.float() if logp.dtype in _LOW else picked)  # torch's kernels add in float32 as well
    weights = _weights(valid, classes, weight, loss.dtype)
    loss = torch.where(valid, loss if weight is None else loss * weights, 0)
    total = weights.sum()
    loss = loss if reduction == _NONE else loss.sum()
    loss = loss / total if reduction == _MEAN else loss
    return loss.to(logp.dtype), total.to(logp.dtype)


def _nll_backward(grad: Any, logp: Any, target: Any, weight: Any, reduction: int, ignored: int, total: Any) -> Any:
    if logp.dim() < 2:
        return NotImplemented
    valid, classes = _classes(target, ignored)
    grad = -(grad / total if reduction == _MEAN else grad)
    grad = grad if weight is None else grad * _weights(valid, classes, weight, logp.dtype)
    column = torch.where(valid, grad, 0).unsqueeze(1)
    return torch.zeros_like(logp).scatter(1, classes.unsqueeze(1), column)


def _mean(x: Any, **kwargs: Any) -> Any:
    """The sum over the count, where that rounds as the mean does, and the count is known."""
    exact = x.dim() > 1 and isinstance(x.numel(), int) and x.dtype in (torch.float32, torch.float64)
    return x.sum(**kwargs) / x.numel() if exact else NotImplemented


def _filled(number: float) -> Callable[..., Any]:
    """`new_zeros` and `new_ones`, which read no value of their first argument."""

    def parts(x: Any, size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
        return torch.full(size, number, dtype=dtype or x.dtype, device=device or x.device)

    return parts


def _split(x: Any, sizes: Any, dim: int = 0) -> Any:
    """Slices of known sizes along the last dimension. The result of `split` is no tensor."""
    width = x.shape[-1]
    each = sizes if isinstance(sizes, list | tuple) else (sizes,)
    if dim % x.dim() != x.dim() - 1 or not all(isinstance(n, int) for n in (width, *each)):
        return NotImplemented
    ends = [*range(sizes, width, sizes), width] if isinstance(sizes, int) else [*itertools.accumulate(sizes)]
    return tuple(_aten.slice.Tensor(x, dim, begin, end) for begin, end in itertools.pairwise([0, *ends]))


LOSSES: dict[Any, Callable[..., Any]] = {
    _aten.nll_loss_forward.default: _nll_forward,
    _aten.nll_loss2d_forward.default: _nll_forward,  # with words in dimension 1
    _aten.nll_loss_backward.default: _nll_backward,
    _aten.nll_loss2d_backward.default: _nll_backward,
    _aten.new_zeros.default: _filled(0.0),
    _aten.new_ones.default: _filled(1.0),
    _aten.mean.default: _mean,
}
SPLITS: dict[Any, Callable[..., Any]] = {_aten.split.Tensor: _split, _aten.split_with_sizes.default: _split}


def expand(gm: GraphModule, parts: Mapping[Any, Callable[..., Any]]) -> None:
    """Replace the operators of `parts` in `gm`, in place. A function returns `NotImplemented` to leave one."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in parts:
            _expand(gm, node, parts[node.target])


def _expand(gm: GraphModule, node: Node, parts: Callable[..., Any]) -> None:
    inputs = node.all_input_nodes
    values = [n.meta["val"] for n in inputs]

    def function(*args: Any) -> Any:
        known = dict(zip(inputs, args, strict=True))
        own, named = map_arg((node.args, node.kwargs), known.__getitem__)
        return parts(*own, **named)

    mode = next(v for v in values if isinstance(v, torch.Tensor)).fake_mode  # type: ignore[attr-defined]
    with torch_values.tracing_on_fakes(mode), torch_values.python_dispatcher():
        if function(*values) is NotImplemented:
            return
        traced = make_fx(function)(*values)
    made: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with gm.graph.inserting_before(node):
        results: Any = gm.graph.graph_copy(traced.graph, made)
    for user in list(node.users) if isinstance(results, list | tuple) else [node]:
        own = results[user.args[1]] if user.target is operator.getitem else results
        own.meta = user.meta | {"val": own.meta["val"]}
        user.replace_all_uses_with(own)
        if user is not node:
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)
