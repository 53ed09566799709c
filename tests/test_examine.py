"""What of a hook can be read, what not, and that nothing goes by an address."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import random
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import aot_hooks
from aot_hooks import policies
from aot_hooks.examine import Examined, examined, foreign_operator

pytestmark = pytest.mark.core

ROOT = Path(__file__).resolve().parents[1]
SCALE = 2.0
GENERATOR = random.Random(1)
helpers = types.ModuleType("helpers_of_this_test")
helpers.scale = eval("lambda x: x * 2")  # type: ignore[attr-defined]


@torch.library.custom_op("test_examine::pack", mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    return x.half()


namespace = torch.ops.test_examine


class Counter(int):
    pass


class Scale:
    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def test_what_can_be_read_is_not_opaque() -> None:
    def pack(x: torch.Tensor) -> Any:
        y = torch.nn.functional.gelu(x) if x.numel() > math.prod((2, 3)) else torch.ops.aten.sin.default(x)
        return y * SCALE * helpers.scale(1), len(x.shape), x.dtype

    for readable in (pack, Scale(3), Scale(torch.ones(2)), lambda x: x, aot_hooks.Hook("h", pack, pack)):
        assert examined(readable).opaque == ()
        assert examined(readable).foreign


@pytest.mark.parametrize(
    "of_the_library",
    [
        aot_hooks.float8(),
        aot_hooks.int8(),
        aot_hooks.int4(),
        aot_hooks.bitmask(),
        aot_hooks.cast(torch.bfloat16),
        aot_hooks.lossless(),
        policies.first_match(aot_hooks.lossless(), policies.larger_than(1 << 10, aot_hooks.int8())),
        policies.only_these_ops({torch.ops.aten.gelu.default: aot_hooks.float8()}),
    ],
)
def test_the_library_has_nothing_opaque_and_nothing_of_others(of_the_library: Any) -> None:
    found = examined(of_the_library)
    assert found.opaque == () and not found.foreign and found.parts


def imports(x: torch.Tensor) -> Any:
    import colorsys

    return colorsys.rgb_to_hls(1, 2, 3)


OPAQUE: dict[str, tuple[Any, str]] = {
    "an operator of one's own": (lambda x: torch.ops.test_examine.pack(x), "operator test_examine.pack"),
    "an overload of it": (lambda x: torch.ops.test_examine.pack.default(x), "operator test_examine.pack"),
    "a namespace": (lambda x: namespace.pack(x), "operator test_examine.pack"),
    "the environment": (lambda x: x * float(os.environ["A"]), "os.environ"),
    "the time": (lambda x: x * time.time(), "time.time"),
    "Python's random numbers": (lambda x: x * random.random(), "random.random"),
    "a generator": (lambda x: x * GENERATOR.random(), "object of random.Random"),
    "a C function": (Scale(os.getpid), "C function posix.getpid"),
    "an object in C": (Scale(object()), "object of builtins.object"),
    "a module as a value": (Scale(helpers), "module helpers_of_this_test"),
    "an import": (imports, "'import colorsys'"),
    "eval": (lambda x: eval("x"), "eval()"),
    "a module's method": (Scale(GENERATOR.random), "object of random.Random"),
    "in a set": (Scale(frozenset([os.getpid])), "C function posix.getpid"),
}


@pytest.mark.parametrize("what", OPAQUE)
def test_what_cannot_be_read_is_named(what: str) -> None:
    value, said = OPAQUE[what]
    assert any(said in reason for reason in examined(value).opaque), examined(value).opaque


@pytest.mark.parametrize("what", OPAQUE)
def test_a_cache_hash_answers_for_all_inside(what: str) -> None:
    value, _ = OPAQUE[what]
    one = examined(aot_hooks.Hook("h", value, value, cache_hash="1"))
    assert one.opaque == ()
    assert one.digest != examined(aot_hooks.Hook("h", value, value, cache_hash="2")).digest
    assert examined(aot_hooks.Hook("h", value, value)).opaque != ()


def test_a_cache_hash_on_a_function_an_object_and_a_policy() -> None:
    def pack(x: torch.Tensor) -> Any:
        return torch.ops.test_examine.pack(x)

    assert examined(pack).opaque
    pack.cache_hash = "1"  # type: ignore[attr-defined]
    one = examined(pack)
    pack.cache_hash = "2"  # type: ignore[attr-defined]
    assert one.opaque == () and examined(pack).digest != one.digest

    scale = Scale(object())
    scale.cache_hash = "1"  # type: ignore[attr-defined]
    assert examined(scale).opaque == ()

    def policy(row: Any) -> aot_hooks.Hook:
        return aot_hooks.float8() if os.environ.get("A") else aot_hooks.KEEP

    assert examined(policy).opaque == ("os.environ",)
    policy.cache_hash = "1"  # type: ignore[attr-defined]
    assert examined(policy).opaque == ()


def test_a_cache_hash_does_not_hide_what_can_be_read() -> None:
    def make(by: float) -> aot_hooks.Hook:
        return aot_hooks.Hook("h", lambda x: x * by, lambda p: p, cache_hash="same")

    assert examined(make(1.0)).digest != examined(make(2.0)).digest


@torch.fx.wrap
def leaf(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def wrapped(said: str | None) -> torch.fx.GraphModule:
    gm = torch.fx.symbolic_trace(lambda x: leaf(x))
    for node in gm.graph.find_nodes(op="call_function", target=leaf):
        node.meta["is_wrapped"] = True
        if said is not None:
            node.meta["user_cache_hash"] = said
    return gm


def test_leaves_of_fx_wrap_go_by_stock_user_cache_hash() -> None:
    assert examined(wrapped(None)).opaque == ("torch.fx.wrap leaf 'leaf'",)
    one, two = examined(wrapped("1")), examined(wrapped("2"))
    assert one.opaque == two.opaque == () and one.digest != two.digest
    assert examined(wrapped("1")).digest == one.digest


def test_what_functions_reach_through_modules_counts() -> None:
    def pack(x: torch.Tensor) -> Any:
        return helpers.scale(x)

    before = examined(pack).digest
    kept = helpers.scale  # type: ignore[attr-defined]
    try:
        helpers.scale = eval("lambda x: x * 3")  # type: ignore[attr-defined]
        assert examined(pack).digest != before
    finally:
        helpers.scale = kept  # type: ignore[attr-defined]
    assert examined(pack).digest == before


def test_what_wraps_a_function_of_torch_is_not_torchs() -> None:
    def made(by: float) -> Any:
        namespace = {"SCALE": by, "functools": functools, "torch": torch, "__name__": "user"}
        exec("@functools.wraps(torch.relu)\ndef f(x): return x * SCALE", namespace)
        exec("@functools.wraps(torch.nn.functional.relu)\ndef f(x): return x * SCALE", namespace)
        return namespace["f"]

    assert examined(made(2.0)).foreign
    assert examined(made(2.0)).parts != examined(made(3.0)).parts


def test_a_global_that_hides_a_builtin_counts() -> None:
    def made(by: float) -> Any:
        namespace: dict[str, Any] = {"__name__": "user"}
        exec(f"def round(x): return x * {by}\ndef f(x): return round(x)", namespace)
        return namespace["f"]

    assert examined(made(2.0)).parts != examined(made(3.0)).parts
    assert examined(made(2.0)).opaque == ()


def test_a_dataclass_can_be_read() -> None:
    @dataclasses.dataclass(frozen=True)
    class Policy:
        limit: int

        def __call__(self, saved: aot_hooks.SavedTensor) -> aot_hooks.Hook:
            return aot_hooks.int8() if saved.nbytes > self.limit else aot_hooks.KEEP

    assert examined(Policy(3)).opaque == ()
    assert examined(Policy(3)).parts != examined(Policy(4)).parts


def test_numbers_of_a_class_of_their_own_count_by_value() -> None:
    assert examined(Scale(Counter(3))).digest == examined(Scale(Counter(3))).digest
    assert examined(Scale(Counter(3))).digest != examined(Scale(Counter(4))).digest
    assert examined(Scale(Counter(3))).digest != examined(Scale(3)).digest


def test_operators_in_a_graph() -> None:
    assert foreign_operator(torch.fx.symbolic_trace(lambda x: torch.ops.aten.sin.default(x))) is None
    gm = torch.fx.symbolic_trace(lambda x: torch.ops.test_examine.pack.default(x))
    assert foreign_operator(gm) == "test_examine.pack.default"


PROGRAM = """
    import sys, torch, aot_hooks
    from aot_hooks import policies
    from aot_hooks.examine import examined
    table = torch.tensor([1.0, 2.5])
    class Pack:
        def __init__(self, sizes): self.sizes = sizes
        def __call__(self, x): return (x * table[0]).half(), {d for d in self.sizes}, x.dtype
    hook = aot_hooks.Hook("h", Pack(frozenset({"a", "b", "c", 3})), lambda p: p[0].to(p[-1]))
    policy = policies.first_match(policies.only_these_ops({"gelu": hook}), aot_hooks.float8())
    print(examined(hook, policy).digest, examined(hook, policy).opaque)
"""


def test_it_is_the_same_in_every_process() -> None:
    def run(seed: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    first = run("1")
    assert first == run("2")
    assert first.endswith("()\n")


def test_parts_are_told_apart() -> None:
    assert Examined(("a", "b"), (), False).digest != Examined(("a\x00", "b"), (), False).digest
