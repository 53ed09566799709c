"""What a function reaches of an object: the attributes that it plainly reads, or all of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aot_hooks.content import content
from aot_hooks.reached import members, reads

pytestmark = pytest.mark.core


class Methods:
    def reads_two(self, x: Any) -> Any:
        return x * self.a + (self.b if x else 0)

    def reads_inside(self, x: Any) -> Any:
        return [x * self.a for _ in range(2)], lambda: self.b

    def reads_deeper(self, x: Any) -> Any:
        return self.a.b.c(x)

    def does_not_read(self, x: Any) -> Any:
        return x

    def passes_it_on(self, x: Any) -> Any:
        return id(self)

    def returns_it(self, x: Any) -> Any:
        return self if x else self.a

    def renames_it(self, x: Any) -> Any:
        other = self
        return other.a

    def sets(self, x: Any) -> None:
        self.a = x

    def deletes(self, x: Any) -> None:
        del self.a

    def rebinds_inside(self, x: Any) -> Any:
        def inner() -> None:
            nonlocal self
            self = x

        return inner, self.a

    def looks_about(self, x: Any) -> Any:
        return locals(), self.a

    def calls_super(self, x: Any) -> Any:
        return super().__init__(), self.a


READS: dict[str, tuple[str, ...] | None] = {
    "reads_two": ("a", "b"),
    "reads_inside": ("a", "b"),
    "reads_deeper": ("a",),
    "does_not_read": (),
    **dict.fromkeys(["passes_it_on", "returns_it", "renames_it", "sets", "deletes"]),
    **dict.fromkeys(["rebinds_inside", "looks_about", "calls_super"]),
}


@pytest.mark.parametrize("name", READS)
def test_reads(name: str) -> None:
    assert reads(vars(Methods)[name].__code__, "self") == READS[name]


class Quantizer(nn.Module):
    levels = 16

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.steps, self.unused = 2.0, 3, object()
        self.register_buffer("table", torch.arange(4.0))
        self.linear = nn.Linear(2, 2)

    @property
    def half(self) -> float:
        return self.scale / 2

    @functools.cached_property
    def steps_cached(self) -> int:
        return self.steps

    @staticmethod
    def ratio(x: Any) -> Any:
        return x / 3

    def by_scale(self, x: Any) -> Any:
        return x * self.scale

    def by_table(self, x: Any) -> Any:
        return self.table[x]

    def by_method(self, x: Any) -> Any:
        return self.by_scale(x) + self.ratio(x) + self.levels

    def by_property(self, x: Any) -> Any:
        return x * self.half

    def by_cached_property(self, x: Any) -> Any:
        return x * self.steps_cached

    def by_itself(self, x: Any) -> Any:
        return self.by_itself(x - 1) if x else self.scale

    def by_all(self, x: Any) -> Any:
        return self(x)


def set_to(name: str, value: Any) -> Callable[[Quantizer], None]:
    return lambda q: setattr(q, name, value)


CHANGES: dict[str, Callable[[Quantizer], Any]] = {
    "scale": set_to("scale", 5.0),
    "steps": set_to("steps", 5),
    "steps_cached": set_to("steps_cached", 5),
    "levels": set_to("levels", 5),
    "table": lambda q: q.table.add_(1),
    "parameter": lambda q: q.linear.weight.add_(1),
}
COUNTS = {
    "by_scale": {"scale"},
    "by_table": {"table"},
    "by_method": {"scale", "levels"},
    "by_property": {"scale"},
    "by_cached_property": {"steps_cached"},
    "by_itself": {"scale"},
    "by_all": set(CHANGES),
}


def method(q: Quantizer, name: str) -> Any:
    return getattr(q, name)


def closure(q: Quantizer, name: str) -> Any:
    return {
        "by_scale": lambda x: x * q.scale,
        "by_table": lambda x: q.table[x],
        "by_method": lambda x: q.by_method(x),
        "by_property": lambda x: x * q.half,
        "by_cached_property": lambda x: x * q.steps_cached,
        "by_itself": lambda x: q.by_itself(x),
        "by_all": lambda x: q(x),
    }[name]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("make", [method, closure])
def test_an_object_counts_by_what_is_read_of_it(make: Any, name: str, change: str) -> None:
    q = Quantizer()
    before = content(make(q, name))
    with torch.no_grad():
        CHANGES[change](q)
    assert (content(make(q, name)) != before) == (change in COUNTS[name])


Q = Quantizer()


def test_a_global_object_counts_by_what_is_read_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any) -> Any:
        return x * Q.scale

    before = content(f)
    monkeypatch.setattr(Q, "steps", 7)
    assert content(f) == before
    monkeypatch.setattr(Q, "scale", 7.0)
    assert content(f) != before


def test_equal_objects_of_two_classes_differ_by_what_their_methods_do() -> None:
    class Other(Quantizer):
        def by_scale(self, x: Any) -> Any:
            return x - self.scale

    assert content(Quantizer().by_method) == content(Quantizer().by_method) != content(Other().by_method)


class Broken:
    @functools.cached_property
    def k(self) -> float:
        raise ValueError("no k")

    @functools.cached_property
    def unread(self) -> float:
        raise AssertionError

    def pack(self, x: Any) -> Any:
        return x * self.k


def test_a_cached_property_counts_as_what_is_held_from_its_first_use_on() -> None:
    q = Quantizer()
    before = content(q.by_cached_property)
    assert q.steps_cached == 3 and content(q.by_cached_property) == before  # use makes no difference
    q.steps = 4  # nor what it was made of
    assert content(q.by_cached_property) == before
    q.steps_cached = 4
    other = Quantizer()
    other.steps = 4
    assert content(q.by_cached_property) == content(other.by_cached_property) != before


def test_a_cached_property_that_raises_or_is_not_read_is_left_alone() -> None:
    broken = Broken()
    assert content(broken.pack) == content(Broken().pack) and not vars(broken)
    vars(broken)["k"] = 2.0
    assert content(broken.pack) != content(Broken().pack)


def test_code_of_the_class_is_not_run() -> None:
    class Strange:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError

    class Descriptor:
        def __get__(self, *_: Any) -> Any:
            raise AssertionError

    class Holds:
        a = Descriptor()

    assert members(Strange(), ["a"]) is None and members(Holds(), ["a"]) is None
    assert members(Methods(), ["a"]) is None and members(Methods(), ["__class__"]) is None
