"""The trace of a step: which calls run, which of them hold saved tensors, and where the step ends.

      calls     forward 0   forward 1   forward 2   backward 2   backward 1   backward 0   forward 0 ...
      holding   0           0 1         0 1 2       0 1          0            -            of the next step

A call saves tensors at once, and releases them at once. A budget records each call of a compiled graph. For
`offload(across_graphs=True)` each run of an operator that sends tensors is a call.

A step ends where no call holds anything. Something may hold a call for ever, as a kept output of an evaluation does.
Then steps would have no end: such calls are left out, with one warning. If their backward comes after all, it takes
more of them from then on, see `Recorder._is_endless`.

Who owns a recorder decides what it sees: a budget has one for each thread, offload has one for each device.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import warn_user
from ..torch_private import autograd

# Held calls count as kept, and not as a part of the step, after this many later calls of the same kind have run
# backward, for each of them. The second number holds once a warning has named such calls.
_KEPT_AFTER, _KEPT_AGAIN = 8, 2
_RAISED = 8  # The limit above is raised by this factor each time that the backward of a kept call runs after all.
_MOST_KEPT_AFTER = 4096  # The limit above is never raised beyond this number of calls.
_MOST_AFTER = 1024  # Held calls also count as kept after this many later calls of any kind.
_MOST_REPLACED = 2  # They also do once calls were dropped this many times although a later call had run backward.
_MOST_EVENTS = 1 << 17  # A step of more events is cut, so that a program without an end takes no memory for ever.


class Phase(Enum):
    """What a call does at an event. The values are the names of the fields of `Bytes`."""

    FORWARD = "forward"
    """It saves tensors, and holds them from then on."""
    BACKWARD = "backward"
    """It reads what it saved. A budget notes the end of a backward, offload each read of an operator's tensors."""


class Event(NamedTuple):
    """A point of a step at which a call runs."""

    phase: Phase
    call: int  # the number of the call in its step


@dataclass(frozen=True)
class Trace:
    """What ran in a step, as a value: equal traces are steps that may have one plan.

    Attributes:
        calls: what ran in each call: a version of a graph, or an operator's `Sends`.
        events: in the order in which they came.
        dropped: (call, number of events before) for each call whose saved tensors were released without a backward.
    """

    calls: tuple[Any, ...]
    events: tuple[Event, ...]
    dropped: tuple[tuple[int, int], ...] = ()

    def is_nested(self, graph_of: Callable[[Any], Hashable]) -> bool:
        """Whether the calls of each graph run backward in the reverse order of their forwards."""
        waiting: dict[Hashable, list[int]] = {}
        gone = dict(self.dropped)
        for event in self.events:
            of_graph = waiting.setdefault(graph_of(self.calls[event.call]), [])
            if event.phase is Phase.FORWARD:
                of_graph.append(event.call)
                continue
            while of_graph and of_graph[-1] in gone:
                of_graph.pop()
            if not of_graph or of_graph.pop() != event.call:
                return False
        return True


@dataclass(eq=False)
class Call:
    """Something that holds saved tensors from its forward on.

    Attributes:
        step: the number of its step.
        number: in its step.
        what: what runs, see `Trace.calls`.
        was_read: its backward has run, at least once.
        parameters: weak references to the parameters that it reads, if its step notes them.
        accumulates: for each of these, whether it had a gradient by then.
        returned: the memory of tensors with a gradient that it returned, but for that of inputs, and its bytes.
        freed_bytes: those of `returned` that nothing held any more when its backward began, less what was held by then
            of other calls whose backward had begun. None before that.
        inputs: the memory of other tensors with a gradient that it reads.
        keeps_inputs: the program still held some of these when its backward began, and its version counts them as gone.
        is_chained: calls of the same graph returned all these, and it reads no further leaf that is no parameter. FSDP2
            hands them on as other tensors.
    """

    step: int
    number: int
    what: Any
    was_read: bool = False
    parameters: Sequence[weakref.ref[torch.Tensor]] = ()
    accumulates: Sequence[bool] = ()
    inputs: Sequence[StorageWeakRef] = ()
    returned: Sequence[tuple[StorageWeakRef, int]] = ()
    freed_bytes: int | None = None
    is_chained: bool = False
    keeps_inputs: bool = False


@dataclass(eq=False)
class Step:
    """A step while it runs, and the last one until the next begins.

    Attributes:
        number: no other step has it.
        holding: the calls that hold what they saved, by number.
        most: the most calls that held something at the same time.
        replaced: the numbers of events before which calls were dropped after the backward of a later one.
        is_over: nothing is held any more, and whoever wants to know was told.
        is_part: it began without calls whose backward runs in it, because these were left out.
        notes_parameters: its calls note their parameters.
        allocated: bytes on the device at its begin, if its owner measures that.
        eager_bytes: those of them that its own code has allocated before the first call, if its owner measures that.
        began: when it began, if its owner measures that.
        loss_bytes: what the program's own code took between a forward and the backward after it, at most, if its owner
            measures that; None: not measured.
    """

    calls: list[Call] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    holding: dict[int, Call] = field(default_factory=dict)
    most: int = 0
    replaced: set[int] = field(default_factory=set)
    is_over: bool = False
    is_part: bool = False
    notes_parameters: bool = False
    allocated: int | None = None
    eager_bytes: int = 0
    began: Any = None
    loss_bytes: int | None = None
    number: int = field(default_factory=itertools.count().__next__)

    def trace(self, *, with_dropped: bool = True) -> Trace:
        dropped = tuple(self.dropped) if with_dropped else ()
        return Trace(tuple(call.what for call in self.calls), tuple(self.events), dropped)

    @property
    def calls_since(self) -> int:
        """How many calls came after the newest that holds something. None of them holds anything."""
        return len(self.calls) - 1 - next(reversed(self.holding))

    def release(self, call: Call) -> bool:
        """Note that `call` holds nothing any more. False if it held nothing."""
        if self.holding.pop(call.number, None) is None:
            return False
        if not call.was_read:
            self.dropped.append((call.number, len(self.events)))
            if any(later.was_read for later in self.calls[call.number + 1 :]):
                self.replaced.add(len(self.events))
        return True


def _as_it_is(what: Any) -> Hashable:
    return what  # type: ignore[no-any-return]


def _memory_of(tensors: Iterable[torch.Tensor], beside: Iterable[torch.Tensor]) -> list[tuple[StorageWeakRef, int]]:
    """The storages of plain `tensors`, but for those of `beside`, and their bytes."""
    plain = [x.untyped_storage() for x in tensors if type(x) is torch.Tensor]
    known = {StorageWeakRef(x.untyped_storage()) for x in beside}
    return [*{ref: (ref, s.nbytes()) for s in plain if (ref := StorageWeakRef(s)) not in known}.values()]


@dataclass(eq=False)
class Recorder:
    """The steps of one thread, or of one device.

    Attributes:
        title: whose steps they are, for the warning.
        effect: what becomes of calls that are left out, for the warning.
        category: of the warning.
        on_end: called with each step that ends, but not with what is left out.
        kind_of: calls of one kind come again in each step: returns the kind of a call from `Call.what`.
        lock: protects the step. An owner may give its own.
    """

    title: str
    effect: str
    category: type[Warning]
    on_end: Callable[[Step], None]
    kind_of: Callable[[Any], Hashable] = _as_it_is
    lock: Any = field(default_factory=threading.RLock)
    step: Step = field(default_factory=Step)
    _dropped: deque[Call] = field(default_factory=deque)
    _kept_after: int = _KEPT_AFTER
    _warned: bool = False

    def before_call(self) -> Step:
        """A call is about to begin. Returns its step: a new one if the last has ended, or has no end."""
        with self.lock:
            self.release_dropped()
            step = self.step
            if not step.is_over and not step.holding and step.events:
                self.end()
            elif step.holding and self._is_endless():
                self._leave_out()
            if self.step.is_over:
                self.step = Step()
            return self.step

    def saves(self, what: Any, inputs: Iterable[torch.Tensor] = (), outputs: Iterable[torch.Tensor] = ()) -> Call:
        """Note that a call has begun to hold what it saved. `inputs`, `outputs`: its tensors that have a gradient."""
        with self.lock:
            step = self.step
            call = Call(step.number, len(step.calls), what)
            if step.notes_parameters:
                inputs = [*inputs]
                made, leaves = ([x for x in inputs if x.is_leaf == leaf] for leaf in (False, True))
                call.parameters = [*map(weakref.ref, leaves)]
                call.accumulates = [x.grad is not None for x in leaves]
                call.inputs = [StorageWeakRef(x.untyped_storage()) for x in made]
                call.returned = _memory_of(outputs, beside=inputs)
                same = (other for other in step.calls if self.kind_of(other.what) == self.kind_of(what))
                given = [x for x in leaves if not isinstance(x, torch.nn.Parameter)]
                known = {memory for other in same for memory, _ in other.returned}
                call.is_chained = not given and known.issuperset(call.inputs)
            step.calls.append(call)
            step.events.append(Event(Phase.FORWARD, call.number))
            step.holding[call.number] = call
            step.most = max(step.most, len(step.holding))
            return call

    def reads(self, call: Call) -> bool:
        """Note that the backward of `call` runs, or has run. False if an earlier step began with it."""
        with self.lock:
            if call.step != self.step.number:
                self._kept_after = min(_RAISED * self._kept_after, _MOST_KEPT_AFTER)
                self.step.is_part = True
                return False
            call.was_read = True
            self.step.events.append(Event(Phase.BACKWARD, call.number))
            return True

    def drop(self, call: Call) -> None:
        """`call` holds nothing any more. Takes no lock: the garbage collector may call it anywhere."""
        self._dropped.append(call)

    def release_dropped(self) -> None:
        with self.lock:
            while self._dropped:
                call = self._dropped.popleft()
                if call.step == self.step.number:
                    self.step.release(call)

    def end(self) -> None:
        """End the step, whether or not calls hold something."""
        self.step.is_over = True
        self.on_end(self.step)

    def forget(self) -> None:
        with self.lock:
            self.step, self._kept_after, self._warned = Step(), _KEPT_AFTER, False

    def _is_endless(self) -> bool:
        """Whether the calls that hold something are kept, as by the output of an evaluation.

        Never in a backward: checkpoints may run one graph many times there before its first call goes backward.
        """
        step = self.step
        if len(step.events) >= _MOST_EVENTS:
            return True
        if autograd.current_backward() != -1:
            return False
        if len(step.replaced) >= _MOST_REPLACED:
            return True
        after = step.calls_since
        if after < _KEPT_AGAIN * len(step.holding):
            return False
        ran = Counter(self.kind_of(call.what) for call in step.calls[len(step.calls) - after :] if call.was_read)
        kept = Counter(self.kind_of(call.what) for call in step.holding.values())
        return after >= _MOST_AFTER or all(ran[kind] >= self._kept_after * count for kind, count in kept.items())

    def _leave_out(self) -> None:
        """Begin a step without the calls that hold something. With a warning, for the first time."""
        step, warns = self.step, not self._warned
        self.step = Step()
        if warns:
            self._kept_after, self._warned = _KEPT_AGAIN, True
            warn_user(
                f"aot_hooks: {self.title}: {len(step.holding)} calls of compiled graphs keep what they saved, and "
                f"{step.calls_since} others have come and gone since. A step ends where nothing is saved, so none "
                f"had an end, or a plan. From now on steps end without them, and {self.effect}. Is the output of an "
                "evaluation kept, or an exception? Compute it under torch.no_grad(), or keep output.detach()",
                self.category,
            )
