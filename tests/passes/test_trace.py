"""Tracing one hook on one saved value: what crosses, what is burned in, and the graphs against the functions."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aot_hooks import Hook, saved_tensors_hooks
from aot_hooks.errors import HookContractError
from aot_hooks.passes.trace import TracedHook, canonical, trace_hook

pytestmark = pytest.mark.core


def fake_of(x: torch.Tensor, dynamic: tuple[int, ...] = ()) -> torch.Tensor:
    """A fake tensor like `x`, with the dimensions in `dynamic` symbolic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = [DimDynamic.DYNAMIC if d in dynamic else DimDynamic.STATIC for d in range(x.dim())]
    return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def trace(pack: Any, unpack: Any, x: torch.Tensor, dynamic: tuple[int, ...] = ()) -> TracedHook:
    return trace_hook(Hook("h", pack, unpack), fake_of(x, dynamic), "'x'", decompositions=None, twice=True)


def round_trip(traced: TracedHook, x: torch.Tensor) -> torch.Tensor:
    (out,) = traced.unpack(*traced.pack(x))
    return out


def check(pack: Any, unpack: Any, x: torch.Tensor) -> TracedHook:
    """The graphs compute what the functions compute, bit for bit, with the saved tensor's strides."""
    traced = trace(pack, unpack, x)
    out, expected = round_trip(traced, x), unpack(pack(x))
    assert out.dtype == x.dtype and out.shape == x.shape
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    return traced


def ops(gm: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def leaf_shapes(traced: TracedHook, x: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in traced.pack(x)]


STRUCTURES: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda x: x + 1, lambda p: p - 1),
    "tuple": (lambda x: (x.half(), x.dtype), lambda p: p[0].to(p[1])),
    "list": (lambda x: [x.half(), x * 2], lambda p: p[0].float() + p[1]),
    "dict": (lambda x: {"q": x.half(), "s": x.abs().amax()}, lambda p: p["q"].float() * p["s"]),
    "nested": (lambda x: ({"a": [x * 2, (x.half(),)]}, None), lambda p: p[0]["a"][0] + p[0]["a"][1][0].float()),
    "none": (lambda x: (None, x.half(), None), lambda p: p[1].float() if p[0] is None else p[2]),
    "constants": (lambda x: (x.half(), 3, 2.5, True, "name"), lambda p: p[0].float() * p[1] * p[2] if p[3] else p[0]),
    "shape": (lambda x: (x.flatten().half(), x.shape, x.device), lambda p: p[0].view(p[1]).float().to(p[2])),
    "size": (lambda x: (x.flatten().half(), x.size(0)), lambda p: p[0].unflatten(0, (p[1], -1)).float()),
    "same tensor twice": (lambda x: (y := x.half(), y), lambda p: p[0].float() + p[1].float()),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_crosses(name: str) -> None:
    check(*STRUCTURES[name], torch.randn(4, 6))


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_crosses_with_symbolic_sizes(name: str) -> None:
    pack, unpack = STRUCTURES[name]
    x = torch.randn(4, 6)
    traced = trace(pack, unpack, x, dynamic=(0, 1))
    for other in (x, torch.randn(5, 3)):
        torch.testing.assert_close(round_trip(traced, other), unpack(pack(other)), rtol=0, atol=0)


def test_only_tensors_and_symbolic_ints_cross() -> None:
    pack, unpack = STRUCTURES["constants"]
    assert len(trace(pack, unpack, torch.randn(4)).pack.graph.output_node().args[0]) == 1
    pack, unpack = STRUCTURES["shape"]
    assert len(trace(pack, unpack, torch.randn(4, 6)).pack.graph.output_node().args[0]) == 1
    traced = trace(pack, unpack, torch.randn(4, 6), dynamic=(0,))
    values = [n.meta["val"] for n in traced.pack.graph.output_node().args[0]]
    assert [type(v).__name__ for v in values] == ["FakeTensor", "SymInt"], "the static 6 is burned in"


class Scaled:
    def __init__(self, q: torch.Tensor, scale: torch.Tensor) -> None:
        self.q, self.scale = q, scale


pytree.register_pytree_node(Scaled, lambda d: ([d.q, d.scale], None), lambda children, _: Scaled(*children))


def test_registered_pytree_node_crosses() -> None:
    check(lambda x: Scaled(x.half(), x.abs().amax()), lambda d: d.q.float() * d.scale, torch.randn(3, 4))


# --- constants -------------------------------------------------------------------------------------------------------


def test_closed_over_codebook_is_a_constant() -> None:
    codebook = torch.linspace(-3, 3, 16)

    def pack(x: torch.Tensor) -> torch.Tensor:
        return (x[..., None] - codebook).abs().argmin(-1).to(torch.uint8)

    traced = check(pack, lambda q: codebook[q.int()], torch.randn(5, 7))
    (in_pack,), (in_unpack,) = (
        [v for v in vars_and_buffers(gm) if isinstance(v, torch.Tensor)] for gm in (traced.pack, traced.unpack)
    )
    assert in_pack is in_unpack and torch.equal(in_pack, codebook), "one copy for all that read it"
    assert in_pack is not codebook, "what becomes of the user's tensor is nothing to the graph"


def test_constant_tensor_in_what_pack_returns_does_not_cross() -> None:
    offset = torch.arange(4.0)
    traced = check(lambda x: ((x - offset).half(), offset), lambda p: p[0].float() + p[1], torch.randn(3, 4))
    assert leaf_shapes(traced, torch.randn(3, 4)) == [(3, 4)]


def vars_and_buffers(gm: torch.fx.GraphModule) -> list[Any]:
    return [*vars(gm).values(), *gm.buffers()]


class Rotate(torch.nn.Module):
    def __init__(self, inverse: bool) -> None:
        super().__init__()
        q, _ = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("q", q.T.contiguous() if inverse else q)
        self.weight = torch.nn.Parameter(torch.full((6,), 0.5 if inverse else 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.q) * self.weight


def test_module_with_buffers_and_parameters() -> None:
    x = torch.randn(4, 6)
    pack, unpack = Rotate(False), Rotate(True)
    with torch.no_grad():
        traced = check(lambda x: pack(x).half(), lambda p: unpack(p.float()), x)
        torch.testing.assert_close(round_trip(traced, x), x, rtol=0, atol=0.01)


def test_graph_modules_as_hooks() -> None:
    x = torch.randn(4, 6)
    check(torch.fx.symbolic_trace(lambda x: x.half()), torch.fx.symbolic_trace(lambda p: p.float()), x)


# --- identity --------------------------------------------------------------------------------------------------------


def test_identity_is_told() -> None:
    x = torch.randn(4)
    assert trace(lambda x: x, lambda p: p, x).identity
    assert trace(lambda x: (x, None), lambda p: p[0], x).identity
    assert trace(lambda x: x.detach(), lambda p: p.view_as(p).detach(), x).unpack is not None
    assert not trace(lambda x: x.half(), lambda p: p.float(), x).identity
    assert not trace(lambda x: x, lambda p: p * 1, x).identity
    assert not trace(lambda x: (x, x), lambda p: p[0] + p[1], x).identity


def test_control_flow_on_what_the_tensor_is() -> None:
    def pack(x: torch.Tensor) -> Any:
        return x.half() if x.dtype is torch.float32 and x.dim() == 2 and x.numel() > 8 else x

    def unpack(p: torch.Tensor) -> torch.Tensor:
        return p.float() if p.dtype is torch.float16 else p

    assert not trace(pack, unpack, torch.randn(4, 4)).identity
    assert trace(pack, unpack, torch.randn(2, 2)).identity
    assert trace(pack, unpack, torch.randn(16)).identity
    assert trace(pack, unpack, torch.randn(4, 4, dtype=torch.float64)).identity


# --- layouts ---------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(4, 6).t(),
    "permuted": lambda: torch.randn(2, 3, 4, 5).permute(2, 0, 3, 1),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "size one": lambda: torch.randn(4, 1, 6).permute(2, 1, 0),
    "sliced": lambda: torch.randn(4, 6)[:, 1:5],
    "strided": lambda: torch.randn(8, 6)[::2, ::3],
    "sliced and transposed": lambda: torch.randn(6, 8)[1:, ::2].t(),
    "with offset": lambda: torch.randn(3, 4, 6)[1],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_are_restored(name: str) -> None:
    x = LAYOUTS[name]()
    # an unpack that always makes contiguous memory
    traced = trace(lambda x: (x.reshape(-1).contiguous(), x.shape), lambda p: p[0].view(p[1]).clone(), x)
    out = round_trip(traced, x)
    torch.testing.assert_close(out, x, rtol=0, atol=0)

    def order(t: torch.Tensor) -> list[int]:
        return sorted((d for d in range(t.dim()) if t.shape[d] > 1), key=lambda d: -t.stride(d))

    assert order(out) == order(x), "dimensions stand in memory in the saved tensor's order"
    if x.is_contiguous() or name in ("transposed", "permuted", "channels_last"):
        assert out.stride() == x.stride()


@pytest.mark.parametrize("dynamic", [(), (0, 1)])
def test_expanded_dimension_is_packed_once(dynamic: tuple[int, ...]) -> None:
    x = torch.randn(1, 6).expand(5, 6)
    pack, unpack = lambda x: x.half().contiguous(), lambda p: p.float()
    traced = trace(pack, unpack, x, dynamic)
    assert traced.pack(x)[0].shape == (1, 6)
    out = round_trip(traced, x)
    assert out.stride() == (0, 1)
    torch.testing.assert_close(out, x.half().float(), rtol=0, atol=0)


def test_several_expanded_dimensions() -> None:
    x = torch.randn(2, 1, 3, 1).expand(2, 4, 3, 7)
    traced = trace(lambda x: x.half().contiguous(), lambda p: p.float(), x)
    assert leaf_shapes(traced, x) == [(2, 1, 3, 1)]
    out = round_trip(traced, x)
    assert out.stride() == x.stride()
    torch.testing.assert_close(out, x.half().float(), rtol=0, atol=0)


def test_fully_expanded_scalar() -> None:
    x = torch.randn(()).expand(3, 4)
    traced = trace(lambda x: x.half(), lambda p: p.float(), x)
    assert leaf_shapes(traced, x) == [(1, 1)]
    torch.testing.assert_close(round_trip(traced, x), x.half().float(), rtol=0, atol=0)


@pytest.mark.parametrize("eager", [False, True])
def test_an_expanded_dimension_of_size_0(eager: bool) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.sin().expand(0, 3) * w.sin()).sin().sum()

    x, w = torch.randn(1, 3, requires_grad=True), torch.randn(0, 3, requires_grad=True)
    call = fn if eager else torch.compile(fn, backend="aot_hooks", options={"inner": "aten"})
    with saved_tensors_hooks(lambda x: (x.half(),), lambda p: p[0].float(), scope="all"):
        y = call(x, w)
    y.backward()
    assert torch.equal(x.grad, torch.zeros(1, 3)) and w.grad.shape == (0, 3)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    flat = x.resolve_conj().reshape(-1)
    return (torch.view_as_real(flat) if x.is_complex() else flat).contiguous().view(torch.uint8)


VALUES = {
    "0-d": torch.randn(()),
    "empty": torch.randn(0, 4),
    "empty with a zero inside": torch.randn(3, 0, 2),
    "complex": torch.randn(3, 4, dtype=torch.complex64),
    "complex transposed": torch.randn(3, 4, dtype=torch.complex64).t(),
    "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj(),
    "bool": torch.randn(3, 4) > 0,
    "int64": torch.randint(-5, 5, (3, 4)),
    "uint8": torch.randint(0, 5, (3, 4), dtype=torch.uint8),
    "bfloat16": torch.randn(3, 4).bfloat16(),
    "float64": torch.randn(3, 4, dtype=torch.float64),
    "not finite": torch.tensor([[torch.inf, -torch.inf, torch.nan, -0.0, 1e-40, 3.4e38]]),
}


@pytest.mark.parametrize("name", VALUES)
def test_every_kind_of_value(name: str) -> None:
    """Through bytes and back, bit for bit."""
    x = VALUES[name]

    def pack(x: torch.Tensor) -> Any:
        flat = x.resolve_conj().contiguous().reshape(-1)
        return (torch.view_as_real(flat).clone() if x.is_complex() else flat).view(torch.uint8), x.dtype, x.shape

    def unpack(p: Any) -> torch.Tensor:
        q, dtype, shape = p
        if dtype.is_complex:
            return torch.view_as_complex(q.view(torch.float32).view(-1, 2)).view(shape)
        return q.view(dtype).view(shape)

    traced = trace(pack, unpack, x)
    out = round_trip(traced, x)
    assert out.dtype == x.dtype and out.shape == x.shape
    assert torch.equal(bits_of(out), bits_of(x))


# --- functionalization -----------------------------------------------------------------------------------------------


def test_in_place_work_on_temporaries_becomes_functional() -> None:
    def pack(x: torch.Tensor) -> Any:
        y = x.clone()
        y.mul_(2).add_(1)
        y[0] = 7
        out = torch.empty_like(y)
        torch.mul(y, 3, out=out)
        return out

    def unpack(p: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(p)
        y.view(-1).copy_(p.view(-1))
        y.div_(3)
        return y

    traced = check(pack, unpack, torch.randn(3, 4))
    for gm in (traced.pack, traced.unpack):
        mutable = [n.target for n in gm.graph.nodes if n.op == "call_function" and n.target._schema.is_mutable]
        assert not mutable
    assert not any("detach" in op or "alias" in op for op in ops(traced.pack) + ops(traced.unpack))


def test_in_place_random() -> None:
    x = torch.randn(64, 64)
    traced = trace(lambda x: x + torch.empty_like(x).uniform_(2, 3), lambda p: p, x)
    noise = round_trip(traced, x) - x
    assert 1.99 < noise.min() < 2.1 and 2.9 < noise.max() < 3.01 and noise.std() > 0.2


def test_decompositions_are_applied() -> None:
    table = {torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x)}
    hook = Hook("h", torch.nn.functional.silu, lambda p: p)
    x = torch.randn(3)
    plain = trace_hook(hook, fake_of(x), "'x'", decompositions=None)
    decomposed = trace_hook(hook, fake_of(x), "'x'", decompositions=table)
    assert ops(plain.pack) == ["aten.silu.default"]
    assert ops(decomposed.pack) == ["aten.sigmoid.default", "aten.mul.Tensor"]


# --- canonical form --------------------------------------------------------------------------------------------------


def test_canonical_is_free_of_names() -> None:
    def one(x: torch.Tensor) -> torch.Tensor:
        lower = x * 2
        return lower.half()

    def other(tensor: torch.Tensor) -> torch.Tensor:
        upper = tensor * 2
        return upper.half()

    def different(x: torch.Tensor) -> torch.Tensor:
        return (x * 3).half()

    x = torch.randn(3)
    texts = [canonical(trace(pack, lambda p: p.float(), x).pack) for pack in (one, other, different)]
    assert texts[0] == texts[1] != texts[2]
    renamed = trace(one, lambda p: p.float(), x).pack
    for i, node in enumerate(renamed.graph.nodes):
        node._rename(f"anything_{i}")
    renamed.recompile()
    assert canonical(renamed) == texts[0]


def test_canonical_golden() -> None:
    traced = trace(lambda x: (x.to(torch.float8_e5m2), x.dtype), lambda p: p[0].to(p[1]), torch.randn(3))
    expecttest.assert_expected_inline(
        "\n".join([*canonical(traced.pack), *canonical(traced.unpack)]),
        """\
%0 = placeholder  () {}
%1 = call_function aten._to_copy.default ('%0',) {'dtype': torch.float8_e5m2}
%2 = output  (('%1',),) {}
%0 = placeholder  () {}
%1 = call_function aten._to_copy.default ('%0',) {'dtype': torch.float32}
%2 = output  (['%1'],) {}""",
    )


def test_canonical_tells_constants_by_their_bytes() -> None:
    def text(constant: torch.Tensor) -> list[str]:
        return canonical(trace(lambda x: x * constant, lambda p: p, torch.randn(3)).pack)

    a = torch.tensor([1.0, 2.0, 3.0])
    assert text(a) == text(a.clone()) != text(a + 1)


def test_canonical_tells_graphs_inside_apart() -> None:
    def text(factor: float) -> list[str]:
        body = torch.fx.symbolic_trace(lambda x: x * factor)
        root = torch.nn.Module()
        root.body = body
        graph = torch.fx.Graph()
        x, inside = graph.placeholder("x"), graph.get_attr("body")
        graph.output(graph.call_function(torch.ops.higher_order.invoke_subgraph, (inside, "0", x)))
        return canonical(torch.fx.GraphModule(root, graph))

    assert text(2.0) == text(2.0) != text(3.0)


def test_another_size_in_each_trace_is_hidden_state() -> None:
    calls = iter(range(100))

    def pack(x: torch.Tensor) -> Any:
        return x.new_zeros(x.shape[0] + next(calls)), x.half()

    with pytest.raises(HookContractError, match="two traces of it differ"):
        trace(pack, lambda p: p[1].float(), torch.randn(4, 3), dynamic=(0,))
