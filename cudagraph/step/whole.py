"""`whole_step`: a training step of the user's, from its inputs to the updated parameters, as one CUDA graph.

    call --> a recording applies --> replay                                     the usual case
             else, the first time with such inputs and host values --> run it    a real step, which warms up
             else --> record: the whole step
                              or, if the update can't be captured, forward and backward; the update runs uncaptured
                              or, if they can't be captured either, nothing; the step runs uncaptured from then on

A replay never guesses: where a value differs from a recording's snapshot, that recording is not replayed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import counters
from ..errors import NotCapturableError, OptionError
from ..options import Options
from ..settling import unsettled_count
from ..torch_private import compilers
from ..torch_private import cuda as torch_cuda
from ..torch_private.distributed import (
    are_there,
    call_before_groups_end,
    forget_backward,
    is_timed,
    make_reducer_anew,
    reduced_parameters,
    replicas_in,
    resume_timing,
    sequence_numbers,
)
from ..tree.dispatch import as_they_are, run_as_they_are
from ..tree.driver import CaptureDriver, cuda_driver
from ..tree.node import Cursor
from ..tree.tree import Failure
from .accumulators import renew
from .gradients import LastGradients, ReadsGradients
from .host import CannotCompare, HostState
from .inputs import StepCall, changing_value, objects_in, reason_against, step_call
from .numbers import NotTraced
from .outputs import ChangesValue
from .ranks import MOST_RECORDINGS, Ranks
from .recording import (
    CaptureRequest,
    StepRecording,
    Unforeseen,
    make_capturable,
    parallel,
    parameters_of,
    reason_against_new_reducers,
    record_step,
)
from .watch import users_line

log = logging.getLogger("cudagraph")

LIMITS = {"size_limit": 16, "rerecord_limit": 16}  # by default
OPTIONS = ("or_error", *LIMITS, "warmup_steps")
MOST_FAILED_CAPTURES = 3  # in a row, by errors that may not come again, such as out of memory
MOST_UNSETTLED_CALLS = 64  # in a row; then it is recorded although what it calls may still change
MOST_UNSTABLE_CALLS = 4  # in a row, each with other host values than the one before


every_step: weakref.WeakSet[WholeStep] = weakref.WeakSet()
on_streams_of_captures: weakref.WeakSet[Any] = weakref.WeakSet()  # replicas, by the stream of their reducers


class Replay(NamedTuple):
    """A way to run a call: replay this recording."""

    recording: StepRecording


class Record(NamedTuple):
    """Record the step, with the host values of this snapshot."""

    host: HostState


class WarmUp(NamedTuple):
    """Run it uncaptured, so that it can be recorded later: `done` such calls have warmed up then."""

    done: int


class AsItIs(NamedTuple):
    """Run it uncaptured, for a reason that is logged, or without one."""

    reason: str = ""


class Refuse(NamedTuple):
    """Run it uncaptured, now and ever after."""

    reason: str
    on_all_ranks: bool = False


class FailedCapture(NamedTuple):
    """A capture that left no trace.

    Attributes:
        again: whether another one is to follow at once, which allows for what this one has found.
        may_succeed: whether another one may succeed after a warm-up.
        changed_by_step: the path of a host value that the step itself changes, if that is why.
        read_numbers: whether it had numbers that are read on the device.
    """

    reason: str
    again: bool = False
    may_succeed: bool = False
    changed_by_step: tuple[str, ...] = ()
    read_numbers: bool = False


Way = Replay | Record | WarmUp | AsItIs | Refuse


class WholeStep:
    """A step that runs as a CUDA graph. `whole_step` makes it."""

    def __init__(
        self,
        run: Callable[..., Any],
        update: Callable[[], None] | None,
        roots: Mapping[str, Any],
        update_roots: Mapping[str, Any],
        state: Any,
        options: Mapping[str, Any] | None,
    ) -> None:
        unknown = [name for name in options or {} if name not in OPTIONS]
        if unknown:
            raise OptionError(f"unknown option {unknown[0]!r} of a whole step; valid options: {', '.join(OPTIONS)}")
        self.options = Options.parse({**LIMITS, **(options or {})})
        self._made_of = run, update, roots, update_roots, state, options
        self.run, self.update = run, update
        self.roots, self.update_roots = {**roots, **({} if state is None else {"state": state})}, dict(update_roots)
        self.driver: CaptureDriver = cuda_driver()
        self.name = self._attribute = getattr(run, "__name__", "step")
        self.cursor: Cursor | None = None
        self.talks_in: list[Any] = []  # groups of processes in which the step was seen to run collectives
        self.ranks: Ranks | None = None  # those processes, from the call after that on
        self.old_reducers_of: list[Any] = []  # models whose reducers are made anew before the next call
        self._lock = threading.RLock()
        self._logged: set[str] = set()
        self._begin()
        self.own_names = {*vars(self), "own_names"}  # other attributes are the user's, as on any function
        every_step.add(self)

    def _begin(self) -> None:
        self.refused = ""  # why it runs without a graph from now on; "" as long as it may have one
        self.all_refused = False  # whether all ranks know of it, so that they need no agreement any more
        self.update_refused = ""  # why the update of the parameters runs outside of the graph; "" if it is inside
        self.latest: StepRecording | None = None
        self.recordings: dict[tuple[Any, ...], list[StepRecording]] = {}
        self.warm: dict[tuple[Any, ...], tuple[HostState, int]] = {}  # by key: a snapshot, warm-ups with these values
        self.numbers: set[str] = set()  # paths of numbers that have changed: graphs read them on the device
        self.numbers_refused = False  # whether a capture that reads them there failed
        self.deciding = ""  # the path of one by which the step decides in each call, so that they are refused
        self.outputs: set[str] = set()  # paths at which the step stores tensors
        self.objects: dict[str, Any] = {}  # modules, optimizers and the like that it was called with
        self.reads_gradients = False  # whether the step reads gradients from before it; the first capture finds out
        self.calls_compiled = False  # whether a function was called that Dynamo compiles
        self.failed_captures = self.unstable_calls = self.unsettled_calls = 0
        self._pool: Any = None
        # Gradients of closed recordings, which somebody may still hold: pool, storage, address.
        self._left: list[tuple[Any, StorageWeakRef, int]] = []
        self._last_gradients: LastGradients = {}

    def _drop_recordings(self) -> None:
        for recording in self.every_recording():
            recording.close()
        self.latest, self.recordings = None, {}
        self.warm.clear()

    def reset(self) -> None:
        """Free all recordings and their memory; later calls warm up and record again."""
        for model in {model for host in self._hosts() for model in replicas_in(host.objects())}:
            resume_timing(model)
        self._drop_recordings()
        if self._pool is not None:
            self._pool.release()
        self._begin()

    def __reduce__(self) -> Any:
        """A copy has recordings of its own."""
        return WholeStep, self._made_of, {"name": self.name}

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = f"{owner.__module__}.{owner.__qualname__}.{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> WholeStep:
        """The step of one object, if this decorates a method."""
        if instance is None or self.update is not None:
            return self
        if not hasattr(instance, "__dict__"):
            raise AttributeError(f"{self.name} is a whole step: it needs a __dict__, which {type(instance)} lacks")
        known: dict[str, Any] = instance.__dict__
        step: WholeStep | None = known.get(self._attribute)
        if step is None or getattr(step.run, "__self__", None) is not instance:  # that of what it was copied from
            step = known[self._attribute] = step_of(types.MethodType(self.run, instance), *self._made_of[-2:])
        return step

    def host_roots(self) -> dict[str, Any]:
        """What a step around this one reads through it."""
        return {**self.roots, **self.update_roots}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; see `whole_step`."""
        if torch.compiler.is_dynamo_compiling():
            return _outside_of_compiled_code(self, args, kwargs)
        with self._lock:  # another thread's call would write to the same inputs
            call = step_call(args, kwargs)
            if run_as_they_are():  # a part of a step around it
                return self._as_it_is(call)
            if self.talks_in and not are_there(self.talks_in):
                self._leave_groups()
            alone = self.ranks is None and not self.talks_in
            if alone and self.latest is not None and self.latest.applies(call):
                return self.latest.replay(call.flat)
            if self.talks_in and self.ranks is None:
                self.ranks = Ranks(self.talks_in, self.name)
            renews, ranks = bool(self.old_reducers_of), self.ranks  # models that an earlier call has found
            way = self._before_new_reducers(self._way(call)) if renews else self._way(call)
            if ranks is not None:
                way = self._common_way(way, call, renews=renews)
            elif renews and not isinstance(way, Refuse):
                self._make_reducers_anew()
            result = self._follow(way, call)
            if ranks is not None and self.cursor is not None:
                ranks.launched(self.cursor)
            return result

    def _follow(self, way: Way, call: StepCall) -> Any:
        if isinstance(way, Replay):
            self.latest = way.recording
            return self.latest.replay(call.flat)
        if isinstance(way, Record):
            return self._record(call, way.host)
        if isinstance(way, WarmUp):
            return self._warm_up_for(way, call)
        if isinstance(way, Refuse):
            self.old_reducers_of = []  # no call needs others
            return self._refuse(way.reason, call, on_all_ranks=way.on_all_ranks)
        return self._skip(way.reason, call) if way.reason else self._as_it_is(call)

    def _before_new_reducers(self, way: Way) -> Way:
        """The way of a call before which models get new reducers: those are not recorded yet."""
        if (reason := reason_against_new_reducers(self.old_reducers_of)) is not None:
            return Refuse(reason)
        return AsItIs() if isinstance(way, (Replay, Record)) else way

    def _common_way(self, way: Way, call: StepCall, *, renews: bool) -> Way:
        """The way that all ranks go, which know each other's ways now. See ranks.py.

        `renews`: whether this rank has reducers to make anew. That changes what a reducer sends, so all ranks do it
        before the same call, or none does.
        """
        assert self.ranks is not None
        refused = way.reason if isinstance(way, Refuse) else self.refused
        can_run = isinstance(way, (Replay, Record)) and self.ranks.recordings < MOST_RECORDINGS
        by_number = self._applying(way, call)
        common = self.ranks.shared(by_number, could_record=can_run, is_refused=bool(refused), renews=renews)
        if common.is_refused:
            rank, reason = self.ranks.first(refused or None)
            return Refuse(reason if refused else f"on rank {rank}, {reason}", on_all_ranks=True)
        if common.renew:
            self._make_reducers_anew()
        host = way.host if isinstance(way, Record) else None
        if common.could_record and not common.numbers:  # look once more, at what takes a snapshot of the host values
            with contextlib.suppress(CannotCompare):  # the others wait in the exchange; the next call says why
                host = host or self._host()
            by_number = {} if host is None else self._applying(way, call, host)
            common = self.ranks.shared(by_number, could_record=host is not None)
        if common.numbers:
            return Replay(by_number[common.numbers[0]])
        if host is not None and common.could_record:
            return Record(host)
        return AsItIs() if isinstance(way, (Replay, Record)) else way

    def _applying(self, way: Way, call: StepCall, host: HostState | None = None) -> dict[int, StepRecording]:
        """The recordings that could be replayed, by their numbers among the ranks. One of this rank alone has none."""
        known = self.recordings.get(call.key, ()) if isinstance(way, (Replay, Record)) else ()
        chosen = way.recording if isinstance(way, Replay) else None
        shared = (one for one in known if one.number >= 0)
        return {one.number: one for one in shared if one is chosen or one.applies(call, host)}

    def _way(self, call: StepCall) -> Way:
        """How the call is to run. Nothing of it has run yet."""
        if self.latest is not None and self.latest.applies(call):
            return Replay(self.latest)
        if self.refused:
            return AsItIs(self.refused)
        if torch_cuda.dispatch_modes() or (self.cursor is not None and self.driver.is_capturing()):
            return AsItIs()
        try:
            return self._find(call)
        except CannotCompare as error:
            return Refuse(str(error))

    def _find(self, call: StepCall) -> Way:
        """As `_way`, for a call that `latest` does not take."""
        if (way := self._way_without_host(call)) is not None:
            return way
        host = self._prepared_host(call.flat)
        if isinstance(host, Refuse):
            return host
        gone = self._close_stale_recordings(host)
        if gone and self.unstable_calls >= MOST_UNSTABLE_CALLS:
            return Refuse(f"{gone} is another tensor in each call")
        self.unstable_calls += bool(gone)
        if (way := self._way_by_recordings(call, host)) is not None:
            return way
        return self._way_by_warmup(call, host)

    def _way_without_host(self, call: StepCall) -> Way | None:
        """The way of a call for which nothing but its arguments has to be known; None if there is none."""
        reason = reason_against(call.flat) if torch.is_grad_enabled() else "gradients are turned off around it"
        if reason is not None:
            return AsItIs(reason)
        for recording in self.recordings.get(call.key, ()):
            if recording.applies(call):
                return Replay(recording)
            if call.key == recording.key and (aliased := recording.aliased(call.flat)) is not None:
                return AsItIs(f"input {aliased} is in memory that the step writes to; give it a copy")
        if call.key in self.warm or len(self.warm) < self.options.size_limit:
            return None
        changing = changing_value(call.key, [*self.warm])
        if changing is None:
            return AsItIs(f"it was called with {len(self.warm)} shapes (options['size_limit'])")
        return AsItIs(changing) if any(self.recordings.values()) else Refuse(changing)

    def _prepared_host(self, flat: Sequence[Any]) -> HostState | Refuse:
        """The host state of now, with all made ready for a capture, or why there will be none."""
        is_new = self._remember(objects_in(flat))
        host = self._host()
        if (self.cursor is None or is_new) and (reason := parallel(host)) is not None:
            return Refuse(reason)
        if self.cursor is None:
            devices = dict.fromkeys(x.device for x in host.tensors.values() if x.device.type == self.driver.device_type)
            where = ", ".join(map(str, devices)) or "the CPU"
            reason = f"its tensors are on {where}, not on one CUDA device" if len(devices) != 1 else None
            if (reason := reason or self.driver.why_not()) is not None:
                return Refuse(reason)
            self.cursor = Cursor(self.driver, next(iter(devices)))
        self.cursor.follow_stream()
        self.old_reducers_of = [x for x in replicas_in(host.objects()) if x not in on_streams_of_captures]
        return self._host() if make_capturable(host, self.cursor.device) else host

    def _way_by_recordings(self, call: StepCall, host: HostState) -> Way | None:
        """A replay, or a call as it is because one more recording would not help; None if the step may be recorded."""
        known = self.recordings.get(call.key, [])
        for recording in known:
            if recording.applies(call, host):
                return Replay(recording)
        if self.update is not None and any(x.grad is not None for x in parameters_of(host)):
            return AsItIs("a parameter has a gradient already, to which the step adds")
        condition = known[-1].numbers.broken_condition() if known else None
        once = [one.replays <= 1 for one in known[-MOST_UNSTABLE_CALLS:]]
        if condition is not None and len(once) == MOST_UNSTABLE_CALLS and all(once):
            if self._leave_update_out(str(condition), (condition.name,)):
                return self._find(call)
        if len(known) <= self.options.rerecord_limit:
            return None
        changed = known[-1].host.differences(host) or ({} if condition is None else {condition.name: ""})
        what = next((f"{path}: {how}" for path, how in changed.items()), "its tensors moved")
        what = what if condition is None else str(condition)
        if changed and self._leave_update_out(what, changed):
            return self._find(call)
        return AsItIs(f"it was recorded {len(known)} times, last because {what}")

    def _way_by_warmup(self, call: StepCall, host: HostState) -> Way:
        """A warm-up until nothing has changed for some calls, then a recording."""
        warm, count = self.warm.get(call.key, (host, 0))
        changed = warm.differences(host)
        if changed and changed.keys() <= host.places.keys() and not self.numbers_refused:
            self.numbers, changed = self.numbers | changed.keys(), {}
        if changed.keys() <= self.outputs:  # None now, in the place of what the step stores there
            changed = {}
        waits = bool(self.old_reducers_of) or any(map(is_timed, replicas_in(host.objects())))
        if not changed and count >= self.options.warmup_steps and not waits:
            return Record(host) if (reason := parallel(host)) is None else Refuse(reason)
        if changed:
            # What is no number, if anything; or the number that kept others from being read on the device.
            path = min(changed, key=lambda path: (path in host.places, path != self.deciding))
            what = f"{path} changes between calls: {changed[path]}"
            log.debug("%s warms up again: %s", self.name, what)
            self.unstable_calls += 1
            if self.unstable_calls > MOST_UNSTABLE_CALLS:
                if self._leave_update_out(what, changed):
                    return self._find(call)
                return Refuse(what)
        return WarmUp(1 if changed else count + 1)

    def _warm_up_for(self, way: WarmUp, call: StepCall) -> Any:
        before = unsettled_count()
        result = self._warm_up(call)
        self.unsettled_calls = 0 if unsettled_count() == before else self.unsettled_calls + 1
        is_settled = not 0 < self.unsettled_calls <= MOST_UNSETTLED_CALLS
        if self.unsettled_calls == MOST_UNSETTLED_CALLS:
            log.info(
                "%s compiles or tries plans in each of %d calls: what it does now is recorded",
                self.name,
                MOST_UNSETTLED_CALLS,
            )
        try:
            self.warm[call.key] = self._host(), way.done if is_settled else 0
        except CannotCompare as error:  # the next call says so; this one has run
            self.reset()
            self.refused = str(error)
        return result

    def _close_stale_recordings(self, host: HostState) -> str:
        """Close recordings that read tensors which `host` does not reach, such as an optimizer's old state. Returns the
        path of such a tensor of a step that has no recording yet, or ""."""
        reached = {id(x) for x in host.tensors.values()}
        for key, known in self.recordings.items():
            stale = [one for one in known if not reached.issuperset(map(id, one.host.tensors.values()))]
            for recording in stale:
                self._left += [(recording.pool, storage, slot.address) for storage, slot in recording.gradients.memory]
                recording.close()
                self.latest = None if recording is self.latest else self.latest
            self.recordings[key] = [one for one in known if one not in stale]
        self._watch_later_gradients()
        gone = ""
        for key, (warm, _) in self.warm.items():
            if path := next((path for path, x in warm.tensors.items() if id(x) not in reached), ""):
                self.warm[key], gone = (host, 0), gone if self.recordings.get(key) else path
        return gone

    def _watch_later_gradients(self) -> None:
        """Have each recording watch the gradients of later recordings, which may lie where it writes to."""
        every = self.every_recording()
        for recording in every:
            pool, avoided = recording.pool, recording.gradients_in_use
            others = [other for other in every if other is not recording and other.pool is pool]
            slots = [slot for other in others for storage, slot in other.gradients.memory if storage not in avoided]
            orphans = [storage for of, storage, _ in self._left if of is pool and storage not in avoided]
            recording.gradients.require_free(slots, orphans)

    def every_recording(self) -> list[StepRecording]:
        """All recordings that it has."""
        return [recording for known in self.recordings.values() for recording in known]

    def _hosts(self) -> list[HostState]:
        return [*(one.host for one in self.every_recording()), *(host for host, _ in self.warm.values())]

    def _remember(self, objects: Mapping[str, Any]) -> bool:
        """Have modules and the like among the arguments compared from now on. Returns whether there are new ones."""
        known = {id(x) for x in self.objects.values()}
        new = {name: x for name, x in objects.items() if id(x) not in known}
        self.objects |= {f"{name} ({id(x):x})" if name in self.objects else name: x for name, x in new.items()}
        return bool(new)

    def _host(self) -> HostState:
        roots = self.roots if self.update_refused else {**self.roots, **self.update_roots}
        roots = {**roots, **self.objects}
        return HostState(roots, self.driver.device_type, outputs=self.outputs)

    def _record(self, call: StepCall, host: HostState) -> Any:
        """Record the step and replay the recording. If the capture fails, run the step uncaptured this time. From then
        on less of it is captured, unless another attempt may succeed."""
        while True:
            made = self._capture(call, host)
            if self.ranks is not None:
                made = self._common_outcome(made, host)
            if isinstance(made, StepRecording):
                return self._keep(made).replay(call.flat)
            self.old_reducers_of = replicas_in(host.objects())
            on_streams_of_captures.difference_update(self.old_reducers_of)
            for model in self.old_reducers_of:
                forget_backward(model)
            if not made.again:
                break
            if self.old_reducers_of:
                return self._as_it_is(call)
            host = self._host()
        reason, changed_by_step = made.reason, made.changed_by_step
        self.failed_captures += 1
        if made.may_succeed and self.failed_captures < MOST_FAILED_CAPTURES:
            log.info("%s is captured another time: %s", self.name, reason)
            return self._warm_up(call)
        # A step changes such a value with the update outside and with rates as numbers as well.
        if any(not path.startswith((*host.optimizers, "optimizer")) for path in changed_by_step):
            return self._refuse(reason, call, on_all_ranks=self.ranks is not None)
        if made.read_numbers:
            self.numbers_refused = True
            log.info("%s is recorded for each of its numbers: %s", self.name, reason)
            return self._warm_up(call)
        if self._leave_update_out(reason):
            return self._follow(self._find(call), call)
        return self._refuse(reason, call, on_all_ranks=self.ranks is not None)

    def _request(self, call: StepCall, host: HostState) -> CaptureRequest:
        """The step to capture, whole or without its update, and the memory of other recordings, which stays theirs."""
        assert self.cursor is not None
        pool = self._opened_pool()
        self._left = [entry for entry in self._left if not entry[1].expired()]
        orphans = {storage: address for of, storage, address in self._left if of is pool}
        every = [one for one in self.every_recording() if one.pool is pool]
        run, update = (self._forward_backward, self.update) if self.update_refused else (self._all, None)
        return CaptureRequest(
            pool=pool,
            cursor=self.cursor,
            run=run,
            update=update,
            call=call,
            take_snapshot=self._host,
            host=host,
            number_paths=() if self.numbers_refused else self.numbers,
            blocks_of_others={address for one in every for address in one.blocks} | {*orphans.values()},
            gradients_in_use={storage for one in every for storage, _ in one.gradients.memory} | {*orphans},
            last_gradients=self._last_gradients,
            reads_gradients=self.reads_gradients,
            calls_compiled=self.calls_compiled,
        )

    def _capture(self, call: StepCall, host: HostState) -> StepRecording | FailedCapture:
        """Record the step, without a replay."""
        request = self._request(call, host)
        pool, reads_numbers = request.pool, bool(request.number_paths)
        try:
            recording = record_step(request)
            if recording.talks and self.ranks is None and sequence_numbers():
                recording.close()  # made by this rank alone; a call that runs uncaptured finds the groups
                return FailedCapture("it talks to other processes, as no call before did", may_succeed=True)
            now = None if recording.applies(call) else self._host()
            if now is None or recording.applies(call, now):
                return recording
            if (condition := recording.numbers.broken_condition()) is not None:
                recording.close()
                self.deciding = condition.name
                return FailedCapture(str(condition), read_numbers=True)
            changed = ", ".join(f"{path}: {text}" for path, text in host.differences(now).items())
            changed = changed or "torch's settings, or somebody holds its gradients (return clones of them)"
            recording.close()
            return FailedCapture(
                f"what it reads changed while it was captured: {changed[:500]}", read_numbers=reads_numbers
            )
        except AssertionError:  # a bug, which is not to be hidden
            raise
        except Exception as error:
            failure = Failure(error, self.driver)
            line = "" if failure.is_ours else users_line(error.__traceback__)
            wants_gradients = isinstance(error, ReadsGradients)
            found = error if isinstance(error, Unforeseen) else None
            self.deciding = error.path if isinstance(error, NotTraced) else self.deciding
            made = FailedCapture(
                f"{failure.reason} ({line})" if line else failure.reason,
                may_succeed=failure.needs_warmup or not failure.is_final,
                changed_by_step=(error.path,) if isinstance(error, ChangesValue) else (),
                read_numbers=reads_numbers,
            )
        pool.broken = pool.broken or not pool.live_blocks_are(request.blocks_of_others)
        self.reads_gradients |= wants_gradients
        return made._replace(again=wants_gradients or (found is not None and self._allow_for(found)))

    def _common_outcome(self, made: StepRecording | FailedCapture, host: HostState) -> StepRecording | FailedCapture:
        """What has become of a capture on all ranks: a recording, if all have one; or the failure of the first."""
        assert self.ranks is not None
        failure = made if isinstance(made, FailedCapture) else None
        is_lost = self.ranks.highest(0 if failure is None else 1 if failure.again else 2)
        if not is_lost:
            assert isinstance(made, StepRecording)
            made.number, self.ranks.recordings = self.ranks.recordings, self.ranks.recordings + 1
            return made
        if isinstance(made, StepRecording):
            made.close()
        if is_lost == 1:
            return FailedCapture("", again=True)
        rank, first = self.ranks.first(None if failure is None or failure.again else tuple(failure))
        common = FailedCapture(*first)
        return common if failure is not None else common._replace(reason=f"on rank {rank}, {common.reason}")

    def _make_reducers_anew(self) -> None:
        """Give models reducers that can be captured. Recordings write to the old buckets, so those of all steps go."""
        replicas, self.old_reducers_of = self.old_reducers_of, []
        for step in every_step:
            if step is self or any(model in host.objects() for host in step._hosts() for model in replicas):
                step._drop_recordings()
        for model in replicas:
            for x in reduced_parameters(model):
                renew(x)  # whatever holds the old reducer, such as a snapshot of host values
            with self._opened_pool().on_side_stream():
                make_reducer_anew(model)
            on_streams_of_captures.add(model)

    def _leave_groups(self) -> None:
        """Forget groups that are gone, and recordings that talk in them. The next calls find out anew."""
        self.reset()
        self.ranks, self.talks_in = None, []

    def _keep(self, recording: StepRecording) -> StepRecording:
        if recording.talks:  # also in a group of one
            call_before_groups_end(free_steps_that_talk)
        counters.add("recordings")
        known = self.recordings.setdefault(recording.key, [])
        counters.add("rerecordings", bool(known))
        known.append(recording)
        self._watch_later_gradients()
        self.warm[recording.key] = recording.host, self.options.warmup_steps
        self.unstable_calls = self.failed_captures = 0
        self.latest = recording
        return recording

    def _allow_for(self, found: Unforeseen) -> bool:
        """Allow for what a step stores from now on. False if nothing is new, or numbers can't be read on the device."""
        outputs, numbers = {*found.outputs} - self.outputs, {*found.numbers} - self.numbers
        if not (outputs or numbers) or (numbers and self.numbers_refused):
            return False
        self.outputs |= outputs
        self.numbers |= numbers
        if outputs:
            self.warm.clear()  # these snapshots have the tensors as dependencies
        return True

    def _leave_update_out(self, reason: str, changed: Iterable[str] = ()) -> bool:
        """From now on, capture forward and backward only. False if there is no update to leave out, or no more, or if
        one of the values `changed` is none of an optimizer's."""
        if self.update is None or self.update_refused or not all(path.startswith("optimizer") for path in changed):
            return False
        if self.options.or_error:
            raise NotCapturableError(f"{self.name} can't run as one CUDA graph: {reason}")
        self.reset()
        self.update_refused = reason
        log.warning("%s: its update of the parameters runs outside of the CUDA graph: %s", self.name, reason)
        return True

    def _skip(self, reason: str, call: StepCall) -> Any:
        if self.options.or_error:
            raise NotCapturableError(f"{self.name} can't run as one CUDA graph: {reason}")
        kind = reason.partition(",")[0]  # without the values of this call
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("%s runs without a CUDA graph of the whole step: %s", self.name, reason)
        counters.add("skips")
        return self._as_it_is(call)

    def _refuse(self, reason: str, call: StepCall, *, on_all_ranks: bool = False) -> Any:
        self.reset()
        self.refused = reason
        if on_all_ranks:
            self.ranks, self.talks_in, self.all_refused = None, [], True
        return self._skip(reason, call)

    # --- running the step

    def _arguments(self, call: StepCall) -> Any:
        """The arguments, with tensors on the step's device."""
        if self.cursor is None:
            return call.arguments(call.flat)
        device = self.cursor.device
        there = [not isinstance(x, torch.Tensor) or x.device == device for x in call.flat]
        moved = zip(call.flat, there, strict=True)
        return call.arguments([x if is_there else x.to(device, non_blocking=x.is_pinned()) for x, is_there in moved])

    def _forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        torch.clear_autocast_cache()  # it may have copies of earlier values of parameters
        try:
            flat, spec = torch_cuda.flatten(self.run(*args, **kwargs))
        finally:
            torch.clear_autocast_cache()
        return torch_cuda.unflatten([x.detach() if isinstance(x, torch.Tensor) else x for x in flat], spec)

    def _all(self, *args: Any, **kwargs: Any) -> Any:
        result = self._forward_backward(*args, **kwargs)
        if self.update is not None:
            self.update()
        return result

    @contextlib.contextmanager
    def _noting_collectives(self) -> Iterator[None]:
        """Whatever runs here uncaptured: find out whether it talks to other processes."""
        before = {} if self.ranks is not None or self.all_refused else sequence_numbers()
        yield
        if before:
            self.talks_in = [group for group, count in sequence_numbers().items() if before.get(group) != count]
            if self.talks_in:
                call_before_groups_end(free_steps_that_talk)

    def _as_it_is(self, call: StepCall) -> Any:
        with self._noting_collectives():
            args, kwargs = self._arguments(call)
            return _copied(self._all(*args, **kwargs))

    def _warm_up(self, call: StepCall) -> Any:
        """Run the step uncaptured, on the stream of captures, so that a capture can have the memory that it frees. The
        update runs on the current stream, so that the optimizer's state does not lie between activations."""
        counters.add("warmups")

        def note_compiled() -> None:
            self.calls_compiled = True

        note = compilers.noting_compiled_calls(note_compiled)
        with as_they_are(), note, self._noting_collectives(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
            with self._opened_pool().on_side_stream():
                args, kwargs = self._arguments(call)
                result = self._forward_backward(*args, **kwargs)
            if self.update is not None:
                self.update()
        return _copied(result)

    def _opened_pool(self) -> Any:
        assert self.cursor is not None
        if self._pool is not None and self._pool.broken:
            self._pool.release()  # now: its graph must not be destroyed in a later capture
            self._pool = None
        if self._pool is None:
            self._pool = self.driver.open_pool(self.cursor.device)
        return self._pool


@functools.partial(torch.compiler.disable, reason="a whole step is a CUDA graph of its own")
def _outside_of_compiled_code(step: WholeStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return step(*args, **kwargs)


def _copied(result: Any) -> Any:
    """The result of a step in memory of its own: a later step may write to what it returned."""
    flat, spec = torch_cuda.flatten(result)
    return torch_cuda.unflatten([x.clone() if isinstance(x, torch.Tensor) else x for x in flat], spec)


def free_steps_that_talk() -> None:
    """Free the recordings of steps with collectives. NCCL ends a communicator only when no graph uses it any more:
    `torch.distributed.destroy_process_group()` would wait for ever."""
    for step in list(every_step):
        if step.ranks is not None or step.talks_in or any(one.talks for one in step.every_recording()):
            step._leave_groups()


def reset() -> None:
    """Free the recordings of all whole steps."""
    for step in list(every_step):
        step.reset()


def step_of(function: Callable[..., Any], state: Any, options: Mapping[str, Any] | None) -> WholeStep:
    """A whole step of the user's own function or method."""
    name = getattr(function, "__name__", "step")
    step = WholeStep(function, None, {"step" if name == "state" else name: function}, {}, state, options)
    functools.update_wrapper(step, function)
    return step
