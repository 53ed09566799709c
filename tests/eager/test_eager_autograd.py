"""Autograd's own rules hold under hooks in eager code: in-place checks, retained graphs, derivatives, lifetimes."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sentinel import Chain, assert_same, compiled, gradients, hand_gradients, integers, quadruple, scale
from torch import Tensor, nn

from aot_hooks import Hook, saved_tensors_hooks, saved_tensors_policy
from aot_hooks.errors import HookContractError

# --- autograd's own rules --------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("hooked", [False, True], ids=["stock", "hooks"])
def test_a_kept_tensor_changed_in_place_raises_as_in_stock(hooked: bool) -> None:
    x, w = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True)
    with saved_tensors_hooks(*quadruple) if hooked else torch.enable_grad():
        y = (x @ w).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_an_output_changed_in_place_raises_as_in_stock() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    x = torch.randn(4, 3, requires_grad=True)
    with saved_tensors_hooks(*quadruple):
        out = Model()(x * 2)
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_packed_tensor_may_change_later() -> None:
    """Kinder than autograd without hooks, and equal to torch's own hooks: the packed tensor is a copy."""
    x, w = integers(4, 3).requires_grad_(), integers(3, 2).requires_grad_()
    with saved_tensors_hooks(*scale(4)):
        h = x * 2
        y = (h @ w).sum()
    h.detach().zero_()
    (got,) = torch.autograd.grad(y, w)
    assert torch.equal(got, 4 * (x.detach() * 2).T @ torch.ones(4, 2))


def doubles(p: Tensor) -> Tensor:
    return p.mul_(2)


def doubles_a_view_in_a_dict(p: dict[str, Tensor]) -> Tensor:
    p["packed"].t().mul_(2)
    return p["packed"].clone()


def pops(p: list[Tensor]) -> Tensor:
    return p.pop() * 2


def doubles_past_autograd(p: Tensor) -> Tensor:
    p.data.mul_(2)
    return p.clone()


def doubles_by_numpy(p: Tensor) -> Tensor:
    array = p.numpy()
    array *= 2
    return p.clone()


WRITERS = {
    "in place": (lambda x: x.clone(), doubles),
    "past autograd": (lambda x: x.clone(), doubles_past_autograd),
    "in place, a view": (lambda x: {"packed": x.clone()}, doubles_a_view_in_a_dict),
}


@pytest.mark.core
@pytest.mark.parametrize("eager_hook", [False, True], ids=["eager", "around a graph"])
@pytest.mark.parametrize("writer", WRITERS)
def test_an_unpack_that_writes_to_what_was_packed_is_right_once(
    model: Chain, x: Tensor, writer: str, eager_hook: bool
) -> None:
    """In a graph it is right each time: there it is traced, and made functional."""
    call = compiled(model) if eager_hook else model
    leaves = [x, *model.parameters()]
    with saved_tensors_hooks(Hook("writer", *WRITERS[writer], eager=eager_hook)):
        out = call(x).sum()
    assert_same(list(torch.autograd.grad(out, leaves, retain_graph=True)), hand_gradients(model, x, h=2))
    with pytest.raises(HookContractError, match=r"hook 'writer' .*unpack '.*' .*changed what was packed in place"):
        torch.autograd.grad(out, leaves)
    with saved_tensors_hooks(Hook("writer", *WRITERS[writer])):
        out = compiled(model)(x).sum()
    for _ in range(2):
        assert_same(list(torch.autograd.grad(out, leaves, retain_graph=True)), hand_gradients(model, x, h=2))


@pytest.mark.parametrize("write", [doubles, doubles_past_autograd, doubles_by_numpy])
def test_a_pack_that_writes_to_its_input_is_refused(model: Chain, x: Tensor, write: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        h = x @ model.weights[0]
        return h @ model.weights[1] + h.sum()

    pytest.importorskip("numpy")
    with pytest.raises(HookContractError, match=r"hook 'writer' .*pack '.*' .*mutates its input in place"):
        with saved_tensors_hooks(Hook("writer", write, lambda p: p), scope="all"):
            forward(x)
    if write is not doubles_by_numpy:  # which can't be traced
        with pytest.raises(
            torch._dynamo.exc.BackendCompilerFailed, match=r"hook 'writer' .*pack '.*' .*mutates its input"
        ):
            with saved_tensors_hooks(Hook("writer", write, lambda p: p), scope="all"):
                compiled(forward)(x)


@pytest.mark.core
def test_an_unpack_may_take_containers_apart(model: Chain, x: Tensor, wrap: Any) -> None:
    with saved_tensors_hooks(lambda x: [x.clone()], pops):
        out = wrap(model)(x).sum()
    for _ in range(2):
        got = list(torch.autograd.grad(out, [x, *model.parameters()], retain_graph=True))
        assert_same(got, hand_gradients(model, x, h=2))


def test_retain_graph(model: Chain, x: Tensor) -> None:
    with saved_tensors_hooks(*quadruple):
        out = model(x).sum()
    leaves = [x, *model.parameters()]
    for _ in range(3):
        assert_same(list(torch.autograd.grad(out, leaves, retain_graph=True)), hand_gradients(model, x, h=4))


@pytest.mark.core
def test_second_derivatives() -> None:
    """Exact hooks leave them exact: the unpacked tensor stays connected to the graph."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x * x
            return (h * h).sin().sum()

    def second(hooked: bool) -> Tensor:
        x = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
        with saved_tensors_hooks(lambda x: x.clone(), lambda x: x) if hooked else torch.enable_grad():
            (g,) = torch.autograd.grad(Model()(x), x, create_graph=True)
            (gg,) = torch.autograd.grad(g.sum(), x)
        return gg

    assert torch.equal(second(True), second(False))


def test_anomaly_mode_and_gradcheck() -> None:
    w = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor, w: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda x: (x * 2, 2), lambda p: p[0] / p[1]):
            return torch.tanh(x @ w) @ w.T

    with torch.autograd.detect_anomaly(check_nan=True):
        assert torch.autograd.gradcheck(f, (x, w))


# --- memory ----------------------------------------------------------------------------------------------------------


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.intermediate: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        self.intermediate = weakref.ref(h.untyped_storage())
        return (h * h).sum()


@pytest.mark.core
@pytest.mark.parametrize("end", ["backward", "drop"])
def test_nothing_outlives_the_graph(end: str) -> None:
    """By reference counts alone: no cycle keeps a packed tensor until the next collection."""
    packed: list[Any] = []

    def pack(x: Tensor) -> Tensor:
        y = x * 1
        packed.append(weakref.ref(y))
        return y

    gc.collect()
    gc.disable()
    try:
        with saved_tensors_hooks(Hook("watched", pack, lambda x: x, eager=True)):
            loss = Square()(torch.randn(4, requires_grad=True))
        assert len(packed) == 1 and packed[0]() is not None
        if end == "backward":
            loss.backward()
        else:
            del loss
        assert packed[0]() is None
    finally:
        gc.enable()


@pytest.mark.core
def test_the_tensor_itself_is_gone_once_it_is_packed() -> None:
    sizes: list[int] = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            alive = weakref.ref(h)
            y = h * h
            del h
            y = y * 3
            sizes.append(alive() is None)
            return y

    with saved_tensors_hooks(lambda x: x.half(), lambda x: x.float()):
        out = Watch()(torch.randn(4999, requires_grad=True))  # of a size that no other test leaves behind
    tensors = [o for o in gc.get_objects() if type(o) is Tensor and o.shape == (4999,) and o.dtype == torch.float32]
    assert sizes == [True]
    assert len([t for t in tensors if t is not out]) <= 1  # the leaf may live, the intermediate must not
    out.sum().backward()


def test_no_cycles_left_for_the_collector(model: Chain, x: Tensor) -> None:
    def step() -> None:
        with saved_tensors_hooks(*quadruple):
            gradients(model, model, x)

    step()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(20):
            step()
        assert len(gc.get_objects()) - before < 200
    finally:
        gc.enable()


@pytest.mark.core
@pytest.mark.parametrize("scope", ["donated", "no_static", "all"])
@pytest.mark.parametrize(
    ("pack", "unpack"),
    [(lambda x: x, lambda p: p), (lambda x: (x.view(-1), 1), lambda p: p[0].view(4, 4))],
    ids=["its argument", "a view"],
)
def test_a_write_to_what_pack_returned_as_it_was_is_an_error(pack, unpack, scope):
    """As without hooks: pack has made no copy."""
    x = torch.randn(4, 4, requires_grad=True)
    with saved_tensors_hooks(pack, unpack, scope=scope):
        a = x * 2
        b = a * a
        a.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            b.sum().backward()


# --- a tensor that is saved again ------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_write_through_data_between_two_saves_is_seen() -> None:
    """An optimizer of one's own, weight clipping: autograd counts no version for a write through `.data`."""
    w, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    h = w * 2
    with saved_tensors_hooks(lambda t: t.clone(), lambda p: p):
        a = x * h
        h.data.mul_(3)
        b = x * h
    assert torch.autograd.grad(a.sum(), x)[0].tolist() == [2.0] * 3
    assert torch.autograd.grad(b.sum(), x)[0].tolist() == [6.0] * 3


def test_a_context_entered_anew_packs_with_the_hooks_new_value() -> None:
    w, number = torch.ones(3, requires_grad=True), SimpleNamespace(k=2.0)
    h = w * 2
    pack, unpack = (lambda x: x * number.k), (lambda p: p / number.k)
    outs = []
    for number.k in (2.0, 4.0):
        with saved_tensors_hooks(pack, unpack):
            outs.append(h * h)
    assert torch.autograd.grad(outs[1].sum(), w)[0].tolist() == [8.0] * 3


@dataclasses.dataclass
class Divided:
    by: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return x / self.by


def test_equal_hooks_of_a_policy_pack_once_for_an_operator() -> None:
    packed = []

    def pack(x: Tensor) -> Tensor:
        packed.append(tuple(x.shape))
        return x.clone()

    h = torch.ones(3, requires_grad=True) * 2
    with saved_tensors_policy(lambda _: Hook("h", pack, torch.clone)):
        h * h
    assert packed == [(3,)]


def test_hooks_that_cannot_be_compared() -> None:
    """Dataclasses compare their tensors element by element."""
    w = torch.ones(4, requires_grad=True)
    h, outs = w * 2, []
    for _ in range(2):
        with saved_tensors_hooks(Divided(torch.full((4,), 2.0)), lambda p: p * 2):
            outs.append(h * h)
    assert torch.autograd.grad(sum(outs).sum(), w)[0].tolist() == [16.0] * 4
