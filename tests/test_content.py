"""Digests: equal for what says the same, different for what computes something else, the same in every process."""

from __future__ import annotations

import array
import collections
import functools
import math
import os
import textwrap
import weakref
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aot_hooks import Hook, float8
from aot_hooks.content import content
from aot_hooks.errors import HookContractError
from aot_hooks.examine import examined

pytestmark = pytest.mark.core


def function(source: str, name: str | None = None, **globals: Any) -> Any:
    """The function that `source` defines, in a module of its own."""
    namespace: dict[str, Any] = {"torch": torch, "math": math, "__name__": "user", **globals}
    exec(textwrap.dedent(source), namespace)
    return namespace[name or next(k for k in reversed(namespace) if callable(namespace[k]))]


def scale(k: Any) -> Callable[[Any], Any]:
    return lambda x: x * k


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


class Times:
    def __init__(self, k: float) -> None:
        self.k = k

    def __call__(self, x: Any) -> Any:
        return x * self.k

    def method(self, x: Any) -> Any:
        return x * self.k

    def other(self, x: Any) -> Any:
        return x / self.k


class Slots:
    __slots__ = ("k",)

    def __init__(self, k: float) -> None:
        self.k = k

    def __call__(self, x: Any) -> Any:
        return x * self.k


@dataclass(frozen=True)
class BesideFields:
    of: InitVar[float]

    def __post_init__(self, of: float) -> None:
        object.__setattr__(self, "k", of)

    def __call__(self, x: Any) -> Any:
        return x * self.k  # type: ignore[attr-defined]


def test_what_a_dataclass_holds_beside_its_fields_counts() -> None:
    assert content(BesideFields(2.0)) == content(BesideFields(2.0)) != content(BesideFields(3.0))


@dataclass(frozen=True)
class Frozen:
    k: float

    def __call__(self, x: Any) -> Any:
        return x * self.k


class Module(torch.nn.Module):
    def __init__(self, k: float, how: str) -> None:
        super().__init__()
        if how == "buffer":
            self.register_buffer("k", torch.tensor(k))
        elif how == "hidden buffer":
            self.register_buffer("k", torch.tensor(k), persistent=False)
        elif how == "parameter":
            self.k = torch.nn.Parameter(torch.tensor(k))
        elif how == "child's":
            self.child = Module(k, "plain")
        else:
            self.k = k

    def forward(self, x: Any) -> Any:
        return x * self.k


OBJECTS: dict[str, Callable[[float], Any]] = {
    "callable": Times,
    "slots": Slots,
    "dataclass": Frozen,
    "method": lambda k: Times(k).method,
    "partial": lambda k: functools.partial(lambda x, k: x * k, k=k),
    "partial, by position": lambda k: functools.partial(lambda k, x: x * k, k),
    "module, buffer": lambda k: Module(k, "buffer"),
    "module, hidden buffer": lambda k: Module(k, "hidden buffer"),
    "module, parameter": lambda k: Module(k, "parameter"),
    "module, number": lambda k: Module(k, "plain"),
    "module, number of a child": lambda k: Module(k, "child's"),
    "closure": scale,
    "closure in a closure": lambda k: (lambda f: lambda x: f(x))(scale(k)),
    "tensor": lambda k: scale(torch.tensor(k)),
    "dict": lambda k: scale({"k": k}),
    "keys of a dict": lambda k: scale({k: 1}),
    "set": lambda k: scale({k, "a"}),
    "hook": lambda k: Hook("h", scale(k), scale(1)),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_objects_count_by_what_they_hold(kind: str) -> None:
    make = OBJECTS[kind]
    assert content(make(2.0)) == content(make(2.0))
    assert content(make(2.0)) != content(make(3.0))


CONTAINERS = {
    "method of a dict": "class C(dict):\n def __missing__(self, key): return 2.0\nvalue = C(a=1)",
    "attribute of a dict": "class C(dict): pass\nvalue = C(a=1)\nvalue.k = 2.0",
    "item of a dict": "class C(dict): pass\nvalue = C(a=2.0)",
    "default of a dict": "import collections\ndef f(): return 2.0\nvalue = collections.defaultdict(f)",
    "property of a list": "class C(list):\n @property\n def k(self): return 2.0\nvalue = C([1])",
    "property of a tuple": "class C(tuple):\n @property\n def k(self): return 2.0\nvalue = C((1,))",
    "slot of a list": "class C(list):\n __slots__ = ('k',)\nvalue = C([1])\nvalue.k = 2.0",
    "field of a named tuple": "import collections\nvalue = collections.namedtuple('C', 'k')(2.0)",
    "name of a field": "import collections\nvalue = collections.namedtuple('C', 'k' if 2.0 == 2 else 'j')(1)",
    "method of a named tuple": (
        "from typing import NamedTuple\nclass C(NamedTuple):\n a: int | None\n"
        " def k(self): return self.a * 2.0\nvalue = C(1)"
    ),
    "method of a set": "class C(set):\n def k(self): return 2.0\nvalue = C({1})",
    "item of a set": "class C(frozenset): pass\nvalue = C({2.0})",
}


@pytest.mark.parametrize("what", CONTAINERS)
def test_containers_count_by_their_items_and_by_their_class(what: str) -> None:
    def made(source: str) -> Any:
        space: dict[str, Any] = {"__name__": "containers"}
        exec(source, space)
        return scale(space["value"])

    source = CONTAINERS[what]
    same, other = made(source), made(source.replace("2.0", "3.0"))
    assert content(made(source)) == content(same) != content(other)
    assert examined(same).opaque == examined(other).opaque == ()
    assert examined(made(source)).parts == examined(same).parts != examined(other).parts


def test_how_deeply_things_are_nested_makes_no_difference() -> None:
    def chain(k: float, make: Callable[[Any], Any], length: int = 1200) -> Any:
        value: Any = k
        for _ in range(length):
            value = make(value)
        return scale(value)

    for make in (lambda v: [v], lambda v: (1, {"v": v}), Times, lambda v: functools.partial(print, v), scale):
        assert content(chain(2.0, make)) == content(chain(2.0, make)) != content(chain(3.0, make))
        assert examined(chain(2.0, make)).parts == examined(chain(2.0, make)).parts != examined(chain(3.0, make)).parts
    said = examined(chain(2.0, lambda v: [v, v]), chain(2.0, lambda v: [os.environ, v]))
    assert "C function posix.putenv" in said.opaque
    sets = chain(2.0, lambda v: frozenset({v}), 50)
    assert content(sets) == content(chain(2.0, lambda v: frozenset({v}), 50))
    endless = chain(2.0, lambda v: frozenset({v}))
    with pytest.raises(HookContractError, match="nested too deeply"):
        content(endless)
    assert examined(endless).opaque == ("sets nested too deeply",)


def test_methods_of_one_object_differ() -> None:
    assert content(Times(2).method) != content(Times(2).other)


def test_an_attribute_set_on_a_function_counts() -> None:
    def f(x: Any) -> Any:
        return x * f.k  # type: ignore[attr-defined]

    digests = []
    for k in (2, 3, 2):
        f.k = k  # type: ignore[attr-defined]
        digests.append(content(f))
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize("setting", ["e4m3 rowwise", "e5m2 rowwise", "e4m3 tensorwise"])
def test_library_hooks(setting: str) -> None:
    kinds = {
        "e4m3 rowwise": (torch.float8_e4m3fn, "rowwise"),
        "e5m2 rowwise": (torch.float8_e5m2, "rowwise"),
        "e4m3 tensorwise": (torch.float8_e4m3fn, "tensorwise"),
    }
    others = {content(float8(*args)) for name, args in kinds.items() if name != setting}
    assert content(float8(*kinds[setting])) not in others
    assert content(float8(*kinds[setting])) == content(float8.__wrapped__(*kinds[setting]))


def test_a_function_that_makes_hooks_does_not_change_by_what_it_has_made() -> None:
    before = content(lambda x: float8().pack(x))
    float8(torch.float8_e5m2, statistics=True)
    assert content(lambda x: float8().pack(x)) == before


# --- graphs of objects -----------------------------------------------------------------------------------------------


def test_recursion() -> None:
    source = "def f(n): return 1 if n == 0 else n * f(n - 1)"
    assert content(function(source)) == content(function(source))
    assert content(function(source)) != content(function(source.replace("1 if", "2 if")))


def test_mutual_recursion() -> None:
    source = "def g(n): return f(n - K)\ndef f(n): return n and g(n)"
    assert content(function(source, "f", K=1)) == content(function(source, "f", K=1))
    assert content(function(source, "f", K=1)) != content(function(source, "f", K=2))


def test_cycles() -> None:
    def ring(k: int) -> list[Any]:
        a: list[Any] = [k]
        a.append(a)
        return a

    assert content(ring(1)) == content(ring(1)) != content(ring(2))


def test_sets_have_no_order_and_dicts_have_one() -> None:
    assert content({"a", "b", "c"}) == content({"c", "b", "a"})
    assert content({"a": 1, "b": 2}) != content({"b": 2, "a": 1})


def test_sharing_is_told_from_copies_or_not_but_always_alike() -> None:
    """An object met again is the same object: what a hook does with one list or two equal ones may differ."""
    one = [1, 2]
    assert content((one, one)) == content((one, one))


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


@dataclass
class Box:
    k: float


KEPT: dict[float, Box] = {}


@pytest.mark.core
@pytest.mark.parametrize(
    "make",
    [
        lambda k: torch.tensor(k).mul,
        lambda k: {"a": k}.get,
        lambda k: collections.deque([k]),
        lambda k: weakref.ref(KEPT.setdefault(k, Box(k))),
        lambda k: array.array("d", [k]),
        lambda k: bytearray(str(k).encode()),
        lambda k: torch.tensor(complex(1, k)).conj() if k > 2 else torch.tensor(complex(1, 3)),
    ],
    ids=[
        "method of a tensor",
        "method of a dict",
        "deque",
        "weak reference",
        "array",
        "bytes",
        "conjugate",
    ],
)
def test_what_is_held_counts_and_not_which_object_holds_it(make: Callable[[float], Any]) -> None:
    assert content(make(2.0)) == content(make(2.0)) != content(make(3.0))
