"""Policies: which tensors they choose, compiled and eager, and that they are values.

Values first (plain rows, no graph), then what a model saves, then sizes and recompiling.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sentinel import Chain, assert_same, compiled, gradients, graph_count, hand_gradients, scale
from steps import HALF
from torch import Tensor, nn

import aot_hooks
from aot_hooks import KEEP, Hook, SavedTensor, float8, lossless, policies, saved_tensors_hooks, saved_tensors_policy
from aot_hooks.content import content
from aot_hooks.errors import OptionError, PolicyError
from aot_hooks.operators import operator_behind, same_operator
from aot_hooks.policies import (
    everything,
    first_match,
    larger_than,
    only_these_dtypes,
    only_these_modules,
    only_these_names,
    only_these_ops,
)

aten = torch.ops.aten
DOUBLE, TRIPLE = Hook("double", *scale(2)), Hook("triple", *scale(3))


def row(**changes: Any) -> SavedTensor:
    fields = dict(
        name="gelu",
        op="aten.gelu.default",
        shape=(4, 8),
        dtype=torch.float32,
        device=torch.device("cpu"),
        nbytes=128,
        storage=0,
        module_path="layers.0.mlp.fc1",
        source_line="model.py:31: h = gelu(x)",
        backward_ops=("aten.mm.default",),
        is_input=False,
        is_output=False,
        is_static=False,
    )
    return SavedTensor(**fields | changes)


# --- what each chooses -----------------------------------------------------------------------------------------------


def test_everything_and_larger_than() -> None:
    assert everything(DOUBLE)(row()) is DOUBLE
    assert [larger_than(n, DOUBLE)(row(nbytes=128)) for n in (0, 127, 128)] == [DOUBLE, DOUBLE, KEEP]


@pytest.mark.parametrize(
    ("key", "op", "fits"),
    [
        (aten.gelu.default, "aten.gelu.default", True),
        (aten.gelu, "aten.gelu.default", True),
        ("gelu", "aten.gelu.default", True),
        ("aten.gelu", "aten.gelu.default", True),
        ("aten::gelu", "aten.gelu.default", True),
        (aten.gelu.default, "aten.gelu_backward.default", False),
        (aten.mul.Tensor, "aten.mul.Tensor", True),
        (aten.mul.Tensor, "aten.mul.Scalar", False),
        (aten.mul.Tensor, "aten.mul", True),  # an eager part, where the overload isn't known
        (aten.relu_.default, "aten.relu.default", True),
        (aten.softmax.int, "aten._softmax.default", True),
        (aten._softmax.default, "aten._log_softmax.default", False),
        (aten.mm.default, "aten.bmm.default", False),
        ("input", "input", True),
        ("input", "aten.mm.default", False),
    ],
)
def test_by_operator(key: Any, op: str, fits: bool) -> None:
    assert only_these_ops({key: DOUBLE})(row(op=op)) is (DOUBLE if fits else KEEP)


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("layers.*.mlp", "layers.0.mlp", True),
        ("layers.*.mlp", "layers.0.mlp.fc1", True),  # what is inside belongs to it
        ("layers.*.mlp", "layers.0.mlp2", False),
        ("layers.*.mlp", "layers.0", False),
        ("layers.*.mlp", "encoder.layers.0.mlp", False),
        ("layers.*.mlp", "layers.mlp", False),
        ("*.mlp", "layers.0.mlp", False),  # a star stands for one name
        ("**.mlp", "encoder.layers.0.mlp.fc1", True),
        ("**.mlp", "mlp", True),
        ("layers.**.fc1", "layers.0.mlp.fc1", True),
        ("layers.[01].mlp", "layers.1.mlp", True),
        ("layers.[01].mlp", "layers.2.mlp", False),
        ("layers.?", "layers.12", False),
        ("fc*", "fc1", True),
        ("**", "", True),
        ("*", "", False),
    ],
)
def test_by_module(pattern: str, path: str, fits: bool) -> None:
    assert only_these_modules({pattern: DOUBLE})(row(module_path=path)) is (DOUBLE if fits else KEEP)


def test_by_dtype_and_by_name() -> None:
    assert only_these_dtypes({torch.float32: DOUBLE})(row()) is DOUBLE
    assert only_these_dtypes({torch.bfloat16: DOUBLE})(row()) is KEEP
    assert only_these_names({"b": DOUBLE})(row(checkpoint_names=("a", "b"))) is DOUBLE
    assert only_these_names({"b": DOUBLE})(row(checkpoint_names=("bb",))) is KEEP


def test_the_first_key_that_fits_decides() -> None:
    policy = only_these_modules({"layers.0": KEEP, "layers.*": DOUBLE})
    assert [policy(row(module_path=f"layers.{i}.mlp")) for i in (0, 1)] == [KEEP, DOUBLE]


def test_first_match() -> None:
    policy = first_match(only_these_ops({aten.mm: DOUBLE}), larger_than(100, TRIPLE))
    assert policy(row(op="aten.mm.default", nbytes=1)) is DOUBLE
    assert policy(row(nbytes=128)) is TRIPLE
    assert policy(row(nbytes=1)) is KEEP
    assert first_match()(row()) is KEEP


def test_keep_in_a_policy_decides_and_in_a_plain_function_does_not() -> None:
    assert first_match(only_these_ops({aten.gelu: KEEP}), everything(DOUBLE))(row()) is KEEP
    assert first_match(lambda saved: KEEP, everything(DOUBLE))(row()) is DOUBLE
    assert first_match(KEEP, DOUBLE)(row()) is KEEP


def test_a_hook_that_declines_leaves_it_to_the_next() -> None:
    mask = row(dtype=torch.bool)
    assert float8().declines(mask) is not None
    assert first_match(float8(), DOUBLE)(mask) is DOUBLE
    assert first_match(float8(), DOUBLE)(row(shape=(4, 64))) is float8()


def test_a_policy_where_a_hook_is_expected_is_both_conditions() -> None:
    policy = larger_than(100, only_these_ops({aten.gelu: DOUBLE}))
    assert [policy(r) for r in (row(), row(nbytes=1), row(op="aten.mm.default"))] == [DOUBLE, KEEP, KEEP]
    assert first_match(policy, TRIPLE)(row(nbytes=1)) is TRIPLE


def test_says_why_it_keeps() -> None:
    mask = row(dtype=torch.bool)
    leaves = float8().declines(mask)
    assert first_match(only_these_ops({aten.gelu: float8()}), lossless()).why_kept(
        row(nbytes=8)
    ) == lossless().why_kept(row(nbytes=8))
    assert larger_than(100, float8()).why_kept(mask) == leaves
    assert larger_than(1000, float8()).why_kept(mask) == "not larger than 1000 bytes"  # float8 wasn't asked
    assert first_match(only_these_ops({aten.mm: float8()}), float8()).why_kept(mask) == leaves


# --- policies are values ---------------------------------------------------------------------------------------------

MAKERS = {
    "everything": lambda hook: everything(hook),
    "larger_than": lambda hook: larger_than(1 << 20, hook),
    "only_these_ops": lambda hook: only_these_ops({aten.gelu.default: hook, aten.mm: KEEP}),
    "only_these_modules": lambda hook: only_these_modules({"layers.*.mlp": hook}),
    "only_these_names": lambda hook: only_these_names({"qkv": hook, "out": KEEP}),
    "only_these_dtypes": lambda hook: only_these_dtypes({torch.float32: hook}),
    "first_match": lambda hook: first_match(only_these_ops({aten.gelu: hook}), larger_than(1 << 20, hook)),
}


@pytest.mark.core
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_is_a_value(make: Any) -> None:
    policy, again, other = make(float8()), make(float8()), make(float8(scaling="blockwise"))
    assert policy == again and hash(policy) == hash(again) and {policy: 1}[again] == 1
    assert policy != other
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert pickle.loads(pickle.dumps(KEEP)) is copy.deepcopy(KEEP) is KEEP  # told by identity
    with pytest.raises(AttributeError):
        policy.hook = KEEP


def test_prints_as_what_one_types() -> None:
    names = {name: getattr(policies, name) for name in policies.__all__}
    names |= {"KEEP": KEEP, "torch": torch, "half": HALF}
    for make in MAKERS.values():
        policy = make(HALF)
        assert eval(repr(policy), names) == policy
    policy = first_match(larger_than(1048576, HALF), only_these_ops({aten.gelu.default: KEEP}))
    assert repr(policy) == "first_match(larger_than(1048576, half), only_these_ops({'aten.gelu.default': KEEP}))"
    assert repr(first_match(test_prints_as_what_one_types)) == "first_match(test_prints_as_what_one_types)"


def test_content_differs_where_behaviour_differs() -> None:
    different = [
        *(make(float8()) for make in MAKERS.values()),
        *(make(float8(scaling="blockwise")) for make in MAKERS.values()),
        larger_than(1, float8()),
        only_these_names({"qkv": KEEP, "out": float8()}),
        only_these_modules({"layers.**.mlp": float8()}),
        only_these_dtypes({torch.bfloat16: float8()}),
        only_these_ops({aten.gelu: float8(), aten.mm: KEEP}),
        first_match(larger_than(1 << 20, float8()), only_these_ops({aten.gelu: float8()})),
        only_these_modules({"layers.0": float8(), "layers.*": KEEP}),
        only_these_modules({"layers.*": KEEP, "layers.0": float8()}),
    ]
    keys = [content(policy) for policy in different]
    assert len(set(keys)) == len(keys)
    assert content(larger_than(1, Hook("a", *scale(2)))) == content(larger_than(1, Hook("b", *scale(2))))
    assert content(larger_than(1, Hook("a", *scale(2)))) != content(larger_than(1, Hook("a", *scale(3))))


def test_content_is_the_same_in_another_process() -> None:
    code = (
        "import torch; from aot_hooks import *; from aot_hooks.content import content\n"
        "p = policies; a = torch.ops.aten\n"
        "print(content(p.first_match(p.only_these_ops({a.gelu: float8()}), p.larger_than(1 << 20, float8()))))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == content(MAKERS["first_match"](float8()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: everything(3), "everything: expected a Hook, or a policy, got 3"),
        (lambda: everything(Hook), "got the class Hook"),
        (lambda: larger_than("1 MB", DOUBLE), "expected bytes as an int of at least 0, got '1 MB'"),
        (lambda: larger_than(-1, DOUBLE), "got -1"),
        (lambda: larger_than(True, DOUBLE), "got True"),
        (lambda: larger_than(1, None), "larger_than: expected a Hook, or a policy, got None"),
        (lambda: only_these_ops({aten.gelu.default: 1}), "only_these_ops: expected a Hook"),
        (lambda: only_these_ops({}), "expected a dict from an operator to a Hook"),
        (lambda: only_these_ops([aten.gelu]), "expected a dict from an operator to a Hook"),
        (lambda: only_these_ops({F.gelu: DOUBLE}), "expected an operator such as torch.ops.aten.gelu.default"),
        (lambda: only_these_ops({"aten.gelo": DOUBLE}), "torch has no operator aten.gelo"),
        (lambda: only_these_ops({"aten.gelu.Tensor": DOUBLE}), "torch has no operator aten.gelu.Tensor"),
        (lambda: only_these_ops({aten.linear.default: DOUBLE}), "aten.linear.default is made of other operators"),
        (lambda: only_these_modules({"layers..mlp": DOUBLE}), "expected a module's path"),
        (lambda: only_these_modules({nn.Linear: DOUBLE}), "expected a module's path"),
        (lambda: only_these_names({"": DOUBLE}), "expected a name as a string"),
        (lambda: only_these_dtypes({"float32": DOUBLE}), "expected a torch.dtype such as torch.float32"),
        (lambda: first_match(DOUBLE, 7), "first_match: expected a Hook, or a policy, got 7"),
    ],
)
def test_bad_arguments_raise_what_was_expected(make: Any, message: str) -> None:
    with pytest.raises(OptionError) as error:
        make()
    assert message in str(error.value)


# --- what a model saves, compiled and eager --------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.norm, self.mlp, self.proj, self.broken = nn.LayerNorm(16), Mlp(), nn.Linear(16, 16, bias=False), broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(torch.softmax(x, -1))
        if self.broken:
            torch._dynamo.graph_break()
        return self.mlp(self.norm(x)).tanh()


class Net(nn.Module):
    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(broken) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def eager(fn: Any, **_: Any) -> Any:
    return fn


def chosen(call: Any, policy: Any) -> set[tuple[str, str]]:
    """Operators and modules of the intermediates that `policy` gives a hook, without overloads."""
    found = set()

    def spy(saved: SavedTensor) -> Hook:
        hook = policy(saved)
        if hook is not KEEP:
            found.add((".".join(saved.op.split(".")[:2]), saved.module_path))
        return hook

    x = torch.randn(8, 3, 16, requires_grad=True)
    with saved_tensors_policy(spy):
        call(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    return found


LAYERS = ("layers.0", "layers.1")
CHOSEN = {
    "softmax": (only_these_ops({aten._softmax: HALF}), {("aten._softmax", layer) for layer in LAYERS}),
    "gelu": (only_these_ops({aten.gelu.default: HALF}), {("aten.gelu", f"{layer}.mlp") for layer in LAYERS}),
    "tanh": (only_these_ops({"tanh": HALF}), {("aten.tanh", layer) for layer in LAYERS}),
    # `linear` of 3-d inputs gives a view of what the product gave, with and without a bias
    "addmm": (only_these_ops({aten.addmm: HALF}), {("aten.addmm", f"{layer}.mlp.fc1") for layer in LAYERS}),
    "mm": (only_these_ops({aten.mm: HALF}), {("aten.mm", f"{layer}.proj") for layer in LAYERS}),
    "all mlps": (
        only_these_modules({"layers.*.mlp": HALF}),
        {("aten.addmm", f"{layer}.mlp.fc1") for layer in LAYERS} | {("aten.gelu", f"{layer}.mlp") for layer in LAYERS},
    ),
    "one mlp": (
        only_these_modules({"layers.1.mlp": HALF}),
        {("aten.addmm", "layers.1.mlp.fc1"), ("aten.gelu", "layers.1.mlp")},
    ),
    "deep": (only_these_modules({"**.fc1": HALF}), {("aten.addmm", f"{layer}.mlp.fc1") for layer in LAYERS}),
}


@pytest.mark.core
@pytest.mark.parametrize("wrap", [compiled, eager], ids=["compiled", "eager"])
@pytest.mark.parametrize("which", CHOSEN)
def test_operators_and_modules_are_the_same_compiled_and_eager(which: str, wrap: Any) -> None:
    policy, expected = CHOSEN[which]
    assert chosen(wrap(Net()), policy) == expected


@pytest.mark.core
@pytest.mark.parametrize("which", ["softmax", "gelu", "addmm", "all mlps", "deep"])
def test_operators_and_modules_are_the_same_across_a_graph_break(which: str) -> None:
    """What a frame gives back is an output of its graph; and torch runs the first layer's graphs for the second too."""
    policy, expected = CHOSEN[which]
    first = {(op, path) for op, path in expected if path.startswith("layers.0")}
    assert first <= chosen(compiled(Net(broken=True), fullgraph=False), policy) <= expected


@pytest.mark.core
def test_modules_in_eager_parts_of_a_compiled_model() -> None:
    model = Net()
    torch.compiler.disable(model.layers[1])  # a module is disabled in place
    model.layers[1].forward = torch.compiler.disable(model.layers[1].forward)
    got = chosen(compiled(model, fullgraph=False), only_these_modules({"layers.*.mlp": HALF}))
    assert got == CHOSEN["all mlps"][1]


@pytest.mark.slow
def test_operators_and_modules_under_inductor() -> None:
    policy, expected = CHOSEN["all mlps"]
    got = chosen(compiled(Net(), inner="inductor"), policy)
    assert expected <= got  # and what the min-cut saves because it recomputes `tanh`
    assert got - expected <= {("aten.addmm", f"{layer}.mlp.fc2") for layer in LAYERS}


def roots_of(model: nn.Module) -> list[Any]:
    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def step(self, x: Tensor) -> Tensor:
            return self.model(x)

    return [model, lambda x: model(x), Trainer().step, lambda x: dict(m=model)["m"](x)]


@pytest.mark.parametrize("wrap", [compiled, eager], ids=["compiled", "eager"])
@pytest.mark.parametrize("form", range(4), ids=["model", "closure", "attribute", "dict"])
def test_paths_begin_at_the_outermost_module(form: int, wrap: Any) -> None:
    policy, expected = CHOSEN["all mlps"]
    assert chosen(wrap(roots_of(Net())[form]), policy) == expected


def test_an_operator_that_saves_nothing_counts_to_what_is_around_its_neighbours() -> None:
    """Footgun: in eager parts nothing tells where an addition ran; its place is found from those before and after."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) + x)

    model = nn.Sequential(Residual(), nn.Linear(16, 16))
    policy = only_these_ops({aten.add: HALF})
    assert chosen(model, policy) == chosen(compiled(model), policy) == {("aten.add", "0")}


def test_names_of_grad_fns() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    outs = [x.sigmoid(), torch.log_softmax(x, 0), F.layer_norm(x, (4,)), x @ x, x * 2, x.relu(), F.silu(x), x.cumsum(0)]
    ops = ["sigmoid", "_log_softmax", "native_layer_norm", "mm", "mul", "relu", "silu", "cumsum"]
    for out, op in zip(outs, ops, strict=True):
        assert same_operator(f"aten.{op}", operator_behind(type(out.grad_fn).__name__)), out.grad_fn
    assert operator_behind("MyFunctionBackward") == "MyFunctionBackward"


@torch.library.custom_op("aot_hooks_tests::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return x * 3


thrice.register_fake(lambda x: torch.empty_like(x))
thrice.register_autograd(lambda ctx, g: g * 3)


@pytest.mark.parametrize("wrap", [compiled, eager], ids=["compiled", "eager"])
def test_an_operator_of_the_users(wrap: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    policy = only_these_ops({torch.ops.aot_hooks_tests.thrice.default: HALF})
    got = chosen(wrap(lambda x: (thrice(model(x)) * model(x)).sum()), policy)
    assert {op for op, _ in got} == {"aot_hooks_tests.thrice"}


# --- contexts, options, regions --------------------------------------------------------------------------------------

H1, H2 = 6 * 5 * 4, 6 * 4 * 4  # bytes of the two intermediates of the chain
ON_THE_CHAIN = {
    "everything": (everything(DOUBLE), {"h": 2}),
    "larger_than": (larger_than(H2, DOUBLE), {"h1": 2}),
    "only_these_ops": (only_these_ops({aten.mm.default: DOUBLE}), {"h": 2}),
    "only_these_modules": (only_these_modules({"**": DOUBLE}), {"h": 2}),
    "only_these_dtypes": (only_these_dtypes({torch.float32: DOUBLE}), {"h": 2}),
    "first_match": (first_match(larger_than(H2, DOUBLE), TRIPLE), {"h1": 2, "h2": 3}),
    "function": (lambda saved: DOUBLE if saved.nbytes > H2 else TRIPLE, {"h1": 2, "h2": 3}),
}


@pytest.mark.core
@pytest.mark.parametrize("name", ON_THE_CHAIN)
def test_as_context_as_option_and_in_a_region(model: Chain, x: Tensor, name: str) -> None:
    policy, factors = ON_THE_CHAIN[name]

    def region(x: Tensor) -> Tensor:
        with saved_tensors_policy(policy):
            return model(x)

    expected = hand_gradients(model, x, **factors)
    assert_same(gradients(compiled(model, policy=policy), model, x), expected)
    assert_same(gradients(compiled(region), model, x), expected)
    for call in (compiled(model), model):
        with saved_tensors_policy(policy):
            assert_same(gradients(call, model, x), expected)


@pytest.mark.core
def test_innermost_wins_and_any_context_wins_over_options(model: Chain, x: Tensor) -> None:
    call = compiled(model, policy=everything(Hook("five", *scale(5))))
    with saved_tensors_policy(everything(DOUBLE)):
        with saved_tensors_policy(larger_than(H2, TRIPLE)):
            assert_same(
                gradients(call, model, x), hand_gradients(model, x, h1=3)
            )  # not 2 for h2: contexts don't add up
        with saved_tensors_hooks(KEEP):
            assert_same(gradients(call, model, x), hand_gradients(model, x))
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))
    assert_same(gradients(call, model, x), hand_gradients(model, x, h=5))


@pytest.mark.parametrize("scope", ["donated", "no_static", "all"])
@pytest.mark.parametrize("wrap", [compiled, eager], ids=["compiled", "eager"])
def test_scopes(model: Chain, x: Tensor, scope: str, wrap: Any) -> None:
    factors = {"donated": {"h": 2}, "no_static": {"h": 2, "x": 2}, "all": {"h": 2, "x": 2, "w": 2}}[scope]
    with saved_tensors_policy(everything(DOUBLE), scope=scope):
        assert_same(gradients(wrap(model), model, x), hand_gradients(model, x, **factors))


@pytest.mark.core
def test_equal_policies_made_anew_are_one_graph_and_a_change_is_one_more(model: Chain, x: Tensor) -> None:
    call, before = compiled(model), graph_count()
    for n in (H2, H2, H1, H1, H2):
        with saved_tensors_policy(larger_than(n, Hook("double", *scale(2)))):
            got = gradients(call, model, x)
        assert_same(got, hand_gradients(model, x, **({"h1": 2} if n == H2 else {})))
    assert graph_count() - before == 2


# --- errors ----------------------------------------------------------------------------------------------------------


def raises(saved: SavedTensor) -> Hook:
    raise KeyError("size")


@pytest.mark.core
@pytest.mark.parametrize("wrap", [compiled, eager], ids=["compiled", "eager"])
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (raises, "policy 'raises' raised KeyError: 'size' on saved"),
        (lambda saved: None, "answered None for saved"),
        (lambda saved: "float8", "answered 'float8' for saved"),
        (first_match(larger_than(1, lambda saved: None)), "answered None for saved"),
    ],
    ids=["raises", "none", "string", "inside another"],
)
def test_a_bad_policy_is_named_with_the_tensor_and_the_line(policy: Any, message: str, wrap: Any) -> None:
    lin = nn.Linear(4, 4)

    def f(x: Tensor) -> Tensor:
        return lin(lin(x).sigmoid()).sum()  # here

    with pytest.raises(Exception) as error, saved_tensors_policy(policy):
        wrap(f)(torch.randn(3, 4, requires_grad=True))
    ours = getattr(error.value, "inner_exception", error.value)
    assert isinstance(ours, PolicyError)
    assert message in str(ours) and "float32[3, 4]" in str(ours)
    assert "test_policies.py:" in str(ours) and "# here" in str(ours)


# --- symbolic sizes --------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("how", ["mark_dynamic", "dynamic=True"])
@pytest.mark.parametrize(
    "policy",
    [
        larger_than(1000, HALF),
        first_match(only_these_dtypes({torch.float32: larger_than(1000, HALF)}), KEEP),
        lambda saved: HALF if saved.shape[0] > 10 and saved.nbytes // saved.shape[0] == 64 else KEEP,
    ],
    ids=["larger_than", "nested", "function"],
)
def test_sizes_neither_specialize_nor_recompile(policy: Any, how: str) -> None:
    lin = nn.Linear(16, 16)
    call = compiled(lambda x: lin(lin(x).sigmoid()).sum(), dynamic=True if how == "dynamic=True" else None)
    before = graph_count()
    with saved_tensors_policy(policy):
        for rows in (20, 8, 40, 2, 100):  # 512 bytes and less at 8 and at 2
            x = torch.randn(rows, 16)
            if how == "mark_dynamic":
                torch._dynamo.mark_dynamic(x, 0)  # raises if a guard makes it a constant
            call(x).backward()
    assert graph_count() - before == 1
    (plan,) = aot_hooks.last_plans(call)
    (decision,) = [d for d in plan.decisions if d.hook is not KEEP]
    assert decision.saved.op == "aten.sigmoid.default" and decision.saved.nbytes == 20 * 16 * 4
    assert str(decision.saved.shape[0]).startswith("s")


def test_that_detector_fails_for_a_size_that_is_guarded() -> None:
    lin = nn.Linear(16, 16)
    call = compiled(lambda x: lin(lin(x).sigmoid()).sum() if x.shape[0] > 10 else lin(x).sum(), dynamic=True)
    before = graph_count()
    for rows in (20, 8):
        call(torch.randn(rows, 16)).backward()
    assert graph_count() - before == 2


def test_the_size_at_compile_time_decides() -> None:
    lin = nn.Linear(16, 16)
    packed = []
    for first in (20, 8):
        torch._dynamo.reset()
        call = compiled(lambda x: lin(lin(x).sigmoid()).sum(), dynamic=True)
        with saved_tensors_policy(larger_than(1000, HALF)):
            for rows in (first, 14, 30):
                call(torch.randn(rows, 16)).backward()
        (plan,) = aot_hooks.last_plans(call)
        packed.append(sum(d.hook is not KEEP for d in plan.decisions))
    assert packed == [1, 0]


# --- made inside a compiled function ---------------------------------------------------------------------------------


MADE_INSIDE = {
    "everything": (lambda: everything(DOUBLE), {"h": 2}),
    "larger_than": (lambda: larger_than(H2, DOUBLE), {"h1": 2}),
    "only_these_ops": (lambda: only_these_ops({aten.mm.default: DOUBLE}), {"h": 2}),
    "only_these_modules": (lambda: only_these_modules({"**": DOUBLE}), {"h": 2}),
    "only_these_names": (lambda: only_these_names({"h": DOUBLE}), {}),
    "only_these_dtypes": (lambda: only_these_dtypes({torch.float32: DOUBLE}), {"h": 2}),
    "first_match": (lambda: first_match(larger_than(H2, DOUBLE), TRIPLE), {"h1": 2, "h2": 3}),
}


@pytest.mark.parametrize("name", MADE_INSIDE)
def test_made_inside_a_compiled_function(model: Chain, x: Tensor, name: str) -> None:
    make, factors = MADE_INSIDE[name]

    def region(x: Tensor) -> Tensor:
        with saved_tensors_policy(make()):
            return model(x)

    assert_same(gradients(compiled(region), model, x), hand_gradients(model, x, **factors))
