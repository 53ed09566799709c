"""For tests of identity: `x * k` with k held in many ways, each with a change that makes it 3.

FOLLOWED: made anew it is the same graph, changed it is another one. REFUSED: a compilation refuses the hook.
"""

from __future__ import annotations

import array
import collections
import copy
import ctypes
import dataclasses
import datetime
import decimal
import enum
import functools
import importlib
import operator
import os
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

np = pytest.importorskip("numpy")

Change = Callable[[], None]
Case = tuple[Callable[[Tensor], Any], Change]  # pack for 2, and what makes it one for 3


FACTOR = 2.0
settings = types.ModuleType("settings_of_test_identity")


NumpyArray, Bytes = type("NumpyArray", (np.ndarray,), {}), type("Bytes", (bytearray,), {})


@dataclasses.dataclass
class Config:
    k: float = 2.0


class Slotted:
    __slots__ = ("k",)

    def __init__(self) -> None:
        self.k = 2.0


class Holding(nn.Module):
    by_class = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.k = 2.0
        self.register_buffer("table", torch.tensor(2.0))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.k

    @property
    def twice(self) -> float:
        return self.k

    def by_method(self, x: Tensor) -> Tensor:
        return self.scaled(x)

    def by_property(self, x: Tensor) -> Tensor:
        return x * self.twice

    def by_attribute_of_the_class(self, x: Tensor) -> Tensor:
        return x * self.by_class

    def by_buffer(self, x: Tensor) -> Tensor:
        return x * self.table


def graph_of(made: torch.fx.GraphModule | None, k: float) -> torch.fx.GraphModule:
    """`x * made.k * (k / 2)`, put into `made`."""
    if made is None:
        made = torch.fx.GraphModule(nn.Module(), torch.fx.Graph())
        made.k = torch.tensor(2.0)
    graph = torch.fx.Graph()
    product = graph.call_function(torch.mul, (graph.placeholder("x"), graph.get_attr("k")))
    graph.output(graph.call_function(torch.mul, (product, k / 2)))
    made.graph = graph
    made.recompile()
    return made


class ByMode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 if self.training else 3.0)


def with_k(held: Any) -> Any:
    held.k = 2.0
    return held


def set_k(held: Any) -> None:
    held.k = 3.0


def first(value: Any) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(0, value)


def partial_of(held: Any) -> Any:
    return functools.partial(lambda x, held: x * held["k"], held=held)


def by_values(held: Any) -> Any:
    values = held.values()
    return lambda x: x * next(iter(values))


def by_name(_: Any, name: str = "config") -> Any:
    return lambda x: x * getattr(settings, name).k


def by_import(_: Any, name: str = settings.__name__) -> Any:
    return lambda x: x * importlib.import_module(name).K


Pair = collections.namedtuple("Pair", "a b")
sparse = torch.Tensor.to_sparse
by_k, by_first = (lambda held: lambda x: x * held.k), (lambda held: lambda x: x * held[0])

# what is held, the pack that holds it, and what makes it another
# fmt: off
FOLLOWED_TABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute_of_a_tensor": (lambda: with_k(torch.ones(3)), by_k, set_k),
    "attribute_of_a_parameter": (lambda: with_k(nn.Parameter(torch.ones(3))), by_k, set_k),
    "mode_of_a_module": (ByMode, lambda held: held, lambda held: held.eval()),
    "mode_of_a_graph": (lambda: torch.fx.symbolic_trace(lambda x: x * 1),
                        lambda held: lambda x: held(x) * (2.0 if held.training else 3.0), lambda held: held.eval()),
    "ndarray": (lambda: np.array([2.0], np.float32), lambda held: lambda x: x * torch.as_tensor(held), first(3.0)),
    "attribute_by_name": (lambda: setattr(settings, "config", types.SimpleNamespace(k=2.0)), by_name,
                          lambda _: set_k(settings.config)),
    "ctypes_value": (lambda: ctypes.c_double(2.0), lambda held: lambda x: x * held.value,
                     lambda held: setattr(held, "value", 3.0)),
    "environment": (lambda: os.environ, lambda _: lambda x: x * float(os.environ["TEST_IDENTITY"]),
                    lambda held: held.__setitem__("TEST_IDENTITY", "3")),
    "date": (lambda: [datetime.date(2000, 1, 2)], lambda held: lambda x: x * held[0].day,
             first(datetime.date(2000, 1, 3))),
    "norm_of_numpy": (lambda: np.array([2.0]), lambda held, norm=np.linalg.norm: lambda x: x * float(norm(held)),
                      first(3.0)),
    "dataclass_field": (Config, by_k, set_k),
    "namedtuple_in_a_list": (lambda: [Pair(2.0, 1)], lambda held: lambda x: x * held[-1].a,
                             lambda held: held.append(Pair(3.0, 1))),
    "slots": (Slotted, by_k, set_k),
    "partial_of_a_function": (lambda: {"k": 2.0}, partial_of, lambda held: held.__setitem__("k", 3.0)),
    "tensor_in_place": (lambda: torch.tensor([2.0]), lambda held: lambda x: x * held, lambda held: held.fill_(3.0)),
    "large_tensor_in_place": (lambda: torch.full((4096, 5), 2.0), lambda held: lambda x: x * held[-1, : x.shape[-1]],
                              lambda held: held.fill_(3.0)),
    "attribute_of_a_method": (Holding, lambda held: held.by_method, set_k),
    "method_of_a_method": (Holding, lambda held: held.by_method,
                           lambda held: setattr(held, "scaled", lambda x: x * 3)),
    "property": (Holding, lambda held: held.by_property, set_k),
    "attribute_over_that_of_the_class": (Holding, lambda held: held.by_attribute_of_the_class,
                                         lambda held: setattr(held, "by_class", 3.0)),
    "buffer": (Holding, lambda held: held.by_buffer, lambda held: held.table.fill_(3.0)),
    "buffer_replaced": (Holding, lambda held: held.by_buffer, lambda held: setattr(held, "table", torch.tensor(3.0))),
    "data_of_a_buffer": (Holding, lambda held: held.by_buffer, lambda held: held.table.data.fill_(3.0)),
    "constant_of_a_graph": (lambda: graph_of(None, 2.0), lambda held: held,
                            lambda held: setattr(held, "k", torch.tensor(3.0))),
    "code_of_a_graph": (lambda: graph_of(None, 2.0), lambda held: held, lambda held: graph_of(held, 3.0)),
}
REFUSED_TABLE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "ndarray_subclass": (lambda: np.array([2.0], dtype=np.float32).view(NumpyArray),
                         lambda held: lambda x: x * float(held[0]), first(3.0)),
    "object_array": (lambda: np.array([2.0], dtype=object), by_first, first(3.0)),
    "bytearray_subclass": (lambda: Bytes(b"\x02"), by_first, first(3)),
    "array_of_array": (lambda: array.array("d", [2.0]), by_first, first(3.0)),
    "view_of_a_dict": (lambda: {"k": 2.0}, by_values, lambda held: held.__setitem__("k", 3.0)),
    "imported_by_name": (lambda: setattr(settings, "K", 2.0), by_import, lambda _: setattr(settings, "K", 3.0)),
    "methodcaller": (lambda: [operator.methodcaller("mul", 2.0)], lambda held: lambda x: held[0](x),
                     first(operator.methodcaller("mul", 3.0))),
    "random_object": (lambda: random.Random(0), lambda held: lambda x: x * (2.0 + 0 * held.random()),
                      lambda held: held.seed(5)),
    "generator": (torch.Generator, lambda held: lambda x: x * 2 + 0 * torch.rand(1, generator=held),
                  lambda held: held.manual_seed(5)),
    "decimal_number": (lambda: [decimal.Decimal("2")], lambda held: lambda x: x * float(held[0]),
                       first(decimal.Decimal("3"))),
    "sparse_tensor": (lambda: [sparse(torch.tensor([2.0]))], lambda held: lambda x: x * held[0].to_dense(),
                      first(sparse(torch.tensor([3.0])))),
    "copied_object": (lambda: types.SimpleNamespace(k=2.0), lambda held: lambda x: x * copy.copy(held).k, set_k),
    "masked_array": (lambda: np.array([2.0]), lambda held, ma=np.ma: lambda x: x * float(ma.masked_array(held).sum()),
                     first(3.0)),
}
# fmt: on


def enum_attribute() -> Case:
    class Mode(enum.Enum):
        ON = 1

        def __init__(self, _: int) -> None:
            self.k = 2.0

    mode = Mode.ON
    return lambda x: x * mode.k, lambda: setattr(mode, "k", 3.0)


def enum_method() -> Case:
    class Mode(enum.Enum):
        ON = 1

        def factor(self) -> float:
            return FACTOR

    mode = Mode.ON
    return lambda x: x * mode.factor(), lambda: operator.setitem(globals(), "FACTOR", 3.0)


def attribute_of_a_class() -> Case:
    class Scale:
        k = 2.0

    held = Scale()
    return lambda x: x * held.k, lambda: setattr(Scale, "k", 3.0)


def metaclass_attribute() -> Case:
    class Meta(type):
        k = 2.0

    class Config(metaclass=Meta):
        pass

    return lambda x: x * Config.k, lambda: setattr(Meta, "k", 3.0)


def metaclass_attribute_by_type() -> Case:
    Meta = type("Meta", (type,), {"k": 2.0})
    config = Meta("Config", (), {})()
    return lambda x: x * type(config).k, lambda: setattr(Meta, "k", 3.0)


def method_of_a_class() -> Case:
    class Scale:
        def scaled(self, x: Tensor) -> Tensor:
            return x * 2

    held = Scale()
    return lambda x: held.scaled(x), lambda: setattr(Scale, "scaled", lambda self, x: x * 3)


def globals_of_a_function() -> Case:
    def pack(x: Tensor) -> Any:
        return x * pack.__globals__["FACTOR"]

    return pack, lambda: operator.setitem(globals(), "FACTOR", 3.0)


def closure_of_an_inner_function() -> Case:
    k = 2.0

    def inner(x: Tensor) -> Tensor:
        return x * k

    def change() -> None:
        nonlocal k
        k = 3.0

    return lambda x: inner(x), change


def default_of_a_function() -> Case:
    def pack(x: Tensor, k: float = 2.0) -> Tensor:
        return x * k

    return pack, lambda: setattr(pack, "__defaults__", (3.0,))


def code_of_a_function() -> Case:
    def pack(x: Tensor) -> Tensor:
        return x * 2.0

    return pack, lambda: setattr(pack, "__code__", (lambda x: x * 3.0).__code__)


def globals_of_executed_code() -> Case:
    names: dict[str, Any] = {"__name__": "__main__", "k": 2.0}
    exec("def pack(x):\n    return x * k", names)
    return names["pack"], lambda: operator.setitem(names, "k", 3.0)


def cases(table: dict[str, Any], *functions: Callable[[], Case]) -> list[Any]:
    def case_of(make: Any, pack: Any, change: Any) -> Callable[[], Case]:
        def case() -> Case:
            held = make()
            return pack(held), lambda: change(held)

        return case

    rows = [pytest.param(case_of(*row), id=name) for name, row in table.items()]
    return rows + [pytest.param(case, id=case.__name__) for case in functions]


# fmt: off
FOLLOWED = cases(
    FOLLOWED_TABLE, attribute_of_a_class, globals_of_executed_code, enum_attribute, enum_method, globals_of_a_function,
    closure_of_an_inner_function, default_of_a_function, code_of_a_function,
)
# fmt: on
REFUSED = cases(REFUSED_TABLE, metaclass_attribute, metaclass_attribute_by_type)

# listed in docs/footguns.md: Dynamo guards none of these, for any compiled function
NOT_NOTICED = [method_of_a_class]
