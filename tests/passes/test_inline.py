"""The rewrite itself: what the graphs look like after it, where pack and unpack stand, and what crosses."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from graphs import EXACT, FLOAT8, HALF, by_hand, capture, inputs, ops, text
from torch.fx import GraphModule, Node

from aot_hooks import Hook
from aot_hooks.graphs.layout import in_layout, layout_of

pytestmark = pytest.mark.core

FLAT_FLOAT8 = Hook(
    "float8",
    lambda x: (x.reshape(-1).to(torch.float8_e5m2), x.shape, x.dtype),
    lambda p: p[0].to(p[2]).view(p[1]),
)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


def worked_example(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return Square.apply(x + y).sin()


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


# --- goldens ---------------------------------------------------------------------------------------------------------


def test_worked_example() -> None:
    _, after = capture(worked_example, leaf(4, 8), leaf(4, 8), hook=FLAT_FLOAT8)
    expecttest.assert_expected_inline(
        text(after.fw, after.bw),
        """\
primals_1 float32[4, 8] = input
primals_2 float32[4, 8] = input
add float32[4, 8] = aten.add.Tensor(primals_1, primals_2)
mul float32[4, 8] = aten.mul.Tensor(add, add)
laid_out float32[4, 8] = laid_out(add, (0, 1), (8, 1))
add_pack_view float32[32] = aten.view.default(laid_out, [-1])
add_pack__to_copy float8_e5m2[32] = aten._to_copy.default(add_pack_view, dtype=torch.float8_e5m2)
layout_of float32[0, 8, 1] = layout_of(add)
sin float32[4, 8] = aten.sin.default(mul)
return sin, add_pack__to_copy, layout_of
--
add_packed_0 float8_e5m2[32] = input
add_packed_1 float32[0, 8, 1] = input
tangents_1 float32[4, 8] = input
add_unpack__to_copy float32[32] = aten._to_copy.default(add_packed_0, dtype=torch.float32)
add_unpack_view float32[4, 8] = aten.view.default(add_unpack__to_copy, [4, 8])
in_layout float32[4, 8] = in_layout(add_unpack_view, add_packed_1, True)
mul float32[4, 8] = aten.mul.Tensor(in_layout, in_layout)
cos float32[4, 8] = aten.cos.default(mul)
mul_1 float32[4, 8] = aten.mul.Tensor(tangents_1, cos)
mul_2 float32[4, 8] = aten.mul.Tensor(in_layout, 2)
mul_3 float32[4, 8] = aten.mul.Tensor(mul_2, mul_1)
return mul_3, mul_3
""",
    )


def test_worked_example_with_symbolic_sizes() -> None:
    _, after = capture(worked_example, leaf(4, 8), leaf(4, 8), hook=FLAT_FLOAT8, dynamic=True)
    expecttest.assert_expected_inline(
        text(after.fw, after.bw),
        """\
primals_1 a = input
primals_2 b = input
primals_3 float32[a, b] = input
primals_4 float32[a, b] = input
add float32[a, b] = aten.add.Tensor(primals_3, primals_4)
mul float32[a, b] = aten.mul.Tensor(add, add)
laid_out float32[a, b] = laid_out(add, (0, 1), None)
add_pack_sym_size_int b = aten.sym_size.int(laid_out, 1)
add_pack_sym_size_int_1 a = aten.sym_size.int(laid_out, 0)
add_pack_view float32[b*a] = aten.view.default(laid_out, [-1])
add_pack__to_copy float8_e5m2[b*a] = aten._to_copy.default(add_pack_view, dtype=torch.float8_e5m2)
layout_of float32[0, b, 1] = layout_of(add)
sin float32[a, b] = aten.sin.default(mul)
return sin, add_pack__to_copy, layout_of, primals_2, primals_1
--
primals_2 b = input
primals_1 a = input
add_packed_0 float8_e5m2[b*a] = input
add_packed_3 float32[0, b, 1] = input
tangents_1 float32[a, b] = input
add_unpack__to_copy float32[b*a] = aten._to_copy.default(add_packed_0, dtype=torch.float32)
add_unpack_view float32[a, b] = aten.view.default(add_unpack__to_copy, [primals_1, primals_2])
in_layout float32[a, b] = in_layout(add_unpack_view, add_packed_3, True)
mul float32[a, b] = aten.mul.Tensor(in_layout, in_layout)
cos float32[a, b] = aten.cos.default(mul)
mul_1 float32[a, b] = aten.mul.Tensor(tangents_1, cos)
mul_2 float32[a, b] = aten.mul.Tensor(in_layout, 2)
mul_3 float32[a, b] = aten.mul.Tensor(mul_2, mul_1)
return None, None, mul_3, mul_3
""",
    )


def test_symbolic_int_that_the_graph_does_not_save_yet() -> None:
    # half the elements: a size that no other value of the graph has
    hook = Hook(
        "split",
        lambda x: (x.half(), x.shape[0] * 2, x.shape[0] * 2 + 0),
        lambda p: p[0][: p[1] // 2].float() + 0 * p[2],
    )
    _, after = capture(worked_example, leaf(4, 8), leaf(4, 8), hook=hook, dynamic=True)
    lines = text(after.fw, after.bw).splitlines()
    assert "add_pack_mul 2*a = <built-in function mul>(add_pack_sym_size_int, 2)" in lines
    assert "return sin, add_pack__to_copy, layout_of, primals_2, primals_1, add_pack_mul" in lines
    assert "add_packed_1 2*a = input" in lines
    assert "add_unpack_floordiv a = <built-in function floordiv>(add_packed_1, 2)" in lines


# --- where things stand ----------------------------------------------------------------------------------------------


W = torch.randn(8, 8)


def three_layers(x: torch.Tensor) -> torch.Tensor:
    """Each layer saves what its product makes; the backward reads them in the opposite order."""
    for _ in range(3):
        x = Square.apply(x @ W).sin()
    return x


def test_pack_stands_after_last_forward_use_and_unpack_before_first_backward_use() -> None:
    before, after = capture(three_layers, leaf(4, 8), hook=EXACT)
    saved = [n.name for n in before.saved if n.name.startswith("mm")]
    assert len(saved) == 3
    for name in saved:
        fw, bw = list(after.fw.graph.nodes), list(after.bw.graph.nodes)
        value = next(n for n in fw if n.name == name)
        *readers, laid, strides = sorted(fw.index(n) for n in value.users)
        assert [n.name for n in fw[laid].users] == [f"{name}_pack_clone"] and laid == readers[-1] + 1
        assert fw[strides].target is layout_of and strides == laid + 2
        was = next(n for n in before.bw.graph.nodes if n.name == name)
        reader = next(n for n in bw if n.name == next(iter(was.users)).name)
        # EXACT's unpack is empty: what the first reader reads is the packed input itself, in its layout
        (unpacked,) = (n for n in reader.all_input_nodes if n.target is in_layout)
        assert [n.name for n in unpacked.all_input_nodes] == [f"{name}_packed_0", f"{name}_packed_1"]
    _, after = capture(three_layers, leaf(4, 8), hook=HALF)
    bw = list(after.bw.graph.nodes)
    for name in saved:
        unpack = next(n for n in bw if n.name == f"{name}_unpack__to_copy")
        (in_its_layout,) = unpack.users
        assert bw.index(min(in_its_layout.users, key=bw.index)) == bw.index(unpack) + 2


def test_events_interleave() -> None:
    """Packs along the forward and unpacks along the backward, not all at the end and at the top."""
    _, after = capture(three_layers, leaf(4, 8), hook=FLOAT8)

    def events(gm: GraphModule) -> str:
        shown = {"aten._to_copy.default": "convert", "aten.sin.default": "sin", "aten.cos.default": "cos"}
        return " ".join(shown[op] for op in ops(gm) if op in shown)

    assert events(after.fw) == "convert sin convert sin convert sin"
    assert events(after.bw) == "convert cos convert cos convert cos"


def test_pack_waits_for_the_last_use_through_a_view() -> None:
    pair = by_hand(
        lambda x, w: ((y := x * 2).t() @ w, y.sin(), y),
        lambda y, g, h: (g.sum() * y.cos() * h,),
        torch.randn(4, 4),
        torch.randn(4, 4),
        num_fwd_outputs=2,
    )
    pair.apply(EXACT)
    nodes = [n.name for n in pair.fw.graph.nodes]
    assert nodes.index("mul_pack_clone") == max(nodes.index("mm"), nodes.index("sin")) + 2, "after `laid_out`"


def test_pack_of_an_input_stands_after_all_inputs() -> None:
    pair = by_hand(lambda x, y: (x * y, x, y), lambda x, y, g: (g * y, g * x), torch.randn(3), torch.randn(3))
    pair.apply(HALF, scope="all")
    assert [n.op for n in pair.fw.graph.nodes][:2] == ["placeholder"] * 2
    assert ops(pair.fw).count("aten._to_copy.default") == 2


# --- symbolic ints ---------------------------------------------------------------------------------------------------


def test_new_symints_stand_at_the_end_and_before_the_first_tensor() -> None:
    hook = Hook("h", lambda x: (x.half(), x.shape[0] + 1, x.shape[1] * 3), lambda p: p[0].float() * (p[1] * p[2] > 0))
    before, after = capture(three_layers, leaf(4, 8), hook=hook, dynamic=True)
    kinds = [isinstance(n.meta["val"], torch.SymInt) for n in after.saved]
    assert kinds == sorted(kinds), "tensors, then symints"
    old = [n.name for n in before.saved if isinstance(n.meta["val"], torch.SymInt)]
    new = [n for n in after.saved if isinstance(n.meta["val"], torch.SymInt)]
    assert [n.name for n in new][: len(old)] == old
    values = [n.meta["val"] for n in inputs(after.bw)]
    assert [str(v) for v in values[: len(new)]] == [str(n.meta["val"]) for n in new]
    assert not any(isinstance(v, torch.SymInt) for v in values[len(new) :])
    # three saved tensors of the same sizes: each expression crosses once
    assert len({str(n.meta["val"]) for n in new}) == len(new)


def test_sizes_that_cross_already_are_used() -> None:
    before, after = capture(worked_example, leaf(4, 8), leaf(4, 8), hook=FLAT_FLOAT8, dynamic=True)
    syms = [[n.name for n in p.saved if isinstance(n.meta["val"], torch.SymInt)] for p in (before, after)]
    assert syms[0] == syms[1] and len(syms[0]) == 2


def test_no_new_name_says_tangents_or_primals() -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    before, after = capture(lambda x, w: (x @ w).sin(), x, w, hook=HALF, scope="all")
    old = {n.name for p in (before.fw, before.bw) for n in p.graph.nodes}
    new = {n.name for p in (after.fw, after.bw) for n in p.graph.nodes} - old
    assert new and not any("tangents" in name or "primals" in name for name in new)


# --- what else crosses -----------------------------------------------------------------------------------------------


def test_saves_without_version_check_stay_the_last_tensors() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.x = x  # an attribute: saved without a version check
            ctx.save_for_backward(y)
            return x * y

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g * ctx.saved_tensors[0], g * ctx.x

    def unchecked(node: Node) -> bool:
        return bool(node.meta.get("saved_tensor_with_no_vc_check"))

    two = Hook("two", lambda x: (x.half(), x.abs().amax()), lambda p: p[0].float() + 0 * p[1])
    before, after = capture(lambda x, y: Scale.apply(x @ W, y @ W), leaf(4, 8), leaf(4, 8), hook=two)
    flags = [[unchecked(n) for n in pair.saved] for pair in (before, after)]
    assert [sum(f) for f in flags] == [1, 3] and len(flags[1]) == len(flags[0]) + 4
    assert flags == [sorted(f) for f in flags]


class Token:
    """Stands for an object that torch carries from forward to backward as it is."""


def test_opaque_objects_stay_between_tensors_and_symints() -> None:
    pair = by_hand(lambda x: ((y := x * 2).sin(), y), lambda y, g: (g * y.cos(),), torch.randn(4))
    token = Token()
    with pair.fw.graph.inserting_before(pair.fw.graph.output_node()):
        made = pair.fw.graph.call_function(Token)
    made.meta["val"] = token
    output = pair.fw.graph.output_node()
    output.args = ((*output.args[0], made),)
    with pair.bw.graph.inserting_before(inputs(pair.bw)[-1]):
        taken = pair.bw.graph.placeholder("token")
    taken.meta["val"] = token
    pair.apply(Hook("two", lambda x: (x.half(), x.abs().amax()), lambda p: p[0].float() + 0 * p[1]))
    assert [n is made for n in pair.saved] == [False, False, False, True]
    assert [n.name == "token" for n in inputs(pair.bw)] == [False, False, False, True, False]


def test_every_new_node_has_a_value() -> None:
    _, after = capture(three_layers, leaf(4, 8), hook=FLAT_FLOAT8, dynamic=True)
    for gm in (after.fw, after.bw):
        assert all("val" in n.meta for n in gm.graph.nodes if n.op not in ("output", "get_attr"))


def test_a_shared_constant_is_one_attribute() -> None:
    table = torch.linspace(-8, 8, 256)
    hook = Hook(
        "codebook",
        lambda x: (x[..., None] - table).abs().argmin(-1).to(torch.uint8),
        lambda p: table[p.int()],
    )
    _, after = capture(three_layers, leaf(4, 8), hook=hook)
    for gm in (after.fw, after.bw):
        assert len({n.target for n in gm.graph.find_nodes(op="get_attr")}) == 1
