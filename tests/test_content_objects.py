"""Digests of objects: by what they hold, wherever it is held, in any nesting, with cycles."""

from __future__ import annotations

import array
import collections
import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any

import pytest
import torch
from digested import scale

from aot_hooks import Hook, float8
from aot_hooks.content import content
from aot_hooks.examine import examined

pytestmark = pytest.mark.core


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

    for make in (
        lambda v: [v],
        lambda v: (1, {"v": v}),
        lambda v: frozenset({v}),
        Times,
        lambda v: functools.partial(print, v),
        scale,
    ):
        assert content(chain(2.0, make)) == content(chain(2.0, make)) != content(chain(3.0, make))
        assert examined(chain(2.0, make)).parts == examined(chain(2.0, make)).parts != examined(chain(3.0, make)).parts
    said = examined(chain(2.0, lambda v: [v, v]), chain(2.0, lambda v: [os.environ, v]))
    assert "C function posix.putenv" in said.opaque


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
    float8(torch.float8_e5m2, scaling="blockwise")
    assert content(lambda x: float8().pack(x)) == before


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


@dataclass
class Box:
    k: float


KEPT: dict[float, Box] = {}


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
