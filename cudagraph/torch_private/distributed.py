"""Groups of processes, and the reducer of DistributedDataParallel (2.11 to 2.15)."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from . import symbols
from .symbols import late

need = functools.cache(symbols.need)

# torch times each of the first 10 iterations, and looks at the times in the next one: the device must not be capturing.
LAST_TIMED_ITERATION = 10
NEVER = (1 << 31) - 1  # iterations between two that are timed after that
BY_DEFAULT = 100  # the same, as torch has it; nobody can read what a program has set

default_store: Callable[[], Any] = late("torch.distributed.distributed_c10d._get_default_store")


def _backends(group: Any) -> list[Any]:
    return [group._get_backend(device) for device in group._device_types]


def _groups_of_several() -> list[Any]:
    """The groups of this process with another process in them."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    groups = need("torch.distributed.distributed_c10d._world").pg_map
    return [group for group in groups if group.size() > 1]


def _collective_count(group: Any) -> int | None:
    """How many collectives a group has run; None if its backend does not count them."""
    try:
        return sum(each._get_sequence_number_for_group() for each in _backends(group))
    except RuntimeError:
        return None


def sequence_numbers() -> dict[Any, int]:
    """How many collectives each group of this process has run. Empty where there is no other process."""
    counts = {group: _collective_count(group) for group in _groups_of_several()}
    return {group: count for group, count in counts.items() if count is not None}


class _Ending:
    """Stands among the communicators that `torch.distributed.destroy_process_group()` finalizes first."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.finalize = run


def call_before_groups_end(run: Callable[[], None]) -> None:
    """Call `run` when the groups of this process are destroyed, before NCCL ends, and when the process ends."""
    communicators = need("torch.distributed.distributed_c10d._world").comms
    if not any(isinstance(each, _Ending) and each.finalize is run for each in communicators):
        communicators.append(_Ending(run))
    atexit.unregister(run)
    atexit.register(run)


def uncounted_backend() -> str | None:
    """The name of a backend that does not count collectives, so nobody sees whether a step talks; None without one."""
    found = (group for group in _groups_of_several() if _collective_count(group) is None)
    return next((dist.get_backend(group) for group in found), None)


def are_there(groups: Collection[Any]) -> bool:
    """Whether none of `groups` was destroyed."""
    known = need("torch.distributed.distributed_c10d._world").pg_map if dist.is_available() else {}
    return all(group in known for group in groups)


def ranks_of(groups: Collection[Any]) -> list[int]:
    """The ranks of a group, or those of the default group if there are several."""
    members = [set(dist.get_process_group_ranks(group)) for group in groups]
    largest = max(members, key=len)
    if all(each <= largest for each in members):
        return sorted(largest)
    return dist.get_process_group_ranks(dist.group.WORLD)


def timeout_of_default_group() -> datetime.timedelta:
    """How long a collective may take, as the program has said."""
    timeouts = [each.options._timeout for each in _backends(dist.group.WORLD) if hasattr(each, "options")]
    return max(timeouts, default=datetime.timedelta(minutes=10))


def abort(groups: Collection[Any]) -> None:
    """End all collectives of `groups`, also those that wait for a process that is gone. Nothing is sent after that."""
    for group in groups:
        for backend in _backends(group):
            backend.abort()


def is_dtensor(x: Any) -> bool:
    """Whether `x` is a tensor that is spread over processes, without importing torch's module for it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_part(x: torch.Tensor) -> torch.Tensor:
    """The tensor of this process in a `DTensor`; another tensor as it is."""
    return x._local_tensor if is_dtensor(x) else x  # type: ignore[attr-defined]


def spread_of(x: Any) -> Any:
    """How a `DTensor` is spread over processes, to compare; None for another tensor."""
    return x._spec if is_dtensor(x) else None


def with_local_part(x: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor spread like the `DTensor` `x`, over another tensor of this process; `local` if `x` is none."""
    if not is_dtensor(x):
        return local
    names, context = x.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: local if name == "_local_tensor" else getattr(x, name) for name in names}
    make = type(x).__tensor_unflatten__  # type: ignore[attr-defined]
    spread: torch.Tensor = make(inner, context, x.shape, x.stride())
    return spread


def clone_of(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x`. That of a `DTensor` is spread alike, and calls no code of its own."""
    return with_local_part(x, local_part(x).clone())


def sharded_modules(objects: Collection[Any]) -> list[Any]:
    """Those of `objects` that `fully_shard` was called with."""
    return [x for x in objects if hasattr(type(x), "_get_fsdp_state")]


def _sharded_states(objects: Collection[Any]) -> list[Any]:
    """The states that FSDP2 keeps for modules among `objects`."""
    return [x._get_fsdp_state() for x in sharded_modules(objects)]


def _groups_of(state: Any) -> list[Any]:
    """The groups of parameters of a state of FSDP2, of which torch had one at most up to 2.12."""
    one = state._fsdp_param_group
    return getattr(state, "_fsdp_param_groups", [] if one is None else [one])


def _params_of(objects: Collection[Any]) -> list[Any]:
    """What FSDP2 keeps for the parameters of modules among `objects`."""
    return [x for state in _sharded_states(objects) for group in _groups_of(state) for x in group.fsdp_params]


# What a program sets by methods such as `set_requires_gradient_sync`. Versions of torch lack some.
OPTIONS_OF_STATES = ("_states_to_forward_prefetch", "_states_to_backward_prefetch")
OPTIONS_OF_CONTEXTS = ("is_last_backward",)
OPTIONS_OF_GROUPS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "gradient_divide_factor",
    "post_forward_mesh_info",
    "unshard_in_backward",
    "unshard_async_op",
    "force_sum_reduction_for_comms",
    "_all_reduce_hook",
    "_all_gather_comm",
    "_reduce_scatter_comm",
)


def sharding_options(module: Any) -> dict[str, tuple[dict[str, Any], str]]:
    """Where FSDP2 keeps what a program has set for `module`: attributes of its own objects, and their names there."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for state in _sharded_states([module]):
        groups = [
            (f" of group {i}" if i else "", group, OPTIONS_OF_GROUPS) for i, group in enumerate(_groups_of(state))
        ]
        owners = [("", state, OPTIONS_OF_STATES), ("", state._state_ctx, OPTIONS_OF_CONTEXTS), *groups]
        found |= {name + end: (vars(x), name) for end, x, names in owners for name in names if name in vars(x)}
    return found


def gathered_storages(objects: Collection[Any]) -> list[torch.UntypedStorage]:
    """The storages that FSDP2 gathers the parameters of modules among `objects` into. Between steps they are empty, and
    a capture fills them from its pool."""
    params = _params_of(objects)
    return [tensor.untyped_storage() for x in params for tensor in (*x.all_gather_outputs, x._sharded_param_data)]


def groups_that_gather_into(storages: Collection[int]) -> set[Any]:
    """The groups of parameters that FSDP2 gathers into one of `storages`."""
    if "torch.distributed.fsdp" not in sys.modules:
        return set()
    states = [ref() for ref in need("torch.distributed._composable_state._module_state_mapping").values()]
    groups = (group for state in states if hasattr(state, "_fsdp_param_group") for group in _groups_of(state))
    params = ((group, x) for group in groups for x in group.fsdp_params)
    tensors = ((group, y) for group, x in params for y in (*x.all_gather_outputs, *x._unsharded_inner_tensors))
    return {group for group, y in tensors if y.untyped_storage()._cdata in storages}


def allocate_gathered_in(
    context: Callable[[], contextlib.AbstractContextManager[None]], groups: Collection[Any]
) -> None:
    """Have FSDP2 allocate what it gathers for `groups` within `context()`; `gather_as_before` ends it."""

    def wait_for_unshard(of_torch: Callable[[], None]) -> None:
        with context():
            of_torch()

    for group in groups:
        if "wait_for_unshard" not in vars(group):
            group.wait_for_unshard = functools.partial(wait_for_unshard, group.wait_for_unshard)


def gather_as_before(groups: Collection[Any]) -> None:
    """End what `allocate_gathered_in` has begun. What is gathered stays where it is until it is freed."""
    for group in groups:
        vars(group).pop("wait_for_unshard", None)


def gather_no_more(modules: Collection[Any]) -> None:
    """Free what FSDP2 has gathered for `modules` and kept, as a forward without a backward leaves its last ones: graphs
    gather for themselves."""
    for module in modules:
        if any(not group.is_sharded for group in _groups_of(module._get_fsdp_state())):
            module.reshard()


def unreduced_gradients(objects: Collection[Any]) -> list[tuple[Any, str]]:
    """Where FSDP2 keeps gradients that were not exchanged: objects, and names of attributes. None without one."""
    params = _params_of(objects)
    groups = [group for state in _sharded_states(objects) for group in _groups_of(state)]
    places = [(x, "unsharded_accumulated_grad") for x in params if "unsharded_accumulated_grad" in vars(x)]
    places += [(x, "_partial_reduce_output") for x in groups if "_partial_reduce_output" in vars(x)]
    return [*places, *((x._unsharded_param, "grad") for x in params if hasattr(x, "_unsharded_param"))]


def forget_events(objects: Collection[Any]) -> None:
    """Have modules of FSDP2 wait for their streams and not for events of the step before: a capture may wait for no
    event from outside, and nothing outside for one of a capture. What such an event stands for must be done."""
    for state in _sharded_states(objects):
        state._state_ctx.post_optim_event = None
        for group in _groups_of(state):
            group._reshard_after_forward_event = None


def unsharded_parameters(objects: Collection[Any]) -> dict[str, torch.Tensor]:
    """The parameters that FSDP2 has a forward use, by names of theirs. They are leaves: it takes their gradients."""
    every = [x._unsharded_param for x in _params_of(objects) if hasattr(x, "_unsharded_param")]
    return {f"unsharded parameter {i}": x for i, x in enumerate(every)}


def forget_failed_step(objects: Collection[Any]) -> None:
    """Have modules of FSDP2 as they are between steps, after a capture that failed in the middle of one.

    What they wait for are events of that capture, which no stream may wait for now.
    """
    for state in _sharded_states(objects):
        comm = state._comm_ctx
        comm.all_gather_state = None
        comm.post_forward_order.clear()
        if hasattr(comm, "reduce_scatter_states"):
            comm.reduce_scatter_states.clear()
            comm._last_post_reduce_events.clear()
        else:
            comm.reduce_scatter_state = None
        idle = type(state._training_state).IDLE
        state._training_state = idle
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        if hasattr(comm, "active_gradient_reduction"):  # 2.15
            comm.active_gradient_reduction = state._state_ctx.manual_backward_finalization_active = None
            state._state_ctx.gradient_reduction_pending = False
        for group in _groups_of(state):
            group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
            group._post_forward_indices.clear()
            if hasattr(group, "_post_backward_pending"):  # 2.15
                group._post_backward_pending = False
                group._partial_reduce_output_layout.clear()
            group._training_state = idle
            group._to_sharded()


def replicas_in(objects: Collection[Any]) -> list[torch.nn.parallel.DistributedDataParallel]:
    """The models among `objects` that are a `DistributedDataParallel`."""
    return [x for x in objects if isinstance(x, torch.nn.parallel.DistributedDataParallel)]


def reduced_parameters(ddp: Any) -> list[torch.Tensor]:
    """The parameters of `ddp` whose gradients it exchanges: its reducer has hooks on their accumulators."""
    parameters: list[torch.Tensor] = ddp._build_params_for_reducer()[0]
    return parameters


def is_timed(ddp: Any) -> bool:
    """Whether torch may still look at times of `ddp` on the device. Later ones are not taken until `resume_timing`."""
    ddp._set_ddp_runtime_logging_sample_rate(NEVER)
    return ddp._get_ddp_logging_data().get("iteration", 0) < LAST_TIMED_ITERATION


def resume_timing(ddp: Any) -> None:
    """Have torch take times of `ddp` as it does by default."""
    ddp._set_ddp_runtime_logging_sample_rate(BY_DEFAULT)


def forget_backward(ddp: Any) -> None:
    """Let `ddp` run after a backward that did not end. Call `make_reducer_anew` before the next iteration."""
    ddp.reducer._reset_state()


def reason_against_replica(ddp: Any) -> str | None:
    """Why steps with `ddp` can't be captured; None if they can."""
    if ddp.find_unused_parameters and not ddp.static_graph:
        return "find_unused_parameters=True reads on the host which parameters were used; use static_graph=True"
    if ddp.mixed_precision is not None:
        return "its mixed_precision copies parameters on streams of its own; use torch.autocast"
    if ddp._delay_all_reduce_params:
        return "delay_all_reduce_named_params waits on the host"
    return None


def make_reducer_anew(ddp: Any) -> None:
    """Have the reducer of `ddp` made on the current stream. Nothing else may refer to the one that it has.

    It keeps a node of autograd for each parameter, which always runs on the stream that it was made on. On the default
    stream, where most programs make their models, no capture could include it. A new reducer has new
    buckets, and times its first iterations.
    """
    hooks, builtin = ddp._comm_hooks, str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    ddp.reducer._remove_autograd_hooks()
    del ddp.reducer
    ddp.logger = None  # it keeps the reducer
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        need("torch.distributed._register_comm_hook")(ddp.reducer, state, hook)
    if builtin.startswith("BuiltinCommHookType."):
        ddp.logger._set_comm_hook_name(builtin)
        kind = getattr(dist.BuiltinCommHookType, builtin.partition(".")[2])
        need("torch.distributed._register_builtin_comm_hook")(ddp.reducer, kind)
