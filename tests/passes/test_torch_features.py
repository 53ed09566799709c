"""What torch can save: every case packed exactly gives the gradients it gives without hooks, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import BITS, assert_same, compiled, packed_count, step
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.testing._internal.two_tensor import TwoTensor

import aot_hooks
from aot_hooks import Hook
from aot_hooks.errors import HookTraceError, unwrapped

Tensor = torch.Tensor


def x() -> Tensor:
    return torch.randn(4, 8, requires_grad=True)


def w() -> Tensor:
    return torch.randn(8, 8, requires_grad=True)


def saved_and_returned(x: Tensor, w: Tensor) -> Any:
    y = (x @ w).exp()  # exp saves what it returns
    return y, y.sin(), ((y @ w).sin() @ w).tanh()


def two_views(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return (y.t() @ y[:, 1:5].sin()).cos() + (y.view(2, 16) @ y.view(2, 16).t()).sum()


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.add_(1)
    z = y.exp()
    return (z @ w).relu_() * y.sin()


def indices(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    order = y.argsort(-1)
    top, _ = (y @ w).topk(3)
    return y.gather(1, order).sin() @ w + top.sum() + y[:, [0, 2]].exp().sum() + y.index_select(0, order[0] % 4).sum()


def complex_numbers(x: Tensor, w: Tensor) -> Tensor:
    z = torch.complex(x @ w, x)
    return (z * z.conj().t().reshape(z.shape)).abs().sin() + torch.fft.rfft(x @ w).abs().sum()


def masks(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    mask = y > 0
    return torch.where(mask, y.sin(), y.cos()) @ w + y.masked_fill(mask, 0.5).exp() + (y @ w).relu() + y.clamp(-1, 1)


def not_finite(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y = torch.where(y > 0.5, torch.inf, y)
    return (y * -y).exp() @ w + (y.softmax(-1) @ w)


# name -> function, inputs
CASES: dict[str, tuple[Any, Any]] = {
    "one tensor": (lambda x, w: (x @ w).sin() @ w, lambda: (x(), w())),
    "saved twice": (lambda x, w: (y := x @ w) * y.exp() * (y @ w), lambda: (x(), w())),
    "saved and returned": (saved_and_returned, lambda: (x(), w())),
    "returned as it is given": (lambda x, w: (x, (x @ w).sin() @ w, w), lambda: (x(), w())),
    "views of one storage": (two_views, lambda: (x(), w())),
    "aliases": (lambda x, w: ((y := x @ w)[:].sin() @ w).cos() + y[:] * y.detach().exp(), lambda: (x(), w())),
    "tied weights": (lambda x, w: ((x @ w).sin() @ w.t()).cos() @ w, lambda: (x(), w())),
    "expanded": (lambda x, w: ((x @ w).sum(1, keepdim=True).expand(4, 8) * x).sin() @ w, lambda: (x(), w())),
    "broadcast": (lambda x, w: ((x @ w)[:, None, :] * (x @ w)[None].exp()).sin() @ w, lambda: (x(), w())),
    "transposed": (lambda x, w: ((x @ w).t() @ (x @ w).sin()).t() @ (x @ w).t().contiguous(), lambda: (x(), w())),
    "not contiguous": (lambda x, w: (x @ w)[:, ::2].exp() @ (x @ w)[:, ::2].t().sin(), lambda: (x(), w())),
    "not dense input": (lambda x, w: (x[::2, 1::2] @ w[::2]).sin() @ w, lambda: (x(), w())),
    "0-d": (lambda x, w: ((x @ w).sum().sin() * (x @ w).sum().exp()) * x, lambda: (x(), w())),
    "empty": (lambda x, w: ((x[:0] @ w).sin() @ w).sum() + (x @ w).sin(), lambda: (x(), w())),
    "masks": (masks, lambda: (x(), w())),
    "indices": (indices, lambda: (x(), w())),
    "complex": (complex_numbers, lambda: (x(), w())),
    "not finite": (not_finite, lambda: (x(), w())),
    "zeros": (lambda x, w: ((x @ w) * (y := torch.zeros_like(x)) + y).sin() @ w, lambda: (x(), w())),
    "in place": (in_place, lambda: (x(), w())),
    "input changed in place": (lambda x, w: (x.mul_(2) @ w).sin() @ w, lambda: (torch.randn(4, 8), w())),
    "float64": (
        lambda x, w: (x @ w).sin() @ w,
        lambda: (x().detach().double(), w().detach().double().requires_grad_()),
    ),
    "bfloat16": (
        lambda x, w: (x @ w).sin() @ w,
        lambda: (x().detach().bfloat16(), w().detach().bfloat16().requires_grad_()),
    ),
    "cumulative": (lambda x, w: (x @ w).cumsum(1).cumprod(0).sin() @ w, lambda: (x(), w())),
    "norms": (lambda x, w: (x @ w) / (x @ w).norm(dim=-1, keepdim=True) @ w + (x @ w).logsumexp(0), lambda: (x(), w())),
    "linear algebra": (
        lambda x, w: torch.linalg.solve(w @ w.t() + torch.eye(8), (x @ w).t()).sin(),
        lambda: (x(), w()),
    ),
    "dictionary": (lambda d: {"y": (d["x"] @ d["w"]).sin() @ d["w"]}, lambda: ({"x": x(), "w": w()},)),
}
SHORT = ("one tensor", "views of one storage", "masks", "indices", "not finite", "in place", "expanded")
# Code of Inductor for views, bools, integers and what is written to in place.
UNDER_INDUCTOR = ("views of one storage", "masks", "indices", "in place")


def check(name: str, inner: str, dynamic: bool) -> None:
    fn, make = CASES[name]
    torch.manual_seed(0)
    args = make()
    eager = step(fn, *args)
    # Inductor may fuse in another order with hooks, which moves the last bits: eager mode is the judge.
    expected = step(compiled(fn, inner, dynamic=dynamic), *args) if inner == "aten" else eager
    torch._dynamo.reset()
    call = compiled(fn, inner, dynamic=dynamic)
    got = step(call, *args, hook=BITS)
    assert packed_count(call) > 0, "the case is about something that is packed"
    assert_same(got, expected, exactly=inner == "aten")
    assert_same(got, eager, exactly=False) if name != "bfloat16" else None
    assert step(call, *args, hook=BITS)[1][0] is not None  # and once more, without compiling


@pytest.mark.core
@pytest.mark.parametrize("name", CASES)
def test_exactly_packed_with_symbolic_sizes(name: str) -> None:
    check(name, "aten", dynamic=True)


@pytest.mark.parametrize("name", SHORT)
def test_exactly_packed_with_static_sizes(name: str) -> None:
    check(name, "aten", dynamic=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNDER_INDUCTOR)
def test_exactly_packed_under_inductor(name: str) -> None:
    check(name, "inductor", dynamic=True)


@pytest.mark.slow
def test_exactly_packed_under_inductor_with_static_sizes() -> None:
    check("views of one storage", "inductor", dynamic=False)


# --- layers ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 6)
        for t in range(3):
            h, c = self.cell(x[t], (h, c))
        return h


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, padding_idx=0)
        self.out = nn.Linear(8, 10)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.out(self.table(tokens).tanh())
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


LAYERS: dict[str, tuple[Any, Any]] = {
    "layer norm": (lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU()), lambda: torch.randn(4, 8)),
    "rms norm": (lambda: nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.SiLU()), lambda: torch.randn(4, 8)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()), lambda: torch.randn(4, 8)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 2)),
        lambda: torch.randn(2, 3, 8, 8),
    ),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 2, 2)).to(memory_format=torch.channels_last),
        lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh()),
        lambda: torch.randn(2, 3, 9),
    ),
    "cell loop": (CellLoop, lambda: torch.randn(3, 4, 8)),
    "attention": (Attention, lambda: torch.randn(2, 5, 16)),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        lambda: torch.randn(2, 5, 16),
    ),
    "embedding": (Embedded, lambda: torch.randint(0, 10, (2, 5))),
}


@pytest.mark.core
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    make, inputs = LAYERS[name]
    torch.manual_seed(0)
    model, x = make(), inputs()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    expected = step(compiled(model), x)
    stats = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    torch._dynamo.reset()
    call = compiled(model)
    assert_same(step(call, x, hook=BITS), expected)
    assert_same(dict(model.state_dict()), stats)
    assert packed_count(call) > 0
    model.load_state_dict(state)
    assert_same(step(model, x), expected, exactly=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["channels last", "attention"])
def test_layers_under_inductor(name: str) -> None:
    make, inputs = LAYERS[name]
    torch.manual_seed(0)
    model, x = make(), inputs()
    call = compiled(model, "inductor")
    assert_same(step(call, x, hook=BITS), step(model, x), exactly=False)
    assert packed_count(call) > 0


# --- float8 ----------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float8_e4m3fn, 4), (torch.float8_e5m2, 3)])
def test_gradient_error_of_float8_is_bounded(dtype: torch.dtype, bits: int, scaling: str) -> None:
    """With the identity as weight the gradient of u * u is 2 * u' of the stored u', so its error is float8's."""
    x, eye = torch.randn(16, 256, requires_grad=True), torch.eye(256)
    call = compiled(lambda x: (u := x @ eye) * u.detach() + u)  # du = u' * g + g
    _, (grad,) = step(call, x, hook=aot_hooks.float8(dtype, scaling))
    assert packed_count(call) == 1
    weights = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).view(x.shape)
    exact = (x.detach().double() + 1) * weights
    value = x.detach().double().abs()
    scale = value.amax() / (416 if bits == 4 else 49152)
    step_near_zero = scale * 2.0 ** (-10 if bits == 4 else -17)
    bound = (value * 2.0**-bits + step_near_zero) * weights * (1 + 1e-5) + 1e-5
    error = (grad.double() - exact).abs()
    assert (error <= bound).all()
    assert error.max() > 0, "float8 was at work"


@pytest.mark.core
@pytest.mark.parametrize("fill", [0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38])
def test_float8_and_values_it_has_no_room_for(fill: float) -> None:
    x, eye = torch.randn(4, 64, requires_grad=True), torch.eye(64)
    with torch.no_grad():
        x[1] = fill
        x[2, 3] = fill
    call = compiled(lambda x: (u := x + (x @ eye) * 0) * u.detach(), fullgraph=True)
    hook = aot_hooks.float8()
    plain = step(call, x)
    torch._dynamo.reset()
    _, (grad,) = step(call, x, hook=hook)
    for row in (0, 3):
        torch.testing.assert_close(grad[row], plain[1][0][row], rtol=2.0**-3, atol=0.1)
    assert grad[0].isfinite().all() and grad[3].isfinite().all()


@pytest.mark.core
def test_attention_mask_of_minus_infinity() -> None:
    torch.manual_seed(0)
    bias = torch.full((6, 6), -torch.inf).triu(1)
    x = torch.randn(6, 64, requires_grad=True)

    def f(x: Tensor, w: Tensor) -> Tensor:
        scores = (x @ w @ x.t()) / 8 + bias
        return scores.softmax(-1) @ x

    args = (x, torch.randn(64, 64, requires_grad=True) / 8)
    call = compiled(f)
    _, grads = step(call, *args, hook=aot_hooks.float8())
    _, exact = step(f, *args)
    for grad, wanted in zip(grads, exact, strict=True):
        assert grad.isfinite().all()
        assert (grad - wanted).norm() < 0.1 * wanted.norm()


# --- tensor subclasses as inputs -------------------------------------------------------------------------------------


@pytest.mark.core
def test_subclass_inputs() -> None:
    def run(hook: Hook | None) -> Any:
        torch.manual_seed(0)
        torch._dynamo.reset()
        a, b = torch.randn(4, 8), torch.randn(4, 8)
        x = TwoTensor(a, b).requires_grad_()
        weight = torch.randn(8, 8, requires_grad=True)
        call = compiled(lambda x, w: (x @ w).sin() @ w)
        _, grads = step_of(call, x, weight, hook)
        return [grads[0].a, grads[0].b, grads[1].a, grads[1].b], call

    def step_of(call: Any, x: Tensor, weight: Tensor, hook: Hook | None) -> Any:
        with aot_hooks.saved_tensors_hooks(hook or aot_hooks.KEEP):
            out = call(x, weight)
        return out, torch.autograd.grad(out.sum(), [x, weight])

    expected, _ = run(None)
    got, call = run(BITS)
    assert_same(got, expected)
    assert packed_count(call) >= 2, "both halves of the intermediate"


# --- gaps ------------------------------------------------------------------------------------------------------------

ELEMENTWISE = (F.softplus, F.gelu, lambda x: F.layer_norm(x, x.shape[-1:]))
SLICES = {
    "chunk": lambda x: x.chunk(2, -1)[1],
    "column": lambda x: x[:, 1:7:2],
    "turned": lambda x: x.t()[2:9],
    "heads": lambda x: x.view(x.shape[0], 2, -1).transpose(0, 1)[..., :3],
    "every other row": lambda x: x[::2, 3:],
    "expanded": lambda x: x[:, None, :5].expand(-1, 3, 5),
}


@pytest.mark.parametrize("where", ["input", "intermediate", "eager"])
@pytest.mark.parametrize("part", SLICES)
@pytest.mark.core
def test_views_with_gaps_come_back_with_them(part: str, where: str) -> None:
    """A kernel of ATen may take a row by itself or several at once, and then rounds otherwise."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        view = SLICES[part](x if where == "input" else x @ w)
        return torch.cat([operator(view).flatten() for operator in ELEMENTWISE])

    torch.manual_seed(0)
    args = torch.randn(17, 10, requires_grad=True), torch.randn(10, 10, requires_grad=True)
    copying = Hook("copying", lambda x: x.clone(memory_format=torch.contiguous_format), lambda p: p)
    call = f if where == "eager" else compiled(f)
    expected = step(call, *args)
    torch._dynamo.reset()
    call = f if where == "eager" else compiled(f)
    assert_same(step(call, *args, hook=copying, scope="all"), expected)
    assert where == "eager" or packed_count(call) > 0


@pytest.mark.core
def test_dynamic_views_with_gaps_compile_once() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return F.softplus((x @ w).chunk(2, -1)[1])

    copying = Hook("copying", lambda x: x.clone(memory_format=torch.contiguous_format), lambda p: p)
    call = compiled(f, dynamic=True)
    for rows, columns in ((17, 10), (5, 14), (33, 6)):
        args = torch.randn(rows, columns, requires_grad=True), torch.randn(columns, columns, requires_grad=True)
        assert_same(step(call, *args, hook=copying), step(compiled(f), *args))
    assert len(aot_hooks.last_plans(call)) == 1


def cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > -1e9, lambda y: y * 4, lambda y: y + 1, (x,))


def cond_otherwise(x: Tensor) -> Tensor:
    return torch.cond(x.sum() < -1e9, lambda y: y + 1, lambda y: y * 4, (x,))


def cond_of_a_constant(x: Tensor) -> Tensor:
    return torch.cond(torch.tensor(True), lambda y: y * 4, lambda y: y + 1, (x,))


def two_conds_beside_constants(x: Tensor) -> Tensor:
    other = torch.cond(x.sum() > -1e9, lambda y: y * 0, lambda y: y + 7, (x,))
    return (cond(x) + other) * torch.ones(8) + torch.zeros(8)


def loop(x: Tensor) -> Tensor:
    return while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x * 1))[1]


def rows(x: Tensor) -> Tensor:
    return scan(lambda carried, row: (carried + 1, row * 4), torch.zeros(8), x)[1]


CONTROL_FLOW = [cond, cond_otherwise, cond_of_a_constant, two_conds_beside_constants, loop, rows]


@pytest.mark.core
@pytest.mark.parametrize("part", ["pack", "unpack"])
@pytest.mark.parametrize("times_four", CONTROL_FLOW, ids=[f.__name__ for f in CONTROL_FLOW])
def test_hooks_with_control_flow(times_four: Any, part: str) -> None:
    """Each body is called where it stands, also for the second saved tensor."""
    check_control_flow(times_four, part, "aten")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["pack", "unpack"])
@pytest.mark.parametrize(
    "times_four", [cond, cond_otherwise, two_conds_beside_constants, loop], ids=lambda f: f.__name__
)
def test_hooks_with_control_flow_under_inductor(times_four: Any, part: str) -> None:
    check_control_flow(times_four, part, "inductor")


def each_row(x: Tensor) -> Tensor:
    return map_rows(lambda row: row * 4, x)


def rows_in_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > -1e9, rows, lambda y: y * 4, (x,))


@pytest.mark.parametrize("part", ["pack", "unpack"])
@pytest.mark.parametrize(("fn", "name"), [(rows, "scan"), (each_row, "map"), (rows_in_a_branch, "scan")])
def test_scans_in_hooks_under_inductor_are_an_error_with_a_way_out(fn: Any, name: str, part: str) -> None:
    with pytest.raises(Exception, match=f"{part} '.*' .*calls {name}, which Inductor .* 'aten'") as raised:
        check_control_flow(fn, part, "inductor")
    assert isinstance(unwrapped(raised.value), HookTraceError)


def check_control_flow(times_four: Any, part: str, inner: str) -> None:
    torch.manual_seed(0)
    saved, weight = torch.randn(8, 8), torch.randn(8, 8)
    hook = Hook("x 4", times_four, lambda x: x) if part == "pack" else Hook("x 4", lambda x: x * 1, times_four)
    found = []
    for each in (hook, Hook("by hand", lambda x: x * 4, lambda x: x)):
        torch._dynamo.reset()
        x = saved.clone().requires_grad_()
        options = {"inner": inner, "policy": each}
        f = torch.compile(lambda x: torch.tanh(torch.tanh(x @ weight) @ weight), backend="aot_hooks", options=options)
        f(x).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)
