"""What is decided, and that both graphs still compute the same: views of one storage, scopes, rows that add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import EXACT, FLOAT8, HALF, Pair, by_hand, capture, inputs, ops, outputs, text
from torch.fx import Graph, GraphModule

from aot_hooks import KEEP, Hook, SavedTensor

pytestmark = pytest.mark.core

FLAT_HALF = Hook("flat half", lambda x: (x.reshape(-1).half(), x.shape, x.dtype), lambda p: p[0].to(p[2]).view(p[1]))

# --- views of one storage --------------------------------------------------------------------------------------------


def views_pair(*views: Any) -> Pair:
    """A forward that saves some views of one 4x6 intermediate, and a backward that reads all of them."""

    def forward(x: torch.Tensor) -> Any:
        y = x * 2
        return (y.sin(), *(view(y) for view in views))

    def backward(*args: torch.Tensor) -> Any:
        *saved, g = args
        grads = [(s.cos() * (i + 1)).sum() for i, s in enumerate(saved)]
        return (g * sum(grads), *(s + 1 for s in saved))

    return by_hand(forward, backward, torch.randn(4, 6))


VIEWS = {
    "twice": (lambda y: y.view(4, 6), lambda y: y.view(4, 6)),
    "transpose": (lambda y: y, lambda y: y.t()),
    "transpose first": (lambda y: y.t(), lambda y: y),
    "slice": (lambda y: y, lambda y: y[1:3, ::2]),
    "slice first": (lambda y: y[1:3, ::2], lambda y: y),
    "select": (lambda y: y, lambda y: y[2], lambda y: y[:, 3]),
    "flat and transpose of a slice": (lambda y: y.view(-1), lambda y: y[:, 1:4].t()),
    "expand": (lambda y: y, lambda y: y[:1].expand(4, 6)),
    "unsqueezed": (lambda y: y[None], lambda y: y[:, None, :]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_one_storage_are_packed_once(name: str) -> None:
    pair = views_pair(*VIEWS[name])
    x = torch.randn(4, 6)
    expected = pair.copy().run(x)
    pair.apply(EXACT)
    assert len(pair.packed) == 1, "one packing crosses"
    torch.testing.assert_close(pair.run(x), expected, rtol=0, atol=0)
    assert pair.plan is not None
    assert pair.plan.saved_bytes == 96 and pair.plan.packed_bytes == 96


@pytest.mark.parametrize("name", VIEWS)
def test_views_come_back_from_a_lossy_hook_as_one_tensor(name: str) -> None:
    pair = views_pair(*VIEWS[name])
    x = torch.randn(4, 6)
    pair.apply(HALF)
    rounded = views_pair(*(lambda y, v=v: v(y.half().float()) for v in VIEWS[name]))
    assert pair.plan is not None and pair.plan.packed_bytes == 48
    _, grads = pair.run(x)
    _, wanted = rounded.run(x)
    torch.testing.assert_close(grads, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "views",
    [
        (lambda y: y[:2], lambda y: y[1:]),  # neither covers the other
        (lambda y: y[:, :3], lambda y: y[:, 3:]),
    ],
)
def test_views_that_do_not_cover_one_another_still_compute_the_same(views: Any) -> None:
    pair = views_pair(*views)
    x = torch.randn(4, 6)
    expected = pair.copy().run(x)
    pair.apply(EXACT)
    torch.testing.assert_close(pair.run(x), expected, rtol=0, atol=0)


def test_views_by_operators_that_count_from_the_start_of_a_storage_stay() -> None:
    """Unpacking makes another storage, where `as_strided` would read by the strides of the trace."""
    pair = views_pair(lambda y: y, lambda y: y.as_strided((6, 4), (1, 6)))
    x = torch.randn(4, 6)
    expected = pair.copy().run(x)
    pair.apply(EXACT)
    torch.testing.assert_close(pair.run(x), expected, rtol=0, atol=0)
    reasons = [d.reason for d in pair.plan.decisions if d.hook is KEEP]  # type: ignore[union-attr]
    assert len(reasons) == 2 and all("which it is no view of by operators that can run again" in r for r in reasons)


def test_the_source_of_all_views_is_packed_if_none_is_saved() -> None:
    pair = views_pair(lambda y: y.unflatten(1, (2, 3)).transpose(1, 2), lambda y: y.unflatten(1, (2, 3))[None])
    x = torch.randn(4, 6)
    expected = pair.copy().run(x)
    pair.apply(HALF)
    (packed,) = pair.packed
    assert packed.meta["val"].shape == (4, 6) and "aten.as_strided.default" not in ops(pair.bw)
    torch.testing.assert_close(pair.run(x), expected, rtol=1e-2, atol=1e-2)


def test_a_view_of_a_split_is_split_again() -> None:
    def forward(x: torch.Tensor) -> Any:
        y = x * 2
        part = y.split(3, 1)[1]
        return y.sin(), y, part.t(), part

    x = torch.randn(4, 6)
    pair = by_hand(forward, lambda y, turned, part, g: (g * y, turned + 1, part + 2), x)
    expected = pair.copy().run(x)
    pair.apply(EXACT)
    assert len(pair.packed) == 1 and ops(pair.bw).count("aten.split.Tensor") == 2
    torch.testing.assert_close(pair.run(x), expected, rtol=0, atol=0)


def test_a_view_of_what_the_user_gets_stays() -> None:
    pair = by_hand(lambda x: ((y := x * 2), y.t()), lambda s, g: (g * s.t(),), torch.randn(3, 4))
    pair.apply(HALF)
    assert "aten._to_copy.default" not in ops(pair.fw)
    (decision,) = pair.plan.decisions  # type: ignore[union-attr]
    assert decision.hook is KEEP and decision.reason == "an output of the graph" and decision.saved.is_output


@pytest.mark.parametrize("swapped", [False, True])
def test_a_view_that_is_only_compared_leaves_the_other_its_numbers(swapped: bool) -> None:
    """The comparison's bits stand for one view. The other comes back from the hook, as if it were alone."""
    order = slice(None, None, -1 if swapped else 1)

    def forward(x: torch.Tensor) -> Any:
        y = x * 2
        return (y.sin(), *(y, y.t())[order])

    def backward(*args: torch.Tensor) -> Any:
        *saved, g = args
        y, transposed = saved[order]
        return (y > 0.5) * g, transposed.t() * g

    x = torch.randn(64, 64)
    pair = by_hand(forward, backward, x)
    _, (compared, product) = pair.copy().run(x)
    _, grads = pair.apply(replace(HALF, lossy=True)).run(x)
    torch.testing.assert_close(grads[0], compared, rtol=0, atol=0)
    torch.testing.assert_close(grads[1], product, rtol=1e-3, atol=1e-3)
    assert not torch.equal(grads[1], product)


def test_each_view_has_the_hook_that_a_policy_chose_for_it() -> None:
    def policy(saved: SavedTensor) -> Hook:
        return EXACT if saved.shape == (6, 4) else HALF

    pair = views_pair(*VIEWS["transpose"])
    x = torch.randn(4, 6)
    _, (_, y, transposed) = pair.copy().run(x)
    _, grads = pair.apply(policy).run(x)
    assert torch.equal(grads[2], transposed) and not torch.equal(grads[1], y)
    assert [d.hook for d in pair.plan.decisions] == [HALF, EXACT]  # type: ignore[union-attr]


def test_one_view_that_must_stay_keeps_all() -> None:
    def policy(saved: SavedTensor) -> Hook:
        return KEEP if saved.shape == (6, 4) else HALF

    pair = views_pair(*VIEWS["transpose"]).apply(policy)
    assert "aten._to_copy.default" not in ops(pair.fw)
    assert "shares its storage" in pair.plan.decisions[0].reason  # type: ignore[union-attr]


# --- what is decided -------------------------------------------------------------------------------------------------


def test_scopes() -> None:
    def packed(scope: str) -> list[str]:
        pair = by_hand(
            lambda w, x: ((y := x @ w), y.sin(), w, x, y, y.sin().cos()),
            lambda w, x, y, c, g, h: (g @ w.t(), x.t() @ h, y * c),
            torch.randn(4, 4),
            torch.randn(4, 4),
            num_fwd_outputs=2,
        )
        pair.apply(HALF, scope=scope, static_inputs=[0])
        return [d.saved.name for d in pair.plan.decisions if d.hook is HALF]  # type: ignore[union-attr]

    assert packed("donated") == ["cos"]
    assert packed("no_static") == ["x_1", "mm", "cos"]
    assert packed("all") == ["w_1", "x_1", "mm", "cos"]


def test_identity_hook_changes_nothing() -> None:
    pair = views_pair(lambda y: y)
    was = text(pair.fw, pair.bw)
    pair.apply(Hook("as it is", lambda x: x, lambda p: p))
    assert text(pair.fw, pair.bw) == was
    (decision,) = pair.plan.decisions  # type: ignore[union-attr]
    assert decision.hook is KEEP and decision.packed_bytes == decision.saved_bytes == 96


def test_graphs_without_a_hook_in_force_are_left() -> None:
    pair = views_pair(lambda y: y)
    was = text(pair.fw, pair.bw)
    pair.apply(None)
    assert text(pair.fw, pair.bw) == was


def test_no_dead_inputs_are_left() -> None:
    pair = views_pair(*VIEWS["select"]).apply(HALF)
    assert all(n.users for n in inputs(pair.bw))
    assert len(outputs(pair.bw)) == 4


@pytest.mark.parametrize(
    ("hook", "dynamic"), [(HALF, False), (FLOAT8, True), (FLAT_HALF, False), (EXACT, False), (FLAT_HALF, True)]
)
def test_rows_add_up(hook: Hook, dynamic: bool) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Softmax(-1))
    _, after = capture(
        lambda x: layer(x).sum() + x.t().contiguous().exp().sum(),
        torch.randn(4, 8, requires_grad=True),
        hook=hook,
        dynamic=dynamic,
    )
    plan = after.plan
    assert plan is not None and len(plan.decisions) >= 3
    assert plan.saved_bytes == sum(d.saved_bytes for d in plan.decisions) > 0
    assert plan.packed_bytes == sum(d.packed_bytes for d in plan.decisions) > 0
    # against what the forward graph really returns
    storages = {}
    user = {n.meta["val"].untyped_storage()._cdata for n in inputs(after.fw) if isinstance(n.meta["val"], torch.Tensor)}
    for node in after.saved:
        if isinstance(node.meta["val"], torch.Tensor):
            storage = node.meta["val"].untyped_storage()
            storages[storage._cdata] = int(storage.nbytes())
    assert plan.packed_bytes == sum(n for key, n in storages.items() if key not in user)


def test_graphs_that_are_empty_are_left() -> None:
    empty = Graph()
    empty.output(())
    pair = Pair(GraphModule({}, empty), _empty(), 0).apply(HALF)
    assert pair.plan is not None and pair.plan.decisions == ()


def _empty() -> GraphModule:
    graph = Graph()
    graph.output(())
    return GraphModule({}, graph)
