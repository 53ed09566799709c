"""Numbers of the host that change between calls, such as a learning rate, as device memory that a graph reads.

    capture   a `Traced` number stands in each place; what the step computes from it is traced as well
              an operator takes one as a factor or a summand --> it gets a tensor on the device instead
              a comparison --> a condition: the outcome must be the same again
              all else (a size, an index, an option of a kernel) --> a condition: the number must be the same again
    replay    places --> values --> conditions hold? --> values that changed are written to the device --> launch

What the step computes from such numbers on the host, `1 - lr * weight_decay` or `self.tokens + 128`, is computed on the
host in each replay too, in float64. The step's own assignments of such numbers are repeated.

`torch.SymFloat` is the base of traced numbers because torch's functions take one wherever they take a number. In a hook
of a backward no function mode is on. There a number reaches the dispatch mode of watch.py, or torch asks its `node` for
it. That is a condition as well, or the end of the capture.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ..torch_private import cuda as torch_cuda
from ..tree.capture import CannotCapture
from . import scalars

MOST_ON_DEVICE = 512  # numbers of each dtype that one graph reads on the device; others are conditions
MOST_SINGLE_FILLS = 4  # past so many changed numbers, one copy from the host costs less than a launch for each


class Place(NamedTuple):
    """Where a number is kept: an entry of a dict, or a position in a tuple that is one."""

    container: dict[Any, Any]
    key: Any
    position: int | None = None

    def get(self) -> Any:
        value = self.container.get(self.key)
        if self.position is None:
            return value
        return value[self.position] if type(value) is tuple and len(value) > self.position else None

    def put(self, value: Any) -> None:
        if self.position is not None:
            old = self.container[self.key]
            value = (*old[: self.position], value, *old[self.position + 1 :])
        self.container[self.key] = value


class Traced:
    """A number while the step is captured. `value()` computes it from the numbers in their places as they are then."""

    numbers: Numbers
    value: Callable[[], Any]
    key: Hashable  # equal for numbers that are computed alike
    name: str  # the path of a number that it is computed from
    kind: type  # int or float
    __class__ = property(lambda self: self.kind)  # for `isinstance(x, float)`

    def derived(self, op: Callable[..., Any], *operands: Any) -> Any:
        """The result of `op` as a traced number; a condition, if it is no int or float."""
        values = [x.value if isinstance(x, Traced) else functools.partial(_itself, x) for x in operands]
        key = (op, *(x.key if isinstance(x, Traced) else repr(x) for x in operands))

        def value() -> Any:
            return op(*[each() for each in values])

        result = value()
        if type(result) in (int, float):
            return traced(self.numbers, value, key, self.name)
        self.numbers.conditions[key] = Condition(self.name, value, result)
        return result

    def guarded(self) -> Any:
        """The plain number. From now on it is a condition: a replay needs the same number."""
        result = self.value()
        self.numbers.conditions[self.key] = Condition(self.name, self.value, result)
        return result


def _itself(value: Any) -> Any:
    return value


class Condition(NamedTuple):
    """Something that a step decides by a number: it must come out the same again."""

    name: str
    value: Callable[[], Any]
    expected: Any

    def __str__(self) -> str:
        return f"{self.name} is another number than before, and what the step does depends on it"

    def holds(self) -> bool:
        now = self.value()
        return type(now) is type(self.expected) and _same(now, self.expected)


def _same(x: Any, y: Any) -> bool:
    """Whether two numbers are equal, to the sign of zero."""
    return bool(x == y) and (x != 0 or str(x) == str(y))


class NotTraced(CannotCapture):
    """The step uses the number at `path` where nobody can put a tensor in its place."""

    def __init__(self, path: str, how: str) -> None:
        super().__init__(f"uses {path} {how}")
        self.path = path


class _Node:
    """What torch asks for the number, where one comes to it."""

    constant = None

    def __init__(self, number: Traced) -> None:
        self._number = number

    def guard_float(self, *_: Any) -> float:
        return float(self._number.guarded())

    def guard_int(self, *_: Any) -> int:
        return int(self._number.guarded())

    def __getattr__(self, name: str) -> Any:
        raise NotTraced(self._number.name, f"in a way that is not traced ({name})")


class _TracedFloat(Traced, torch.SymFloat):
    pass


class _TracedInt(Traced, torch.SymInt):
    pass


class _Foreign(Traced):
    """A number that torch's functions don't take. It stands where no function mode may be on."""


def traced(numbers: Numbers, value: Callable[[], Any], key: Hashable, name: str) -> Any:
    """A traced number whose value is `value()`; see `Traced`."""
    cls: Any = (_TracedInt if type(value()) is int else _TracedFloat) if numbers.for_torch else _Foreign
    made = cls.__new__(cls)
    made.numbers, made.value, made.key, made.name, made.kind = numbers, value, key, name, type(value())
    made.node = _Node(made)
    return made


def _binary(op: Callable[..., Any], *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Traced, other: Any) -> Any:
        if not isinstance(other, (int, float, Traced)):
            return NotImplemented
        return self.derived(op, other, self) if swapped else self.derived(op, self, other)

    return method


def _unary(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *rest: self.derived(op, self, *rest)


def _guarded(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *rest: op(self.guarded(), *rest)


ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
OF_ONE: tuple[Any, ...] = (operator.neg, operator.pos, abs, round, math.floor, math.ceil, math.trunc, bool)
CONVERSIONS: tuple[Any, ...] = (float, int, operator.index, hash, repr, str, format)
for _cls in (Traced, _TracedFloat, _TracedInt):  # torch's own classes define these methods, too
    for _name in ARITHMETIC:
        setattr(_cls, f"__{_name}__", _binary(getattr(operator, _name)))
        setattr(_cls, f"__r{_name}__", _binary(getattr(operator, _name), swapped=True))
    for _name in COMPARISONS:
        setattr(_cls, f"__{_name}__", _binary(getattr(operator, _name)))
    for _op in OF_ONE:
        setattr(_cls, f"__{_op.__name__}__", _unary(_op))
    for _op in CONVERSIONS:
        setattr(_cls, f"__{_op.__name__}__", _guarded(_op))
    for _name in ("is_integer", "as_integer_ratio", "hex", "bit_length", "conjugate"):
        setattr(_cls, _name, _guarded(operator.methodcaller(_name)))
    setattr(_cls, "__deepcopy__", _guarded(lambda value, _: value))  # noqa: B010
    setattr(_cls, "__reduce_ex__", _guarded(lambda value, _: (type(value), (value,))))  # noqa: B010


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which the object `owner` has another attribute."""
    own, before = vars(owner), dict(vars(owner))
    own[name] = value
    try:
        yield
    finally:
        del own[name]
        own.update({name: before[name]} if name in before else {})


class Numbers:
    """The numbers at `places`, which one recording reads on `device`."""

    def __init__(self, places: Mapping[str, Place], device: torch.device) -> None:
        self.places = dict(places)
        self.device = device
        self._now = {path: place.get() for path, place in self.places.items()}
        self.conditions: dict[Hashable, Condition] = {}
        self.assigned: list[tuple[str, Callable[[], Any]]] = []  # paths to which the step assigns, and the new values
        self.for_torch = True
        self._banks: dict[torch.dtype, torch.Tensor] = {}
        # What the elements of a bank are filled with, in their order.
        self._slots: dict[torch.dtype, dict[Hashable, Callable[[], Any]]] = {}
        self._filled: dict[torch.dtype, list[Any]] = {}
        self._is_filled, self._holds = False, True
        if self.places:
            dtypes = (torch.float32, torch.float64, torch.int64, torch.int32)
            self._banks = {dtype: torch.zeros(MOST_ON_DEVICE, dtype=dtype, device=device) for dtype in dtypes}

    def __bool__(self) -> bool:
        return bool(self.places)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The memory that the graph reads."""
        return [*self._banks.values()]

    # --- while the step is captured

    @contextlib.contextmanager
    def in_place(self, optimizers: Sequence[torch.optim.Optimizer], *, everywhere: bool) -> Iterator[None]:
        """A context in which the step finds traced numbers in the places. Torch's functions take them within `step()`
        of the optimizers, in hooks of a backward too, and elsewhere only if `everywhere`: there is no function mode
        around code that Dynamo compiles."""
        if not self.places:
            yield
            return
        originals = {path: place.get() for path, place in self.places.items()}
        self.for_torch = everywhere
        given = self._put_traced()
        try:
            with contextlib.ExitStack() as stack:
                if everywhere:
                    stack.enter_context(_Operators())
                for optimizer in optimizers:
                    stack.enter_context(self._within_step(optimizer, given))
                yield
            self._note_assigned(given)
        finally:
            for path, place in self.places.items():
                place.put(originals[path])

    def _put_traced(self) -> dict[str, Any]:
        """Put traced numbers into the places; returns them by path."""
        given = {path: self._traced(path) for path in self.places}
        for path, place in self.places.items():
            place.put(given[path])
        return given

    def _within_step(self, optimizer: Any, given: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """A context in which torch's functions take the numbers within `step()` of the optimizer."""
        inner = optimizer.step

        @functools.partial(torch.compiler.disable, reason="it reads numbers on the device")
        def step(*args: Any, **kwargs: Any) -> Any:
            with self._taken_by_torch(given), _Operators():
                return inner(*args, **kwargs)

        return replaced(optimizer, "step", step)

    @contextlib.contextmanager
    def _taken_by_torch(self, given: Mapping[str, Any]) -> Iterator[None]:
        """A context with numbers in the places that torch's functions take, in place of those `given`."""
        if self.for_torch:
            yield
            return
        self.for_torch = True
        within = self._put_traced()
        try:
            yield
        finally:
            self.for_torch = False
            for path, place in self.places.items():
                if place.get() is within[path]:
                    place.put(given[path])

    def _note_assigned(self, given: Mapping[str, Any]) -> None:
        """Note the numbers that the step has assigned. `given`: those that stood in the places before."""
        for path, place in self.places.items():
            value = place.get()
            if value is not given[path]:
                if not isinstance(value, (int, float, Traced)):
                    raise CannotCapture(f"sets {path} to a {type(value).__name__}, which a replay would not")
                self.assigned.append(
                    (path, value.value if isinstance(value, Traced) else functools.partial(_itself, value))
                )

    def _traced(self, path: str) -> Any:
        return traced(self, lambda: self._now[path], path, path)

    def on_device(self, number: Traced, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor of no dimensions for a number; None if there is no room."""
        slots = self._slots.setdefault(dtype, {})
        if dtype not in self._banks or len(slots) == MOST_ON_DEVICE:
            return None
        slots.setdefault(number.key, number.value)
        return self._banks[dtype][[*slots].index(number.key)]

    # --- for replays

    def follow(self, places: Mapping[str, Place]) -> None:
        """From now on the numbers are kept in these places: those of groups that `load_state_dict` has made, say."""
        self.places = {path: places[path] for path in self.places}

    def read(self) -> tuple[list[Place], bool]:
        """Read the numbers in their places. Returns the places with another value than before, and whether a replay
        would be right with these numbers."""
        changed, is_other_kind = [], False
        for path, place in self.places.items():
            value = place.get()
            if value is not self._now[path]:
                if type(value) is not type(self._now[path]):
                    is_other_kind = True
                else:
                    changed.append(place)
                    self._now[path] = value
        if changed or not self._holds:
            self._is_filled, self._holds = False, self.broken_condition() is None
        return changed, self._holds and not is_other_kind

    def broken_condition(self) -> Condition | None:
        """The first condition that does not hold for the numbers of now."""
        return next((each for each in self.conditions.values() if not each.holds()), None)

    def fill(self) -> None:
        """Write the numbers that changed to the device, on the current stream."""
        if self._is_filled:
            return
        self._is_filled = True
        for dtype, slots in self._slots.items():
            values, filled, bank = (
                [value() for value in slots.values()],
                self._filled.get(dtype, []),
                self._banks[dtype],
            )
            indices = [i for i, x in enumerate(values) if i >= len(filled) or not _same(x, filled[i])]
            if len(indices) <= MOST_SINGLE_FILLS:
                for i in indices:
                    bank[i].fill_(values[i])
            else:
                bank[: len(values)].copy_(torch.tensor(values, dtype=dtype), non_blocking=True)
            self._filled[dtype] = values

    def assign(self) -> list[Place]:
        """After a replay: assign the numbers that the step assigns. Returns their places."""
        values = [(path, value()) for path, value in self.assigned]
        for path, value in values:
            self.places[path].put(value)
        return [self.places[path] for path, _ in values]


def without_traced(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an operator, with plain, guarded numbers in place of traced ones.

    A traced number comes to an operator only where no function mode is on, such as in hooks of a backward.
    """
    flat, spec = torch_cuda.flatten((args, kwargs))
    numbers = [x for x in flat if isinstance(x, Traced)]
    if not numbers:
        return args, kwargs
    if torch.is_grad_enabled():  # torch has saved it for the backward, and not as the number that it is
        raise NotTraced(numbers[0].name, "where torch's function modes are off")
    args, kwargs = torch_cuda.unflatten([x.guarded() if isinstance(x, Traced) else x for x in flat], spec)
    return args, kwargs


class _Operators(TorchFunctionMode):
    """Gives torch's functions tensors on the device, or plain numbers, in place of traced ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return scalars.called(func, args, kwargs or {})
