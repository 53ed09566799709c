"""Attention reads keys and values before they are repeated for heads of queries, with the gradients of eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from aot_hooks import budget, lossless, partitioner
from aot_hooks.graphs.workspaces import workspace_bytes
from aot_hooks.hook import Hook
from aot_hooks.passes.shared_heads import share_heads

BATCH, HEADS, SHARED, LENGTH, WIDTH = 2, 8, 2, 24, 16
TIMES = HEADS // SHARED
aten = torch.ops.aten
EXACTLY = Hook("as it is", lambda x: x.clone(), lambda x: x, lossy=True)  # so that only sums differ

Layer = Callable[..., Tensor]


def attention(repeat: Callable[[Tensor], Tensor], **named: Any) -> Layer:
    def layer(x: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = ((x @ w).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for w in weights)
        return F.scaled_dot_product_attention(q, repeat(k.sin()), repeat(v), is_causal=not named, **named)

    return layer


def interleaved(y: Tensor) -> Tensor:
    return y.repeat_interleave(TIMES, dim=1)


def expanded(y: Tensor) -> Tensor:
    """As in transformers."""
    return y[:, :, None, :, :].expand(BATCH, SHARED, TIMES, LENGTH, WIDTH).reshape(BATCH, HEADS, LENGTH, WIDTH)


def tiled(y: Tensor) -> Tensor:
    """Neighboring heads read other keys."""
    return y.repeat(1, TIMES, 1, 1)


def scaled(y: Tensor) -> Tensor:
    """Each head reads numbers of its own."""
    return interleaved(y) * torch.arange(1.0, HEADS + 1, dtype=y.dtype)[:, None, None]


def arguments() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    widths = (HEADS * WIDTH, SHARED * WIDTH, SHARED * WIDTH)
    shapes = [(BATCH, LENGTH, 32), *((32, width) for width in widths)]
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes)


def gradients(layer: Layer, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(layer(*args).cos().sum(), [x for x in args if x.requires_grad])


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The heads of keys and values that the attention of each joint graph reads, forward and backward."""
    found: list[int] = []

    def noted(joint: GraphModule, *, fused: bool) -> None:
        share_heads(joint, fused=fused)
        for node in joint.graph.nodes:
            if "flash_attention_for_cpu" in str(node.target):
                at = 2 if "backward" in str(node.target) else 1
                found.extend(n.meta["val"].shape[1] for n in node.args[at : at + 2])

    monkeypatch.setattr(partitioner, "share_heads", noted)
    return found


def compiled(layer: Layer, policy: Any, inner: str = "aten") -> Layer:
    torch._dynamo.reset()
    return torch.compile(layer, backend="aot_hooks", options={"inner": inner, "policy": policy})


@pytest.mark.parametrize("repeat", [interleaved, expanded])
@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_keys_and_values_are_read_as_they_were_before_they_were_repeated(heads, repeat, inner) -> None:
    args, layer, near = arguments(), attention(repeat), {"rtol": 1e-12, "atol": 1e-12}
    if inner == "inductor":  # torch 2.11 compiles no attention in float64
        args, near = tuple(x.detach().float().requires_grad_() for x in args), {"rtol": 1e-3, "atol": 1e-3}
    fn = compiled(layer, EXACTLY, inner)
    torch.testing.assert_close(fn(*args), layer(*args), **near)
    for found, exact in zip(gradients(fn, args), gradients(layer, args), strict=True):
        torch.testing.assert_close(found, exact, **near)
    assert heads == [SHARED] * 4


@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_keys_that_lie_otherwise_than_in_the_trace(heads, inner) -> None:
    """A CPU's batch norm gives its result another layout than its fake kernel: the last stride is 16, not 1."""
    norm = torch.nn.BatchNorm2d(SHARED)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (interleaved(norm(y.transpose(-1, -2)).transpose(-1, -2)) for y in (k, v))
        return F.scaled_dot_product_attention(q.sin(), k, v, is_causal=True)

    generator = torch.Generator().manual_seed(0)
    args = tuple(
        torch.randn(BATCH, n, LENGTH, WIDTH, generator=generator).requires_grad_() for n in (HEADS, SHARED, SHARED)
    )
    fn = compiled(layer, EXACTLY, inner)
    torch.testing.assert_close(fn(*args), layer(*args), rtol=1e-4, atol=1e-4)
    for found, exact in zip(gradients(fn, args), gradients(layer, args), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)
    assert heads == [SHARED] * 4


@pytest.mark.parametrize("frozen", [(1,), (2, 3), (1, 2, 3)])
def test_weights_without_a_gradient_change_nothing(heads, frozen) -> None:
    """As with LoRA: some gradients of attention have no reader."""
    args, layer = arguments(), attention(interleaved)
    for i in frozen:
        args[i].requires_grad_(False)
    fn = compiled(layer, EXACTLY)
    for found, exact in zip(gradients(fn, args), gradients(layer, args), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    assert heads == [SHARED] * 4


@pytest.mark.parametrize("repeat", [tiled, scaled])
def test_other_keys_stay(heads, repeat) -> None:
    args, layer = arguments(), attention(repeat)
    found = gradients(compiled(layer, EXACTLY), args)
    assert all(map(torch.equal, found, gradients(layer, args)))
    assert heads == [HEADS] * 4


def test_a_mask_of_each_head_stays(heads) -> None:
    mask = torch.randn(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    args, layer = arguments(), attention(interleaved, attn_mask=mask)
    found = gradients(compiled(layer, EXACTLY), args)
    assert all(map(torch.equal, found, gradients(layer, args)))
    assert set(heads) <= {HEADS}


@pytest.mark.parametrize("width", [WIDTH, 2 * WIDTH])
def test_keys_whose_numbers_are_not_side_by_side_stay(heads, width) -> None:
    """As after a convolution, or every second number: kernels read them as if they were, repeated keys are copies."""

    def layer(x: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = ((x @ w).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for w in weights)
        if width == WIDTH:
            k, v = (y.mT.contiguous().mT for y in (k, v))
        else:
            k, v = (y.repeat_interleave(2, dim=-1).sin()[..., ::2] for y in (k, v))
        return F.scaled_dot_product_attention(q, interleaved(k), interleaved(v), is_causal=True)

    args = arguments()
    for found, exact in zip(gradients(compiled(layer, EXACTLY), args), gradients(layer, args), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    assert heads == [HEADS] * 4


@pytest.mark.parametrize("policy", [lossless(), budget("1GiB", max_error=0)])
def test_exact_means_keep_the_order_of_sums(heads, policy) -> None:
    args, layer = arguments(), attention(interleaved)
    found = gradients(compiled(layer, policy), args)
    assert all(map(torch.equal, found, gradients(layer, args)))
    assert heads == []


def test_repeated_keys_that_the_program_also_reads_stay_right(heads) -> None:
    args = arguments()

    def layer(x: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = ((x @ w).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for w in weights)
        k, v = interleaved(k), interleaved(v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * k.square()

    for found, exact in zip(gradients(compiled(layer, EXACTLY), args), gradients(layer, args), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    assert heads == [SHARED] * 2 + [HEADS] * 2, "the gradient of the repeated keys has another term"


@pytest.mark.parametrize(("shared", "more_mib"), [(HEADS, 0), (SHARED, 2)])
def test_gradients_of_each_head_count_while_attention_adds_them_up(shared: int, more_mib: int) -> None:
    """1 MiB for keys and for values each, beside sums in float32 of 2 MiB and a number for each row of queries."""
    graph, sizes = Graph(), [(2, HEADS, 512, 64), (2, HEADS, 512, 64), *[(2, shared, 512, 64)] * 2]
    with FakeTensorMode():
        values = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
    nodes = [graph.placeholder(name) for name in ("gradient", "q", "k", "v")]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    backward = graph.call_function(aten._scaled_dot_product_cudnn_attention_backward.default, tuple(nodes))
    assert workspace_bytes(backward) == (2 + more_mib) * 2**20 + 4 * 2 * HEADS * 512


def test_symbolic_heads_count_by_their_hints() -> None:
    """And nothing is assumed of them, which would compile the program again for another number."""
    graph, shapes = Graph(), ShapeEnv()
    mode, dynamic = FakeTensorMode(shape_env=shapes), [DimDynamic.STATIC, DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 2]
    for name, heads in (("gradient", 8), ("q", 8), ("k", 2), ("v", 2)):
        value = torch.empty(2, heads, 512, 64, dtype=torch.bfloat16, device="meta")
        context = StatelessSymbolicContext(dynamic_sizes=dynamic)
        fake = mode.from_tensor(value, symbolic_context=context, source=ConstantSource(name))
        with mode:
            graph.placeholder(name).meta["val"] = torch.empty(fake.shape, dtype=torch.bfloat16, device="cuda")
    backward = graph.call_function(aten._scaled_dot_product_cudnn_attention_backward.default, tuple(graph.nodes))
    known = len(shapes.guards)
    assert workspace_bytes(backward) == 4 * 2**20 + 4 * 2 * 8 * 512
    assert len(shapes.guards) == known


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["CUDNN_ATTENTION", "FLASH_ATTENTION"])
def test_kernels_of_cuda_read_shared_heads(kernel: str) -> None:
    """With the numbers that repeated heads give, and with no more memory than a plan counts."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, gradient = (
        torch.randn(2, n, 4096, 128, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for n in (32, 4, 4, 32)
    )

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (y.repeat_interleave(8, dim=1) for y in (k, v))
        return F.scaled_dot_product_attention(q.cos(), k, v, is_causal=True)

    with sdpa_kernel(getattr(SDPBackend, kernel)):
        fn = compiled(repeated, EXACTLY, "inductor")
        both = [f(q, k, v) for f in (fn, repeated)]
        found, expected = ([y, *torch.autograd.grad(y, (q, k, v), gradient)] for y in both)
        for a, b in zip(found, expected, strict=True):
            assert float((a.float() - b.float()).norm() / b.float().norm()) <= 0.01
        del both, found, expected, a, b
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = torch.autograd.grad(y, (q, k, v), gradient)
        taken = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in made)
    print(kernel, taken / 2**20, "MiB beside the gradients")
    times = 2 if kernel == "FLASH_ATTENTION" else 1
    assert taken <= 1.01 * (4 * (q.numel() + q.numel() // 128) + times * 2 * q.nbytes)
