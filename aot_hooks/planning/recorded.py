"""What one thread runs between two points at which nothing is saved, as many.py watches it.

marks     forward 0, forward 1, backward 1, backward 0        each with the version of the graph that ran
trace     the same, with how many calls of each graph hold saved tensors meanwhile
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..torch_private import autograd
from .moments import Event
from .step import Bytes

# A step counts as endless at any of these limits, see `RecordedStep.is_endless`:
_KEPT_AFTER = 2  # for each call that holds something: backwards of its graph since the newest such call
_MOST_AFTER = 256  # calls since the newest call that holds something
_MOST_REPLACED = 2  # calls that were dropped although a later call had run backward
_MOST_MARKS = 8192  # marks of the step
_GATHERED = 2  # times a call's parameters: FSDP2 keeps the buffer that it has gathered into until it gathers the next


@dataclass(eq=False)
class Version:
    """A compiled version of a graph, with the bytes of a call of it.

    Attributes:
        tight: a version that holds less, which the first `tight_calls` calls of the graph in a step run.
        loose_calls: how many may run this one at the same time, if there is a tight one.
        is_tight: it is such a version.
    """

    graph: Any
    kind: str
    nbytes: Bytes
    tight: Version | None = None
    tight_calls: int = 0
    loose_calls: int = 0
    is_tight: bool = False

    def for_next_call(self, step: RecordedStep) -> Version:
        """The version for the next call in `step`: the tight one, until all planned tight calls hold saved tensors.

        So at most `loose_calls` calls hold as much as this version, in whatever order calls come.
        """
        if self.tight is None:
            return self
        holding = Counter(version.is_tight for version in step.holding.values() if version.graph is self.graph)
        fits = holding[True] == self.tight_calls and holding[False] < self.loose_calls
        return self if fits else self.tight


@dataclass(eq=False)
class RecordedStep:
    """What a thread runs between two points at which nothing is saved.

    Attributes:
        marks: ("forward", "backward" or "dropped", number of the call, its version). "dropped": no backward ran.
        holding: calls that hold what they saved, by number.
        allocated: bytes at its begin, if it is measured.
        count, most: calls so far, and the most that held something at the same time.
        leaves: for each call weak references to its parameters; None: not noted.
        gathered_bytes: of the parameters that are gathered for the largest call, and of the buffer beside them.
        replaced: how many calls were dropped that had held something during the backward of a later one.
        gone: numbers of calls that were dropped. Appended without the lock: a collection may run while it is held.
    """

    marks: list[tuple[str, int, Version]] = field(default_factory=list)
    holding: dict[int, Version] = field(default_factory=dict)
    allocated: int | None = None
    count: int = 0
    most: int = 0
    leaves: list[list[weakref.ref[torch.Tensor]]] | None = None
    gathered_bytes: int = 0
    replaced: int = 0
    gone: deque[int] = field(default_factory=deque)

    @property
    def held_bytes(self) -> int:
        return sum(version.nbytes.held for version in self.holding.values())

    def drop(self) -> None:
        while self.gone:
            self.release("dropped", self.gone.popleft())

    def release(self, how: str, number: int) -> bool:
        """Mark that a call holds nothing any more; False if it is left out."""
        if (version := self.holding.pop(number, None)) is None:
            return False
        if how == "dropped":
            self.replaced += any(one == "backward" and other > number for one, other, _ in self.marks)
        self.marks.append((how, number, version))
        return True

    def note_gathered(self) -> int:
        """Set `gathered_bytes` if parameters have memory for a part of the step, as with FSDP2, and return those of
        the first call.

        Those of the first call always count: when it begins again, they were gathered again or never freed.
        """
        noted = [[leaf for ref in refs if (leaf := ref()) is not None] for refs in self.leaves or ()]
        freed = [any(_is_freed(part) for leaf in leaves for part in _plain(leaf)) for leaves in noted]
        if not any(freed):
            return 0
        gathered = [_GATHERED * sum(map(_parameter_bytes, leaves)) for leaves in noted]
        self.gathered_bytes = max(n for i, n in enumerate(gathered) if freed[i] or not i)
        return gathered[0]

    @property
    def is_nested(self) -> bool:
        """Whether the calls of each graph run backward in the reverse order of their forwards."""
        waiting: dict[Any, list[int]] = defaultdict(list)
        for how, number, version in self.marks:
            if how == "forward":
                waiting[version.graph].append(number)
            elif waiting[version.graph].pop() != number:
                return False
        return True

    @property
    def is_endless(self) -> bool:
        """Whether, before a forward, calls have held something for longer than a step, as calls with kept outputs do.

        Not while a backward runs: checkpoints may run one graph many times there before its first call goes backward.
        """
        if len(self.marks) >= _MOST_MARKS:
            return True
        if autograd.current_backward() != -1:
            return False
        if self.replaced >= _MOST_REPLACED:
            return True
        newest = next(reversed(self.holding))
        after = self.count - 1 - newest  # calls that hold nothing any more
        if after < _KEPT_AFTER * len(self.holding):
            return False
        ran = Counter(version.graph for how, number, version in self.marks if how == "backward" and number > newest)
        kept = Counter(version.graph for version in self.holding.values())
        return after >= _MOST_AFTER or all(ran[graph] >= _KEPT_AFTER * count for graph, count in kept.items())

    def trace(self, key: Callable[[Version], Any]) -> list[Event]:
        """The events with a `key` for each version. Gradients are those that parameters have now."""
        events: list[Event] = []
        holding: dict[int, Version] = {}
        gradients: dict[int, int] = {}
        for how, number, version in self.marks:
            holding.pop(number, None)
            if how != "dropped":
                held = Counter(map(key, holding.values()))
                events.append(Event(how, key(version), held, sum(gradients.values()), self.gathered_bytes))
            if how == "forward":
                holding[number] = version
            elif how == "backward" and self.leaves is not None:
                leaves = [leaf for ref in self.leaves[number] if (leaf := ref()) is not None]
                gradients |= {id(p): p.grad.numel() * p.grad.element_size() for p in leaves if p.grad is not None}
        return events


def _plain(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """`x`, or the plain tensors inside of a wrapper subclass, such as the local tensor of a DTensor."""
    if not hasattr(x, "__tensor_flatten__"):
        yield x
        return
    for part in (getattr(x, name) for name in x.__tensor_flatten__()[0]):
        if isinstance(part, torch.Tensor):  # from torch 2.13 on, parts of a DTensor are its mesh, too
            yield from _plain(part)


def _is_freed(x: torch.Tensor) -> bool:
    """Whether the storage of `x`, a plain tensor, was resized to 0 bytes."""
    return x.layout is torch.strided and x.numel() > 0 and x.untyped_storage().nbytes() == 0


def _parameter_bytes(x: torch.Tensor) -> int:
    parts = _plain(x) if isinstance(x, torch.nn.Parameter) else ()
    return sum(part.numel() * part.element_size() for part in parts)
