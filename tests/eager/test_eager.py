"""The same hooks where torch runs eagerly: graph breaks, disabled parts, `force_eager`, no compile at all."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sentinel import Chain, assert_same, compiled, gradients, hand_gradients, integers, quadruple, scale
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks import Hook, saved_tensors_hooks
from aot_hooks.errors import PolicyError

F = nn.functional


class Recorder:
    """A pair that notes the shapes it packs; a side effect, so the hook has to say `eager=True`."""

    def __init__(self) -> None:
        self.packed: list[tuple[int, ...]] = []

    def pack(self, x: Tensor) -> Tensor:
        self.packed.append(tuple(x.shape))
        return x.clone()

    def hooks(self, **scope: str) -> Any:
        return saved_tensors_hooks(Hook("recorder", self.pack, lambda x: x, eager=True), **scope)


# --- compiled and eager agree ----------------------------------------------------------------------------------------


def no_compile(model: nn.Module) -> Callable[..., Any]:
    return model


def force_eager(model: nn.Module) -> Callable[..., Any]:
    call = compiled(model)

    def run(x: Tensor) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return call(x)

    return run


class Broken(nn.Module):
    """The chain with a graph break after each of its first products."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.weights = chain.weights

    def forward(self, x: Tensor) -> Tensor:
        w1, w2, w3 = self.weights
        h1 = x @ w1
        torch._dynamo.graph_break()
        h2 = h1 @ w2
        torch._dynamo.graph_break()
        return h2 @ w3


class BrokenLoop(Broken):
    def forward(self, x: Tensor) -> Tensor:
        for w in self.weights:
            x = x @ w
            torch._dynamo.graph_break()
        return x


class DisabledMiddle(Broken):
    @torch._dynamo.disable
    def middle(self, h: Tensor, w: Tensor) -> Tensor:
        return h @ w

    def forward(self, x: Tensor) -> Tensor:
        w1, w2, w3 = self.weights
        h1 = x @ w1
        h2 = self.middle(h1, w2)
        return h2 @ w3


def disabled_whole(model: Chain) -> Callable[..., Any]:
    return compiled(torch._dynamo.disable(model), fullgraph=False)  # type: ignore[no-any-return]


WAYS = [compiled, no_compile, force_eager, disabled_whole]


@pytest.mark.core
@pytest.mark.parametrize("scope", ["donated", "no_static", "all"])
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_every_way_to_run_packs_the_same(model: Chain, x: Tensor, way: Any, scope: str) -> None:
    factors = {"donated": {"h": 4}, "no_static": {"h": 4, "x": 4}, "all": {"h": 4, "x": 4, "w": 4}}[scope]
    call = way(model)
    for _ in range(2):
        with saved_tensors_hooks(*quadruple, scope=scope):
            got = gradients(call, model, x)
        assert_same(got, hand_gradients(model, x, **factors))


@pytest.mark.core
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_other_names_of_a_parameter_are_static(way: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            return (x * 2) @ self.weight.detach() * self.weight.data[0]

    x = torch.ones(4, 3, requires_grad=True)
    with saved_tensors_hooks(*quadruple, scope="no_static"):
        way(Model())(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[10.0] * 3] * 4


@pytest.mark.core
@pytest.mark.parametrize(
    ("broken", "donated"),
    [
        (Broken, {}),  # footgun: h1 and h2 are outputs of one graph and inputs of the next
        (BrokenLoop, {"h": 4}),  # Dynamo leaves a frame with a break in a loop to Python as a whole
        (DisabledMiddle, {"h1": 4}),  # h1 is saved by the eager part, h2 by the graph after it
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_a_model_in_parts(model: Chain, x: Tensor, broken: Any, donated: dict[str, float]) -> None:
    call = compiled(broken(model), fullgraph=False)
    for _ in range(2):
        with saved_tensors_hooks(*quadruple):
            assert_same(gradients(call, model, x), hand_gradients(model, x, **donated))
    for scope, factors in (("no_static", {"h": 4, "x": 4}), ("all", {"h": 4, "x": 4, "w": 4})):
        with saved_tensors_hooks(*quadruple, scope=scope):
            assert_same(gradients(call, model, x), hand_gradients(model, x, **factors))
    assert_same(gradients(call, model, x), hand_gradients(model, x))


@pytest.mark.core
@pytest.mark.parametrize("widths", [(3, 2), (3, 8, 2), (4, 4, 4, 4), (1, 7, 1), (2, 16, 3, 16, 2)])
def test_relu_mlp_equals_compiled_bitwise(widths: tuple[int, ...]) -> None:
    """ReLU commutes with the factor, so it does not matter which side of it is saved."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    model, x = nn.Sequential(*layers[:-1]), integers(5, widths[0]).requires_grad_()
    for p in model.parameters():
        p.data = integers(*p.shape)
    leaves = [x, *model.parameters()]

    def run(call: Callable[..., Any]) -> list[Tensor]:
        with saved_tensors_hooks(*quadruple):
            return list(torch.autograd.grad(call(x).sum(), leaves))

    ways = [run(model), run(compiled(model)), run(force_eager(model))]
    assert_same(ways[1], ways[0])
    assert_same(ways[2], ways[0])
    plain = list(torch.autograd.grad(model(x).sum(), leaves))
    if len(widths) > 2:
        assert not all(torch.equal(a, b) for a, b in zip(ways[0], plain, strict=True))
    else:
        assert_same(ways[0], plain)


# --- what is never packed --------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    "last", [torch.exp, torch.tanh, torch.sigmoid, lambda x: F.softmax(x, -1), lambda x: F.log_softmax(x, -1)]
)
def test_an_output_that_is_saved_is_not_packed(last: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return last(x @ w)  # type: ignore[no-any-return]

    x, w, recorder = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True), Recorder()
    with recorder.hooks():
        out = Model()(x, w)
        out.square().sum().backward()
    assert recorder.packed == []


def test_outputs_in_containers_are_not_packed() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Any:
            h = x @ w
            return {"kept": [h.exp()], "loss": h.exp().sum()}

    x, w, recorder = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True), Recorder()
    with recorder.hooks():
        out = Model()(x, w)
    assert len(recorder.packed) == 1  # the exp that is summed and dropped
    out["loss"].backward()


@pytest.mark.core
def test_views_of_parameters_and_inputs_are_not_packed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 6))
            self.register_buffer("mask", torch.ones(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return ((x.t().t() * self.mask) @ self.w.t()[:3].t()).sum()

    recorder, x = Recorder(), torch.randn(4, 3, requires_grad=True)
    with recorder.hooks():
        loss = Model()(x)
    assert recorder.packed == [(4, 3)]  # x * mask
    loss.backward()


def test_what_the_outermost_module_was_given_is_not_packed() -> None:
    """Also when it was computed before, under the same context; and by keyword, in containers."""

    class Model(nn.Module):
        def forward(self, batch: dict[str, Tensor], *, w: Tensor) -> Tensor:
            return batch["x"] @ w

    recorder, leaf = Recorder(), torch.randn(4, 3, requires_grad=True)
    with recorder.hooks():
        x, w = leaf * 2, leaf.t() * 2
        before = list(recorder.packed)
        Model()({"x": x}, w=w).sum().backward()
    assert recorder.packed == before


@pytest.mark.core
def test_a_tensor_saved_twice_is_packed_once() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
            h = x @ w
            return (h @ v).sum() + (h @ v).sum() + (h * h).sum()

    x, w, v = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    recorder = Recorder()
    with recorder.hooks():
        Model()(x, w, v).backward()
    assert recorder.packed == [(4, 2)]


# --- nesting, checkpoint ---------------------------------------------------------------------------------------------


def test_nested_contexts_part_by_part() -> None:
    """The context that is innermost when a tensor is saved is the one that packs it."""

    class Model(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            h = x @ w
            a = h @ w
            with saved_tensors_hooks(*scale(3)):
                b = a @ w
            return b @ w

    x, w = integers(4, 3), integers(3, 3).requires_grad_()
    with saved_tensors_hooks(*scale(2)):
        (got,) = torch.autograd.grad(Model()(x, w).sum(), w)
    v, g = w.detach(), torch.ones(4, 3)
    values, expected = [x, x @ v, x @ v @ v, x @ v @ v @ v], torch.zeros(3, 3)
    for value, k in zip(reversed(values), (2, 3, 2, 1), strict=True):
        expected, g = expected + k * value.T @ g, g @ v.T
    assert torch.equal(got, expected)


@pytest.mark.core
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_inside_a_context(use_reentrant: bool) -> None:
    """Exact hooks: a checkpoint saves its input through them and computes the rest again."""

    class Model(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            h = torch.tanh(x @ w)
            h = checkpoint(lambda h: torch.tanh(h @ w) @ w, h, use_reentrant=use_reentrant)
            return torch.tanh(h @ w).sum()

    x, w = torch.randn(4, 3), torch.randn(3, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(Model()(x, w), w) if not use_reentrant else (None,)
    if use_reentrant:  # grad() does not go with a reentrant checkpoint
        Model()(x, w).backward()
        expected, w.grad = w.grad, None
    with saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        Model()(x, w).backward()
    assert torch.equal(w.grad, expected)


@pytest.mark.parametrize("wrap", [no_compile, compiled, force_eager], ids=lambda f: f.__name__)
def test_functions_are_covered_like_modules(wrap: Any) -> None:
    w = integers(3, 3).requires_grad_()

    def f(x: Tensor) -> Tensor:
        return x @ w @ w

    x = integers(4, 3).requires_grad_()
    call = wrap(f)
    with saved_tensors_hooks(*quadruple):
        (got,) = torch.autograd.grad(call(x).sum(), w)
    v, ones = w.detach(), torch.ones(4, 3)
    assert torch.equal(got, x.detach().T @ (ones @ v.T) + 4 * (x.detach() @ v).T @ ones)


def test_a_backward_on_another_thread_leaves_nothing_behind(model: Chain, x: Tensor) -> None:
    """As on CUDA, where autograd's own threads let go of what was saved."""
    from aot_hooks.eager import packing

    before = len(packing._local.seen)
    for step in range(1, 4):
        with saved_tensors_hooks(*quadruple):
            loss = model(x[:step]).sum()
        assert len(packing._local.seen) > before
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert len(packing._local.seen) == before


# --- Hook(eager=True) around a compiled call -------------------------------------------------------------------------


@pytest.mark.core
def test_an_eager_hook_sees_the_intermediates_of_a_compiled_graph(model: Chain, x: Tensor) -> None:
    seen: list[tuple[int, ...]] = []

    def pack(x: Tensor) -> Tensor:
        seen.append(tuple(sorted(x.shape)))  # a side effect, and it runs in each step
        return x * 2

    call = compiled(model)
    for step in range(1, 3):
        with saved_tensors_hooks(Hook("noting", pack, lambda x: x * 2, eager=True)):
            got = gradients(call, model, x)
        assert_same(got, hand_gradients(model, x, h=4))
        assert sorted(seen) == sorted([(4, 6), (5, 6)] * step)


def test_an_eager_hook_may_read_values(model: Chain, x: Tensor) -> None:
    hook = Hook("reads", lambda x: (x, x.sum().item()), lambda p: p[0] * 4 if p[1] == p[1] else p[0], eager=True)
    with saved_tensors_hooks(hook):
        got = gradients(compiled(model), model, x)
    assert_same(got, hand_gradients(model, x, h=4))


def test_eager_and_traced_hooks_take_turns(model: Chain, x: Tensor) -> None:
    call = compiled(model)
    for _ in range(3):
        with saved_tensors_hooks(Hook("eager", *scale(2), eager=True)):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))
        with saved_tensors_hooks(Hook("traced", *scale(3))):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=3))
        assert_same(gradients(call, model, x), hand_gradients(model, x))


CELL = """
def run(x, policy):
    with aot_hooks.saved_tensors_policy(policy, scope="all"):
        return x.sin().exp()

def wrong(saved):
    return saved.nonsense
"""


@pytest.mark.parametrize("file", ["<ipython-input-1-abc>", "<string>", "<stdin>"])
def test_lines_of_a_notebook_cell_or_of_a_command_are_the_users(file: str) -> None:
    names: dict[str, Any] = {"aot_hooks": aot_hooks, "__name__": "__main__"}
    exec(compile(CELL, file, "exec"), names)
    lines = []

    def look(saved: Any) -> Any:
        lines.append(saved.source_line)
        return aot_hooks.KEEP

    x = torch.ones(3, requires_grad=True)
    names["run"](x, look)
    assert lines and all(line.startswith(f"{file}:4") for line in lines), lines
    with pytest.raises(PolicyError) as error:
        names["run"](x, names["wrong"])
    assert f"({file}:7)" in str(error.value)


@pytest.mark.parametrize("hook", [aot_hooks.float8(), aot_hooks.int8(), aot_hooks.cast(torch.bfloat16)])
def test_a_ctc_loss_has_the_gradient_of_its_own_likelihoods(hook: aot_hooks.Hook) -> None:
    """Its backward exponentiates them: rounded, they made the gradient 0.7 off, 3.6 in a model of speech."""
    torch.manual_seed(0)
    logits = torch.randn(16, 8, 32, requires_grad=True)
    targets, lengths = torch.randint(1, 32, (8, 6)), (torch.full((8,), 16), torch.full((8,), 6))

    def likelihoods(x: torch.Tensor) -> torch.Tensor:
        return x.log_softmax(2)

    compiled = torch.compile(likelihoods, backend="aot_hooks", options={"inner": "aten"})
    for run in (likelihoods, compiled):
        (expected,) = torch.autograd.grad(F.ctc_loss(run(logits), targets, *lengths), logits)
        with aot_hooks.saved_tensors_hooks(hook):
            loss = F.ctc_loss(run(logits), targets, *lengths)
        assert torch.equal(torch.autograd.grad(loss, logits)[0], expected)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
@pytest.mark.parametrize("hook", [aot_hooks.int8(), aot_hooks.offload(min_bytes=0)], ids=str)
def test_nested_tensors_stay_as_they_are(layout: torch.layout, hook: Hook) -> None:
    """Torch does not tell the sizes of a strided one, which attention over a jagged one makes inside."""
    torch.manual_seed(0)
    linear = nn.Linear(32, 32)
    rows = [torch.randn(5, 32), torch.randn(9, 32)]

    def loss() -> Tensor:
        x = linear(torch.nested.nested_tensor(rows, layout=layout))
        if layout is torch.strided:
            return torch.nested.to_padded_tensor(F.relu(x), 0.0).square().sum()
        heads = x.unflatten(-1, [2, 16]).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2).values().square().sum()

    def gradient(context: Any) -> Tensor:
        with context:
            total = loss()
        return torch.autograd.grad(total, linear.weight)[0]

    without = gradient(contextlib.nullcontext())
    assert without.norm() > 1
    found = gradient(saved_tensors_hooks(hook))
    torch.testing.assert_close(found, without, rtol=0, atol=0)
