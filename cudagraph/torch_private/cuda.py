"""Operators, storages, the allocator and CUDA graphs (2.11 to 2.15).

A missing symbol raises `UnsupportedTorchError` where it is needed, not when the package is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import math
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from . import symbols
from .symbols import has, late

need = functools.cache(symbols.need)

# --- graphs: what operators are, and what they do ---

to_copy = torch.ops.aten._to_copy.default  # what `x.to(...)` becomes in a graph


def is_operator(target: Any) -> bool:
    return isinstance(target, need("torch._ops.OpOverload"))


def is_higher_order(target: Any) -> bool:
    return isinstance(target, need("torch._ops.HigherOrderOperator"))


def argument(op: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The argument `name` of a call of `op`; None if it has none of that name."""
    names = [each.name for each in op._schema.arguments]
    position = names.index(name) if name in names else len(args)
    return args[position] if position < len(args) else kwargs.get(name)


def written_arguments(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call that the operator's schema says it writes to; none if `target` is no operator."""
    infos = [(each.name, each.alias_info) for each in target._schema.arguments] if is_operator(target) else []
    return [argument(target, name, args, kwargs) for name, info in infos if info is not None and info.is_write]


def returns_views(target: Any) -> bool:
    """Whether `target` is an operator whose results are, by its schema, views of arguments that are not written to."""
    infos = [returned.alias_info for returned in target._schema.returns] if is_operator(target) else []
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def overloads_of(target: Any) -> list[Any]:
    """The operators that a node with this target may call; none if it is no operator."""
    if isinstance(target, need("torch._ops.OpOverloadPacket")):
        return [getattr(target, name) for name in target.overloads()]
    return [target] if is_operator(target) else []


def schema_of(target: Any) -> str:
    return str(target._schema)


def operator_called(name: str) -> Any:
    """The operator that `str()` writes as `name`, "mine.scale.default"; None if this process has none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if is_operator(found) else None


def unsafe_by_torch(node: Node) -> bool:
    """Whether torch's own list has the operator of `node`: it is forbidden by name or tagged `cudagraph_unsafe`, writes
    through a boolean index, or returns sparse tensors."""
    return bool(need("torch._inductor.utils.is_cudagraph_unsafe_fx_node")(node))


def data_dependent_sizes(value: Any) -> set[Any]:
    """The symbols in the sizes of `value` that come from a tensor's values ("unbacked")."""
    return set(need("torch.fx.experimental.symbolic_shapes.free_unbacked_symbols")(value))


def free_symbols(value: Any) -> set[Any]:
    return set(need("torch.fx.experimental.symbolic_shapes.free_symbols")(value))


def symbol_of(value: Any) -> tuple[Any, ...]:
    """The symbol of a size that is one symbol; () for any other value."""
    return (value.node.expr,) if isinstance(value, torch.SymInt) and value.node.expr.is_symbol else ()


def storage_key(x: torch.Tensor) -> int | None:
    """Identity of the storage of `x`, also for fake tensors, as long as `x` lives; None if it has none (sparse)."""
    return identity(x.untyped_storage()) if x.layout is torch.strided else None


def set_boxed(gm: GraphModule) -> None:
    """Have `gm.forward` take one list, which it empties, so that arguments can be freed early."""
    gm.graph.set_codegen(need("torch.fx.graph._BoxedCodeGen")())
    gm.recompile()


def boxed(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """`gm` as it is, as a callable with one list as argument, see `set_boxed`."""
    set_boxed(gm)
    forward = gm.forward

    def run(inputs: list[Any]) -> Any:
        return forward(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def without_modes() -> Any:
    """A context in which operators are real, whatever fake or tracing mode is on."""
    return need("torch.utils._python_dispatch._disable_current_modes")()


# --- a whole step ---

flatten: Callable[[Any], tuple[list[Any], Any]] = late("torch.utils._pytree.tree_flatten")
unflatten: Callable[[Any, Any], Any] = late("torch.utils._pytree.tree_unflatten")
# A number that is another one after each change of a dict.
dict_version: Callable[[dict[Any, Any]], int] = late("torch._C._dynamo.guards.dict_version")
dispatch_modes: Callable[[], int] = late("torch._C._len_torch_dispatch_stack")  # how many are on
# The modes of `torch.overrides` that are on, such as `torch.set_default_device` makes.
function_modes: Callable[[], list[Any]] = late("torch.overrides._get_current_function_mode_stack")
without_functions: Callable[[], Any] = late("torch._C.DisableTorchFunction")  # a context without these modes
capturable_devices: Callable[[], list[str]] = late("torch.optim.optimizer._get_capturable_supported_devices")
# The saved-tensor hooks that are on: called with False, the innermost pair, or None.
top_saved_tensor_hooks: Callable[[bool], Any] = late("torch._C._autograd._top_saved_tensors_default_hooks")
# The hooks of a tensor on its gradient; its `__dict__` lacks them.
gradient_hooks = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def update_scaler(scaler: torch.amp.GradScaler) -> None:
    """`scaler.update()`, which makes a new dict of optimizer states. Puts the old one back, empty: a snapshot of host
    values compares dicts by identity."""
    states = scaler._per_optimizer_states
    scaler.update()
    states.clear()
    scaler._per_optimizer_states = states


# Whether a class of tensors has its data in other tensors, as a `DTensor` has.
wraps_tensors: Callable[[type], bool] = late("torch.utils._python_dispatch.is_traceable_wrapper_subclass_type")


fake_mode: Callable[[], Any] = late("torch._guards.active_fake_mode")  # None if operators are real


def dispatching(run: Callable[[Any, Any, Any], Any]) -> Any:
    """A context in which `run(func, args, kwargs)` runs each operator."""

    class Mode(need("torch.utils._python_dispatch.TorchDispatchMode")):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(map(wraps_tensors, types)):
                return NotImplemented  # it calls operators on the tensors inside, which come here again
            if fake_mode() is not None:
                return func(*args, **(kwargs or {}))  # of a DTensor that finds out how its result is spread
            return run(func, args, kwargs or {})

    return Mode()


def tripwire(x: torch.Tensor, error: Callable[[str], Exception]) -> torch.Tensor:
    """A tensor like `x` without memory: any operator on it raises `error("aten.add reads it")`."""

    class Tripwire(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
            raise error(f"{func} reads it")

        def trip(self) -> None:  # modes see an operator before its arguments do
            raise error("an operator reads it")

    make = need("torch.Tensor._make_wrapper_subclass")
    return make(Tripwire, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device)


def tensors_among(value: Any) -> bool:
    """Whether a value is a tensor or a container with one."""
    return any(isinstance(x, torch.Tensor) for x in flatten(value)[0])


def global_guard() -> Callable[[], bool]:
    """A function that tells whether torch's global settings are as they are now: grad mode, autocast, determinism,
    precision of matrix products, default dtype, threads."""
    return need("torch._C._dynamo.guards.GlobalStateGuard")().check


def global_hooks() -> list[dict[int, Any]]:
    """The hooks of all modules, before and after their forward and of their backward, and of all optimizers."""
    return [
        need("torch.nn.modules.module._global_forward_hooks"),
        need("torch.nn.modules.module._global_forward_pre_hooks"),
        need("torch.nn.modules.module._global_backward_hooks"),
        need("torch.nn.modules.module._global_backward_pre_hooks"),
        need("torch.optim.optimizer._global_optimizer_pre_hooks"),
        need("torch.optim.optimizer._global_optimizer_post_hooks"),
    ]


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of the same tensors that tells whether their types, dtypes, devices, shapes, strides and
    `requires_grad` are as they are now. No tensor may occur twice."""
    if not tensors:
        return lambda: True
    sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
    guards = need("torch._C._dynamo.guards.TensorGuards")
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


# --- the allocator and capture ---
# Their signatures are the same from 2.11 to 2.15. They go when torch has public checkpoints and use counts.

storage_use_count: Callable[[int], int] = late("torch._C._storage_Use_Count")
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = late("torch._foreach_copy_")
foreach_mul: Callable[[Any, Any], Any] = late("torch._foreach_mul")
foreach_div: Callable[[Any, Any], Any] = late("torch._foreach_div")
foreach_addcmul: Callable[[Any, Any, Any], Any] = late("torch._foreach_addcmul")
foreach_addcmul_: Callable[[Any, Any, Any], Any] = late("torch._foreach_addcmul_")
foreach_mul_: Callable[[Any, torch.Tensor], Any] = late("torch._foreach_mul_")
graph_task_id: Callable[[], int] = late("torch._C._current_graph_task_id")  # -1 outside of a backward
forward_mode: Callable[[], bool] = late("torch._C._is_fwd_grad_enabled")
# A context: operators neither record history nor count versions. Entering it takes 0.5 us.
below_autograd: Callable[[], Any] = late("torch._C._AutoDispatchBelowADInplaceOrView")
without_autocast: Callable[[], Any] = late("torch._C._DisableAutocast")  # a context
negated: Callable[[torch.Tensor], torch.Tensor] = late("torch._neg_view")
clear_cublas_workspaces: Callable[[], None] = late("torch._C._cuda_clearCublasWorkspaces")
# A storage over memory that it does not own.
storage_at: Callable[[int, torch.device, int], torch.UntypedStorage] = late(
    "torch._C._construct_storage_from_data_pointer"
)


def in_autograd_function() -> bool:
    """Whether the caller runs in the forward of a `torch.autograd.Function`, such as that of a re-entrant checkpoint.

    torch turns forward-mode differentiation off there. `torch.no_grad()` leaves it on.
    """
    return not forward_mode() and not torch.is_inference_mode_enabled()


def checkpoint_around(hooks: tuple[Any, Any] | None) -> weakref.ref[Any] | None:
    """For a forward under `torch.utils.checkpoint`: a reference that lives as long as something that it saved there.

    It is to the hook that gives saved tensors back, which torch makes for each such forward. None elsewhere.
    `hooks`: the innermost hooks on saved tensors, of `top_saved_tensor_hooks`.
    """
    if hooks and getattr(hooks[1], "__module__", None) == "torch.utils.checkpoint":  # Tensor.float has none
        return weakref.ref(hooks[1])
    return None


def alive(reference: weakref.ref[torch.Tensor]) -> torch.Tensor | None:
    """The tensor of `reference`, as `torch.utils.weak.TensorWeakRef` gives it, but out of the collector's reach.

    A tensor that only C++ holds owns its Python object. `_fix_weakref` turns that around. A collection between the two
    calls may free the tensor under the object. Since Python 3.12 one may come between any two instructions.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        x = reference()
        if x is not None and hasattr(x, "_fix_weakref"):
            x._fix_weakref()
        return x
    finally:
        if collects:
            gc.enable()


def awaits_backward(reference: weakref.ref[torch.Tensor]) -> bool:
    """Whether a backward may still run through the compiled forward or the checkpoint that made a tensor.

    Their nodes are of `torch.autograd.Function`, and tell whether a backward has freed what they saved. They are the
    nearest such nodes in the tensor's history, behind in-place operators on it.
    """
    x = alive(reference)
    if x is None:
        return False
    nodes: list[Any] = [x.grad_fn]
    seen = {None}
    for node in nodes:
        if node in seen:
            continue
        seen.add(node)
        if hasattr(type(node), "_raw_saved_tensors"):
            try:
                return node._raw_saved_tensors is not None
            except RuntimeError:  # "Trying to backward through the graph a second time"
                return False
        nodes += [after for after, _ in node.next_functions]
    return False


def fake_mode_of(x: torch.Tensor) -> Any:
    """A context in which tensors are made as fake as `x` is."""
    return getattr(x, "fake_mode", None) or contextlib.nullcontext()


no_marks = types.SimpleNamespace(mark_step_counter=0)  # while nobody has imported torch's module that counts marks
# For functions that Dynamo does not call. NaN is not equal to itself, so no two calls are the same one.
no_calls = types.SimpleNamespace(generation=math.nan)


def torch_marks() -> Any:
    """An object with `mark_step_counter`, minus the number of `torch.compiler.cudagraph_mark_step_begin()` calls.

    Nothing is imported for it.
    """
    is_imported = "torch._inductor.cudagraph_trees" in sys.modules
    return need("torch._inductor.cudagraph_trees.MarkStepBox") if is_imported else no_marks


def calls_of_dynamo() -> Any:
    """While Dynamo compiles, an object with `generation`, a number that changes with each call of a compiled function.

    It is the same in all graphs of one call, also after graph breaks. torch's own trees use it. Else `no_calls`.
    """
    compiling = need("torch._guards.TracingContext").try_get() is not None
    return need("torch._dynamo.mutation_guard.GenerationTracker") if compiling else no_calls


def identity(storage: torch.UntypedStorage) -> int:
    """The address of the C++ object that all aliases share; the argument of `storage_use_count`."""
    return storage._cdata


# Whether `tensors[i]` is at `addresses[i]` for each `i` of `indices`. A build without CUDA lacks torch's function.
pointers_equal: Callable[[Any, Any, Any], bool] = (
    need("torch._C._tensors_data_ptrs_at_indices_equal")
    if has("torch._C._tensors_data_ptrs_at_indices_equal")
    else lambda tensors, addresses, indices: all(tensors[i].data_ptr() == addresses[i] for i in indices)
)


def poison(storage: torch.UntypedStorage, message: str) -> None:
    """From now on, reading the memory of any tensor on `storage` raises a `RuntimeError` with `message`."""
    need("torch._C._set_storage_data_ptr_access_error_msg")(storage._cdata, message)


@functools.cache
def can_swap() -> bool:
    return has("torch.UntypedStorage._swap_data_ptr_")  # 2.13 and later


def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Two storages exchange their memory; all tensors on them follow."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


_THREAD_KEY = "cudagraph trees of this thread"


def stash_for_backward_threads(value: object) -> None:
    """Let threads that run this thread's backwards get `value` by `stashed_for_this_thread`. It must stay alive."""
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(_THREAD_KEY, value)
    if sys.getrefcount(value) == before:
        # 2.11 takes a reference that it was not given, and gives it back when the thread ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def stashed_for_this_thread() -> Any:
    """What `stash_for_backward_threads` got in this thread, or in the thread whose backward it runs; or None."""
    return torch._C._get_obj_in_tls(_THREAD_KEY) if torch._C._is_key_in_tls(_THREAD_KEY) else None


@dataclasses.dataclass(eq=False)
class PrivatePool:
    """A memory pool of one CUDA device that only captures and staged inputs use."""

    device: int
    handle: Any

    @contextlib.contextmanager
    def routed(self) -> Iterator[None]:
        """Allocations of this thread come from the pool."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.device, self.handle)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self.device, self.handle)
            torch._C._cuda_releasePool(self.device, self.handle)

    def keep(self) -> None:
        """Keep the pool, used or not, as long as this object lives. Then `torch.cuda.empty_cache()` gives back its free
        memory, and the rest goes when its tensors are gone.

        `torch.cuda.MemPool` frees its memory by itself when it is dropped, but ends the process if any thread allocates
        from a pool, or captures, at that moment.
        """
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.device, self.handle)
        torch._C._cuda_endAllocateToPool(self.device, self.handle)
        weakref.finalize(self, torch._C._cuda_releasePool, self.device, self.handle).atexit = False

    def stop_routing(self) -> None:
        """After a capture that could not be ended: allocations come from the ordinary pool again."""
        with contextlib.suppress(RuntimeError):  # where torch had stopped it before it raised
            torch._C._cuda_endAllocateToPool(self.device, self.handle)

    def checkpoint(self) -> Any:
        return torch._C._cuda_getCheckpointState(self.device, self.handle)

    def restore(self, state: Any, owners: Sequence[torch.UntypedStorage], free: Sequence[int]) -> None:
        """Allocate the blocks of `state` again. `owners` own those at their addresses; those at `free` are freed."""
        torch._C._cuda_setCheckpointPoolState(self.device, state, [], [owner._cdata for owner in owners])
        for address in free:
            torch._C._cuda_cudaCachingAllocator_raw_delete(address)

    def live_blocks_are(self, addresses: set[int]) -> bool:
        return torch._C._cuda_checkPoolLiveAllocations(self.device, self.handle, addresses)

    def live_blocks(self) -> set[int]:
        """Addresses of all allocated blocks; slow."""
        segments = (s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(self.handle))
        blocks = (block for segment in segments for block in segment["blocks"])
        return {block["address"] for block in blocks if block["state"] == "active_allocated"}


def free_keeping_address(storage: torch.UntypedStorage) -> None:
    """Free the block that `storage` owns; it keeps the address without owning it."""
    torch._C._free_And_Remove_DeleterFn(storage._cdata)


def bare_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """`graph.replay` without the Python method around it."""
    return functools.partial(torch._C._CUDAGraph.replay, graph)


def caches_memory() -> bool:
    """Whether CUDA's caching allocator is in use; `PYTORCH_NO_CUDA_MEMORY_CACHING` turns it off."""
    if not has("torch._C._cuda_cudaCachingAllocator_is_enabled"):  # 2.15 and later
        return True
    return bool(torch._C._cuda_cudaCachingAllocator_is_enabled())


def raw_stream(device: torch.device) -> Callable[[], int]:
    """A function that returns the number of the current stream of `device`."""
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)
