"""Memory order: found where a tensor has one, None where it has none, without a guard."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from aot_hooks.graphs.layout import from_memory_order, in_layout, in_memory_order, laid_out, layout_of


def strides_that_count(x: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1]


@pytest.mark.core
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_any_order_of_leading_dimensions_is_found(order):
    x = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    x = x.permute(*order, 3)
    y, permutation = in_memory_order(x)
    assert y.is_contiguous() and y.data_ptr() == x.data_ptr()
    assert (permutation is None) == (order == (0, 1, 2))
    back = from_memory_order(y, permutation)
    assert torch.equal(back, x) and back.stride() == x.stride()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3]), min_size=0, max_size=5), st.randoms(use_true_random=False))
def test_dense_tensors_of_any_shape(sizes, random):
    order = list(range(max(len(sizes) - 1, 0)))
    random.shuffle(order)
    if sizes:
        order.append(len(sizes) - 1)
    x = torch.randn(sizes).permute(order)
    # a stride of size 1 may be anything
    odd = [random.choice([0, 1, 7]) if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    x = x.as_strided(x.shape, odd)
    y, permutation = in_memory_order(x)
    assert y.is_contiguous()
    fresh = y.clone()  # as an unpack allocates it
    back = from_memory_order(fresh, permutation)
    assert torch.equal(back, x) and strides_that_count(back) == strides_that_count(x)


@pytest.mark.core
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 4).transpose(1, 2),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(2, 3, 4)[:, :2],
        torch.randn(3, 2, 8)[..., ::2].transpose(0, 1),
        torch.randn(3, 1, 4).expand(3, 2, 4).transpose(0, 1),
        torch.randn(10).as_strided((2, 3, 4), (1, 2, 1)),
    ],
    ids=["matrix", "last", "channels_last", "gap", "step", "expanded", "overlap"],
)
def test_no_order_is_made_up(x):
    y, permutation = in_memory_order(x)
    assert y is x and permutation is None


@pytest.mark.core
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (7,), (3, 4), (1, 1, 1)])
def test_what_is_contiguous_stays_as_it_is(shape):
    x = torch.empty(shape)
    y, permutation = in_memory_order(x)
    assert y is x and permutation is None
    assert from_memory_order(y, None) is x


@pytest.mark.core
def test_symbolic_sizes_leave_no_guard():
    seen = []

    def backend(gm, inputs):
        x = gm.graph.find_nodes(op="placeholder")[-1].meta["example_value"]
        env = x.fake_mode.shape_env
        before = len(env.guards)
        y, permutation = in_memory_order(x.transpose(1, 2))
        seen.append((permutation, tuple(y.shape) == tuple(x.shape), len(env.guards) - before))
        # not known to be contiguous: an order must not be guessed from the example
        unknown = x.as_strided(x.shape, (x.shape[1] * x.shape[2] * x.shape[3], x.shape[2] * 12, x.shape[3], 1))
        assert in_memory_order(unknown) == (unknown, None)
        return gm.forward

    x = torch.randn(2, 3, 5, 12)
    torch.compile(lambda x: x.sin(), backend=backend, dynamic=True)(x)
    ((permutation, same, guards),) = seen
    assert permutation == (0, 2, 1, 3) and same
    assert guards == 0


LAYOUTS = {
    "contiguous": lambda: torch.randn(2, 3, 4),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "gaps": lambda: torch.randn(4, 6, 5)[1:3, ::2, :4],
    "gaps, transposed": lambda: torch.randn(4, 6)[:, :3].t(),
    "expanded": lambda: torch.randn(2, 1, 4).expand(2, 3, 4).transpose(0, 2),
    "gaps, size 1": lambda: torch.randn(4, 3, 5)[:, :1].transpose(0, 1),
    "overlap": lambda: torch.randn(10).unfold(0, 4, 2),
    "empty": lambda: torch.randn(3, 4)[:, :0],
    "one value": lambda: torch.randn(3, 4)[1:2, 2:3],
}


@pytest.mark.core
@pytest.mark.parametrize("name", LAYOUTS)
def test_real_strides_come_back(name):
    x = LAYOUTS[name]()
    layout = layout_of(x)
    assert layout.numel() == 0 and layout.untyped_storage().nbytes() == 0
    y = in_layout(x.clone(memory_format=torch.contiguous_format), layout, True)
    assert torch.equal(y, x) and y.stride() == x.stride()
    assert in_layout(y, layout, True) is y, "what has these strides is no copy"
    dense = in_layout(x.clone(memory_format=torch.contiguous_format), layout, False)
    assert torch.equal(dense, x)
    if "gaps" not in name and name != "overlap":
        assert dense.stride() == x.stride()
    assert dense.untyped_storage().nbytes() <= x.numel() * x.element_size()


@pytest.mark.core
def test_a_tensor_is_copied_only_into_a_layout_that_it_does_not_have():
    x = torch.randn(4, 3, 2).permute(2, 0, 1)
    assert laid_out(x, (1, 2, 0), None) is x and laid_out(x, (1, 2, 0), x.stride()) is x
    y = laid_out(x, (0, 1, 2), None)
    assert y.is_contiguous() and torch.equal(y, x)
    one = torch.randn(5, 1, 3)[:, :, ::3]  # any stride of a size of 1 is a view
    y = laid_out(one, (0, 1, 2), (3, 7, 1))
    assert y.stride() == (3, 7, 1) and y.data_ptr() == one.data_ptr()
    z = torch.randn(2, 3, dtype=torch.complex64).conj()
    y = laid_out(z, (1, 0), (1, 2))
    assert y.is_conj() and y.stride() == (1, 2) and torch.equal(y, z)
