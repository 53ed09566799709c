"""The only file of this package that touches `torch._*`.

Each shim names what it stands on, the torch versions it was read and run on, and what would delete it. A missing symbol
raises `UnsupportedTorchError` where it is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.fx import GraphModule, Node

from .errors import UnsupportedTorchError

TESTED = ("2.11.0", "2.13.0", "2.15.0")


def _resolve(path: str) -> Any:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            obj = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            obj = getattr(obj, name)
        return obj
    raise ImportError(path)


@functools.cache
def need(path: str) -> Any:
    """The private symbol at `path`; raises `UnsupportedTorchError` naming it if this torch has none."""
    try:
        return _resolve(path)
    except (ImportError, AttributeError):
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no {path}, which cudagraph needs; tested with torch {', '.join(TESTED)}: "
            "install one of them, or report this version"
        ) from None


def has(path: str) -> bool:
    """Whether this torch has the private symbol at `path`."""
    try:
        _resolve(path)
    except (ImportError, AttributeError):
        return False
    return True


# --- graphs: what operators are, and what they do (2.11 to 2.15) ---

to_copy = torch.ops.aten._to_copy.default  # what `x.to(...)` becomes in a graph


def is_operator(target: Any) -> bool:
    return isinstance(target, need("torch._ops.OpOverload"))


def is_higher_order(target: Any) -> bool:
    return isinstance(target, need("torch._ops.HigherOrderOperator"))


def written_arguments(target: Any) -> list[tuple[int, str]]:
    """(position, name) of each argument that an operator's schema says it writes to."""
    return [
        (i, argument.name)
        for i, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def returns_views(target: Any) -> bool:
    """Whether each result of an operator is, by its schema, a view of an argument that is not written to."""
    returned = target._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


def overloads_of(target: Any) -> list[Any]:
    """The operators that a node with this target may call; none for what is no operator."""
    if is_operator(target):
        return [target]
    if isinstance(target, need("torch._ops.OpOverloadPacket")):
        return [getattr(target, name) for name in target.overloads()]
    return []


def schema_of(operator: Any) -> str:
    return str(operator._schema)


def operator_called(name: str) -> Any:
    """The operator that `str()` writes as `name`, "mine.scale.default"; None if this process has none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if is_operator(found) else None


def unsafe_by_torch(node: Node) -> bool:
    """Whether torch's own list says that the operator of `node` can't be captured: forbidden by name, tagged
    `cudagraph_unsafe`, writing through a boolean index, or giving sparse tensors."""
    return bool(need("torch._inductor.utils.is_cudagraph_unsafe_fx_node")(node))


def data_dependent_sizes(value: Any) -> set[Any]:
    """The symbols in the sizes of `value` that come from a tensor's values ("unbacked")."""
    return set(need("torch.fx.experimental.symbolic_shapes.free_unbacked_symbols")(value))


def free_symbols(value: Any) -> set[Any]:
    """The symbols in the sizes of `value`."""
    return set(need("torch.fx.experimental.symbolic_shapes.free_symbols")(value))


def symbol_of(value: Any) -> tuple[Any, ...]:
    """The symbol that a symbolic size is; () for what is no size, or a size made of others."""
    if not isinstance(value, torch.SymInt):
        return ()
    expression = value.node.expr
    return (expression,) if expression.is_symbol else ()


def storage_key(x: torch.Tensor) -> int | None:
    """Identity of the storage of `x`, also for fake tensors, as long as `x` lives; None if it has none (sparse)."""
    if x.layout is not torch.strided:
        return None
    return int(x.untyped_storage()._cdata)


# --- AOTAutograd (2.11 to 2.15) ---


def static_inputs_of_forward() -> tuple[int, ...]:
    """While AOTAutograd compiles a forward: its inputs that are parameters or buffers, which stay where they are."""
    context = need("torch._guards.TracingContext").try_get()
    if context is None or context.fw_metadata is None:
        return ()
    return tuple(context.fw_metadata.static_input_indices or ())


def returned_by_forward() -> int | None:
    """While AOTAutograd compiles a forward: how many of its first outputs are not kept for the backward."""
    context = need("torch._guards.TracingContext").try_get()
    if context is None or context.fw_metadata is None:
        return None
    count: int | None = getattr(context.fw_metadata, "num_forward", None)
    return count


def runtime_only_passes_on(inputs: Sequence[Any]) -> bool:
    """After AOTAutograd has compiled an inference graph for Dynamo's `inputs`, or `captures_in_cache` took it: whether
    what runs around that graph hands on inputs and outputs as they are, and else only turns off autograd and autocast.

    Read off `ViewAndMutationMeta`: no input is written to, no output made anew as an alias or marked dynamic, no
    subclass taken apart, no effect tokens or states of generators passed along. Goes when Dynamo calls boxed backends.
    """
    context = need("torch._guards.TracingContext").try_get()
    meta = context.fw_metadata if context is not None else None
    if meta is None:
        return False
    fake = need("torch._subclasses.fake_tensor.FakeTensor")
    taken_apart = need("torch._functorch._aot_autograd.schemas.SubclassCreationMeta")
    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, fake, int, torch.SymInt)
    return (
        all(type(x) in plain for x in inputs)
        and not any(info.mutates_data or info.mutates_metadata for info in meta.input_info)
        and not any(isinstance(x, taken_apart) for x in (*meta.subclass_inp_meta, *meta.subclass_fw_graph_out_meta))
        and meta.num_outputs_aliased == meta.num_intermediate_bases == 0
        and not (meta.dynamic_outputs or meta.tokens or meta.is_rng_op_functionalized or meta.num_graphsafe_rng_states)
        and meta.grad_enabled_mutation is None
    )


def min_cut_partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    partition = need("torch._functorch.partitioners.min_cut_rematerialization_partition")
    out: tuple[GraphModule, GraphModule] = partition(joint, inputs, **kwargs)
    return out


def compile_aten(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """AOTAutograd with a compiler for each kind of graph; mutations of inputs stay in inference graphs."""
    compiled: Callable[..., Any] = need("torch._dynamo.backends.common.aot_autograd")(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(gm, inputs)
    return compiled


def uncompiled(fn: Any) -> Any:
    """What `torch.compile` was given to make `fn`; `fn` itself if it was not made so."""
    if isinstance(fn, torch.nn.Module):
        return getattr(fn, "_orig_mod", fn)
    return getattr(fn, "_torchdynamo_orig_callable", fn)


def set_boxed(gm: GraphModule) -> None:
    """Have `gm.forward` take one list, which it empties, so that what it was given can be freed early."""
    gm.graph.set_codegen(need("torch.fx.graph._BoxedCodeGen")())
    gm.recompile()


def fake_mode_of(x: torch.Tensor) -> Any:
    """A context in which tensors are made as fake as `x` is."""
    return getattr(x, "fake_mode", None) or contextlib.nullcontext()


def without_modes() -> Any:
    """Real operators, whatever fake or tracing mode is on."""
    return need("torch.utils._python_dispatch._disable_current_modes")()


# --- Inductor (2.11 to 2.15) ---


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's settings for `torch.compile(mode=...)`. Raises `RuntimeError` for an unknown mode."""
    if mode is None or mode == "default":
        return {}
    return dict(need("torch._inductor.list_mode_options")(mode))


def inductor_inner_compile() -> Callable[..., Any]:
    inner: Callable[..., Any] = need("torch._inductor.compile_fx.compile_fx_inner")
    return inner


def compile_inductor(
    gm: GraphModule, inputs: Sequence[Any], inner_compile: Callable[..., Any], patches: dict[str, Any]
) -> Callable[..., Any]:
    """Inductor without CUDA graphs of its own. To be called where AOTAutograd's cache is off, or inside
    `captures_in_cache`: by itself it would answer with a graph that is not captured."""
    compile_fx = need("torch._inductor.compile_fx.compile_fx")
    patches = patches | {"triton.cudagraphs": False}
    compiled: Callable[..., Any] = compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches)
    return compiled


def without_autograd_cache() -> Any:
    """torch's cache of AOTAutograd's results off; Inductor's own cache of code stays on."""
    return need("torch._functorch.config").patch({"enable_autograd_cache": False})


def inductor_capture_settings(*, cut: bool) -> Any:
    """With `cut`, Inductor's scheduler puts what can be captured into functions of their own, which it does only where
    it believes that it will capture them; without, all is one function."""
    return need("torch._inductor.config").patch({"triton.cudagraphs": cut, "graph_partition": cut})


def no_cudagraphs() -> Any:
    """The argument `cudagraphs` of Inductor's inner compile that keeps it from capturing what it compiled."""
    return need("torch._inductor.utils.BoxedBool")(False)


def is_compiled_graph(code: Any) -> bool:
    return isinstance(code, need("torch._inductor.output_code.CompiledFxGraph"))


def callable_of(code: Any) -> Callable[[list[Any]], Any]:
    run: Callable[[list[Any]], Any] = code.current_callable
    return run


def set_callable(code: Any, run: Callable[[list[Any]], Any]) -> None:
    code.current_callable = run


def mutated_inputs(code: Any) -> tuple[int, ...]:
    return tuple(sorted(code.mutated_input_idxs))


def constants_of(code: Any) -> tuple[torch.Tensor, ...]:
    return tuple(c for c in (code.constants or {}).values() if isinstance(c, torch.Tensor))


def reason_of_inductor(code: Any) -> str | None:
    """Why Inductor's lowering found that a graph can't be captured."""
    reason: str | None = code.disabled_cudagraphs_reason
    return reason


class PartitionMap(NamedTuple):
    """Which input of the graph an input of a piece is, None for what is no input; which outputs an output of it is."""

    inputs: tuple[int | None, ...]
    outputs: tuple[tuple[int, ...], ...]


def partitions_of(code: Any) -> list[PartitionMap] | None:
    """The pieces of the code that Inductor made to be captured; None if it did not look for any."""
    if code.partition_maps is None:
        return None

    def several(index: int | list[int] | None) -> tuple[int, ...]:  # 2.15 has a list, before it was one or None
        return () if index is None else tuple(index) if isinstance(index, list) else (index,)

    return [
        PartitionMap(tuple(m.input_index_mapping), tuple(map(several, m.output_index_mapping)))
        for m in code.partition_maps
    ]


def with_partitions(code: Any, wraps: Sequence[Callable[[Any], Any]]) -> Callable[[list[Any]], Any]:
    """What runs `code` with each of its pieces wrapped.

    The object that holds the pieces belongs to the generated module, which graphs with equal code share: ours is a new
    one. What aligns inputs around the old one, which torch adds only where something is to be checked, is added again.
    """
    shared = code.compiled_fn_runner
    runner = type(shared)(list(shared.partitions))
    runner.recursively_apply_fns(list(wraps))
    run: Callable[[list[Any]], Any] = runner.call
    if code.inputs_to_check:
        align = need("torch._inductor.utils.align_inputs_from_check_idxs")
        run = align(run, code.inputs_to_check, code.mutated_input_idxs)
    return run


def graph_number(code: Any) -> Any:
    """Inductor's number of a compiled graph, the same for a forward and its backward."""
    return code.fx_kwargs.get("graph_id")


# --- AOTAutograd's cache (2.11 to 2.15) ---

_BESIDE = "cudagraph"  # attribute of the forward's metadata, which is stored in the entry as it is
_COPIED = ("_fx_graph_cache_key", "_fx_graph_cache_debug_lines", "_time_taken_ns", "guards_expr")


def why_not_cached() -> str:
    """Why entries that are made or taken now would not be those of our captures; "" if they would."""
    config = need("torch._inductor.config")
    if getattr(config, "cudagraph_policy", None) is not None:
        return "a cudagraph_policy is set, which changes what Inductor compiled"
    if config.freezing and not torch.is_grad_enabled():
        return "parameters are frozen"
    if need("torch._functorch._aot_autograd.autograd_cache.should_bundle_autograd_cache")():
        return "torch bundles compiled code with its entries"
    return ""


def stored_as(run: Callable[..., Any], code: Any) -> None:
    """Have AOTAutograd store `run`, which it is given to call, as Inductor's `code` that `run` captures."""
    if code._fx_graph_cache_key is None:
        return  # then torch stores nothing
    for name in _COPIED:
        setattr(run, name, getattr(code, name))


def beside_entry() -> Callable[[bytes], None] | None:
    """While AOTAutograd compiles a forward or an inference graph: a call that puts data beside the entry that will be
    made of it, also when that is not before the first backward. The last data counts. None if there is no place."""
    context = need("torch._guards.TracingContext").try_get()
    metadata = context.fw_metadata if context is not None else None
    return None if metadata is None else functools.partial(setattr, metadata, _BESIDE)


def _beside(entry: Any) -> bytes | None:
    found: bytes | None = getattr(entry.runtime_metadata, _BESIDE, None)
    return found or getattr(_traced_metadata(entry), _BESIDE, None)


def _traced_metadata(entry: Any) -> Any:
    """The forward's metadata as `TracingContext` has it when torch compiles: with tensor subclasses taken apart."""
    subclasses = entry.maybe_subclass_meta
    return entry.runtime_metadata if subclasses is None else subclasses.fw_metadata


@contextlib.contextmanager
def captures_in_cache(
    key: str,
    take: Callable[[bytes | None, tuple[str, ...]], Sequence[Any]],
    refused: type[Exception],
    finish: Callable[[Any, Any], Any],
) -> Iterator[None]:
    """What is compiled inside, on this thread, has `key` in its key of torch's cache of AOTAutograd's results.

    Of an entry that is found, `take(data beside it, ("forward", "backward") or ("inference",))` says what is known of
    its graphs, and `finish(code, known)` makes of the code of each what is to be called. If `take` raises `refused`,
    all is compiled as where there is no cache.

    Two functions of `torch._functorch._aot_autograd.autograd_cache` are called through ours and put back on exit, as
    `aot_hooks` does, which may be around us or not; who compiles holds Dynamo's lock, so nobody else is between. On the
    entry, the methods that finish loaded code are ours. Goes when torch lets a backend wrap what its cache loads.
    """
    module = need("torch._functorch._aot_autograd.autograd_cache")
    cache = module.AOTAutogradCache
    thread = threading.get_ident()

    def keyed(mod: Any, inputs: Any, config: Any, *rest: Any, **named: Any) -> Any:
        found, lines = make_key(mod, inputs, config, *rest, **named)
        if threading.get_ident() != thread:
            return found, lines
        static = sorted(getattr(config, "static_input_indices", None) or ())  # in torch's own key since 2.13
        own = hashlib.sha256(f"{key} {static}".encode()).hexdigest()[:32]
        return f"{found}_{own}", lines

    def lookup(*args: Any, **named: Any) -> Any:
        result = own_lookup.__func__(*args, **named)
        if result is None or threading.get_ident() != thread:
            return result
        entry = result[0]
        loaded = [entry.compiled_fw] if entry.compiled_bw is None else [entry.compiled_fw, entry.compiled_bw]
        words = ("inference",) if entry.compiled_bw is None else ("forward", "backward")
        try:
            known = take(_beside(entry), words)
        except refused as e:
            raise module.BypassAOTAutogradCache(str(e)) from e
        for each, of_it in zip(loaded, known, strict=True):
            each.post_compile = _finishing(each, of_it, finish)
        context = need("torch._guards.TracingContext").try_get()
        if context is not None:  # torch puts it there only when it compiles; `runtime_only_passes_on` reads it
            context.fw_metadata = _traced_metadata(entry)
        return result

    with need("torch._dynamo.convert_frame.compile_lock"):
        make_key, own_lookup = module.autograd_cache_key, cache.__dict__["_lookup"]
        module.autograd_cache_key, cache._lookup = keyed, staticmethod(lookup)
        try:
            yield
        finally:
            module.autograd_cache_key, cache._lookup = make_key, own_lookup


def _finishing(loaded: Any, known: Any, finish: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`post_compile` of loaded code: torch's own, and then ours."""
    own = loaded.post_compile
    is_backward = hasattr(loaded, "backward_state_indices")

    def post_compile(code: Any, fx_config: Any) -> Any:
        own(code, {**fx_config, "cudagraphs": no_cudagraphs()})
        run = finish(code, known)
        # what autograd calls is not for Dynamo to trace: as torch's own method says of a backward
        return torch.compiler.disable(run) if is_backward else run

    return post_compile


# --- Inductor's policy for CUDA graphs (2.13 and later; goes with support of 2.11) ---

_POLICY = "torch._inductor.cudagraph_utils.CUDAGraphPolicy"


def inductor_policy_class() -> type:
    """What a policy for CUDA graphs derives from; `object` on a torch that asks none."""
    base: type = need(_POLICY) if has(_POLICY) else object
    return base


def need_inductor_policy() -> None:
    """Raises `UnsupportedTorchError` on a torch that asks no policy."""
    if not has("torch._inductor.config.cudagraph_policy"):
        raise UnsupportedTorchError(
            f"cudagraph.Policy needs torch 2.13 or later, which has torch._inductor.config.cudagraph_policy; this is "
            f"torch {torch.__version__}: use torch.compile(backend='cudagraph_tree', options={{'inner': 'inductor'}})"
        )


# --- the allocator and capture (2.11 to 2.15) ---
# One signature in all of them. They go when torch offers the allocator's checkpoints and use counts publicly.

MARK_MODULE = "torch._inductor.cudagraph_trees"  # where torch.compiler.cudagraph_mark_step_begin() counts

storage_use_count: Callable[[int], int] = need("torch._C._storage_Use_Count")
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = need("torch._foreach_copy_")
graph_task_id: Callable[[], int] = need("torch._C._current_graph_task_id")  # -1 outside of a backward
# A context: operators neither record history nor count versions. Entering it takes 0.5 us.
below_autograd: Callable[[], Any] = need("torch._C._AutoDispatchBelowADInplaceOrView")

without_autocast: Callable[[], Any] = need("torch._C._DisableAutocast")  # a context

THREAD_KEY = "cudagraph trees of this thread"


class NoMarks:
    """Stands for torch's count of marks as long as nobody has imported what counts."""

    mark_step_counter = 0


def torch_marks() -> Any:
    """What has `mark_step_counter`, minus the number of calls of `torch.compiler.cudagraph_mark_step_begin()`; nothing
    is imported for it."""
    module = sys.modules.get(MARK_MODULE)
    return NoMarks if module is None else module.MarkStepBox


def storage_at(address: int, device: torch.device, nbytes: int) -> torch.UntypedStorage:
    """A storage over memory that it does not own."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return cast(torch.UntypedStorage, storage)


def identity(storage: torch.UntypedStorage) -> int:
    """The address of the C++ object that all aliases share; what `storage_use_count` takes."""
    cdata: int = storage._cdata
    return cdata


def _pointers_equal(tensors: Sequence[Any], addresses: Sequence[int | None], indices: Sequence[int]) -> bool:
    return all(tensors[i].data_ptr() == addresses[i] for i in indices)


# A build without CUDA lacks it.
pointers_equal: Callable[[Any, Any, Any], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _pointers_equal
)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(tensor)


def can_poison() -> bool:
    return has("torch._C._set_storage_data_ptr_access_error_msg")


def poison(storage: torch.UntypedStorage, message: str) -> None:
    """From now on, reading the memory of any tensor on `storage` raises a `RuntimeError` with `message`."""
    need("torch._C._set_storage_data_ptr_access_error_msg")(storage._cdata, message)


def can_swap() -> bool:
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # 2.13 and later


def swap_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Two storages exchange their memory; all tensors on them follow."""
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]


def keep_for_backward_threads(value: object) -> None:
    """Let threads that run this thread's backwards find `value` with `kept_for_this_thread`. `value` must live on."""
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(THREAD_KEY, value)
    if sys.getrefcount(value) == before:
        # 2.11 takes a reference that it was not given, and gives it back when the thread ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def kept_for_this_thread() -> Any:
    """What the thread that this one runs a backward for, or this one, has kept; None if nothing."""
    return torch._C._get_obj_in_tls(THREAD_KEY) if torch._C._is_key_in_tls(THREAD_KEY) else None


class PrivatePool:
    """A memory pool of one CUDA device that only captures and staged inputs use."""

    def __init__(self, device: int, handle: Any) -> None:
        self.device = device
        self.handle = handle

    @contextlib.contextmanager
    def routed(self) -> Iterator[None]:
        """Allocations of this thread come out of the pool."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.device, self.handle)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self.device, self.handle)
            torch._C._cuda_releasePool(self.device, self.handle)

    def keep(self) -> None:
        """It is there, used or not, until this object is gone. Then what is free of it goes with the next
        `torch.cuda.empty_cache()`, and what is held when it is let go of.

        `torch.cuda.MemPool` gives its memory back by itself when it is dropped, but ends the process if any thread
        allocates from a pool, or captures, at that moment.
        """
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.device, self.handle)
        torch._C._cuda_endAllocateToPool(self.device, self.handle)
        weakref.finalize(self, torch._C._cuda_releasePool, self.device, self.handle).atexit = False

    def stop_routing(self) -> None:
        """After a capture that could not be ended: allocations come out of the ordinary pool again."""
        with contextlib.suppress(RuntimeError):  # where torch had stopped it before it raised
            torch._C._cuda_endAllocateToPool(self.device, self.handle)

    def checkpoint(self) -> Any:
        return torch._C._cuda_getCheckpointState(self.device, self.handle)

    def restore(self, state: Any, owners: Sequence[torch.UntypedStorage], free: Sequence[int]) -> None:
        """The blocks of `state` are allocated; `owners` own theirs from now on; those at `free` are given back."""
        torch._C._cuda_setCheckpointPoolState(self.device, state, [], [owner._cdata for owner in owners])
        for address in free:
            torch._C._cuda_cudaCachingAllocator_raw_delete(address)

    def live_blocks_are(self, addresses: set[int]) -> bool:
        equal: bool = torch._C._cuda_checkPoolLiveAllocations(self.device, self.handle, addresses)
        return equal

    def live_blocks(self) -> set[int]:
        """Addresses of all allocated blocks; slow."""
        live = set()
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == tuple(self.handle):
                address = segment["address"]
                for block in segment["blocks"]:
                    if block["state"] == "active_allocated":
                        live.add(address)
                    address += block["size"]
        return live


def free_keeping_address(storage: torch.UntypedStorage) -> None:
    """Free the block that `storage` owns; it goes on pointing there without owning it."""
    torch._C._free_And_Remove_DeleterFn(storage._cdata)


def bare_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """`graph.replay` without the Python method around it."""
    replay: Callable[[], None] = functools.partial(torch._C._CUDAGraph.replay, graph)
    return replay


def clear_cublas_workspaces() -> None:
    torch._C._cuda_clearCublasWorkspaces()


def raw_stream(device: int) -> Callable[[], int]:
    """A call that tells which stream of `device` is current, as a number."""
    return functools.partial(torch._C._cuda_getCurrentRawStream, device)
