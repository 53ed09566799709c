"""Which operator of eager code reads a saved tensor in its backward, and whether it bears rounding.

      h --pack hook--> Saved(h)           autograd makes node 17 of `h.sin()`, saves h for it, then runs the operator
      ...
      y --pack hook--> y.grad_fn --next_functions--> node 17, which holds that Saved as `_raw_saved_self`
                                                       |
                                                       +-- its backward, traced on fake tensors: mul(g, cos(h))
                                                             --graphs/backward_reads.py--> "singular": h stays

A hook is called with a tensor, and not told for which operator. But the node of an operator is reached from the results
of later ones: each of them saves a tensor that was made of earlier results, sooner or later. Until then the tensor
waits as it is. What has waited up to the backward is found from the node that runs first.

The backward of an operator is traced once for each kind of call: its name, its numbers, and which of its tensors are
large. So eager code follows the same table as graphs. Functions of the user's are unknown reads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ..graphs import read_tables as tables
from ..graphs.backward_reads import BackwardReads, Read, tests_of
from ..graphs.read_tables import Test
from ..settings.operators import operator_behind
from ..torch_private import autograd
from .norms import Groups, groups_read_by

_MOST_KINDS = 4096  # traced backwards that are remembered; a model has some dozens
_MOST_VISITED = 4096  # numbers of nodes that are remembered before those that can't be met again are dropped
# A tensor with fewer elements than a sixteenth of the largest one may be a statistic, see backward_reads.py.
_SMALL = 16
# Of their results only the first has a gradient. The others are statistics, which the backward reads.
_ONE_RESULT = tables.NORMS | {"aten.native_layer_norm.default", "aten.native_group_norm.default"}


@dataclass(frozen=True)
class Reading:
    """How the backward of one operator reads one saved tensor.

    Attributes:
        tests: the yes-or-no tests that it makes of each number, () if it reads the shape only. None: it reads numbers.
        reads: reads of the numbers that are not smooth.
        groups: if it is a norm's input, see norms.py.
    """

    tests: tuple[Test, ...] | None = None
    reads: tuple[Read, ...] = ()
    groups: Groups | None = None


class Waiting:
    """The operators of one thread that have saved a tensor for a hook that may round, and are not found yet."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a backward may run on another thread
        self.operators: dict[int, weakref.ref[Saved]] = {}  # by number, ascending; each with one of its tensors
        self.visited: set[int] = set()  # numbers of nodes from which none of them can be reached any more


class _Local(threading.local):
    def __init__(self) -> None:
        self.waiting = Waiting()
        self.fakes: Mapping[int, torch.Tensor] | None = None  # while a backward is traced: what unpacking returns


_local = _Local()


class Saved:
    """What autograd holds for one saved tensor of one operator, if a hook may round it.

    Attributes:
        value: where the tensor is stored, perhaps for several operators.
        reading: how the operator reads it; None while the operator is not known.
    """

    __slots__ = ("__weakref__", "reading", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.reading: Reading | None = None
        waiting = _local.waiting
        with waiting.lock:
            # an operator's tensors are saved one after the other, and released together: one stands for all
            waiting.operators[_running_operator()] = weakref.ref(self)


def this_thread() -> Waiting:
    """The operators of this thread that wait."""
    return _local.waiting


def _running_operator() -> int:
    """The number of the operator that saves a tensor now."""
    return autograd.next_sequence_number() - 1


def fake_of(held: Any) -> torch.Tensor | None:
    """The fake tensor for what a pack hook returned; None if no backward is traced."""
    return None if _local.fakes is None else _local.fakes[id(held)]


def find_from(x: torch.Tensor) -> None:
    """Search the operators that `x` was computed by for waiting ones. `x` is the tensor that is saved now."""
    waiting = _local.waiting
    if waiting.operators and x.grad_fn is not None:
        _find(waiting, x.grad_fn, incomplete=_running_operator())


def find_from_backward(waiting: Waiting) -> bool:
    """Find the operator whose backward runs, and those that wait behind it; False if no backward runs."""
    if waiting.operators and (node := autograd.current_node()) is not None:
        _read(node, runs=True)
        _find(waiting, node)
        return True
    return False


def _find(waiting: Waiting, start: Any, incomplete: int | None = None) -> None:
    """Read every node that `start` was made by, and itself, back to the oldest operator that waits.

    `incomplete`: the number of the node that autograd is making; its tensors are not all saved yet.
    """
    operators, visited = waiting.operators, waiting.visited
    with waiting.lock:
        while operators and next(iter(operators.values()))() is None:
            del operators[next(iter(operators))]
        if not operators:
            return visited.clear()
        oldest = next(iter(operators))
        if len(visited) > _MOST_VISITED:
            visited.difference_update([number for number in visited if number < oldest])
        stack = [start]
        while stack:
            node = stack.pop()
            number = autograd.sequence_number(node)
            if number < oldest or number in visited:
                continue
            if number != incomplete:
                visited.add(number)
                if operators.pop(number, None) is not None:
                    _read(node)
            stack += [before for before, _ in node.next_functions if before is not None]


def _read(node: Any, *, runs: bool = False) -> None:
    """Note how the backward of `node` reads what was saved for it. `runs`: it runs now, so it can't be traced."""
    packed = autograd.packed_by(node)
    if any(isinstance(each, Saved) and each.reading is None for each in packed.values()):
        readings = _readings(node, packed, runs)
        for key, each in packed.items():
            if isinstance(each, Saved) and each.reading is None:
                groups = groups_read_by(node, each.value.shape) if key[0] == autograd.INPUT else None
                each.reading = replace(readings[key], groups=groups)


_Key = tuple[str, int]  # the attribute of a node for a saved tensor, and the position in it
_known: dict[Any, dict[_Key, Reading]] = {}


def _readings(node: Any, packed: Mapping[_Key, Any], runs: bool) -> dict[_Key, Reading]:
    """How the backward of `node` reads each tensor that it has saved, by the keys of `packed`.

    Found once for each kind of node by tracing its backward on fake tensors. A node that `runs` can't be traced, so
    its reads are unknown unless another of its kind was traced before.

    `packed`: what our pack hook returned for each of these tensors, see `autograd.packed_by`.
    """
    unknown = dict.fromkeys(packed, _unknown(node))
    is_nested = autograd.makes_nested(node) or any(value.is_nested for _, value in _values(packed))
    if autograd.is_python_node(node) or is_nested:
        return unknown
    kind = _kind(node, packed)
    if kind not in _known:
        if runs:  # it holds a lock, and a second run of it would wait for that
            return unknown
        try:
            found = _trace(node, packed)
        except RuntimeError:  # an operator without a fake kernel, or one that reads values
            if not autograd.packed_by(node):  # its backward has run meanwhile, on another thread
                return unknown
            found = unknown
        if len(_known) >= _MOST_KINDS:
            _known.clear()
        _known[kind] = found
    return _known[kind]


def _unknown(node: Any) -> Reading:
    return Reading(reads=(Read("unknown", operator_behind(node.name())),))


def _kind(node: Any, packed: Mapping[_Key, Any]) -> Any:
    """What the readings of `node` depend on."""
    tensors: list[Any] = [(key, value.shape, value.dtype, value.device) for key, value in _values(packed)]
    tensors += [(i, r.shape, r.dtype, r.device) for i, r in enumerate(autograd.results_of(node))]
    counts = [torch.Size(shape).numel() for _, shape, _, _ in tensors]
    largest = max(counts)
    sizes = tuple((n == 1, n == largest, n * _SMALL < largest) for n in counts)
    kinds = tuple((key, len(shape), dtype, device.type) for key, shape, dtype, device in tensors)
    edges = tuple(before is not None for before, _ in node.next_functions)
    return node.name(), autograd.plain_values(node), kinds, sizes, edges


def _values(packed: Mapping[_Key, Any]) -> Iterator[tuple[_Key, Any]]:
    """The keys of `packed`, each with its `EagerValue`."""
    for key, each in packed.items():
        yield key, each.value if isinstance(each, Saved) else each


def _trace(node: Any, packed: Mapping[_Key, Any]) -> dict[_Key, Reading]:
    """How the backward of `node` reads each tensor of `packed`, from its graph."""
    numbers = {id(each): i for i, each in enumerate(packed.values())}  # of the same one twice, the last
    results = autograd.results_of(node)
    if operator_behind(node.name()) in _ONE_RESULT:
        results = [results[0], *(None for _ in results[1:])]

    def run(tensors: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """The backward of `node`, in which each of our unpack hooks returns one of `tensors`, see `fake_of`."""
        _local.fakes = {number: tensors[i] for number, i in numbers.items()}
        try:
            found = autograd.call_without_hooks(node, gradients)
        finally:
            _local.fakes = None
        several = found if isinstance(found, tuple) else (found,)
        return [each for each in several if each is not None]

    with autograd.fake_operators():
        tensors = [torch.empty_strided(v.shape, v.stride, dtype=v.dtype, device=v.device) for _, v in _values(packed)]
        gradients = [
            torch.empty(r.shape, dtype=r.dtype, device=r.device)
            if r is not None and (r.dtype.is_floating_point or r.dtype.is_complex)
            else None
            for r in results
        ]
        graph = make_fx(run)(tensors, gradients)
    inputs = graph.graph.find_nodes(op="placeholder")[: len(tensors)]
    reads = BackwardReads(None, graph, [(n, n) for n in inputs])
    found = {}
    for key, each in packed.items():
        n = inputs[numbers[id(each)]]
        tests = tests_of(n)
        # an operator that also reads numbers gets no answers: it needs the tensor itself
        others = {replace(f.read, answered=False): None for f in reads.of(n)} if tests is None else ()
        found[key] = Reading(tests, tuple(others))
    return found
