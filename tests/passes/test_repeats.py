"""What the backward computes again is what the forward computed: random numbers, and what is read from buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import ATEN
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks.errors import OptionError, UnsupportedGraphError, unwrapped
from aot_hooks.graphs.repeats import draws
from aot_hooks.partitioner import aot

torch.library.define("aot_hooks_test::noise", "(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
torch.library.impl("aot_hooks_test::noise", "CPU")(torch.rand_like)
torch.library.register_fake("aot_hooks_test::noise")(torch.empty_like)


def attention(h: Tensor) -> Tensor:
    q = h.view(2, 8, 2, 8).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q.sin(), q, dropout_p=0.4).transpose(1, 2).reshape(16, 16)


RANDOM: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda h: F.dropout(h, 0.3),
    lambda h: h * torch.bernoulli(torch.sigmoid(h.detach())),
    lambda h: h * (torch.rand(h.shape) > 0.5),
    lambda h: h * torch.rand_like(h) * torch.randn(16),
    lambda h: h * torch.randint(1, 5, h.shape) / 4,
    lambda h: h[:, torch.multinomial(torch.softmax(h.detach()[0], -1), 16, replacement=True)],
    lambda h: F.rrelu(h, training=True),
    lambda h: h * torch.empty_like(h).exponential_(),
    lambda h: h[torch.randperm(16)],
    lambda h: h * torch.ops.aot_hooks_test.noise(h.detach()),
    attention,
)


class Noisy(nn.Module):
    def __init__(self, kinds: tuple[Callable[[Tensor], Tensor], ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer, random in zip(self.layers, self.kinds, strict=True):
            x = random(layer(x).tanh()).tanh() + x.sin()
        return x


def trained(
    kinds: tuple[Callable[[Tensor], Tensor], ...] = RANDOM, backend: str = "aot_hooks", **options: Any
) -> tuple[list[Tensor], list[int]]:
    """Output and gradients, and the bytes that plans save. Between the two passes the generator is seeded anew."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Noisy(kinds), torch.randn(16, 16, requires_grad=True)
    compiled = torch.compile(model, backend=backend, options=options or None)
    torch.manual_seed(1)
    out = compiled(x)
    torch.manual_seed(2)
    gradients = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
    plans = aot_hooks.last_plans(compiled) if backend == "aot_hooks" else ()
    return [out, *gradients], [plan.saved_bytes for plan in plans]


@pytest.mark.core
def test_random_numbers_are_those_of_the_forward_under_torchs_memory_budget() -> None:
    expected, (all_bytes,) = trained(**ATEN, policy=aot_hooks.lossless())
    for share, options in ((0.3, ATEN | {"policy": aot_hooks.lossless()}), (0.0, ATEN)):
        with torch._functorch.config.patch(activation_memory_budget=share):
            found, saved_bytes = trained(**options)
        assert all(map(torch.equal, found, expected)) and sum(saved_bytes) < all_bytes


def test_checkpoints_under_torchs_memory_budget() -> None:
    """Torch passes states of the generator for what a checkpoint computes again, but not for the rest."""
    kinds = (
        lambda h: checkpoint(lambda h: F.dropout(h, 0.3).sin() * torch.rand_like(h), h, use_reentrant=False),
        lambda h: F.dropout(h, 0.3),
    )
    expected, _ = trained(kinds, **ATEN)
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        found, _ = trained(kinds, **ATEN)
    assert all(map(torch.equal, found, expected))


@pytest.mark.core
def test_torch_alone_draws_other_numbers() -> None:
    """That the test above can fail; if this one does, torch has mended it."""
    expected, _ = trained(RANDOM[:2], backend="aot_eager")
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        found, _ = trained(RANDOM[:2], backend="aot_eager")
    assert torch.equal(found[0], expected[0]) and not torch.equal(found[1], expected[1])


@pytest.mark.slow
def test_random_numbers_are_those_of_the_forward_under_inductor() -> None:
    kinds = RANDOM[0], RANDOM[2], RANDOM[4], RANDOM[9]
    expected, _ = trained(kinds, policy=aot_hooks.lossless())
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        found, _ = trained(kinds, policy=aot_hooks.lossless())
    torch.testing.assert_close(found, expected)


def test_the_mask_is_saved_where_it_is_smaller_than_the_numbers() -> None:
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        _, numbers = trained((lambda h: h * torch.rand(h.shape),), **ATEN, policy=aot_hooks.lossless())
        _, mask = trained((lambda h: h * (torch.rand(h.shape) > 0.5),), **ATEN, policy=aot_hooks.lossless())
    assert numbers == [16 * 16 * 4] and mask == [16 * 16]


def test_a_partition_that_cannot_be_mended_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    partition = aot.min_cut_partition

    def renaming(*args: Any, **kwargs: Any) -> Any:
        fw, bw = partition(*args, **kwargs)
        for node in filter(draws, bw.graph.nodes):
            node.name = "renamed"
        return fw, bw

    monkeypatch.setattr(aot, "min_cut_partition", renaming)
    with (
        torch._functorch.config.patch(activation_memory_budget=0.0),
        pytest.raises(Exception, match=r"2 of aten\.rand\.default where the joint graph has 1 \(test_repeats") as error,
    ):
        trained((lambda h: h * torch.rand(h.shape),), **ATEN)
    assert isinstance(unwrapped(error.value), UnsupportedGraphError)


def test_hooks_take_no_partitioner_of_the_users() -> None:
    compiled = {"inductor": {"custom_partitioner_fn": object()}, "policy": aot_hooks.lossless()}
    with pytest.raises(Exception, match="custom_partitioner_fn is set, but hooks need one of ours") as error:
        trained(RANDOM[:1], **compiled)
    assert isinstance(unwrapped(error.value), OptionError)


def test_what_draws() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    aten = torch.ops.aten
    attend = aten._scaled_dot_product_flash_attention.default

    def is_drawn(target: Any, *args: Any, **kwargs: Any) -> bool:
        return draws(graph.call_function(target, args, kwargs))

    assert is_drawn(attend, x, x, x, 0.1) and not is_drawn(attend, x, x, x, 0.0) and not is_drawn(attend, x, x, x)
    assert is_drawn(aten.native_dropout.default, x, 0.1, True)
    assert not is_drawn(aten.native_dropout.default, x, 0.1, False)
    state = torch._prims.rng_prims.run_with_rng_state
    assert not is_drawn(state, x, aten.rand.default, [2]) and not is_drawn(aten.sin.default, x)
    functional = torch.ops.higher_order.auto_functionalized
    assert is_drawn(functional, torch.ops.aot_hooks_test.noise.default, x=x) and not draws(x)


# --- buffers ----------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mean", torch.linspace(-1, 1, 16))
        self.register_buffer("var", torch.linspace(0.5, 2, 16))
        self.shift = torch.linspace(-1, 1, 64).view(4, 16)[:1]  # an attribute, and a view

    def forward(self, x: Tensor) -> Tensor:
        h = (self.linear(x) - self.mean) * torch.rsqrt(self.var + 1e-5) + self.shift
        return torch.tanh(h) * self.var.sqrt() * h.sigmoid()


AGAIN = {"recompute_pointwise": True, "policy": aot_hooks.lossless()}


@pytest.mark.core
@pytest.mark.parametrize(
    "options", [AGAIN, {"policy": aot_hooks.budget(max_slowdown=float("inf"), max_error=0)}], ids=str
)
def test_a_buffer_is_read_as_it_was_in_the_forward(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = Scaled()
    eager = copy.deepcopy(ours)
    compiled = torch.compile(ours, backend="aot_hooks", options={**ATEN, **options})
    for _ in range(3):
        x = torch.randn(8, 16)
        out, expected = compiled(x), eager(x)
        expected = torch.autograd.grad(expected.sin().sum(), list(eager.parameters()))
        for model in (ours, eager):
            model.mean.data.lerp_(x.mean(0), 0.5)
            model.var.data.lerp_(x.var(0) * 5, 0.5)
            model.shift.data.add_(0.1)
        found = torch.autograd.grad(out.sin().sum(), list(ours.parameters()))
        torch.testing.assert_close(found, expected)


def test_quantized_weights_in_buffers_are_not_copied() -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("weight", torch.randint(-127, 127, (16, 16), dtype=torch.int8))
            self.register_buffer("scale", torch.ones(16, 1) / 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) @ (self.weight.float() * self.scale).t()

    model = Quantized()
    plan = aot_hooks.plan(model, torch.randn(8, 16, requires_grad=True), policy=aot_hooks.lossless(), inner="aten")
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, **AGAIN})
    compiled(torch.randn(8, 16, requires_grad=True)).sum().backward()
    (again,) = aot_hooks.last_plans(compiled)
    assert plan.saved_bytes == 16 * 16 * 4 and again.saved_bytes == 16 * 4  # the weights computed; the scales copied
