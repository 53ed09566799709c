"""`whole_step`: a training step of the user's, from its inputs to the updated parameters, as one CUDA graph.

    call --_way--> replay        a recording applies: same inputs, host values, settings, addresses
                   warm up       the first time with such inputs and host values: a real step
                   record        after it: as much of the step as its `State` has in graphs
                   as it is      something speaks against a graph, now or for good
         --ranks.py--> the same on all ranks          if the step talks to other processes
         --_follow--> the result

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import counters
from ..errors import NotCapturableError, OptionError
from ..options import Options
from ..settling import unsettled_count
from ..torch_private import compilers
from ..torch_private import cuda as torch_cuda
from ..torch_private import distributed as torch_distributed
from ..tree.dispatch import as_they_are, run_as_they_are
from ..tree.driver import CaptureDriver, cuda_driver
from ..tree.node import Cursor
from ..tree.tree import Failure
from .accumulators import renew
from .host import CannotCompare, HostState, is_of
from .inputs import StepCall, changing_value, objects_in, reason_against_inputs, step_call
from .iterators import Iterators
from .numbers import NotTraced
from .outputs import ChangesValue
from .ranks import Ranks
from .recording import (
    StepRecording,
    make_capturable,
    parameters_of,
    reason_against_model,
    reason_against_new_reducers,
    record_step,
)
from .recordings import MOST_UNSTABLE_CALLS, Recordings
from .states import Came, FailedCapture, How, State, Way, state_after
from .watch import users_line

log = logging.getLogger("cudagraph")

LIMITS = {"size_limit": 16, "rerecord_limit": 16}  # by default
OPTIONS = ("or_error", *LIMITS, "warmup_steps")
MOST_FAILED_CAPTURES = 3  # in a row, by errors that may not come again, such as out of memory
MOST_UNSETTLED_CALLS = 64  # in a row; then it is recorded although what it calls may still change


every_step: weakref.WeakSet[WholeStep] = weakref.WeakSet()
on_streams_of_captures: weakref.WeakSet[Any] = weakref.WeakSet()  # replicas, by the stream of their reducers


class WholeStep(Recordings):
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
        self.process_groups: list[Any] = []  # groups of processes in which the step was seen to run collectives
        self.ranks: Ranks | None = None  # those processes, from the call after that on
        self.old_reducers_of: list[Any] = []  # models whose reducers are made anew before the next call
        self._lock = threading.RLock()
        self._logged: set[str] = set()
        self._begin()
        every_step.add(self)

    def _begin(self) -> None:
        super()._begin()
        self.sharded_modules: list[Any] = []  # by FSDP2, as of the last snapshot
        self.refused = ""  # why it runs without a graph from now on; "" as long as it may have one
        self.all_refused = False  # whether all ranks know of it, so that they need no agreement any more
        self.update_refused = ""  # why the update of the parameters runs outside of the graph; "" if it is inside
        # The path of the number that the last failed capture decided by: a branch, say. It is named in the refusal.
        self.deciding_number = ""
        self.failed_captures = self.unstable_calls = self.unsettled_calls = 0

    def reset(self) -> None:
        """Free all recordings and their memory; later calls warm up and record again."""
        for model in {model for host in self._hosts() for model in torch_distributed.replicas_in(host.objects())}:
            torch_distributed.resume_timing(model)
        for recording in self.every_recording():
            recording.close()
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
        if step is None or getattr(step.run, "__self__", None) is not instance:  # a copied object has its original's
            *_, state, options = self._made_of
            step = known[self._attribute] = step_of(types.MethodType(self.run, instance), state, options)
        return step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; see `whole_step`."""
        if torch.compiler.is_dynamo_compiling():
            return _outside_of_compiled_code(self, args, kwargs)
        with self._lock:  # another thread's call would write to the same inputs
            call = step_call(args, kwargs)
            if run_as_they_are():  # a part of a step around it
                return self._as_it_is(call)
            if self.process_groups and not torch_distributed.are_there(self.process_groups):
                self._leave_groups()
            if not self.process_groups and self.latest is not None and self.latest.applies(call):
                return self.latest.replay(call.flat)
            if self.process_groups and self.ranks is None:
                self.ranks = Ranks(self.process_groups, self.name)
            ranks = self.ranks
            result = self._follow(self._prepared_way(call), call)
            if ranks is not None and self.cursor is not None:
                ranks.launched(self.cursor)
            return result

    # --- which way a call runs

    def _prepared_way(self, call: StepCall) -> Way:
        """The way that all ranks go, with reducers that are ready for it. They are made anew before the same call on
        all ranks or on none: that changes what a reducer sends."""
        if not self.refused:
            torch_distributed.gather_no_more(self.sharded_modules)
        renews, way = bool(self.old_reducers_of), self._way(call)
        if renews and (reason := reason_against_new_reducers(self.old_reducers_of)) is not None:
            way = Way(How.REFUSE, reason)
        elif renews and way.is_graph:  # models that get new reducers now are not recorded yet
            way = Way(How.AS_IT_IS)
        if self.ranks is not None:
            refused = way.reason if way.how is How.REFUSE else self.refused
            way, renews = self.ranks.common_way(
                way, functools.partial(self._applying, way, call), self._host, refused=refused, renews=renews
            )
        if renews and way.how is not How.REFUSE:
            self._make_reducers_anew()
        return way

    def _applying(self, way: Way, call: StepCall, host: HostState | None = None) -> dict[int, StepRecording]:
        """The recordings that could be replayed, by their numbers among the ranks. One of this rank alone has none."""
        shared = (one for one in self.recordings.get(call.key, ()) if one.number >= 0 and way.is_graph)
        return {one.number: one for one in shared if one is way.recording or one.applies(call, host)}

    def _way(self, call: StepCall) -> Way:
        """How the call is to run. Nothing of it has run yet."""
        if self.latest is not None and self.latest.applies(call):
            return Way(How.REPLAY, recording=self.latest)
        if self.refused:
            return Way(How.AS_IT_IS, self.refused)
        if torch_cuda.dispatch_modes() or (self.cursor is not None and self.driver.is_capturing()):
            return Way(How.AS_IT_IS)
        try:
            return self._way_without_host(call) or self._way_with_host(call)
        except CannotCompare as error:
            return Way(How.REFUSE, str(error))

    def _way_without_host(self, call: StepCall) -> Way | None:
        """The way of a call for which nothing but its arguments has to be known; None if there is none."""
        reason = reason_against_inputs(call.flat) if torch.is_grad_enabled() else "gradients are turned off around it"
        if reason is not None:
            return Way(How.AS_IT_IS, reason)
        for recording in self.recordings.get(call.key, ()):
            if recording.applies(call):
                return Way(How.REPLAY, recording=recording)
            if (aliased := recording.aliased(call.flat)) is not None:
                return Way(How.AS_IT_IS, f"input {aliased} is in memory that the step writes to; give it a copy")
        if call.key in self.warm or len(self.warm) < self.options.size_limit:
            return None
        changing = changing_value(call.key, [*self.warm])
        if changing is None:
            return Way(How.AS_IT_IS, f"it was called with {len(self.warm)} shapes (options['size_limit'])")
        return Way(How.AS_IT_IS if any(self.recordings.values()) else How.REFUSE, changing)

    def _way_with_host(self, call: StepCall) -> Way:
        """The way of a call for which the host values of now have to be known."""
        host = self._prepared_host(call.flat)
        if isinstance(host, Way):
            return host
        gone = self._close_stale_recordings(host)
        if gone and self.unstable_calls >= MOST_UNSTABLE_CALLS:
            return Way(How.REFUSE, f"{gone} is another tensor in each call")
        self.unstable_calls += bool(gone)
        return self._way_by_recordings(call, host) or self._way_by_warmup(call, host)

    def _prepared_host(self, flat: Sequence[Any]) -> HostState | Way:
        """The host state of now, with all made ready for a capture, or why there will be none."""
        is_new = self._remember(objects_in(flat))
        host = self._host()
        if (self.cursor is None or is_new) and (reason := reason_against_model(host)) is not None:
            return Way(How.REFUSE, reason)
        if self.cursor is None:
            devices = dict.fromkeys(x.device for x in host.tensors.values() if x.device.type == self.driver.device_type)
            where = ", ".join(map(str, devices)) or "the CPU"
            reason = f"its tensors are on {where}, not on one CUDA device" if len(devices) != 1 else None
            if (reason := reason or self.driver.why_not()) is not None:
                return Way(How.REFUSE, reason)
            self.cursor = Cursor(self.driver, next(iter(devices)))
        self.cursor.follow_stream()
        self.sharded_modules = torch_distributed.sharded_modules(host.objects())
        self.old_reducers_of = [
            x for x in torch_distributed.replicas_in(host.objects()) if x not in on_streams_of_captures
        ]
        return self._host() if make_capturable(host, self.cursor.device) else host

    def _way_by_recordings(self, call: StepCall, host: HostState) -> Way | None:
        """A replay, or a call as it is because one more recording would not help; None if the step may be recorded."""
        known = self.recordings.get(call.key, [])
        for recording in known:
            if recording.applies(call, host):
                return Way(How.REPLAY, recording=recording)
        if self.update is not None and any(x.grad is not None for x in parameters_of(host)):
            return Way(How.AS_IT_IS, "a parameter has a gradient already, to which the step adds")
        condition = known[-1].numbers.broken_condition() if known else None
        if condition is not None:
            changed, what = {condition.name: ""}, str(condition)
        else:
            changed = known[-1].host.differences(host) if known else {}
            what = next((f"{path}: {how}" for path, how in changed.items()), "its tensors moved")
        is_over = len(known) > self.options.rerecord_limit
        lately = [one.replays <= 1 for one in known[-MOST_UNSTABLE_CALLS:]]
        is_in_vain = condition is not None and len(lately) == MOST_UNSTABLE_CALLS and all(lately)
        if (is_over or is_in_vain) and changed and self._leave_update_out(what, changed):
            return self._way_with_host(call)
        return Way(How.AS_IT_IS, f"it was recorded {len(known)} times, last because {what}") if is_over else None

    def _way_by_warmup(self, call: StepCall, host: HostState) -> Way:
        """A warm-up until nothing has changed for some calls, then a recording."""
        changed, count = self._since_warm_up(call, host)
        waits = bool(self.old_reducers_of) or any(
            map(torch_distributed.is_timed, torch_distributed.replicas_in(host.objects()))
        )
        if not changed and count >= self.options.warmup_steps and not waits:
            reason = reason_against_model(host)
            return Way(How.RECORD, host=host) if reason is None else Way(How.REFUSE, reason)
        if changed:
            # What is no number, if anything; or the number that kept others from being read on the device.
            path = min(changed, key=lambda path: (path in host.places, path != self.deciding_number))
            what = f"{path} changes between calls: {changed[path]}"
            log.debug("%s warms up again: %s", self.name, what)
            self.unstable_calls += 1
            if self.unstable_calls > MOST_UNSTABLE_CALLS:
                is_left_out = self._leave_update_out(what, changed)
                return self._way_with_host(call) if is_left_out else Way(How.REFUSE, what)
        return Way(How.WARM_UP, host=host, warm_ups=1 if changed else count + 1)

    def _since_warm_up(self, call: StepCall, host: HostState) -> tuple[dict[str, str], int]:
        """What has changed since the last warm-up, and how many calls have warmed up with these values. Nothing, if an
        earlier one had the values of now: a flag may be on in each second call."""
        warm = self.warm.get(call.key, [(host, 0)])
        for one, count in reversed(warm):
            changed = one.differences(host)
            if changed and changed.keys() <= host.places.keys() and not self.state.by_number:
                self.numbers, changed = self.numbers | changed.keys(), {}
            if changed.keys() <= self.outputs:  # None now, in the place of what the step stores there
                return {}, count
        return warm[-1][0].differences(host), 0

    # --- following it

    def _follow(self, way: Way, call: StepCall) -> Any:
        if way.how is How.REPLAY:
            self.latest = way.recording
            return self.latest.replay(call.flat)
        if way.how is How.RECORD:
            return self._record(call, way.host)
        if way.how is How.WARM_UP:
            return self._warm_up_for(way, call)
        if way.how is How.REFUSE:
            self.old_reducers_of = []  # no call needs others
            return self._refuse(way.reason, call, on_all_ranks=way.on_all_ranks)
        return self._skip(way.reason, call) if way.reason else self._as_it_is(call)

    def _warm_up_for(self, way: Way, call: StepCall) -> Any:
        """Warm up, and count it for the recording to come, unless what the step calls may still change."""
        before, iterators = unsettled_count(), Iterators(way.host.iterators())
        result = self._warm_up(call)
        self.unsettled_calls = 0 if unsettled_count() == before else self.unsettled_calls + 1
        if self.unsettled_calls == MOST_UNSETTLED_CALLS:
            why = f"compiles or tries plans in each of {MOST_UNSETTLED_CALLS} calls"
            log.info("%s %s: what it does now is recorded", self.name, why)
        counts = self.unsettled_calls == 0 or self.unsettled_calls > MOST_UNSETTLED_CALLS
        try:
            if (reason := iterators.reason()) is not None:
                raise CannotCompare(reason)
            host, warm_ups = self._host(), way.warm_ups if counts else 0
            self._note_warm(call.key, host.with_flags_of(way.host), warm_ups)
            self._note_warm(call.key, host, warm_ups)
        except CannotCompare as error:  # the next call says so; this one has run
            self.reset()
            self.state, self.refused = State.NOTHING, str(error)
        return result

    def _record(self, call: StepCall, host: HostState) -> Any:
        """Record the step and replay the recording. If the capture fails, run the step uncaptured this time. From then
        on less of it is captured, unless another attempt may succeed."""
        while True:
            made = self._capture(call, host)
            if self.ranks is not None:
                made = self.ranks.common_outcome(made)
            if isinstance(made, StepRecording):
                if made.has_collectives:  # also in a group of one
                    torch_distributed.call_before_groups_end(free_steps_with_collectives)
                self._keep(made, self.options.warmup_steps)
                self.unstable_calls = self.failed_captures = 0
                return made.replay(call.flat)
            self.old_reducers_of = torch_distributed.replicas_in(host.objects())
            on_streams_of_captures.difference_update(self.old_reducers_of)
            for model in self.old_reducers_of:
                torch_distributed.forget_backward(model)
            if made.came is not Came.MORE_FOUND:
                break
            if self.old_reducers_of:
                return self._as_it_is(call)
            host = self._host()
        self.failed_captures += 1
        if made.may_succeed and self.failed_captures < MOST_FAILED_CAPTURES:
            log.info("%s is captured another time: %s", self.name, made.reason)
            return self._warm_up(call)
        after = state_after(self.state, made.came, has_update=self.update is not None)
        if after.by_number:
            self.state = after
            log.info("%s is recorded for each of its numbers: %s", self.name, made.reason)
            return self._warm_up(call)
        if after is State.NO_UPDATE:
            self._run_update_uncaptured(made.reason)
            return self._follow(self._way_with_host(call), call)
        return self._refuse(made.reason, call, on_all_ranks=self.ranks is not None)

    def _capture(self, call: StepCall, host: HostState) -> StepRecording | FailedCapture:
        """Record the step, without a replay."""
        failed = Came.NUMBERS_FAILED if self.numbers and not self.state.by_number else Came.FAILED
        pool, blocks = self.opened_pool(), self.blocks_in_use()
        run, update = (self._all, None) if self.state.has_update else (self._forward_backward, self.update)
        try:
            recording = record_step(self, call, host, run, update)
            failure = self._reason_against_replay(recording, call, host, failed)
            if failure is None:
                return recording
            recording.close()
            return failure
        except AssertionError:  # a bug, which is not to be hidden
            raise
        except Exception as error:
            made = self._failed(error, failed, (*host.optimizers, *self.update_roots))
        pool.broken = pool.broken or not pool.live_blocks_are(blocks)
        return made

    def _reason_against_replay(
        self, recording: StepRecording, call: StepCall, host: HostState, failed: Came
    ) -> FailedCapture | None:
        """Why a new recording is none to replay in the `call` that it was made in; None if it is."""
        if recording.has_collectives and self.ranks is None and torch_distributed.sequence_numbers():
            # made by this rank alone; a call that runs uncaptured finds the groups
            return FailedCapture(failed, "it talks to other processes, as no call before did", may_succeed=True)
        now = None if recording.applies(call) else self._host()
        if now is None or recording.applies(call, now):
            return None
        if (condition := recording.numbers.broken_condition()) is not None:
            self.deciding_number = condition.name
            return FailedCapture(Came.NUMBERS_FAILED, str(condition))
        changed = ", ".join(f"{path}: {text}" for path, text in host.differences(now).items())
        changed = changed or "torch's settings"
        return FailedCapture(failed, f"what it reads changed while it was captured: {changed[:500]}")

    def _failed(self, error: Exception, failed: Came, optimizers: Collection[str]) -> FailedCapture:
        """The failure of a capture that raised `error`. It came of `failed`, if `error` says nothing more precise.

        `optimizers`: their paths. A value of theirs that changes is no reason to leave more than the update out.
        """
        failure = Failure(error, self.driver)
        line = "" if failure.is_ours else users_line(error.__traceback__)
        self.deciding_number = error.path if isinstance(error, NotTraced) else self.deciding_number
        if self._allow_for(error):
            failed = Came.MORE_FOUND
        elif isinstance(error, ChangesValue) and not is_of(error.path, optimizers):
            failed = Came.VALUE_CHANGES
        reason = f"{failure.reason} ({line})" if line else failure.reason
        return FailedCapture(failed, reason, may_succeed=failure.needs_warmup or not failure.is_final)

    # --- less in graphs

    def _leave_update_out(self, reason: str, changed: Collection[str]) -> bool:
        """From now on, capture forward and backward only. False if there is no update to leave out, or no more, or if
        one of the values `changed` is none of an optimizer's."""
        is_options = all(is_of(path, self.update_roots) for path in changed)
        after = state_after(self.state, Came.FAILED, has_update=self.update is not None and is_options)
        if after is State.NO_UPDATE:
            self._run_update_uncaptured(reason)
        return after is State.NO_UPDATE

    def _run_update_uncaptured(self, reason: str) -> None:
        """From now on, run the update after each replay."""
        if self.options.or_error:
            raise NotCapturableError(f"{self.name} can't run as one CUDA graph: {reason}")
        self.reset()
        self.state, self.update_refused = State.NO_UPDATE, reason
        log.warning("%s: its update of the parameters runs outside of the CUDA graph: %s", self.name, reason)

    def _skip(self, reason: str, call: StepCall) -> Any:
        """Run the call uncaptured. The log says why, once for each kind of reason."""
        if self.options.or_error:
            raise NotCapturableError(f"{self.name} can't run as one CUDA graph: {reason}")
        kind = reason.partition(",")[0]  # without the values of this call
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("%s runs without a CUDA graph of the whole step: %s", self.name, reason)
        counters.add("skips")
        return self._as_it_is(call)

    def _refuse(self, reason: str, call: StepCall, *, on_all_ranks: bool = False) -> Any:
        """Run the call uncaptured, and all later ones. `on_all_ranks`: all ranks do, so they need no agreement."""
        self.reset()
        self.state, self.refused = State.NOTHING, reason
        if on_all_ranks:
            self.ranks, self.process_groups, self.all_refused = None, [], True
        return self._skip(reason, call)

    # --- other processes

    def _make_reducers_anew(self) -> None:
        """Give models reducers that can be captured. Recordings write to the old buckets, so those of all steps go."""
        replicas, self.old_reducers_of = self.old_reducers_of, []
        for step in every_step:
            if step is self or any(model in host.objects() for host in step._hosts() for model in replicas):
                step._drop_recordings()
        for model in replicas:
            for x in torch_distributed.reduced_parameters(model):
                renew(x)  # whatever holds the old reducer, such as a snapshot of host values
            with self.opened_pool().on_side_stream():
                torch_distributed.make_reducer_anew(model)
            on_streams_of_captures.add(model)

    @contextlib.contextmanager
    def _noting_collectives(self) -> Iterator[None]:
        """Whatever runs here uncaptured: find out whether it talks to other processes."""
        before = {} if self.ranks is not None or self.all_refused else torch_distributed.sequence_numbers()
        yield
        if before:
            self.process_groups = [
                group for group, count in torch_distributed.sequence_numbers().items() if before.get(group) != count
            ]
            if self.process_groups:
                torch_distributed.call_before_groups_end(free_steps_with_collectives)

    def _leave_groups(self) -> None:
        """Forget groups that are gone, and recordings that talk in them. The next calls find out anew."""
        self.reset()
        self.ranks, self.process_groups = None, []

    # --- running the step

    def _arguments(self, call: StepCall) -> Any:
        """The arguments, with tensors on the step's device."""
        if self.cursor is None:
            return call.arguments(call.flat)
        device = self.cursor.device
        elsewhere = {i for i, x in enumerate(call.flat) if isinstance(x, torch.Tensor) and x.device != device}
        moved = [x.to(device, non_blocking=x.is_pinned()) if i in elsewhere else x for i, x in enumerate(call.flat)]
        return call.arguments(moved)

    def _forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, without its update if that is a function of its own. Its results have no history."""
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

    def _as_it_is(self, call: StepCall) -> Any:
        with self._noting_collectives():
            args, kwargs = self._arguments(call)
            return _copied(self._all(*args, **kwargs))

    def _warm_up(self, call: StepCall) -> Any:
        """Run the step uncaptured, on the stream of captures, so that a capture can have the memory that it frees. The
        update runs on the current stream, so that the optimizer's state does not lie between activations."""
        counters.add("warmups")
        note = compilers.noting_compiled_calls(functools.partial(setattr, self, "calls_compiled", True))
        with as_they_are(), note, self._noting_collectives(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")
            with self.opened_pool().on_side_stream():
                args, kwargs = self._arguments(call)
                result = self._forward_backward(*args, **kwargs)
            if self.update is not None:
                self.update()
        return _copied(result)


@functools.partial(torch.compiler.disable, reason="a whole step is a CUDA graph of its own")
def _outside_of_compiled_code(step: WholeStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return step(*args, **kwargs)


def _copied(result: Any) -> Any:
    """The result of a step in memory of its own: a later step may write to what it returned."""
    flat, spec = torch_cuda.flatten(result)
    return torch_cuda.unflatten([x.clone() if isinstance(x, torch.Tensor) else x for x in flat], spec)


def free_steps_with_collectives() -> None:
    """Free the recordings of steps with collectives. NCCL ends a communicator only when no graph uses it any more:
    `torch.distributed.destroy_process_group()` would wait for ever."""
    for step in list(every_step):
        if step.ranks is not None or step.process_groups or any(one.has_collectives for one in step.every_recording()):
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
