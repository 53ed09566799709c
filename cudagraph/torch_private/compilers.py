"""AOTAutograd and Inductor: calling them, and reading properties of the graphs that they compile (2.11 to 2.15)."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from ..errors import UnsupportedTorchError
from .symbols import has, need

_exchanging = threading.Lock()

# --- AOTAutograd ---


def forward_metadata() -> Any:
    """AOTAutograd's `ViewAndMutationMeta` of the forward or inference graph that it compiles; None outside of that."""
    return getattr(need("torch._guards.TracingContext").try_get(), "fw_metadata", None)


def static_inputs_of_forward() -> tuple[int, ...]:
    """While AOTAutograd compiles a forward: its inputs that are parameters or buffers, which keep their addresses."""
    return tuple(getattr(forward_metadata(), "static_input_indices", None) or ())


def rebound_inputs() -> tuple[int, ...]:
    """While AOTAutograd compiles a forward or an inference graph: inputs that get other memory (`set_`).

    The graph does that, or AOTAutograd when the graph has run; the memory is made by the graph.
    """
    infos = getattr(forward_metadata(), "input_info", ())
    return tuple(i for i, info in enumerate(infos) if info.mutates_storage_metadata)


def returned_by_forward() -> int | None:
    """While AOTAutograd compiles a forward: the number of its first outputs, before those that are saved."""
    return getattr(forward_metadata(), "num_forward", None)


def runtime_only_passes_on(inputs: Sequence[Any]) -> bool:
    """Whether AOTAutograd's runtime around an inference graph passes inputs and outputs on as they are.

    Call it when the graph for Dynamo's `inputs` is compiled, or was taken from the cache. The runtime may turn off
    autograd and autocast. Read off `ViewAndMutationMeta`: no input is written to, no output made anew as an alias or
    marked dynamic, no subclass flattened, no effect tokens or states of generators passed along. Goes when Dynamo calls
    boxed backends.
    """
    meta = forward_metadata()
    if meta is None:
        return False
    fake = need("torch._subclasses.fake_tensor.FakeTensor")
    flattened = need("torch._functorch._aot_autograd.schemas.SubclassCreationMeta")
    plain = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, fake, int, torch.SymInt)
    return (
        all(type(x) in plain for x in inputs)
        and not any(info.mutates_data or info.mutates_metadata for info in meta.input_info)
        and not any(isinstance(x, flattened) for x in (*meta.subclass_inp_meta, *meta.subclass_fw_graph_out_meta))
        and meta.num_outputs_aliased == meta.num_intermediate_bases == 0
        and not (meta.dynamic_outputs or meta.tokens or meta.is_rng_op_functionalized or meta.num_graphsafe_rng_states)
        and meta.grad_enabled_mutation is None
    )


def min_cut_partition(
    joint: GraphModule,
    inputs: Any,
    *,
    merge_repeats: bool = True,
    whole_budget: bool = False,
    **kwargs: Any,
) -> tuple[GraphModule, GraphModule]:
    """torch's own partition.

    `merge_repeats=False` keeps repeated computations apart, whatever torch's settings are. `whole_budget`: as with
    `activation_memory_budget` 1, which computes no random numbers again.
    """
    partition = need("torch._functorch.partitioners.min_cut_rematerialization_partition")
    config = need("torch._functorch.config")
    budget = {"activation_memory_budget": 1.0} if whole_budget else {}
    with config.patch(cse=config.cse and merge_repeats, **budget):
        return partition(joint, inputs, **kwargs)


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
    return need("torch._dynamo.backends.common.aot_autograd")(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(gm, inputs)


def uncompiled(fn: Any) -> Any:
    """The function or module that `torch.compile` made `fn` of; `fn` itself if it is not compiled."""
    return getattr(fn, "_orig_mod" if isinstance(fn, torch.nn.Module) else "_torchdynamo_orig_callable", fn)


def inside_wrapper(function: Any) -> Any:
    """The function inside of a wrapper of Dynamo's; None if `function` is no wrapper."""
    return getattr(function, "_torchdynamo_orig_callable", None)


@contextlib.contextmanager
def noting_compiled_calls(note: Callable[[], None]) -> Iterator[None]:
    """A context in which `note` is called whenever a function is called that Dynamo compiles, in any thread."""

    def noted(callback: Any) -> Any:
        if callback not in (None, False):
            note()
        return callback

    end = exchange_callbacks(noted)
    try:
        yield
    finally:
        end()


def compiled_count() -> int:
    """How many functions Dynamo has compiled, or tried to. `torch._dynamo.reset()` may set it to 0."""
    return int(need("torch._dynamo.utils.counters")["frames"]["total"])


def exchange_callbacks(exchanged: Callable[[Any], Any]) -> Callable[[], None]:
    """Have compiled functions called with `exchanged(callback)`, in all threads; returns what ends it, in any order.

    Each such call asks `_callback_from_stance` for its callback, in 2.11 to 2.15. Goes when torch has a hook for it.
    """
    module = need("torch._dynamo.eval_frame")
    with _exchanging:
        before = module._callback_from_stance

        def callback_from_stance(callback: Any) -> Any:
            return before(callback if hasattr(callback_from_stance, "ended") else exchanged(callback))

        module._callback_from_stance = callback_from_stance

    def end() -> None:
        with _exchanging:
            callback_from_stance.ended = before  # type: ignore[attr-defined]
            while (inner := getattr(module._callback_from_stance, "ended", None)) is not None:
                module._callback_from_stance = inner  # what is inside of one that has ended

    return end


# --- Inductor ---

inductor_inner_compile: Callable[[], Callable[..., Any]] = functools.partial(
    need, "torch._inductor.compile_fx.compile_fx_inner"
)
callable_of: Callable[[Any], Callable[[list[Any]], Any]] = operator.attrgetter("current_callable")
# why Inductor's lowering found that a graph can't be captured
reason_of_inductor: Callable[[Any], str | None] = operator.attrgetter("disabled_cudagraphs_reason")


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's settings for `torch.compile(mode=...)`. Raises `RuntimeError` for an unknown mode."""
    return {} if mode in (None, "default") else dict(need("torch._inductor.list_mode_options")(mode))


def compile_inductor(
    gm: GraphModule,
    inputs: Sequence[Any],
    inner_compile: Callable[..., Any],
    patches: dict[str, Any],
) -> Callable[..., Any]:
    """Inductor without CUDA graphs of its own. Call it where AOTAutograd's cache is off, or extended: the cache by
    itself would return a graph that is not captured."""
    compile_fx = need("torch._inductor.compile_fx.compile_fx")
    return compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches | {"triton.cudagraphs": False})


def custom_partitioner(patches: dict[str, Any]) -> Any:
    """The partitioner that the user has set, in `patches` or in Inductor's configuration; None: torch's own."""
    return patches.get("custom_partitioner_fn", need("torch._inductor.config.custom_partitioner_fn"))


def partitioned_by(fn: Callable[..., Any], key: str, inner: Any = None) -> dict[str, Any]:
    """Inductor settings by which `fn` splits joint graphs; `key` is its identity for torch's caches.

    `inner`: the user's own partitioner, if `fn` calls one. Without an identity of it torch stores nothing.
    """
    base = need("torch._inductor.custom_graph_pass.CustomPartitionerFn")

    def uuid() -> Any:
        if inner is None:
            return key
        identity = inner.uuid()
        return None if identity is None else (key, identity)

    return {"custom_partitioner_fn": pass_class(base)(fn, uuid)}


@functools.cache
def pass_class(base: Any) -> Any:
    """The subclass of torch's `base` for passes of Inductor: `run`, with `identity()` as all that torch's keys hold."""

    class Pass(base):  # type: ignore[misc]
        def __init__(self, run: Callable[..., Any], identity: Callable[[], Any]) -> None:
            self.run, self.identity = run, identity

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

        def uuid(self) -> Any:
            return self.identity()

        def __reduce__(self) -> Any:
            return str, (str(self.uuid()),)  # torch's caches pickle it into their keys

    return Pass


def inductor_capture_settings(*, cut: bool) -> Any:
    """Inductor's settings for code in one function, or with `cut` in one function for each part that can be captured.

    Its scheduler cuts only with `triton.cudagraphs` on; the capture itself is turned off by `no_cudagraphs`.
    """
    return need("torch._inductor.config").patch({"triton.cudagraphs": cut, "graph_partition": cut})


def no_cudagraphs() -> Any:
    """The argument `cudagraphs` with which Inductor's inner compile captures nothing."""
    return need("torch._inductor.utils.BoxedBool")(False)


def is_compiled_graph(code: Any) -> bool:
    return isinstance(code, need("torch._inductor.output_code.CompiledFxGraph"))


def set_callable(code: Any, run: Callable[[list[Any]], Any]) -> None:
    code.current_callable = run


def mutated_inputs(code: Any) -> tuple[int, ...]:
    return tuple(sorted(code.mutated_input_idxs))


def calls_collectives(code: Any) -> bool:
    """Whether Inductor's code calls an operator by which processes talk to each other."""
    return "c10d" in code.source_code


def constants_of(code: Any) -> tuple[torch.Tensor, ...]:
    return tuple(c for c in (code.constants or {}).values() if isinstance(c, torch.Tensor))


class PartitionMap(NamedTuple):
    """For each input of a piece the graph's input, or None; for each output of a piece the graph's outputs."""

    inputs: tuple[int | None, ...]
    outputs: tuple[tuple[int, ...], ...]


def partitions_of(code: Any) -> list[PartitionMap] | None:
    """The pieces that Inductor cut the code into; None if it did not look for any."""
    if code.partition_maps is None:
        return None

    def several(index: int | list[int] | None) -> tuple[int, ...]:  # 2.15 has a list, before it was one or None
        return () if index is None else tuple(index) if isinstance(index, list) else (index,)

    return [
        PartitionMap(tuple(m.input_index_mapping), tuple(map(several, m.output_index_mapping)))
        for m in code.partition_maps
    ]


def with_partitions(code: Any, wraps: Sequence[Callable[[Any], Any]]) -> Callable[[list[Any]], Any]:
    """A call of `code` in which each of its pieces is wrapped.

    The object that holds the pieces belongs to the generated module, which graphs with equal code share: ours is a new
    one. torch wraps the old one in a function that aligns inputs, where inputs must be checked; so does this.
    """
    shared = code.compiled_fn_runner
    runner = type(shared)(list(shared.partitions))
    runner.recursively_apply_fns(list(wraps))
    if not code.inputs_to_check:
        return runner.call
    align = need("torch._inductor.utils.align_inputs_from_check_idxs")
    return align(runner.call, code.inputs_to_check, code.mutated_input_idxs)


def graph_number(code: Any) -> Any:
    """Inductor's number of a compiled graph, the same for a forward and its backward."""
    return code.fx_kwargs.get("graph_id")


def stored_as(run: Callable[..., Any], code: Any) -> None:
    """Have AOTAutograd store `run` in its cache as if it were Inductor's `code`, which `run` captures."""
    if code._fx_graph_cache_key is not None:  # else torch stores nothing
        for name in ("_fx_graph_cache_key", "_fx_graph_cache_debug_lines", "_time_taken_ns", "guards_expr"):
            setattr(run, name, getattr(code, name))


# --- Inductor's policy for CUDA graphs (2.13 and later; goes with support of 2.11) ---


def inductor_policy_class() -> type:
    """The base class of policies for CUDA graphs; `object` on a torch without them."""
    if not has("torch._inductor.cudagraph_utils.CUDAGraphPolicy"):
        return object
    return need("torch._inductor.cudagraph_utils.CUDAGraphPolicy")


def need_inductor_policy() -> None:
    """Raises `UnsupportedTorchError` on a torch without policies for CUDA graphs."""
    if not has("torch._inductor.config.cudagraph_policy"):
        raise UnsupportedTorchError(
            f"cudagraph.Policy needs torch 2.13 or later, which has torch._inductor.config.cudagraph_policy; this is "
            f"torch {torch.__version__}: use torch.compile(backend='cudagraph_tree', options={{'inner': 'inductor'}})"
        )
