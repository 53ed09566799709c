"""Policies by themselves: which rows each chooses, without a graph, and that they are values.

What they choose in a model is in test_policies_models.py, contexts and options in test_policies_contexts.py, symbolic
sizes in test_policies_sizes.py.
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
from sentinel import DOUBLE, TRIPLE
from steps import HALF
from torch import nn

from aot_hooks import KEEP, Hook, SavedTensor, float8, lossless, policies
from aot_hooks.errors import OptionError
from aot_hooks.identity.frozen import described
from aot_hooks.policies import (
    everything,
    first_match,
    larger_than,
    only_these_dtypes,
    only_these_modules,
    only_these_names,
    only_these_ops,
)
from aot_hooks.settings.setting import reason_to_pack

aten = torch.ops.aten


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


def test_says_why_it_packs() -> None:
    def mine(saved: SavedTensor) -> Hook:
        return DOUBLE if saved.shape == (4, 8) else KEEP

    def why(policy: Any, **changes: Any) -> str:
        return reason_to_pack(policy, row(**changes))

    assert why(DOUBLE) == why(everything(DOUBLE)) == why(first_match(DOUBLE)) == ""
    assert why(larger_than(100, DOUBLE)) == "larger than 100 bytes"
    assert why(only_these_ops({aten.mm: KEEP, aten.gelu: DOUBLE})) == "operator aten.gelu"
    assert why(only_these_dtypes({torch.float32: DOUBLE})) == "dtype float32"
    assert why(only_these_names({"a_1": DOUBLE}), checkpoint_names=("a_1",)) == "named a_1"
    inside = only_these_modules({"layers.*": larger_than(100, DOUBLE)})
    assert why(inside, module_path="layers.3.mlp") == "in module layers.*, larger than 100 bytes"
    assert why(mine) == why(everything(mine)) == why(first_match(larger_than(1000, DOUBLE), mine)) == "policy mine"
    assert why(first_match(lossless(), DOUBLE), dtype=torch.bool) == "lossless: a bool is one bit"
    assert why(lossless(), backward_asks=()) == "lossless: only its shape is read"


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
    keys = [described(policy).text for policy in different]
    assert len(set(keys)) == len(keys)
    assert all(described(policy).frozen for policy in different)


@pytest.mark.slow
def test_a_text_is_the_same_in_another_process() -> None:
    code = (
        "import torch; from aot_hooks import *; from aot_hooks.identity.frozen import described\n"
        "p = policies; a = torch.ops.aten\n"
        "print(described(p.first_match(p.only_these_ops({a.gelu: float8()}), p.larger_than(1 << 20, float8()))).text)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == described(MAKERS["first_match"](float8())).text


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
        (lambda: only_these_ops({"aten.gelu.default.x": DOUBLE}), "torch has no operator aten.gelu.default.x"),
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
