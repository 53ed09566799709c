"""What this package knows of AOTAutograd and Inductor: how they are called, what they tell, what torch's caches hold.

See `cudagraph/torch_private/cuda.py` for the rules of such files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from ..errors import UnsupportedTorchError
from .cuda import has, need

# --- AOTAutograd (2.11 to 2.15) ---


def static_inputs_of_forward() -> tuple[int, ...]:
    """While AOTAutograd compiles a forward: its inputs that are parameters or buffers, which stay where they are."""
    context = need("torch._guards.TracingContext").try_get()
    if context is None or context.fw_metadata is None:
        return ()
    return tuple(context.fw_metadata.static_input_indices or ())


def rebound_inputs() -> tuple[int, ...]:
    """While AOTAutograd compiles a forward or an inference graph: inputs that are given other memory (`set_`), by the
    graph or by AOTAutograd when the graph has run; what they are given is memory that the graph made."""
    context = need("torch._guards.TracingContext").try_get()
    if context is None or context.fw_metadata is None:
        return ()
    infos = context.fw_metadata.input_info
    return tuple(i for i, info in enumerate(infos) if info.mutates_storage_metadata)


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
