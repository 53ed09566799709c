"""Ranges of whole numbers, as the graph proves them and as the operators really give them."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aot_hooks.graphs.value_ranges import value_range

aten = torch.ops.aten


def found(fn, *args, mode="fake"):
    """The range of the result of `fn`, and the result."""
    gm = make_fx(fn, tracing_mode=mode)(*args)
    node = gm.graph.output_node().args[0]
    return value_range(node), fn(*args)


def odd(x):
    """NaN, -0.0, infinities and numbers."""
    return torch.cat([x.log().flatten(), -x.clamp(min=0).flatten(), -1 / x.clamp(max=0).flatten()])


X = torch.randn(5, 7, 40, 30, generator=torch.Generator().manual_seed(0))
INTEGERS = torch.arange(-500, 500)
MASK = torch.arange(1000) % 3 == 0

PROVEN = {
    "max_pool2d": (lambda x, i, m: aten.max_pool2d_with_indices(x, [2, 2])[1], (0, 1199)),
    "max_pool2d, flat": (
        lambda x, i, m: aten.max_pool2d_with_indices(x, [2, 2])[1].flatten(2).transpose(1, 2),
        (0, 1199),
    ),
    "max_pool2d, padded": (lambda x, i, m: aten.max_pool2d_with_indices(x, [3, 3], [1, 1], [1, 1])[1], (0, 1199)),
    "max_pool3d": (lambda x, i, m: aten.max_pool3d_with_indices(x, [2, 2, 2])[1], (0, 8399)),
    "adaptive_max_pool2d": (lambda x, i, m: aten.adaptive_max_pool2d(x, [3, 4])[1], (0, 1199)),
    "adaptive_max_pool3d": (lambda x, i, m: aten.adaptive_max_pool3d(x, [3, 4, 5])[1], (0, 8399)),
    "argmax": (lambda x, i, m: x.argmax(-1), (0, 29)),
    "argmax of all": (lambda x, i, m: x.argmax(), (0, 41999)),
    "argmin": (lambda x, i, m: x.argmin(1), (0, 6)),
    "max": (lambda x, i, m: x.max(2)[1], (0, 39)),
    "min": (lambda x, i, m: x.min(-2)[1], (0, 39)),
    "topk": (lambda x, i, m: x.topk(3)[1], (0, 29)),
    "topk of rows": (lambda x, i, m: x.topk(3, 2)[1], (0, 39)),
    "sort": (lambda x, i, m: x.sort()[1], (0, 29)),
    "sort of rows": (lambda x, i, m: x.sort(2)[1], (0, 39)),
    "stable sort": (lambda x, i, m: x.sort(dim=1, stable=True)[1], (0, 6)),
    "argsort": (lambda x, i, m: x.argsort(2), (0, 39)),
    "median": (lambda x, i, m: x.median(2)[1], (0, 39)),
    "nanmedian": (lambda x, i, m: x.nanmedian(2)[1], (0, 39)),
    "mode": (lambda x, i, m: x.mode()[1], (0, 29)),
    "kthvalue": (lambda x, i, m: x.kthvalue(3, 1)[1], (0, 6)),
    "cummax": (lambda x, i, m: x.cummax(2)[1], (0, 39)),
    "of a number": (lambda x, i, m: x[0, 0, 0, 0].max(0)[1].expand(4), (0, 0)),
    "of bytes": (lambda x, i, m: i.to(torch.uint8).to(torch.int64), (0, 255)),
    "of bools": (lambda x, i, m: m.to(torch.int64), (0, 1)),
    "of bools, floating point": (lambda x, i, m: m.to(torch.bfloat16), (0, 1)),
    "gathered": (lambda x, i, m: x.argmax(-1)[m.to(torch.int64)[:5]], (0, 29)),
    "sign": (lambda x, i, m: odd(x).sign(), (-1, 1)),
    "sgn of a few": (lambda x, i, m: odd(x[0, 0, 0, :3]).bfloat16().sgn(), (-1, 1)),
}


@pytest.mark.core
@pytest.mark.parametrize(("fn", "expected"), PROVEN.values(), ids=PROVEN)
def test_what_the_graph_proves(fn, expected):
    proven, result = found(fn, X, INTEGERS, MASK)
    assert proven == expected
    assert expected[0] <= result.min() and result.max() <= expected[1]
    assert torch.equal(result, result.round()) and not torch.signbit(result.float()[result == 0]).any()


NOT_PROVEN = {
    "an argument": lambda i, x: i + 0,
    "a conversion that may wrap around": lambda i, x: x.expand(300, 8).argmax(0).to(torch.int8),
    "a conversion of any number": lambda i, x: x.to(torch.int64),
    "large floating-point numbers": lambda i, x: x.expand(300, 8).argmax(0).to(torch.bfloat16),
    "the sign of a complex number": lambda i, x: torch.complex(x, x).sgn(),
    "values, not indices": lambda i, x: i.view(10, 100).max(0)[0],
    "a sum of indices": lambda i, x: x.argmax(0, keepdim=True) + x.argmin(0, keepdim=True),
}


@pytest.mark.core
@pytest.mark.parametrize("fn", NOT_PROVEN.values(), ids=NOT_PROVEN)
def test_what_it_does_not_prove(fn):
    proven, _ = found(fn, INTEGERS, torch.randn(8))
    assert proven is None


def test_a_dilated_window_may_start_past_the_end():
    """With one row, padding 1 and dilation 2 the only window starts at row 1 of 1: the kernel's index is past."""
    x = torch.randn(1, 1, 1, 9)
    proven, result = found(lambda x: aten.max_pool2d_with_indices(x, [2, 2], [1, 1], [1, 1], [2, 2])[1], x)
    assert proven == (0, 1 * 9 + 8)
    assert 9 <= result.max() <= proven[1]


def test_symbolic_sizes_count_as_the_largest_that_the_graph_admits():
    def argmax(x, most=None):
        if most is not None:
            torch._check(x.shape[0] <= most)
        return x.argmax(0)

    assert found(lambda x: argmax(x), torch.randn(12, 3), mode="symbolic")[0] is None
    assert found(lambda x: argmax(x, 300), torch.randn(12, 3), mode="symbolic")[0] == (0, 299)
