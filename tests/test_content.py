"""Digests: equal for what says the same, different for what computes something else, the same in every process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from digested import function, scale
from hypothesis import given, settings
from hypothesis import strategies as st

from aot_hooks import Hook
from aot_hooks.content import content

pytestmark = pytest.mark.core


# --- equal -----------------------------------------------------------------------------------------------------------

SAME = {
    "parameter renamed": ("def f(x): return x * 2", "def f(tensor): return tensor * 2"),
    "local renamed": ("def f(x):\n y = x * 2\n return y", "def f(x):\n z = x * 2\n return z"),
    "function renamed": ("def f(x): return x * 2", "def g(x): return x * 2"),
    "other lines": ("def f(x): return x * 2", "\n\n# a comment\ndef f(x):\n\n    return x * 2"),
    "inner function renamed": (
        "def f(x):\n def g(y): return y + 1\n return g(x)",
        "def f(x):\n def h(y): return y + 1\n return h(x)",
    ),
    "annotated": ("def f(x): return x * 2", "def f(x: 'Tensor') -> 'Tensor': return x * 2"),
}


@pytest.mark.parametrize("case", SAME)
def test_equal(case: str) -> None:
    one, other = SAME[case]
    assert content(function(one)) == content(function(other))


def test_lambda_and_def_say_the_same() -> None:
    assert content(function("f = lambda x: x * 2")) == content(function("def f(x): return x * 2"))


def test_equal_closures_made_anew() -> None:
    assert content(scale(3)) == content(scale(3))


def test_a_hooks_name_says_nothing() -> None:
    assert content(Hook("a", scale(2), scale(3))) == content(Hook("b", scale(2), scale(3)))


def test_equal_tensors_made_anew() -> None:
    assert content(scale(torch.arange(4.0))) == content(scale(torch.arange(4.0)))
    assert content(torch.arange(6.0).view(2, 3)) == content(
        torch.arange(6.0).view(3, 2).T.contiguous().T.reshape(-1).view(2, 3)
    )


def test_a_tensor_counts_by_its_values_not_its_strides() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert content(x) == content(x.T.contiguous().T)


def test_graph_modules_count_by_nodes_not_names() -> None:
    def traced(name: str, k: float = 2.0) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        x = graph.placeholder(name)
        graph.output(graph.call_function(torch.mul, (x, k)))
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    assert content(traced("x")) == content(traced("y"))
    assert content(traced("x")) != content(traced("x", 3.0))


# --- different -------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    1, 1.0, True, 0, 0.0, -0.0, False, None, math.inf, -math.inf, 1j, "1", b"1", "", (), [], {}, set(), frozenset(),
    (1,), [1], {1}, {1: 2}, {1: 2.0}, {2: 1}, (1, (2,)), (1, 2), ((1,), 2), ...,
    slice(1, 2), slice(1, None), slice(2, 1),
    torch.float32, torch.float16, torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1),
    torch.contiguous_format, torch.channels_last, torch.strided, torch.sin, torch.cos, torch.ops.aten.sin.default,
    torch.ops.aten.cos.default, torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList, math.sin, math.cos,
    int, float,
]  # fmt: skip


def test_values_of_all_kinds_differ() -> None:
    known: dict[str, Any] = {}
    for value in [*VALUES, *map(scale, VALUES)]:
        digest = content(value)
        assert digest not in known, f"{value!r} and {known[digest]!r} have one digest"
        known[digest] = value


def test_constants_of_inference_mode_and_limits_of_dtypes_count_by_value() -> None:
    with torch.inference_mode():
        one, same, other = torch.tensor(2.0), torch.tensor(2.0), torch.tensor(3.0)
    assert content(one) == content(same) != content(other)
    assert content(torch.finfo(torch.float16)) == content(torch.finfo(torch.float16)) != content(torch.finfo())


def test_nan_equals_itself() -> None:
    assert content(math.nan) == content(float("nan"))


DIFFERENT = {
    "constant": ("def f(x): return x * 2", "def f(x): return x * 3"),
    "type of a constant": ("def f(x): return x * 2", "def f(x): return x * 2.0"),
    "operator": ("def f(x): return x * 2", "def f(x): return x + 2"),
    "attribute": ("def f(x): return x.sin()", "def f(x): return x.cos()"),
    "string": ("def f(x): return x['a']", "def f(x): return x['b']"),
    "string that is the function's own name": ("def a(x): return x['a']", "def b(x): return x['b']"),
    "string like a function's name": ("def f(x): return x['f.<locals>.a']", "def f(x): return x['f.<locals>.b']"),
    "default": ("def f(x, k=2): return x * k", "def f(x, k=3): return x * k"),
    "keyword default": ("def f(x, *, k=2): return x * k", "def f(x, *, k=3): return x * k"),
    "inner constant": (
        "def f(x):\n def g(y): return y + 1\n return g(x)",
        "def f(x):\n def g(y): return y + 2\n return g(x)",
    ),
    "keyword of an inner function": (
        "def f(x):\n def g(y, a=1, b=2): return y + a - b\n return g(x, a=5)",
        "def f(x):\n def g(y, b=1, a=2): return y + b - a\n return g(x, a=5)",
    ),
    "keyword of a helper": (
        "def g(y, a, b): return y + a - b\ndef f(x): return g(x, a=5, b=1)",
        "def g(y, b, a): return y + b - a\ndef f(x): return g(x, a=5, b=1)",
    ),
    "order of arguments": ("def f(x, y): return x - y", "def f(x, y): return y - x"),
    "members of a set": ("def f(x): return x in {1, 2}", "def f(x): return x in {1, 3}"),
    "string first": ("def f(x):\n return ('a', x)", "def f(x):\n return ('b', x)"),
    "float32 or float16": ("def f(x): return x.to(torch.float32)", "def f(x): return x.to(torch.float16)"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different(case: str) -> None:
    one, other = DIFFERENT[case]
    assert content(function(one)) != content(function(other))


GLOBALS = {
    "used": "def f(x): return x * K",
    "used by an inner function": "def f(x):\n def g(y): return y * K\n return g(x)",
    "used by a lambda in a comprehension": "def f(x): return [(lambda: y * K)() for y in x]",
    "used by a function it calls": "def g(y): return y * K\ndef f(x): return g(x)",
    "used as a default": "def f(x, k=K): return x * k",
    "through two functions": "def h(y): return y * K\ndef g(y): return h(y)\ndef f(x): return g(x)",
    "by a class it makes": "class C:\n def __init__(self): self.k = K\ndef f(x): return x * C().k",
    "by a method of a class": "class C:\n @staticmethod\n def times(x): return x * K\ndef f(x): return C.times(x)",
    "by a property": "class C:\n @property\n def k(self): return K\nc = C()\ndef f(x): return x * c.k",
    "as a class attribute": "class C:\n k = K\ndef f(x): return x * C.k",
    "in a tuple of a class": "class C:\n k = (K, 1)\ndef f(x): return x * C.k[0]",
    "in a dict": "T = {'k': K}\ndef f(x): return x * T['k']",
    "as an attribute of a module": "import types\nm = types.SimpleNamespace(k=K)\ndef f(x): return x * m.k",
    "through a module": "import types\nm = types.ModuleType('m')\nm.k = K\ndef f(x): return x * m.k",
    "as the value of an enum": "import enum\nclass E(enum.Enum):\n k = K\nk = E.k\ndef f(x): return x * k.value",
    "in a hook of a module": (
        "k = K\nm = torch.nn.Identity()\nm.register_forward_hook(lambda m, i, o: o * k)\ndef f(x): return m(x)"
    ),
    "in a wrapped function": (
        "import functools\ndef g(x): return x * K\n@functools.wraps(g)\ndef w(*a): return g(*a)\ndef f(x): return w(x)"
    ),
    "in a cached function": "import functools\n@functools.lru_cache\ndef g(): return K\ndef f(x): return x * g()",
}


@pytest.mark.parametrize("case", GLOBALS)
def test_globals_count_by_value(case: str) -> None:
    one, same, other = (function(GLOBALS[case], "f", K=k) for k in (2, 2, 3))
    assert content(one) == content(same)
    assert content(one) != content(other)


def test_a_global_that_is_missing_differs_from_one_that_is_there() -> None:
    assert content(function("def f(x): return x * K")) != content(function("def f(x): return x * K", K=None))


def test_globals_that_are_not_used_do_not_count() -> None:
    assert content(function("def f(x): return x", K=1)) == content(function("def f(x): return x", K=2))


# --- recursion, borders ----------------------------------------------------------------------------------------------


def test_recursion() -> None:
    source = "def f(n): return 1 if n == 0 else n * f(n - 1)"
    assert content(function(source)) == content(function(source))
    assert content(function(source)) != content(function(source.replace("1 if", "2 if")))


def test_mutual_recursion() -> None:
    source = "def g(n): return f(n - K)\ndef f(n): return n and g(n)"
    assert content(function(source, "f", K=1)) == content(function(source, "f", K=1))
    assert content(function(source, "f", K=1)) != content(function(source, "f", K=2))


def test_values_cannot_be_moved_across_borders() -> None:
    assert content(("ab",), ("c",)) != content(("a",), ("bc",))
    assert content("a\x00str:'b'") != content("a", "b")
    assert content((1, 2), 3) != content((1,), (2, 3))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(values, values)
def test_equal_digests_exactly_for_equal_values(a: Any, b: Any) -> None:
    assert (content(a) == content(b)) == (repr(a) == repr(b))
    assert (content(scale(a)) == content(scale(b))) == (repr(a) == repr(b))
