"""`offload(across_graphs=True)` under Inductor: who else may hold, or write to, the memory of a tensor that stays."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from offloading import copies, stack  # noqa: F401
from test_across_graphs import HOOK, RATES, by_blocks, clock, step  # noqa: F401

import aot_hooks
from aot_hooks.errors import UnusedWarning
from aot_hooks.offloading import at_run_time, placement
from aot_hooks.torch_private import inductor


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def compiled(f: Any, hook: aot_hooks.Hook, **options: Any) -> Any:
    return torch.compile(f, backend="aot_hooks", options={"policy": hook, "scope": "all", **options})


@pytest.mark.slow
def test_products_that_inductor_writes_into_their_cat() -> None:
    """Three saved values in one memory: the backward wrote over the cat before it read the products."""
    ws = [torch.randn(16, 16, requires_grad=True) for _ in range(3)]

    def f(x: torch.Tensor) -> torch.Tensor:
        m1, m2 = x @ ws[0], x @ ws[1]
        both = torch.cat([m1, m2])
        return (torch.cat([m1.sin(), m2.sin()]) @ ws[2] * both).mean()

    g = compiled(f, HOOK)
    for _ in range(5):
        x = 0.3 * torch.randn(64, 16)
        for a, b in zip(torch.autograd.grad(g(x), ws), torch.autograd.grad(f(x), ws), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_pack_that_copies_what_the_caller_has() -> None:
    """Inductor drops a copy that is no output: the backward then wrote over the caller's output."""
    weight = torch.randn(16, 16, requires_grad=True)
    copied = aot_hooks.Hook("copied", lambda x: x.clone(), lambda packed: packed)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).tanh()

    g = compiled(f, aot_hooks.offload(0, copied, rates=RATES, across_graphs=True))
    for _ in range(5):
        x = torch.randn(64, 16)
        expected, y = f(x.clone()), g(x)
        (grad,) = torch.autograd.grad(y.sum(), weight)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(grad, *torch.autograd.grad(expected.sum(), weight))


@pytest.mark.parametrize("name", ["clone", "_to_copy", "cat"])
def test_a_copy_of_an_input_may_be_the_input(name: str) -> None:
    makes = {
        "clone": torch.clone,
        "_to_copy": lambda x: x.to(torch.float32, copy=True),
        "cat": lambda x: torch.cat([x]),
    }
    gm = torch.fx.experimental.proxy_tensor.make_fx(lambda x: (makes[name](x).view(-1), x * 2))(torch.randn(4))
    seen, doubled = gm.graph.output_node().args[0]
    has_own_memory = placement._own_memory(gm)
    assert has_own_memory(doubled)
    assert not has_own_memory(seen)


def test_all_that_inductor_drops_is_known() -> None:
    """A new torch that drops more fails here: see `placement._memories`."""
    from torch._inductor.fx_passes import post_grad

    registry = getattr(post_grad, "noop_registry", None)
    assert registry, "Inductor's table of what it may drop has moved"
    views = {"view", "reshape", "expand", "permute", "unsqueeze", "squeeze"}
    dropped = {str(op.overloadpacket).split(".")[-1] for op in registry if hasattr(op, "overloadpacket")}
    assert dropped - views <= placement._MAY_BE_DROPPED


def test_parts_of_a_cat_share_its_memory() -> None:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        a, b = x.sin(), x.cos()
        return [a, torch.cat([a, b]), b * 2]

    gm = torch.fx.experimental.proxy_tensor.make_fx(f)(torch.randn(4))
    has_own_memory = placement._own_memory(gm)
    assert [has_own_memory(node) for node in gm.graph.output_node().args[0]] == [False, False, True]


def test_a_tensor_that_is_part_of_some_memory_is_copied() -> None:
    whole = torch.randn(8, 8)
    given = [whole.view(64), whole[2:4], whole, torch.empty(0), torch.empty(0)]
    kept = at_run_time._in_own_memory(given)
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
    assert kept[0] is given[0], "whole, and the first in its memory"
    assert len({x.untyped_storage().data_ptr() for x in kept[:3]}) == 3


def test_operators_take_at_most_what_may_be_in_flight() -> None:
    gm = torch.fx.experimental.proxy_tensor.make_fx(lambda *xs: [x + 1 for x in xs])(*[torch.randn(256)] * 40)
    pairs = [(node, node) for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)]

    def lengths(most_bytes: int) -> list[int]:
        return [len(part) for part in placement._parts(pairs, operator.itemgetter(0), most_bytes)]

    assert lengths(1 << 30) == [16, 16, 8]
    assert lengths(3 * 1024) == [3] * 13 + [1]
    assert lengths(100) == [1] * 40


def test_a_large_operator_takes_no_tensor_that_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = torch.fx.experimental.proxy_tensor.make_fx(lambda *xs: [x + 1 for x in xs])(*[torch.randn(256)] * 12)
    pairs = [(node, node) for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)]
    places = dict(zip((node for node, _ in pairs), [pairs[i][0] for i in [2] * 3 + [5] * 3 + [11] * 6], strict=True))
    monkeypatch.setattr(placement, "_PART_BYTES", 4 * 1024)
    parts = placement._parts(pairs, lambda pair: places[pair[0]], 1 << 30)
    assert [len(part) for part in parts] == [6, 6], "a kilobyte each: the first three are too few to be a part"


@pytest.mark.filterwarnings("error::aot_hooks.errors.UnusedWarning")
def test_a_warning_that_is_an_error_leaves_nothing_behind() -> None:
    slow = aot_hooks.Rates(to_host=1e3, to_device=1e3, memory=1e15, operations=1e18, operations32=1e18)
    hooked, x = by_blocks(aot_hooks.offload(0, rates=slow, across_graphs=True)), torch.randn(64, 16)
    for _ in range(3):
        step(hooked, x)
    with pytest.raises(UnusedWarning, match="sends none of its"):
        step(hooked, x)
    torch._dynamo.reset()
    other = by_blocks(HOOK)
    for _ in range(6):
        step(other, x)
    assert aot_hooks.offload_stats()["sent_count"] > 0, "a step of another model is planned"


def test_code_in_cpp_goes_by_the_plan_of_its_graph() -> None:
    assert inductor.copies_are_static({"cpp_wrapper": True})
    assert not inductor.copies_are_static({})
    with warnings.catch_warnings(), torch._inductor.config.patch(cpp_wrapper=True):
        assert inductor.copies_are_static({})
        assert not inductor.copies_are_static({"cpp_wrapper": False})
