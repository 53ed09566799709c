"""One recording of a step: when it applies, and how it is replayed.

applies:  same inputs? same settings? host values as in the snapshot? tensors where they were? gradients as expected?
replay:   one fused copy of the inputs -> launch -> gradients -> copies of what the step returns
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import counters
from ..torch_private import cuda as torch_cuda
from ..torch_private import distributed as torch_distributed
from ..tree.capture import CannotCapture, Capture, Owner, under_way
from ..tree.dispatch import as_they_are
from ..tree.record import Snapshot
from ..tree.tree import one_capture
from .accumulators import is_referenced, renew_for_capture, why_referenced, why_shared
from .gradients import Gradients, ReadsGradients
from .host import ALL, HostRandom, HostState
from .inputs import Inputs, StepCall
from .iterators import Iterators
from .numbers import Numbers, Place, Traced, replaced
from .outputs import ChangesValue, Outputs, Unforeseen, is_storable, refuse_to_store
from .recordings import Recordings
from .users_code import asks_for_types
from .watch import OperatorWatch

PARALLEL = {"FullyShardedDataParallel", "DataParallel"}


def settings() -> tuple[Any, ...]:
    """Global settings that choose kernels or change what a step does, except for those of `torch_cuda.global_guard`."""
    sdp, cudnn = torch.backends.cuda, torch.backends.cudnn
    parts = (getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))
    return (
        *(torch_cuda.top_saved_tensor_hooks(False), *torch_cuda.function_modes()),
        *(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        *(sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled(), sdp.cudnn_sdp_enabled()),
        *(cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        *(getattr(x, "fp32_precision", None) for x in parts),
    )


@contextlib.contextmanager
def refusing_schedules(schedulers: Mapping[str, Any]) -> Iterator[None]:
    """A context in which code raises that calls `step()` or `get_last_lr()` of a scheduler: a replay would call
    neither. By paths."""

    def step(path: str, *_: Any, **__: Any) -> Any:
        name = f"{path}.last_epoch"
        raise ChangesValue(name, f"changes {name} each time, which a replay would not; call {path}.step() after it")

    def get_last_lr(path: str) -> Any:
        raise CannotCapture(f"reads {path}.get_last_lr(), which a replay would not; give it as an input")

    with contextlib.ExitStack() as stack:
        for path, scheduler in schedulers.items():
            for method in (step, get_last_lr):
                refusing = functools.partial(method, path)
                stack.enter_context(replaced(scheduler, method.__name__, refusing))
        yield


_orders = itertools.count()  # of recordings: which of two was made later


class StepRecording:
    """A captured step, which `made` has captured.

    Args:
        written: those of the tensors of the host that the graph writes to.
        update: runs after each launch, outside of the graph.
    """

    def __init__(self, made: _Attempt, written: list[torch.Tensor], update: Callable[[], None] | None) -> None:
        self.key = made.call.key  # see `StepCall`
        self.host = made.host
        self.numbers = made.numbers  # of the host, which the graph reads on the device
        self.outputs = made.outputs  # tensors that the step stores
        self.flags = made.flags  # that the step sets, by path, and what it leaves there
        self.inputs, self.gradients = made.inputs, made.gradients
        self.tensors = made.tensors  # those that the graph may read where they are
        self.blocks, self.written, self.update = made.blocks, written, update
        self.results, self.result_spec = made.results, made.result_spec  # of the graph; flat, as for `unflatten`
        self.cursor, self.pool = made.cursor, made.pool
        self.graph, self.launch = made.graph, made.cursor.driver.launcher(made.graph)
        self.order = next(_orders)
        self.has_collectives = made.watch.has_collectives  # as far as operators were watched
        self.owner = made.owner  # lives as long as the recording; see tree/capture.py
        self.replays = 0
        self.number = -1  # among the recordings that ranks have made together
        self._addresses = [x.data_ptr() for x in self.tensors]
        self._indices = list(range(len(self.tensors)))
        self._guard, self._global_guard = torch_cuda.tensor_guard(self.tensors), torch_cuda.global_guard()
        self._settings = settings()
        self._written_storages = {*map(torch_cuda.storage_key, self.written)}

    def aliased(self, flat: Sequence[Any]) -> int | None:
        """The position of an input in memory that the step writes to: the graph would read a copy from before."""
        storages, addresses = self._written_storages, self.gradients.storage_addresses
        for i, x in enumerate(flat):
            if isinstance(x, torch.Tensor) and x.layout is torch.strided:
                storage = x.untyped_storage()
                if torch_cuda.identity(storage) in storages:
                    return i
                # Where a gradient was when this was recorded, there may be other tensors while it is elsewhere.
                if addresses and storage.data_ptr() in addresses and self.gradients.may_replay():
                    return i
        return None

    def applies(self, call: StepCall, now: HostState | None = None) -> bool:
        """Whether a replay does what the step would in `call`. `now`: a new snapshot, if there is one."""
        if (
            call.key != self.key
            or not self._global_guard()
            or settings() != self._settings
            or torch_cuda.dispatch_modes()
        ):
            return False
        if now is not None:
            if not self.host.differences(now).keys() <= self.numbers.places.keys() <= now.places.keys():
                return False
            self.host = now.copied()
            self.numbers.follow(now.places)
        if self.numbers:
            changed, holds = self.numbers.read()
            for place in changed:
                self.host.accept(place.container, place.key)
            if not holds:
                return False
        if not self.host.unchanged():
            return False
        return (
            torch_cuda.pointers_equal(self.tensors, self._addresses, self._indices)
            and self._guard(*self.tensors)
            and self.aliased(call.flat) is None
            and self.gradients.may_replay()
        )

    def replay(self, flat: Sequence[Any]) -> Any:
        """Run the step on the inputs `flat`, after `applies`. What it returns is in memory of its own."""
        self.cursor.follow_stream()
        self.gradients.drop(self.cursor.driver)
        self.inputs.copy(flat)
        if self.numbers:
            self.numbers.fill()
        self.launch()
        counters.counts["replays"] += 1
        self.replays += 1
        self.gradients.assign()
        results = [
            torch_distributed.clone_of(x) if isinstance(x, torch.Tensor) else x.value() if isinstance(x, Traced) else x
            for x in self.results
        ]
        for container, key, *_ in (*self.outputs.assign(self.host.outputs), *self.numbers.assign()):
            self.host.accept(container, key)
        for path, value in self.flags.items():
            container, key = self.host.flags[path]
            container[key] = value
        if self.update is not None:
            self.update()
        if self.written:
            torch.autograd.graph.increment_version(self.written)  # as the step does: autograd may have saved one
        return torch_cuda.unflatten(results, self.result_spec)

    def close(self) -> None:
        self.gradients.close()
        self.graph.reset()


def reason_against_model(host: HostState) -> str | None:
    """Why a model of `host` that is spread over several devices is not captured; None if there is no such reason."""
    for value in host.objects():
        names = {cls.__name__ for cls in type(value).__mro__} & PARALLEL
        if names:
            return f"the model is a {names.pop()}, and what processes send each other is not captured"
    replicas = torch_distributed.replicas_in(host.objects())
    for replica in replicas:
        if reason := torch_distributed.reason_against_replica(replica):
            return f"its DistributedDataParallel can't be captured: {reason}"
    if (reason := reason_against_new_reducers(replicas)) is not None:
        return reason
    if (backend := torch_distributed.uncounted_backend()) is not None:
        return f"the backend {backend!r} of a group of processes does not count collectives: does the step have any?"
    return None


def reason_against_new_reducers(replicas: Sequence[Any]) -> str | None:
    """Why reducers of replicated models must stay: something else is on nodes that they would replace."""
    for replica in replicas:
        parameters = dict(replica.named_parameters())
        for name, x in parameters.items():
            if is_referenced(x):
                return why_referenced(name)
        if (reason := why_shared(parameters, replicas)) is not None:
            return reason
    return None


def make_capturable(host: HostState, device: torch.device) -> bool:
    """Have the optimizers count steps on the device, which torch requires in a capture. Returns whether any counted
    elsewhere."""
    groups = [
        (o, group) for o in host.optimizers.values() for group in o.param_groups if group.get("capturable") is False
    ]
    if not groups or device.type not in torch_cuda.capturable_devices():
        return False
    for optimizer, group in groups:
        group["capturable"] = True
        for x in group["params"]:
            state = optimizer.state.get(x, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(x.device)
    return True


def parameters_of(host: HostState) -> list[torch.Tensor]:
    """The tensors that may have a gradient."""
    every = (*host.tensors.values(), *host.spread.values())
    return [
        x for x in every if x.is_leaf and (x.requires_grad or isinstance(x, torch.nn.Parameter) or x.grad is not None)
    ]


def leaves_of(host: HostState) -> dict[str, torch.Tensor]:
    """The leaves to which a backward of the step may add gradients, by their paths."""
    every = {**host.tensors, **host.spread, **torch_distributed.unsharded_parameters(host.objects())}
    return {path: x for path, x in every.items() if x.is_leaf and x.requires_grad}


def record_step(
    step: Recordings, call: StepCall, host: HostState, run: Callable[..., Any], update: Callable[[], None] | None
) -> StepRecording:
    """Capture a step. Whether that succeeds or not, all is as before.

    Raises `CannotCapture` with a reason against the capture, or the capture's own error; `Unforeseen`, if it would
    succeed with other numbers or outputs.

    Args:
        step: whose recordings keep their memory.
        call: whose arguments `run` gets.
        host: the snapshot of now.
        run: the step, or its forward and backward.
        update: runs after each replay, outside of the graph.
    """
    for path, x in host.tensors.items():
        if x.layout is not torch.strided or type(x) not in (torch.Tensor, torch.nn.Parameter):
            raise CannotCapture(f"{path} is a {type(x).__name__} of layout {x.layout}")
    attempt = _Attempt(step, call, host)
    try:
        attempt.capture(run)
        attempt.check_side_effects()
        attempt.check_host()
        attempt.find_blocks()
        return attempt.recording(update)
    except BaseException as error:
        if isinstance(error, ReadsGradients):
            error.places = attempt.gradients.not_dropped()
        traceback.clear_frames(error.__traceback__)  # they hold blocks of the pool
        attempt.undo()
        raise


class _Attempt:
    """One attempt to capture a step. Its methods run once each, in their order here; `undo` if one of them raises."""

    inputs: Inputs
    watch: OperatorWatch

    def __init__(self, step: Recordings, call: StepCall, host: HostState) -> None:
        """Note all that `undo` puts back. Nothing is changed yet, so an error needs no `undo`."""
        assert step.cursor is not None
        self.step, self.call, self.host, self.cursor = step, call, host, step.cursor
        self.pool, self.device = step.opened_pool(), self.cursor.device
        self.blocks_of_others = step.blocks_in_use()
        self.blocks: set[int] = set()  # addresses in the pool that the recording needs between replays
        device = self.device
        self.tensors = [*host.tensors.values()]
        generators = [x for x in host.objects() if isinstance(x, torch.Generator) and x.device == device]
        self.snapshot = Snapshot(self.tensors, generators)
        self.versions = [None if x.is_inference() else x._version for x in self.tensors]
        self.on_cpu = [(x, x._version, x.detach().clone()) for x in host.on_cpu]
        self.random_states = [torch.get_rng_state()]
        self.random_numbers = HostRandom(host.objects())
        self.iterators = Iterators(host.iterators())
        # Under a dispatch mode Dynamo gives compiled code up, and a function mode makes it compile anew.
        self.is_watched = not step.calls_compiled
        paths = () if step.state.by_number else step.numbers
        in_optimizers_only = bool(paths) and (not self.is_watched or asks_for_types(host.objects()))
        self.numbers = Numbers(places_of(host, paths, in_optimizers_only=in_optimizers_only), device)
        self.outputs = Outputs(host.outputs)
        self.owner = Owner()
        self.graph: Any = None
        self.results: list[Any] = []  # what the step returns, flat
        self.result_spec: Any = None
        self.replicas = torch_distributed.replicas_in(host.objects())
        in_buckets = [x for model in self.replicas if model.gradient_as_bucket_view for x in model.parameters()]
        places = [(x, "grad") for x in parameters_of(host)]
        places += torch_distributed.unreduced_gradients(host.objects())
        self.gradients = Gradients(places, reads=step.read_gradients, in_buckets=in_buckets)

    def capture(self, run: Callable[..., Any]) -> None:
        """Capture the step. It runs on the host only, so no tensor has other values after it."""
        host = self.host
        self.inputs = Inputs(self.pool, self.call.flat, self.device)
        known = [*self.tensors, *map(torch_distributed.local_part, self.gradients.before), *self.numbers.tensors]
        self.watch = OperatorWatch(self.device, self.inputs.by_storage(), known, has_reducers=bool(self.replicas))
        self.watch.known.update(map(torch_cuda.identity, torch_distributed.gathered_storages(host.objects())))
        self.outputs.cover()
        torch_distributed.forget_events(host.objects())  # the pool waits for the device before a capture
        renew_for_capture(leaves_of(host), host.objects())
        with one_capture(), under_way(Capture(self.owner, ())):
            self.graph, (self.results, self.result_spec) = self.pool.capture(
                functools.partial(self._run, run), self.snapshot.generators
            )
        torch_distributed.forget_events(host.objects())

    def _run(self, run: Callable[..., Any]) -> Any:
        """Run the step, in the capture. Returns its result, flat."""
        host = self.host
        args, kwargs = self.call.arguments(self.inputs.arguments(self.call.flat))
        in_place = self.numbers.in_place([*host.optimizers.values()], everywhere=self.is_watched)
        watched = torch_cuda.dispatching(self.watch.operator) if self.is_watched else contextlib.nullcontext()
        with watched, refusing_schedules(host.schedulers), as_they_are(), in_place:
            result = run(*args, **kwargs)
        self.random_states.append(torch.get_rng_state())  # before the capture puts it back
        return torch_cuda.flatten(result)

    def check_side_effects(self) -> None:
        """Raise if the step did what no graph does again: random numbers of the host."""
        if self.random_numbers.changed() or not torch.equal(*self.random_states):
            raise CannotCapture("draws random numbers on the host")
        if (reason := self.iterators.reason()) is not None:
            raise CannotCapture(reason)
        self.outputs.collect({torch_cuda.storage_key(x) for x in self.tensors})
        self.outputs.uncover()

    def check_host(self) -> None:
        """Raise if host values, the memory of tensors or an input have changed, which a replay would not change."""
        host = self.host
        self.flags = _flags_among_changes(host, self.step._host(), self.numbers)
        host.restore()  # the step may have put equal containers in the place of the old ones
        host.note_versions()
        rebound = {id(x) for x in self.snapshot.rebound()}
        for path, x in host.tensors.items():
            if id(x) in rebound:
                raise CannotCapture(f"gives {path} other memory or another shape, which a replay would not")
        if (written_input := self.inputs.written()) is not None:
            raise CannotCapture(f"writes to input {written_input}, which is the caller's own memory")

    def find_blocks(self) -> None:
        """Find the blocks of the pool that the recording needs. Raise if the step keeps others: nobody would know when
        such a block is free."""
        gradients = self.gradients
        gradients.classify(self.device, self.cursor.driver, self.watch.seen if self.is_watched else None)
        outputs = [*self._results_on_device(), *self.outputs.tensors]
        if not gradients.slots.keys().isdisjoint(map(torch_cuda.storage_key, outputs)):
            raise CannotCapture("returns or stores its gradients, which replays overwrite; use clones of them")
        storages = [x.untyped_storage() for x in (*self.inputs.staged, *outputs)]
        storages += [slot.storage for slot in gradients.slots.values()]
        from_before = {torch_cuda.storage_key(x) for x in self.tensors}
        self.blocks = {s.data_ptr() for s in storages if s.nbytes() and torch_cuda.identity(s) not in from_before}
        gradients.finish()  # from now on only slots hold new gradients, so what else is alive is the step's
        needed = self.blocks | self.blocks_of_others
        if not self.pool.live_blocks_are(needed):
            gc.collect()
            if leaked := self.pool.live_blocks() - needed:
                raise CannotCapture(f"keeps {len(leaked)} tensors that it made, in a place that is not known")

    def _results_on_device(self) -> list[torch.Tensor]:
        """The tensors that the step returns. Raise for one that a replay can't give out."""
        found = [torch_distributed.local_part(x) for x in self.results if isinstance(x, torch.Tensor)]
        for x in found:
            if type(x) is not torch.Tensor or x.layout is not torch.strided or x.device != self.device:
                raise CannotCapture(f"returns a {type(x).__name__} of layout {x.layout} on {x.device}")
        return found

    def recording(self, update: Callable[[], None] | None) -> StepRecording:
        """The recording. Raise if an input is in memory that the step writes to."""
        written = [
            x
            for x, version in zip(self.tensors, self.versions, strict=True)
            if version is not None and (x._version != version or torch_cuda.storage_key(x) in self.watch.written)
        ]
        recording = StepRecording(self, written, update)
        if (aliased := recording.aliased(self.call.flat)) is not None:
            raise CannotCapture(f"writes to the memory of input {aliased}; give it a copy")
        return recording

    def undo(self) -> None:
        """Put back all that the failed attempt has changed, and free its graph."""
        objects = self.host.objects()
        with contextlib.ExitStack() as stack:  # the last first, and each also if one before it raises
            stack.callback(self.gradients.close)
            stack.callback(self.gradients.finish)
            stack.callback(self.random_numbers.restore)
            stack.callback(_restore_values, self.on_cpu)
            stack.callback(self.snapshot.restore)
            stack.callback(self.host.note_versions)
            stack.callback(self.host.restore)
            stack.callback(torch_distributed.forget_events, objects)
            stack.callback(torch_distributed.forget_failed_step, objects)
            stack.callback(self.outputs.uncover)
            if self.graph is not None:
                stack.callback(self.graph.reset)


def _restore_values(tensors: Sequence[tuple[torch.Tensor, int, torch.Tensor]]) -> None:
    """Give each tensor, listed with its old version and a copy, its old values if it was written to."""
    with torch.no_grad():
        for x, version, copy in tensors:
            if x._version != version:
                x.copy_(copy)


def places_of(host: HostState, paths: Collection[str], *, in_optimizers_only: bool) -> dict[str, Place]:
    """Where the numbers at `paths` are kept. `in_optimizers_only`: other numbers must be the same in each replay."""
    groups = tuple(f"{path}.param_groups" for path in host.optimizers)
    return {
        path: host.places[path]
        for path in sorted(paths)
        if path in host.places and (path.startswith(groups) or not in_optimizers_only)
    }


def _flags_among_changes(host: HostState, now: HostState, numbers: Numbers) -> dict[str, Any]:
    """The flags (a bool or None) that the captured step has changed: a replay sets them, too. Raise if the step has
    changed other host values: `Unforeseen`, if another capture can allow for them."""
    changed = host.differences(now)
    # Not one of a dict that the step puts in the place of another, which the program may still hold.
    kept = [p for p, (owner, _) in host.flags.items() if p in now.flags and now.flags[p][0] is owner]
    flags = {path: now.leaves[path][1] for path in kept if path in changed}
    changed = {path: how for path, how in changed.items() if path not in flags}
    stored = {path: container[key] for path, (container, key) in host.stored().items()}
    outputs = [path for path, value in stored.items() if path not in host.outputs and is_storable(value)]
    counted = [path for path in changed if path in host.places.keys() - numbers.places.keys()]
    inside = tuple(f"{path.removesuffix(ALL)}{end}" for path in outputs for end in "[.,")
    others = {
        path: how for path, how in changed.items() if path not in {*counted, *outputs} and not path.startswith(inside)
    }
    for path, how in others.items():
        for name in stored:
            if path.startswith(tuple(f"{name}{end}" for end in "[.,")):
                refuse_to_store(name, stored[name])
        way_out = "return it instead of keeping it there" if path in now.tensors else "change it outside of the step"
        raise ChangesValue(path, f"changes {path} each time, which a replay would not: {how}; {way_out}")
    if changed:
        raise Unforeseen(outputs, counted)
    return flags
