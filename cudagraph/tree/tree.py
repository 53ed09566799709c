"""Graphs of one device as a tree of recordings, walked along the path that the program takes.

    root --f--> node --g--> node            current: where the program is in this step
         \\--g--> node                       edges of current: what to do when a function comes next, ready made

    a call:   edge of the current node -> replay                          the usual case, one look-up
              other recordings there -> replay
              a new step begins here?  -> from the root
              never run before -> warm up, and so does the rest of the step
              -> record

A step ends with `mark_step_begin()`, or as steps.py says, and not while a forward of it still waits for its backward.
What is held of it then is parted with: copied out, or an error on access.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import counters
from ..torch_private import cuda as torch_cuda
from . import reclaim
from .capture import CannotCapture, NotWarmError, Owner
from .driver import CaptureDriver, Pool
from .function import Function, log
from .liveness import Slot, copy_as_it_lies, held, on_slots, stale_message
from .node import Edge, Node
from .record import record
from .steps import REPEATS, Next, next_of, on_the_same
from .uncaptured import Aside, below_autograd
from .warmup import Warming, storages_of

__all__ = ["Tree"]

# Marks that a step may outlive because a forward waits for its backward, for the same reason.
OUTLIVED_MARKS = 8
# Captures of a function that raise what may not be raised another time, such as that there is no memory.
TRIES = 3


class Failed:
    """Why a capture failed, without the error, which keeps memory.

    Attributes:
        reason: for messages.
        said: the reason is this package's own, and may hold at one place alone.
        not_warm: another warm-up is wanted.
        for_good: another capture would fail as well.
    """

    def __init__(self, error: Exception, *, for_good: bool) -> None:
        self.said = isinstance(error, CannotCapture)
        self.not_warm = isinstance(error, NotWarmError)
        self.for_good = for_good
        first_line = str(error).partition("\n")[0]
        self.reason = str(error) if self.said else f"capturing it raised {type(error).__name__}: {first_line}"


class Tree:
    """The recordings of one thread on one device.

    Attributes:
        current: where the path is. Replays move it.
        marks: how many marks there had been when this step began; None to be asked at the next call.
        marked: steps begin with marks, not by themselves.
        calling: which outermost call of a compiled function the last call was a part of; see `Function.calls`.
        stream: the stream that the last replay was launched on.
        tainted: someone keeps memory of the pool that was to be free; it is not used any longer.
        owner: lives as long as the recordings; see `current`.
        put_off: captures that were to come after another warm-up.
        warming: runs what is not warm.
    """

    def __init__(self, driver: CaptureDriver, device: torch.device, marks: int) -> None:
        self.driver = driver
        self.device = device
        self.stream_now = driver.stream(device)
        self.marks: int | None = marks
        self.marks_seen = marks
        self.marked = False
        self.calling: Any = None
        self.functions: set[Function] = set()
        self.put_off: set[tuple[Function, Any]] = set()
        self.warming = Warming(driver, device)
        self._begin()

    def _begin(self) -> None:
        self._pool: Pool | None = None
        self.owner = Owner()
        self.root = Node(self, None, None)
        self.current = self.root
        self.aside: Aside | None = None
        self.nowhere = Node(self, None, None)  # the current node while aside: it has no edges
        self.warmed: dict[Function, int] = {}
        self.sizes: dict[Function, set[Any]] = {}
        self.refusals: dict[tuple[Node, Any], str] = {}
        self.outlived_marks = 0
        self.stream: int | None = None
        self.stream_object: Any = None
        self.tainted = False
        self.dropped: list[Function] = []

    @property
    def pool(self) -> Pool:
        if self._pool is None:
            self._pool = self.driver.open_pool(self.device)
        return self._pool

    def release_pool(self) -> None:
        """No recording uses it any more."""
        if self._pool is not None:
            self._pool.release()
            self._pool = None
        self.owner = Owner()

    @property
    def place(self) -> Node:
        """Where the path is, also while aside."""
        return self.current if self.aside is None else self.aside.place

    def follow_stream(self) -> None:
        if self.stream_now() != self.stream:
            self.change_stream()

    def change_stream(self) -> None:
        """The caller uses another stream than before: it waits for what was launched on that one."""
        self.stream = self.stream_now()
        self.stream_object = self.driver.order_streams(self.device, self.stream_object)

    # --- one call

    def call(self, function: Function, key: Any, inputs: list[Any]) -> list[Any]:
        """A call that no edge of the current node was right for."""
        self.follow_stream()
        if self.tainted and self.aside is None:
            if self.current is self.root:
                self.close(inputs)
            else:  # what the step gave out before is still needed: the pool is given up when it may end
                self._step_aside(warming=False)
        came_from = self.place
        then = self._next(function, inputs)
        in_one_call = self.in_one_call(function)
        self.calling = function.calls.generation
        ends = then is Next.BEGINS
        if ends:
            self.end_step(inputs)
            if self.tainted:
                self.close(inputs)
                came_from = self.root
        outputs = self._known(function, key, inputs)
        if outputs is not None:
            if ends and came_from is not self.root and not came_from.pending and key not in came_from.edges:
                came_from.edges[key] = self._restart(came_from, key)
            return outputs
        if function.uncapturable is not None:
            return self._refuse(function, key, function.uncapturable, inputs)
        if self.aside is not None:
            return self._as_it_is(function, inputs)
        if self.warmed.get(function, 0) < function.options.warmup_steps:
            belongs = in_one_call or bool(on_slots(inputs, self.current.live))
            self._step_aside(warming=True, belongs=belongs)
            return self._as_it_is(function, inputs)
        if self._never_ends(function, inputs):
            self._step_aside(warming=False)
            return self._as_it_is(function, inputs)
        reason = self.refusals.get((self.current, key)) or self._limit(function, key)
        if reason is not None:
            return self._without_graph(function, reason, inputs)
        place = self.current
        outputs = self._record(function, key, inputs)
        if then is Next.READS_ON and function is place.first and self.current.parent is place:
            others = (node.function for node in place.path() if node.function is not function)
            self.current.first = next(others, function)
        return outputs

    def _known(self, function: Function, key: Any, inputs: list[Any]) -> list[Any] | None:
        """Replay one of the recordings at the current node, if one is right."""
        place = self.current
        for child in place.children.get(key, ()):
            outputs = child.replay(inputs)
            if outputs is not None:
                place.edges[key] = child.edge
                return outputs
        return None

    def _restart(self, place: Node, key: Any) -> Edge:
        """An edge from the end of a step to its beginning, for when nothing is held."""

        def restart(inputs: list[Any]) -> list[Any] | None:
            edge = self.root.edges.get(key)
            if edge is None or not place.watch_live.none_held():
                return None
            self.current = self.root
            self.outlived_marks = 0
            return edge(inputs)

        return restart

    def _limit(self, function: Function, key: Any) -> str | None:
        """Why there is to be no more recording of `function` here; None if there may be."""
        options, place = function.options, self.current
        if not self._admits(function, key):
            return (
                f"it was called with {options.size_limit} sizes (options['size_limit']); pad its inputs to fewer sizes"
            )
        known = [child for child in place.children.get(key, ()) if not child.in_place]
        if len(known) > options.rerecord_limit:
            why = function.moved or "what is held there differs"
            return f"it was recorded {len(known)} times at one place because {why} (options['rerecord_limit'])"
        return None

    def _admits(self, function: Function, key: Any) -> bool:
        """Whether anything may be kept for this size; what is refused takes room, too."""
        sizes = self.sizes.setdefault(function, set())
        return key in sizes or len(sizes) < function.options.size_limit

    def _record(self, function: Function, key: Any, inputs: list[Any]) -> list[Any]:
        if self.warming.busy:  # what is warmed up calls it
            self._step_aside(warming=True)
            return self._as_it_is(function, inputs)
        self.warming.over()
        place = self.current
        known = place.children.get(key, ())
        if known:
            function.note_moves(known[-1].addresses, known[-1].fixed_inputs, inputs)
        failed: Failed | None = None
        try:
            with reclaim.one_capture():
                node = record(place, function, key, inputs)
        except AssertionError:  # somebody's mistake, which is not to be hidden
            raise
        except Exception as error:  # whatever else it is: all is as before, and the program runs without it
            failed = Failed(error, for_good=isinstance(error, CannotCapture) or self.driver.is_capture_error(error))
        if failed is not None:  # only now: the error and its traceback are gone, and what they held
            return self._after_failure(failed, function, key, inputs)
        function.failures = 0
        self.sizes[function].add(key)
        self.put_off.discard((function, key))
        counters.add("recordings")
        counters.add("rerecordings", bool(known))
        log.debug("recorded %s, the %dth at this place of the path", function.name, len(known) + 1)
        return node.run(inputs)

    def _after_failure(self, failed: Failed, function: Function, key: Any, inputs: list[Any]) -> list[Any]:
        """A capture failed and left no trace: the call runs as it is. An error that this raises is the program's own.

        A capture that may work another time, because there was no memory, is tried again, `TRIES` times in all.
        """
        if failed.not_warm and (function, key) not in self.put_off:
            self.put_off.add((function, key))
            log.debug("%s warms up once more: %s", function.name, failed.reason)
            self._step_aside(warming=True)
            return self._as_it_is(function, inputs)
        if failed.for_good and (self.tainted or not failed.said):
            function.uncapturable = failed.reason  # another capture would do the same to the next pool
        if failed.for_good:
            return self._refuse(function, key, failed.reason, inputs)
        if function.options.or_error:
            function.skipped(failed.reason)
        counters.add("skips")
        outputs = list(function.piece.run(inputs))
        function.failures += 1  # of captures alone
        if function.failures < TRIES:
            log.info("%s ran as it is, and is captured another time: %s", function.name, failed.reason)
        else:
            function.uncapturable = failed.reason
            function.skipped(failed.reason)
        return outputs

    def record_in_place(self, node: Node, key: Any, inputs: list[Any]) -> list[Any] | None:
        """Record what `node` does once more, with what it copies read where it is. None, and all as before, if there is
        something in the way: `node` goes on as it is."""
        place, function = self.current, node.function
        assert function is not None
        alone = not node.children and place.children.get(key) == [node]
        if self.tainted or self.warming.busy or not alone or not function.settles:
            return None
        storages = [x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)]
        if function.options.rerecord_limit == 0 or len(set(storages)) < len(storages):
            return None  # of which of two on one storage an output is a view, the memory does not tell
        try:
            with reclaim.one_capture():
                in_place = below_autograd(record, place, function, key, inputs, frozenset(node.copied_inputs))
        except AssertionError:
            raise
        except Exception as reason:  # whatever it is: all is as before, and the program runs without it
            log.debug("%s goes on copying its inputs: %s", function.name, reason)
            function.settles = not self.tainted
            return None
        counters.add("recordings")
        counters.add("rerecordings")
        log.debug("recorded %s, which reads its inputs where they are", function.name)
        return below_autograd(in_place.run, inputs)

    def _refuse(self, function: Function, key: Any, reason: str, inputs: list[Any]) -> list[Any]:
        """From now on `function` runs as it is at this place."""
        if self._admits(function, key):
            self.sizes[function].add(key)
            self.refusals[self.current, key] = reason
            self.current.edges[key] = lambda inputs: below_autograd(self._without_graph, function, reason, inputs)
        return self._without_graph(function, reason, inputs)

    def _without_graph(self, function: Function, reason: str, inputs: list[Any]) -> list[Any]:
        function.skipped(reason)
        counters.add("skips")
        return list(function.piece.run(inputs))

    def _step_aside(self, *, warming: bool, after_mark: bool = False, belongs: bool = False) -> None:
        self.aside = Aside(self.current, warming=warming, after_mark=after_mark, belongs=belongs)
        self.current = self.nowhere

    def _as_it_is(self, function: Function, inputs: list[Any]) -> list[Any]:
        assert self.aside is not None
        if not self.aside.warming:
            reason = "forwards of earlier steps wait for a backward; use torch.no_grad() or drop what they returned"
            if self.tainted:
                reason = "a capture failed in this step"
            elif not self.aside.after_mark:
                reason = "the step never ends: something of it is held all the time; mark steps, or let go of it"
            return self._without_graph(function, reason, inputs)
        given = storages_of(inputs)
        outputs = self.warming.run(function, inputs, given)
        self.warmed[function] = self.warmed.get(function, 0) + 1
        counters.add("warmups")
        if self.aside is not None:  # a nested call may have ended the step
            self.aside.ran(function, outputs, given)
        return outputs

    # --- steps

    def mark(self, marks: int, inputs: list[Any]) -> None:
        """There were marks since the last call: a new step begins, unless something waits for its backward."""
        if marks != self.marks_seen:
            self.marked = True
            self._begin_marked_step(inputs)
            if self.tainted and self.place is self.root:
                self.close(inputs)
        self.marks = self.marks_seen = marks  # not if there was no room for copies: the next call tries again
        if self.dropped:
            reclaim.prune(self)
            if self.dropped:
                self.look_up()

    def forget_marks(self, marks: int) -> None:
        """Let steps begin by themselves again, as if there had been none of the `marks` so far."""
        self.marked = False
        self.marks_seen = marks

    def look_up(self) -> None:
        """There is something to do at the next call, which will come here by way of `mark`."""
        self.marks = None

    def _begin_marked_step(self, inputs: list[Any]) -> None:
        current = self.current
        if not current.pending and self.aside is None and current.watch_live.none_held():
            self.current = self.root
            self.outlived_marks = 0
        elif self.waits(self.place):
            self.outlived_marks += 1
            if self.outlived_marks > OUTLIVED_MARKS and self.aside is None:
                self._step_aside(warming=False, after_mark=True)
        else:
            self.end_step(inputs)

    def waits(self, place: Node) -> bool:
        """Whether a backward may still need what a forward of the path gave out."""
        return any(not forward.saved.none_held() for forward in place.pending)

    def in_one_call(self, function: Function) -> bool:
        """Whether one call of a compiled function, which has graph breaks, ran the last graph and calls `function`."""
        return bool(self.calling == function.calls.generation)

    def _next(self, function: Function, inputs: list[Any]) -> Next:
        """Whether a call of `function`, which does not follow the path as it was, begins a new step."""
        place, aside = self.place, self.aside
        if aside is None:
            return Next.GOES_ON if place is self.root else next_of(self, place, function, inputs)
        if not aside.warming:
            if aside.after_mark:
                return Next.GOES_ON if self.waits(place) else Next.BEGINS
            return next_of(self, place, function, inputs)
        in_one_call = self.in_one_call(function)
        if not aside.may_end(function, inputs, marked=self.marked, in_one_call=in_one_call):
            return Next.GOES_ON
        if place is self.root:
            return Next.BEGINS
        then = next_of(self, place, function, inputs)
        if then is not Next.BEGINS:
            self.current, self.aside = place, None  # what came before the warm-up is still needed: the path goes on
        return then

    def _never_ends(self, function: Function, inputs: list[Any]) -> bool:
        """Whether the step repeats `function` while something else is held each time, so that it never ends by itself.
        Such calls run as they are until that is let go of."""
        if self.marked:
            return False
        ran = [node for node in self.current.path() if node.function is function and on_the_same(node, inputs)]
        dead = [node for node in ran if not any(slot is not None and slot.held() for slot in node.template_slots)]
        return len(dead) > REPEATS

    def end_step(self, inputs: list[Any]) -> None:
        """The path ends: the next call starts at the root, and may overwrite everything."""
        place = self.place
        if not place.watch_live.none_held():
            before, number = self.stream_object, self.stream
            self.follow_stream()
            self._part_with(held(place.live), inputs)
            if before is not None and number != self.stream:
                self.driver.let_wait(before, self.stream_object)  # who reads a copy there finds it finished
        self.current = self.root
        self.aside = None
        self.outlived_marks = 0
        self.warming.over()

    def _part_with(self, slots: list[Slot], inputs: list[Any]) -> None:
        """Somebody holds `slots`, whose memory is about to be reused: they get copies, or errors when they read it."""
        given = on_slots(inputs, slots)
        wanted = set(given.values())  # whoever holds what this step reads goes on reading it, or is written to
        moving = [slot for slot in slots if (slot.copies or slot in wanted) and self.can_move(slot)]
        self.driver.copy_out([slot.storage for slot in moving])
        counters.add("held_outputs", len(slots))
        counters.add("copies", len(moving))
        for i, slot in given.items():
            if slot not in moving:
                inputs[i] = copy_as_it_lies(inputs[i])
        for slot in slots:
            if slot not in moving:
                self.driver.poison(slot.storage, stale_message(slot))
            slot.renew(torch_cuda.storage_at(slot.address, slot.storage.device, slot.nbytes))
            # This torch moves only what the allocator made: from now on it is copied when it is given out.
            wants_copies = (slot.copies or slot in wanted) and not slot.host
            slot.given_as_copies = wants_copies and not self.driver.can_copy_out(slot.storage)
        if any(slot.given_as_copies for slot in slots):
            for node in self.root.subtree():
                node.settle()

    def can_move(self, slot: Slot) -> bool:
        return not slot.host and self.driver.can_copy_out(slot.storage)

    def close(self, inputs: list[Any] | None = None) -> None:
        """Forget everything and give the memory back; calls warm up and record again."""
        self.end_step([] if inputs is None else inputs)
        self.root.close()
        self.release_pool()
        warmed = self.warmed if self.tainted else {}
        if not self.tainted:
            self.put_off.clear()
        self._begin()
        self.warmed = warmed
