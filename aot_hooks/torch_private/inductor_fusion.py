"""Inductor's scheduler, for graphs with hooks: the nodes of one kernel, its blocks, and the order of kernels.

nodes of a lowered graph --_before_fusion--> sizes bounded, dependencies merged, offload's order fixed
                         --choices---------> fused by their marks, rows kept in registers

passes/inline.py marks graph nodes in their `meta`: with FROM_HOOK, and with ALONE by `mark_alone`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from cudagraph.torch_private import compilers

from .symbols import need

FROM_HOOK = "aot_hooks_from_hook"  # on nodes that a hook put into the graph
ALONE = "aot_hooks_alone"  # on nodes that are fused only with nodes of the same mark
ALONE_IF_WRITTEN = "aot_hooks_alone_if_written"  # the same, for a kernel none of whose nodes has the mark above
WRITTEN = "inductor_realize_to_strides"  # Inductor's own, on nodes whose results it writes to memory where they stand


def mark_alone(nodes: Sequence[Node], name: str, key: str = ALONE) -> None:
    """Let Inductor fuse `nodes` with each other only."""
    for node in nodes:
        node.meta[key] = name


def pads_no_rows(gm: GraphModule) -> bool:
    """Whether `gm` is compiled without padded rows: values are written where a plan says, or sent to the host.

    Padded rows are not written over others, so a plan's bytes would be wrong. And Inductor 2.11 reads scales that are
    sent with padded strides, of memory without: they were wrong, or NaN.
    """
    return any(WRITTEN in n.meta or str(n.target).startswith("aot_hooks.offload_") for n in gm.graph.nodes)


def kernels_are_decided(gm: GraphModule) -> bool:
    """Whether the kernels of `gm` are decided, see `hold_kernels`. Then they run in the order of the graph."""
    return any(ALONE_IF_WRITTEN in n.meta for n in gm.graph.nodes)


def marks_of(graph: GraphModule) -> str:
    """All marks of a graph's nodes with their positions, as text for cache keys."""
    keys = (ALONE, ALONE_IF_WRITTEN, WRITTEN)
    marks = [(i, *map(n.meta.get, keys), FROM_HOOK in n.meta) for i, n in enumerate(graph.graph.nodes)]
    return repr([mark for mark in marks if any(mark[1:])])


def _origins(scheduler_node: Any) -> Any:
    return getattr(getattr(scheduler_node, "node", None), "origins", ())


def _is_ours(scheduler_node: Any) -> bool:
    return any(FROM_HOOK in origin.meta for origin in _origins(scheduler_node))


def _mark_of(scheduler_node: Any) -> str | None:
    """The mark from `mark_alone` on the nodes behind a scheduler node; cached there, as fusion compares many pairs."""
    cache = scheduler_node.__dict__
    if ALONE not in cache:
        origins = [origin for part in scheduler_node.get_nodes() for origin in _origins(part)]
        marks = (str(o.meta[key]) for key in (ALONE, ALONE_IF_WRITTEN) for o in origins if key in o.meta)
        cache[ALONE] = next(marks, None)
    mark: str | None = cache[ALONE]
    return mark


def _finds_a_scale(features: Any, names: str) -> bool:
    """Whether a kernel finds the scale of a row for a hook, by an operator of such names, and then packs the row."""
    origins = (origin for node in features.reduction_nodes() for origin in _origins(node))
    return any(FROM_HOOK in origin.meta and names in str(origin.target) for origin in origins)


def _reads_rows_twice(features: Any, groups: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a kernel finds the scale of long rows and then reads them again, in blocks that nobody has chosen yet.

    `kwargs`: what Inductor has decided. A kernel that also sums over columns names its blocks differently. A reduction
    within a reduction, as in 2.15, has some blocks that are too small.
    """
    settings = need("torch._inductor.config")
    at_most = need("torch._inductor.virtualized.V").graph.sizevars.statically_known_leq
    autotuned = settings.max_autotune or settings.max_autotune_pointwise
    autotuned |= settings.coordinate_descent_tuning or bool(settings.triton.multi_kernel)
    return not (
        autotuned
        or kwargs.get("fixed_config") is not None
        or kwargs.get("override_persistent_reduction")
        or "override_cooperative_reduction" in kwargs
        or [set(tiling) for tiling in groups] != [{"x", "r0_"}]
        or not _finds_a_scale(features, "aot_hooks.amax_")
        or getattr(features, "strict_reduction_rblock", lambda: None)() is not None  # 2.15: the block is fixed
        or getattr(features.get_reduction_hint(), "name", "") != "INNER"
        or not at_most(32, features.numel)  # fewer rows may be split over programs
        or settings.triton.force_cooperative_reductions
        or not at_most(1024, features.reduction_numel)
    )


@functools.cache
def choices() -> Any:
    """Inductor's heuristics, changed for kernels with hooks. Torch means `InductorChoices` to be overridden so.

    - Nodes that are marked alone are fused with nodes of the same mark only.
    - A row that is reduced for its scale and then read again stays in registers where that was faster on an H200. This
      includes rows that are not contiguous. Lengths: up to 4096 for a single reduction, but not two of 3072 or one of
      14336.
    - Any other such row is read 16 bytes a thread at a time. The longer it is, the more threads read it: then fewer
      rows are under way, and their second reads find them in the cache. silu(a) * b with two packings, 16384 rows on an
      H200, in pieces of 1024, 2048 and 4096: rows of 14336 559, 513, 452 us; of 8192 311, 267, 256; of 4096 138, 131,
      128; of 3072 100, 99, 114. Inductor's own choice is 2048 in 16 warps, 8 bytes a thread: a GELU of 3072 and its two
      packings took 340 us instead of 208.
    """
    base = need("torch._inductor.choices.InductorChoices")

    class Choices(base):  # type: ignore[misc, valid-type]
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            same = _mark_of(node1) == _mark_of(node2)
            return same and bool(base.can_fuse(scheduler, node1, node2, shared_data_score))

        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            if base.should_use_persistent_reduction(features, cooperative_reduction):
                return True
            hint_name = getattr(features.get_reduction_hint(), "name", "")
            if cooperative_reduction or hint_name not in ("INNER", "DEFAULT"):
                return False
            # a kernel that only unpacks for a reduction of the program's own is as Inductor would have it without hooks
            if not _finds_a_scale(features, "amax"):
                return False
            sizes = need("torch._inductor.virtualized.V").graph.sizevars
            count = len(features.reduction_nodes())
            longest = 4096 if count <= 1 else 1024 if count <= 8 else 0
            return bool(sizes.statically_known_leq(features.reduction_numel, longest))

        def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: Any) -> Any:
            kwargs = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
            if not _reads_rows_twice(features, groups, kwargs) or self.should_use_persistent_reduction(features, False):
                return kwargs
            at_most = need("torch._inductor.virtualized.V").graph.sizevars.statically_known_leq
            length = features.reduction_numel
            # the fastest numbers of a row that a program reads at once, of those that the docstring above lists
            block, warps = (1024, 4) if at_most(length, 3072) else (2048, 8) if at_most(length, 6144) else (4096, 16)
            config = {"XBLOCK": 1, "R0_BLOCK": block, "num_warps": warps, "num_stages": 1}
            return {**kwargs, "fixed_config": need("torch._inductor.codegen.triton.FixedTritonConfig")(config)}

        def uuid(self) -> str:
            return "aot_hooks choices 5"

    return Choices()


_OFFLOAD = ("aot_hooks.offload_", "aot_hooks.reload_")


def _order_offload(nodes: list[Any]) -> list[Any]:
    """Add dependencies by which Inductor's scheduler keeps each operator of offload between the same kernels.

    Before fusion the scheduler has its nodes in the order of the graph. Some kernels are fused with no other: products,
    attention, other operators. Each of these depends on the operator of offload before it, and each operator of offload
    on all of these since the one before it. The dependencies are of order alone (`is_fake`), which hold no memory.
    """
    is_ours = {n: str(getattr(n.node, "op_overload", "")).startswith(_OFFLOAD) for n in nodes}
    if not any(is_ours.values()):
        return nodes
    placed = [n for n in nodes if is_ours[n] or n.is_extern() or n.is_template()]
    weak = need("torch._inductor.dependencies.WeakDep")

    def after(node: Any, others: Sequence[Any]) -> None:
        for each in others:
            node.add_fake_dep(weak(next(iter(each.get_buffer_names())), node.get_name(), is_fake=True))

    before: list[Any] = []
    since: list[Any] = []
    for node in placed:
        after(node, before + since if is_ours[node] else before)
        if is_ours[node]:
            before, since = [node], []
        else:
            since.append(node)
    scheduler = nodes[0].scheduler
    scheduler.nodes = scheduler.topological_sort_schedule(nodes)
    scheduler.compute_ancestors()  # by which fusion avoids cycles
    return list(scheduler.nodes)


def _bound_size_hints(graph: Any) -> None:
    """Bound the bytes that Inductor counts for a read of an input of `graph` by the size of that input.

    Inductor counts the elements of the loop that reads. A scale, read once for each value of its block, counted as many
    bytes as those values in float32. Inductor searches the order of kernels with the least memory. Unpacking all saved
    tensors at once then seemed to free more than it took: four Llama blocks with int8 in blocks of 64 peaked at 8.8
    GiB, now 5.8. Goes when `torch._inductor.memory.get_freeable_input_buf` bounds it (2.11 to 2.15).
    """
    hint, whole = graph.get_dep_size_hint, need("torch._inductor.dependencies.StarDep")

    def bounded(dep: Any, count_bytes: bool = True) -> int:
        size: int = hint(dep, count_bytes)
        if size > 1 and dep.name in graph.graph_inputs:
            size = min(size, hint(whole(dep.name), count_bytes))
        return size

    graph.get_dep_size_hint = bounded


def _merge_dependencies_of_blocks(nodes: list[Any]) -> None:
    """Let the loop that packs a value in blocks be fused with the other loops that make or read the value.

    Inductor merges the dimensions of two loops before it compares their reads, but only if their numbers of dimensions
    differ. So [rows, blocks, 128] and [batch, tokens, width] seemed to share nothing, and silu(a) * b and its three
    packings with int8 became four kernels. This merges the dimensions of such packings' reads. Goes with torch 2.11:
    from 2.13 on Inductor finds them.
    """
    memory = need("torch._inductor.dependencies.MemoryDep")

    def dependencies(node: Any) -> list[Any]:
        return [d for d in node.read_writes.reads_and_writes() if isinstance(d, memory) and d.num_vars > 1]

    ours = {node: hasattr(node, "refresh_dependencies") and _is_ours(node) for node in nodes}
    others: dict[str, list[Any]] = {}
    for node in nodes:
        if not ours[node]:
            for d in dependencies(node):
                others.setdefault(d.name, []).append(d)

    def differ(a: Any, b: Any) -> bool:
        return bool(a.num_vars == b.num_vars and a.size != b.size and a.normalize() == b.normalize())

    for node in nodes:
        if ours[node] and any(differ(d, other) for d in dependencies(node) for other in others.get(d.name, ())):
            node.refresh_dependencies(normalize=True, need_clear_tiling_cache=False)


def _before_fusion(nodes: list[Any]) -> list[Any]:
    _bound_size_hints(need("torch._inductor.virtualized.V").graph)
    _merge_dependencies_of_blocks(nodes)
    return _order_offload(nodes)


def order_pass(patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor settings that run `_before_fusion` before fusion, and then the user's own pass; 2.11 to 2.15.

    Goes when the order of kernels can be fixed publicly.
    """
    name = "_pre_fusion_custom_pass"
    after = patches.get(name, getattr(need("torch._inductor.config"), name))

    def run(nodes: list[Any]) -> list[Any]:
        nodes = _before_fusion(nodes)
        return nodes if after is None else after(nodes)

    def uuid() -> str | None:
        then = "" if after is None else after.uuid()
        return None if then is None else f"aot_hooks order 4 {then}"

    if after is not None and not hasattr(after, "uuid"):
        return {name: run}  # torch caches no graph with a pass that has no uuid
    module = need("torch._inductor.custom_graph_pass")
    base = getattr(module, "CustomSchedulerPass", module.CustomGraphPass)  # 2.11 has the second only
    return {name: compilers.pass_class(base)(run, uuid)}
