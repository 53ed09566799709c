"""The recordings of one thread on one device: a tree of nodes, walked along the path that the program takes.

    root --f--> node --g--> node            current: where the program is in this step
         \\--g--> node                       edges of current: prepared, by the function that comes next

    a call:   edge of the current node -> replay                          the usual case, one look-up
              a new step begins here? -> from the root
              other recordings there -> replay
              never run before -> warm up; the rest of the step runs uncaptured
              -> record

A step ends with `mark_step_begin()`, or as steps.py decides. It does not end while a forward of it waits for its
backward. Outputs that are still held then are copied out, or reading them becomes an error.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import counters
from ..torch_private import cuda as torch_cuda
from ..torch_private import distributed as torch_distributed
from .capture import CannotCapture, NotWarmError
from .driver import CaptureDriver, Pool
from .function import Function, log
from .liveness import Slot, copy_preserving_layout, on_slots, slots_in_use, stale_message
from .moves import EARNED, Moves
from .node import Cursor, EdgeKey, Node, Recording, StableInputProbe
from .record import record
from .steps import Call, Next, never_ends, next_of
from .uncaptured import Cause, UncapturedStep, Warmup, below_autograd, weak_storages_of

MAX_IGNORED_MARKS = 8  # marks while a forward waits for its backward; after more, the step runs uncaptured
MAX_FAILED_CAPTURES = 3  # in a row, of one function, by errors that may not come again, such as out of memory
# Threads capture one after the other: a capture empties caches that another may be filling.
# Re-entrant, because captured code may call a captured function.
one_at_a_time = threading.RLock()
captures_under_way = 0
# Trees that finalizers put here. They are closed at once, or after the capture under way; at the latest with a mark.
# Finalizers run wherever the garbage collector does. That may be inside a capture, which would record the copies that
# closing makes, inside a compiler that traces with fake tensors, or in a thread that the tree does not belong to.
to_close: deque[Tree] = deque()
trees_with_collectives: weakref.WeakSet[Tree] = weakref.WeakSet()  # with a recording that has collectives


class Failure:
    """Why a capture failed, without the error, which keeps memory."""

    def __init__(self, error: Exception, driver: CaptureDriver) -> None:
        self.is_ours = isinstance(error, CannotCapture)  # then the reason may apply to one node only
        self.needs_warmup = isinstance(error, NotWarmError)
        self.is_final = self.is_ours or driver.is_capture_error(error)  # another capture would fail as well
        first_line = str(error).partition("\n")[0]
        self.reason = str(error) if self.is_ours else f"capturing it raised {type(error).__name__}: {first_line}"


@dataclass(eq=False)
class FunctionState:
    """What one tree knows of a function."""

    warmup_count: int = 0
    keys: set[EdgeKey] = field(default_factory=set)  # those that it was recorded or refused for; each is a size
    awaiting_second_warmup: set[EdgeKey] = field(default_factory=set)  # those whose capture raised `NotWarmError`
    moves: Moves = field(default_factory=Moves)

    def admits(self, key: EdgeKey, size_limit: int) -> bool:
        """Whether `key` may be recorded or refused. Refusals take memory, too."""
        return key in self.keys or len(self.keys) < size_limit


class Tree(Cursor):
    """The recordings of one thread on one device."""

    def __init__(self, driver: CaptureDriver, device: torch.device, marks: int) -> None:
        super().__init__(driver, device)
        self.marks: int | None = marks  # the thread's count of marks at the last call; None makes the next call `mark`
        self.last_mark = marks  # the same count, but never None: a higher one means that there was a mark
        self.is_marked = False  # the thread marks its steps, so they don't begin by themselves
        # Graphs that are cut into parts and run now, one inside of another; see `dispatch.in_parts`.
        self.outer_inputs: list[weakref.ref[torch.Tensor]] = []  # their inputs, which later parts may read
        self.entered_at: Node | None = None  # where the path was when the outermost was called; None if none runs
        self.last_generation: Any = None  # of the last call: all graphs of one compiled call have the same
        self.functions: set[Function] = set()  # those whose callable is alive
        self.warmup = Warmup(driver, device)
        self.states: defaultdict[Function, FunctionState] = defaultdict(FunctionState)
        # Groups of parameters that FSDP2 gathers within the context `gathering_pool`: at the same addresses each step.
        self.gathered_groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self.gathering_pool: Callable[[], contextlib.AbstractContextManager[None]] | None = None
        self.given_up: dict[Any, str] = {}  # families of functions that run without graphs, and why; see moves.py
        self._begin()

    def _begin(self) -> None:
        self.pool: Pool | None = None  # the first recording opens it
        self.root = self.current = Node(self)
        self.off_path = Node(self)  # current while the step runs uncaptured; only refused functions have edges here
        self.uncaptured: UncapturedStep | None = None
        self.ignored_marks = 0
        self.stream = self.stream_object = None
        self.dropped: list[Function] = []  # those whose recordings are to be closed

    @property
    def path_end(self) -> Node:
        """Where the path is; during an uncaptured step, where it was left."""
        return self.current if self.uncaptured is None else self.uncaptured.node

    @property
    def is_broken(self) -> bool:
        """Whether nothing more can be recorded in the pool."""
        return self.pool is not None and self.pool.broken

    def _release_pool(self) -> None:
        """Give the memory back: no recording is left. The next one opens a new pool."""
        if self.pool is not None:
            self.pool.release()
            self.pool = None

    def call(self, function: Function, key: EdgeKey, inputs: list[Any]) -> list[Any]:
        """Run a call for which the current node has no edge that applies."""
        self.follow_stream()
        if self.is_broken and self.uncaptured is None:
            if self.current is self.root:
                self.close(inputs)
            else:  # outputs of the step are still needed: the pool is given up when the step may end
                self._stop_capturing(Cause.NEVER_ENDS)
        came_from = self.path_end
        generation = function.call_counter.generation
        in_one_call, self.last_generation = self.last_generation == generation, generation
        also_read = self._also_read(came_from.live)
        call = Call(function, inputs, came_from, self.uncaptured, self.is_marked, in_one_call, self.can_move, also_read)
        then = next_of(call)
        if then is Next.BEGINS:
            self.end_step(inputs)
            if self.is_broken:
                self.close(inputs)
                came_from = self.root
        elif then is not Next.WARMS_UP and self.uncaptured is not None and self.uncaptured.cause is Cause.WARMUP:
            # outputs of the path from before the warm-up are still needed: the path goes on
            self.current, self.uncaptured = came_from, None
        node = self.current
        for child in node.children.get(key, ()):
            outputs = child.replay(inputs)
            if outputs is not None:
                node.edges[key] = child.edge
                is_restart = then is Next.BEGINS and came_from is not self.root
                if is_restart and not came_from.pending and key not in came_from.edges:
                    came_from.edges[key] = functools.partial(self._restart, came_from, key)
                return outputs
        why_not = function.uncapturable or self.given_up.get(function.family)
        if why_not is not None:
            return self._refuse(function, key, why_not, inputs)
        if self.uncaptured is not None:
            return self._run_uncaptured(function, inputs)
        if self.states[function].warmup_count < function.options.warmup_steps:
            continues_path = in_one_call or bool(on_slots(inputs, node.live))
            self._stop_capturing(Cause.WARMUP, continues_path=continues_path)
            return self._run_uncaptured(function, inputs)
        if never_ends(call, node):
            self._stop_capturing(Cause.NEVER_ENDS)
            return self._run_uncaptured(function, inputs)
        reason = node.refusals.get(key) or self._limit(function, key)
        if reason is not None:
            return self._skip(function, reason, inputs)
        outputs = self._record(function, key, inputs)
        if then is Next.READS_ON and function is node.first and self.current in node.children.get(key, ()):
            others = (recording.function for recording in node.path() if recording.function is not function)
            self.current.first = next(others, function)
        return outputs

    def _restart(self, end: Node, key: EdgeKey, inputs: list[Any]) -> list[Any] | None:
        """Begin the next step by a replay from the root, if no output of the step that ended at `end` is held.

        `call` makes this the edge of `end` for `key`. None, with nothing changed, if it does not apply.
        """
        edge = self.root.edges.get(key)
        if edge is None or not end.watch_live.none_held():
            return None
        self.current, self.ignored_marks = self.root, 0
        return edge(inputs)

    def _limit(self, function: Function, key: EdgeKey) -> str | None:
        """Why `function` is not recorded here any more; None if it may be."""
        size_limit, rerecord_limit = function.options.size_limit, function.options.rerecord_limit
        if not self.states[function].admits(key, size_limit):
            return f"it was called with {size_limit} sizes (options['size_limit']); pad its inputs to fewer sizes"
        known = [child for child in self.current.children.get(key, ()) if not child.inputs.reads_in_place]
        if len(known) > rerecord_limit:
            why = function.last_move or "what is held there differs"
            return f"it was recorded {len(known)} times at one place because {why} (options['rerecord_limit'])"
        return None

    def _record(self, function: Function, key: EdgeKey, inputs: list[Any]) -> list[Any]:
        if self.warmup.busy:  # a function that warms up calls this one
            self._stop_capturing(Cause.WARMUP)
            return self._run_uncaptured(function, inputs)
        self.warmup.end()
        node = self.current
        if key in node.children:
            layout = node.children[key][-1].inputs
            function.note_moves(layout.addresses, layout.fixed, inputs)
        state, static = self.states[function], function.static_tensors(inputs, node.live)
        moving = state.moves.in_each_step(static)
        if moving:
            return self._refuse(function, key, self._give_up(function, moving), inputs)
        recording = self._capture(function, key, inputs)
        if isinstance(recording, Failure):
            return self._after_failure(recording, function, key, inputs)
        if function.piece.is_inference and recording.inputs.copied:
            record_in_place = functools.partial(below_autograd, self._record_in_place)
            recording.edge = node.edges[key] = StableInputProbe(recording, record_in_place)
        state.moves.recorded(recording, static)
        if function.piece.has_collectives:
            trees_with_collectives.add(self)
            torch_distributed.call_before_groups_end(free_trees_with_collectives)
        function.failed_captures = 0
        state.keys.add(key)
        state.awaiting_second_warmup.discard(key)
        return recording.run(inputs)

    def _gather_at_the_same_addresses(self, function: Function, inputs: list[Any]) -> None:
        """Have FSDP2 gather those static inputs of `function` that it gathers into a pool of this tree."""
        static = function.static_tensors(inputs, ()).values()
        groups = torch_distributed.groups_that_gather_into({torch_cuda.identity(x.untyped_storage()) for x in static})
        if groups:
            self.gathering_pool = self.gathering_pool or self.driver.open_gathering_pool(self.device)
            torch_distributed.allocate_gathered_in(self.gathering_pool, groups)
            self.gathered_groups |= groups

    def _give_up(self, function: Function, moving: Sequence[int]) -> str:
        """Run the family of `function` without graphs from now on, because the inputs `moving` come at new addresses.
        Returns why. Recordings that are of no use any more are closed."""
        counters.add("given_up")
        self.dropped += [other for other in self.functions if other.family == function.family]
        self._close_dropped()
        self.marks = None if self.dropped else self.marks
        names = function.input_name(moving[0]) + (f" and {len(moving) - 1} more" if len(moving) > 1 else "")
        reason = (
            f"{names} moved to new addresses in each step, and a recording reads one; make the step one graph "
            "with cudagraph.whole_step, leave CUDA graphs off here, or call cudagraph.reset() to try again once they "
            "stay where they are"
        )
        self.given_up[function.family] = reason
        return reason

    def _capture(
        self, function: Function, key: EdgeKey, inputs: list[Any], in_place: frozenset[int] = frozenset()
    ) -> Recording | Failure:
        """Record `function` at the current node. After a failure everything is as before."""
        count = len(self.current.children.get(key, ()))
        try:
            with one_capture():
                self.pool = self.pool or self.driver.open_pool(self.device)
                recording = record(self.pool, self.current, key, inputs, in_place)
        except AssertionError:  # a bug, which is not to be hidden
            raise
        except Exception as error:
            return Failure(error, self.driver)
        counters.add("recordings")
        counters.add("rerecordings", bool(count))
        how = ", which reads its inputs where they are" if in_place else ""
        log.debug("recorded %s%s: the %dth at this place of the path", function.name, how, count + 1)
        return recording

    def _after_failure(self, failure: Failure, function: Function, key: EdgeKey, inputs: list[Any]) -> list[Any]:
        """Run the call uncaptured after a capture that failed and left no trace. Its errors are the program's own.

        A capture that may work another time, such as after out of memory, is tried `MAX_FAILED_CAPTURES` times in all.
        """
        awaiting = self.states[function].awaiting_second_warmup
        if failure.needs_warmup and key not in awaiting:
            awaiting.add(key)
            log.debug("%s warms up once more: %s", function.name, failure.reason)
            self._stop_capturing(Cause.WARMUP)
            return self._run_uncaptured(function, inputs)
        if failure.is_final:
            if self.is_broken or not failure.is_ours:
                function.uncapturable = failure.reason  # another capture would do the same to the next pool
            return self._refuse(function, key, failure.reason, inputs)
        if function.options.or_error:
            function.skipped(failure.reason)
        counters.add("skips")
        outputs = list(function.piece.run(inputs))
        function.failed_captures += 1  # not if the program's own error was raised
        if function.failed_captures < MAX_FAILED_CAPTURES:
            log.info("%s ran as it is, and is captured another time: %s", function.name, failure.reason)
        else:
            function.uncapturable = failure.reason
            function.skipped(failure.reason)
        return outputs

    def _record_in_place(self, recording: Recording, inputs: list[Any]) -> list[Any] | None:
        """Record the function of `recording` once more, reading its copied inputs where they are. None, with everything
        as before, if that is not possible."""
        node, function, key = self.current, recording.function, recording.key
        is_alone = not recording.children and node.children.get(key) == [recording]
        if self.is_broken or self.warmup.busy or not is_alone or not function.may_read_in_place:
            return None
        storages = [x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)]
        if function.options.rerecord_limit == 0 or len(set(storages)) < len(storages):
            return None  # of two inputs on one storage, memory does not tell which one an output is a view of
        in_place = self._capture(function, key, inputs, frozenset(recording.inputs.copied))
        if isinstance(in_place, Failure):  # `recording` still applies
            log.debug("%s goes on copying its inputs: %s", function.name, in_place.reason)
            function.may_read_in_place = not self.is_broken
            return None
        recording.replay_count += EARNED  # its inputs stayed where they are
        return in_place.run(inputs)

    def _refuse(self, function: Function, key: EdgeKey, reason: str, inputs: list[Any]) -> list[Any]:
        """Run `function` uncaptured, now and whenever it comes next at this node."""
        state = self.states[function]
        if state.admits(key, function.options.size_limit):
            state.keys.add(key)
            self.current.refusals[key] = reason
            self.current.edges[key] = lambda inputs: below_autograd(self._skip, function, reason, inputs)
        return self._skip(function, reason, inputs)

    def _skip(self, function: Function, reason: str, inputs: list[Any]) -> list[Any]:
        function.skipped(reason)
        counters.add("skips")
        return list(function.piece.run(inputs))

    def _stop_capturing(self, cause: Cause, *, continues_path: bool = False) -> None:
        """The rest of the step runs uncaptured."""
        self.uncaptured = UncapturedStep(self.current, cause, continues_path=continues_path)
        self.current = self.off_path

    def _run_uncaptured(self, function: Function, inputs: list[Any]) -> list[Any]:
        assert self.uncaptured is not None
        cause = self.uncaptured.cause
        if cause is not Cause.WARMUP:
            return self._skip(function, "a capture failed in this step" if self.is_broken else cause.value, inputs)
        self._gather_at_the_same_addresses(function, inputs)
        storages = weak_storages_of(inputs)
        outputs = self.warmup.run(function, inputs, storages)
        self.states[function].warmup_count += 1
        counters.add("warmups")
        if self.uncaptured is not None:  # a nested call may have ended the step
            self.uncaptured.ran(function, outputs, storages)
        return outputs

    def mark(self, marks: int, inputs: list[Any]) -> None:
        """Note marks since the last call: a new step begins, unless a forward waits for its backward."""
        if marks != self.last_mark:
            self.is_marked = True
            if self.uncaptured is None and not self.current.pending and self.current.watch_live.none_held():
                self.current, self.ignored_marks = self.root, 0
            elif self.path_end.waits_for_backward():
                self.ignored_marks += 1
                if self.ignored_marks > MAX_IGNORED_MARKS and self.uncaptured is None:
                    self._stop_capturing(Cause.IGNORED_MARKS)
            else:
                self.end_step(inputs)
            if self.is_broken and self.path_end is self.root:
                self.close(inputs)
        self.marks = self.last_mark = marks  # not if there was no room for copies: the next call tries again
        if self.dropped:
            self._close_dropped()
            self.marks = None if self.dropped else marks

    def end_step(self, inputs: list[Any]) -> None:
        """End the path: the next call starts at the root, and may overwrite everything."""
        end = self.path_end
        if not end.watch_live.none_held():
            before, number = self.stream_object, self.stream
            self.follow_stream()
            self._release_held_outputs(slots_in_use(end.live), inputs)
            if before is not None and number != self.stream:
                self.driver.let_wait(before, self.stream_object)  # a copy is finished before it is read there
        self.current, self.uncaptured, self.ignored_marks = self.root, None, 0
        self.warmup.end()

    def _release_held_outputs(self, slots: list[Slot], inputs: list[Any]) -> None:
        """Copy out the tensors on `slots`, whose memory is about to be reused, or make reading them an error."""
        by_input = on_slots(inputs, slots)
        read = {*by_input.values(), *self._also_read(slots)}  # by this call, whatever becomes of the others
        wanted = [slot for slot in slots if slot.copies or slot in read]
        moving = [slot for slot in wanted if self.can_move(slot)]
        self.driver.copy_out([slot.storage for slot in moving])
        counters.add("held_outputs", len(slots))
        counters.add("copies", len(moving))
        for i, slot in by_input.items():
            if slot not in moving:
                inputs[i] = copy_preserving_layout(inputs[i])
        for slot in slots:
            if slot not in moving:
                self.driver.poison(slot.storage, stale_message(slot))
            slot.renew(torch_cuda.storage_at(slot.address, slot.storage.device, slot.nbytes))
            # Before 2.13, torch moves only storages that its allocator made: a renewed slot gives out copies.
            slot.given_as_copies = slot in wanted and not slot.host and not self.driver.can_copy_out(slot.storage)
        if any(slot.given_as_copies for slot in slots):
            for recording in self.root.recordings():
                recording.choose_output_path()

    def _also_read(self, slots: Sequence[Slot]) -> set[Slot]:
        """Those of `slots` that later parts of a cut graph may read: its inputs, and all once one of its parts ran."""
        if self.entered_at not in (None, self.path_end):
            return set(slots)
        return set(on_slots([torch_cuda.alive(ref) for ref in self.outer_inputs], slots).values())

    def can_move(self, slot: Slot) -> bool:
        return not slot.host and self.driver.can_copy_out(slot.storage)

    def _close_dropped(self) -> None:
        """Close the recordings of dropped functions. The path that the program is on stays until it has ended."""
        gone: set[Function] = set()
        while self.dropped:  # others may be added meanwhile
            gone.add(self.dropped.pop())
        path = self.path_end.path()
        _close_branches(self.root, gone, path)
        _close_branches(self.off_path, gone, path)
        for function in gone:
            self.states.pop(function, None)
            if self.uncaptured is not None:
                self.uncaptured.call_counts.pop(function, None)
        self.dropped += [function for function in gone if any(each.function is function for each in path)]
        if not self.root.children:
            self._release_pool()

    def close_keeping_outputs(self) -> None:
        """`close`; tensors that the program still holds are copied out."""
        for slot in self.path_end.live:
            slot.copies = True
        self.close()

    def close(self, inputs: list[Any] | None = None) -> None:
        """Forget everything and give the memory back; calls record again, and warm up unless the pool was broken."""
        self.end_step(inputs or [])
        self.root.close()
        was_broken = self.is_broken
        self._release_pool()
        if was_broken:
            for state in self.states.values():
                state.keys.clear()
                state.moves = Moves()
        else:
            self.states.clear()
            self.given_up.clear()
            torch_distributed.gather_as_before(self.gathered_groups)
            self.gathered_groups.clear()
            self.gathering_pool = None
        self._begin()


def _close_branches(node: Node, gone: set[Function], path: Collection[Node]) -> None:
    """Close recordings of functions in `gone` after `node`, with all that come after those. Leave those on `path`."""
    for key, children in list(node.children.items()):
        for child in list(children):
            if key[0] not in gone or child in path:
                _close_branches(child, gone, path)
            else:
                children.remove(child)
                child.close()
        if not children:
            del node.children[key]
    for table in (node.edges, node.refusals):
        for key in [key for key in table if key[0] in gone]:
            del table[key]


@contextlib.contextmanager
def one_capture() -> Iterator[None]:
    """A context for one capture: no other one runs meanwhile, and trees are closed when it is over.

    Garbage is collected later: up to torch 2.11, a capture breaks if a CUDA graph is destroyed in its thread meanwhile.
    """
    global captures_under_way
    try:
        with one_at_a_time:
            captures_under_way += 1
            collects = gc.isenabled()
            gc.disable()
            try:
                yield
            finally:
                captures_under_way -= 1
                if collects:
                    gc.enable()
    finally:
        close_pending()


def free_trees_with_collectives() -> None:
    """Free trees with collectives before their groups of processes end: NCCL would wait for their graphs for ever."""
    for tree in list(trees_with_collectives):
        tree.close_keeping_outputs()
    trees_with_collectives.clear()


def close_later(tree: Tree) -> None:
    """Close `tree` as soon as nothing is captured. For finalizers."""
    to_close.append(tree)
    close_pending()


def close_pending() -> None:
    """Close the trees of `to_close`, unless a capture is under way. A tree that got a new function stays."""
    while to_close and one_at_a_time.acquire(blocking=False):
        try:
            if captures_under_way or to_close[0].driver.is_capturing():
                return
            tree = to_close.popleft()
            if not tree.functions:
                try:
                    with torch_cuda.without_modes():
                        tree.close()
                except BaseException:  # a finalizer runs anywhere, in an import of torch too: later, then
                    to_close.append(tree)
                    raise
        except IndexError:  # another thread was faster
            return
        finally:
            one_at_a_time.release()
