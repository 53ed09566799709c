"""Inductor as stock torch calls it, and with what hooks need: a partition, names in the joint graph, heuristics.

gm --compile_fx--> joint pass --> partitioner, `rewrite` in it --> fw, bw --inner_compile--> code
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from cudagraph.torch_private import compilers
from cudagraph.torch_private.damaged_entries import checked_entries

from .inductor_fusion import choices, kernels_are_decided, marks_of, order_pass, pads_no_rows
from .inductor_lowering import register_operators
from .symbols import need

IN_PLANNED_ORDER = {"reorder_for_peak_memory": False}
"""Inductor settings by which kernels run in the order of the graph, in which live bytes were counted to split them.

Inductor's estimate does not know what a kernel writes over. It has moved copies of 128 MiB up into the peak.
"""
mode_options = compilers.mode_options
partitioned_by = compilers.partitioned_by
custom_partitioner = compilers.custom_partitioner


def config_keys() -> set[str]:
    return set(need("torch._inductor.config").get_config_copy())


def decompositions() -> dict[Any, Any]:
    return dict(need("torch._inductor.decomposition.select_decomp_table")())


def replace_random(gm: GraphModule) -> int:
    """Inductor's own rewrite of random ops (it runs on joint graphs only, before hooks stand in them)."""
    if need("torch._inductor.config").fallback_random:
        return 0
    return int(need("torch._inductor.fx_passes.replace_random.replace_random_passes")(gm) or 0)


TWO_PARTITIONERS = "Inductor's setting custom_partitioner_fn is set, but hooks need one of ours; take it out"


def first_joint_pass(fn: Callable[[Any], None], patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor settings by which `fn(graph)`, which changes no node, sees the joint graph before Inductor's own passes.

    A pass that the user set there runs after it; 2.11 to 2.15.
    """
    name = "joint_custom_pre_pass"
    base = need("torch._inductor.custom_graph_pass.CustomGraphPass")
    users = patches.get(name, need("torch._inductor.config.joint_custom_pre_pass"))
    users = tuple(users) if isinstance(users, (list, tuple)) else () if users is None else (users,)

    def run(graph: Any) -> None:
        for each in (fn, *users):
            each(graph)

    def uuid() -> Any:  # torch's key has the graph, and `fn` reads nothing else
        known = [each.uuid() if isinstance(each, base) else None for each in users]
        return None if None in known else ("aot_hooks names", *map(str, known))

    return {name: compilers.pass_class(base)(run, uuid)}


Compile = Callable[..., Any]
Pass = Callable[[GraphModule], GraphModule]
Capture = Callable[[Compile], Compile] | None  # from an inner compile to one that captures


def compile_stock(
    gm: GraphModule,
    inputs: Sequence[Any],
    patches: dict[str, Any],
    capture: Capture = None,
    inner: Compile | None = None,
    without_gradients: Pass | None = None,
) -> Callable[..., Any]:
    """The same call as stock torch's; with `capture` the compiled graphs are captured; `inner` compiles a graph.

    `without_gradients`: a pass over graphs that have no backward, which are not partitioned.
    """
    register_operators()
    inner = inner or need("torch._inductor.compile_fx.compile_fx_inner")

    @functools.wraps(inner)
    def inner_compile(graph: GraphModule, *args: Any, **kwargs: Any) -> Any:
        """It passes over damaged entries of torch's cache; a backward may be compiled when it first runs."""
        if without_gradients is not None and kwargs.get("is_inference"):
            graph = without_gradients(graph)
        with contextlib.nullcontext() if capture is not None else checked_entries():
            return inner(graph, *args, **kwargs)

    if capture is not None:
        return compilers.compile_inductor(gm, inputs, capture(inner_compile), patches)
    compile_fx = need("torch._inductor.compile_fx.compile_fx")
    compiled: Callable[..., Any] = compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches or None)
    return compiled


def compile_with_hooks(
    gm: GraphModule,
    inputs: Sequence[Any],
    patches: dict[str, Any],
    compiling: Callable[[], None],
    capture: Capture = None,
    without_gradients: Pass | None = None,
) -> Callable[..., Any]:
    """Inductor with its heuristics adapted to graphs that pack, see `choices`. Stock heuristics without them.

    `compiling()` is called before each graph is compiled, which may be at the first run of a backward, and is not
    called for graphs from torch's cache.
    """
    inner = need("torch._inductor.compile_fx.compile_fx_inner")
    handler = need("torch._inductor.virtualized.V").set_choices_handler

    def inner_compile(graph: GraphModule, *args: Any, **kwargs: Any) -> Any:
        compiling()
        # torch's key has a graph's attributes, but not its nodes' meta, where our marks for fusion are
        vars(graph)["_aot_hooks_marks"] = marks_of(graph)
        own = {"comprehensive_padding": False} if pads_no_rows(graph) else {}
        own |= IN_PLANNED_ORDER if kernels_are_decided(graph) else {}
        with handler(choices()), need("torch._inductor.config").patch(own):
            return inner(graph, *args, **kwargs)

    # a buffer that waits for its reuse stays alive: the backward of a transformer block held 0.4 GiB
    ours: dict[str, Any] = {"allow_buffer_reuse": False, "dynamic_scale_rblock": False}
    if not _has_cuda_graphs(patches):
        ours["graph_partition"] = False  # its pieces are for CUDA graphs; looking for them is 4% of compiling
    settings = ours | patches | order_pass(patches)
    return compile_stock(gm, inputs, settings, capture, inner_compile, without_gradients)


def _has_cuda_graphs(patches: Mapping[str, Any]) -> bool:
    return bool(patches.get("triton.cudagraphs", need("torch._inductor.config").triton.cudagraphs))


def copies_are_static(patches: Mapping[str, Any]) -> bool:
    """Whether compiled code can't decide in each call what to copy: with CUDA graphs, reuse of buffers, or in
    C++. Code in C++ crashes when it calls a Python operator that returns a list (2.13)."""
    in_cpp = patches.get("cpp_wrapper", need("torch._inductor.config").cpp_wrapper)
    return _has_cuda_graphs(patches) or bool(in_cpp) or bool(patches.get("allow_buffer_reuse", False))


def partition_only(gm: GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> None:
    """Inductor up to its partition, with its decompositions and joint-graph passes; nothing is generated."""
    compile_stock(gm, inputs, patches, inner=lambda *_args, **_kwargs: _only_planned)


def _only_planned(_inputs: list[Any]) -> Any:
    raise AssertionError("a graph that was only planned was called")
