"""AOTAutograd: its partition into forward and backward, and its graphs run as they are (`options["inner"] = "aten"`).

gm --aot_autograd--> joint --partition--> fw, bw --boxed--> generated Python
                                            `--if stored--> AtenCode, in torch's cache: source, constants, globals
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import pickle
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from cudagraph.torch_private import compilers
from cudagraph.torch_private.cuda import boxed
from cudagraph.torch_private.symbols import has

from .symbols import need
from .values import HigherOrderOperator


def min_cut_partition(
    joint: GraphModule, inputs: Any, draws: Callable[[Node], bool] = lambda node: True, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """torch's own partition. Operators with the tag of random ones for which `draws` is False count as any other.

    torch runs a random operator that it computes again with a state of the generator, by an operator of higher order
    that no compiler fuses or reads. 2.11 to 2.14 do so by the tag alone, which attention has without dropout, too.
    """
    split = compilers.min_cut_partition
    if has("torch._functorch.partitioners.is_nonzero_dropout_sdpa"):
        return split(joint, inputs, **kwargs)
    for node in joint.graph.nodes:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if random and node.meta.get("recompute") is not None and not draws(node):
            node.target = _Untagged(node.target)
    fw, bw = split(joint, inputs, **kwargs)
    for gm in (joint, fw, bw):
        untagged = [node for node in gm.graph.nodes if isinstance(node.target, _Untagged)]
        for node in untagged:
            node.target = node.target.operator
        if untagged:
            gm.recompile()
    return fw, bw


class _Untagged:
    """Stands for `operator` in a graph that torch partitions, without tags."""

    tags = ()

    def __init__(self, operator: Any) -> None:
        self.operator = operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.operator(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Untagged) and other.operator == self.operator

    def __hash__(self) -> int:
        return hash(self.operator)


def recomputing_pointwise(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """If `wanted`, torch's partition also computes those pointwise results again that the backward writes to memory.

    It saves them otherwise, for a product of the backward that reads them. The setting is in torch's cache keys.
    """
    if not wanted:
        return contextlib.nullcontext()
    need("torch._functorch.config.ban_recompute_materialized_backward")
    patch: contextlib.AbstractContextManager[Any] = need("torch._functorch.config").patch(
        ban_recompute_materialized_backward=False
    )
    return patch


def keeps_tangents() -> bool:
    """Whether AOTAutograd holds a backward's tangents to its end, as 2.11 does, and not to their last reader.

    The function of 2.11 that hands the tangents on keeps them in its frame. 2.13 and 2.15 generate code instead.
    """
    return has("torch._functorch._aot_autograd.runtime_wrappers._backward_prologue_functional")


def is_tangent(node: Node) -> bool:
    """Whether a node of the backward is an input that holds the gradient of an output.

    AOTAutograd gives these inputs names with "tangents", and torch's partitioner finds them by that as well.
    """
    return bool(need("torch._functorch.partitioners._is_tangent")(node))


def static_inputs(joint: GraphModule, of_program: Sequence[int]) -> tuple[int, ...]:
    """The inputs of `joint` that are parameters or buffers, by index. `of_program`: those that torch names so.

    torch counts the inputs of the program, in which a DTensor is one. From 2.13 on it is two inputs of the graph: its
    part of this process, and its mesh. Goes when torch gives partition functions the indices of its `inner_meta`, as it
    gives compilers (2.11 to 2.15).
    """
    roots: dict[Any, int] = {}  # descriptions of the program's inputs, in order
    found = []
    for i, node in enumerate(joint.graph.find_nodes(op="placeholder")):
        description = node.meta.get("desc", i)
        while hasattr(description, "base"):  # a part of a tensor
            description = description.base
        if roots.setdefault(description, len(roots)) in of_program:
            found.append(i)
    return tuple(found)


def compile_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., Any],
    compile_with: dict[str, Callable[..., Any]] | None = None,
    compiling: Callable[[], None] = lambda: None,
    *,
    stored: bool = False,
    without_gradients: Callable[[GraphModule], GraphModule] = lambda gm: gm,
) -> Callable[..., Any]:
    """AOTAutograd's graphs as they are: Python code, whose arguments are a list that it empties to free memory early.

    Args:
        compile_with: other compilers for "forward", "backward" and "inference" graphs.
        compiling: called before each graph is compiled.
        stored: use torch's cache of AOTAutograd's results. Only inside of `autograd_cache.extended`: `partition` is
            in no key of torch's.
        without_gradients: a pass over graphs that have no backward, which are not partitioned.
    """

    def as_it_is(graph_module: GraphModule, _inputs: Any) -> Any:
        run = boxed(graph_module)
        return _aten_code_class()(run, graph_module) if stored else run

    def announced(compiler: Callable[..., Any]) -> Callable[..., Any]:
        def compile_it(graph_module: GraphModule, inputs: Any) -> Any:
            compiling()
            return compiler(graph_module, inputs)

        return compile_it

    names = ("forward", "backward", "inference")
    using = {name: announced(compile_with[name] if compile_with else as_it_is) for name in names}
    inference = using["inference"]
    using["inference"] = lambda graph_module, inputs: inference(without_gradients(graph_module), inputs)
    if stored and compile_with is None:
        serializable = need("torch._functorch._aot_autograd.schemas.SerializableAOTDispatchCompiler")
        using = {name: serializable(_aten_code_class(), compiler) for name, compiler in using.items()}
    # entries hold the graphs themselves, and are made when the forward is compiled
    patches = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True} if stored else {}
    with need("torch._functorch.config").patch(patches):
        return compilers.compile_aten(gm, inputs, partition=partition, **using)


@contextlib.contextmanager
def recomputed(joint: GraphModule, again: set[str], kept: set[str]) -> Iterator[None]:
    """While entered, torch's partition of `joint` computes the nodes `again` in the backward, and saves `kept`.

    The marks are those of `torch.utils.checkpoint`; nodes that the program has marked itself keep theirs. torch's
    partition replaces the graph of `joint`, so nodes go by name. 2.11 to 2.15.
    """
    key = "recompute"
    own = {n.name: {key: n.meta[key]} for n in joint.graph.nodes if n.meta.get(key) is not None}
    policies = dict.fromkeys(kept, CheckpointPolicy.MUST_SAVE) | dict.fromkeys(again, CheckpointPolicy.MUST_RECOMPUTE)
    for node in joint.graph.nodes:
        if node.op == "call_function" and node.name in policies and node.name not in own:
            node.meta[key] = policies[node.name]
    try:
        yield
    finally:
        for node in joint.graph.nodes:
            node.meta.pop(key, None)
            node.meta.update(own.get(node.name, {}))


def partition_marks(joint: GraphModule) -> tuple[Any, ...]:
    """What torch's partition of `joint` depends on beside the graph itself: settings, and marks on nodes; 2.11 to 2.15.

    A partition may leave marks of its own, and those count as well.
    """
    config = need("torch._functorch.config")
    marks = ((n.name, n.meta["recompute"]) for n in joint.graph.nodes if n.meta.get("recompute") is not None)
    return config.ban_recompute_materialized_backward, *marks


def without_code(root: Any, graph: torch.fx.Graph) -> GraphModule:
    """A module of `graph` whose code is made when it is first run or read; 2.11 to 2.15."""
    made: GraphModule = need("torch.fx._lazy_graph_module._LazyGraphModule")(root, graph)
    return made


def copied(gm: GraphModule, *, lazily: bool = True) -> GraphModule:
    """`gm` with a graph of its own; fake values are shared.

    `lazily`: its code is made when it is first run or read, as torch does for Inductor; 2.11 to 2.15. Code of graphs
    that are only looked at took a fifth of the time of planning.
    """
    graph = copy.deepcopy(gm.graph)
    made = without_code(gm, graph) if lazily else GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    return made


def edited_copy(gm: GraphModule) -> GraphModule:
    """`gm` with a graph of its own, to edit it; fake values, and the code that takes its arguments, are shared.

    `copied` copies the code as well. Torch 2.13 warns when the code of a joint graph is copied; read in 2.11 to 2.15.
    """
    graph = torch.fx.Graph()
    nodes: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    graph.set_codegen(gm.graph._codegen)
    made = GraphModule(gm, graph)
    made.meta = dict(gm.meta)
    return made


def twin(gm: GraphModule) -> GraphModule:
    """A copy of a graph of Dynamo, to compile it twice, with all that Dynamo has set on it and on its nodes.

    For example, AOTAutograd recognizes parameters by the sources that Dynamo has set on the inputs.
    """
    made = copied(gm)
    for new, old in ((made, gm), *zip(made.graph.nodes, gm.graph.nodes, strict=True)):
        vars(new).update({name: value for name, value in vars(old).items() if name not in vars(new)})
    return made


@contextlib.contextmanager
def isolated_compilation() -> Iterator[None]:
    """A context for one of several compilations in the same call of a backend; 2.11 to 2.15.

    AOTAutograd keeps facts of a graph in the call's `TracingContext` until it compiles the backward: which saved
    tensors the backward may write over, for one. A later compilation would replace them.
    """
    context = need("torch._guards.TracingContext").try_get()
    with contextlib.nullcontext() if context is None else need("torch._guards.tracing")(copy.copy(context)):
        yield


@contextlib.contextmanager
def second_compilation() -> Iterator[None]:
    """`isolated_compilation`, also where torch cuts a graph for DDP; 2.11 to 2.15.

    There the first call of what is compiled returns fake tensors, and each lazy compilation of a backward counts as
    that of the next part. This compilation has real tensors from the first call, and is not counted.
    """
    with isolated_compilation():
        context = need("torch._guards.TracingContext").try_get()  # a copy
        if cuts_for_ddp():
            context.fakify_first_call, context.ddp_optimizer_ctx = False, None
        yield


def written_inputs() -> tuple[int, ...]:
    """Inputs of the graph that was compiled last, or taken from the cache, that it writes to; 2.11 to 2.15."""
    infos = getattr(compilers.forward_metadata(), "input_info", ())
    return tuple(i for i, info in enumerate(infos) if info.mutates_data or info.mutates_storage_metadata)


def cuts_for_ddp() -> bool:
    """Whether torch has cut the graph that is compiled for DDP, and so expects one compilation; 2.11 to 2.15."""
    return bool(getattr(need("torch._guards.TracingContext").try_get(), "fakify_first_call", False))


def inlines_hooks() -> bool:
    """Whether AOTAutograd is inlining the hooks in force into a graph; 2.11 to 2.15."""
    code = need("torch._functorch._aot_autograd.graph_compile.maybe_inline_graph_saved_tensors_hooks").__code__
    return any(frame.f_code is code for frame, _ in traceback.walk_stack(inspect.currentframe()))


def donate_nothing() -> None:
    """Keep the backward that is being compiled from writing over saved tensors; 2.11 to 2.15.

    Call it when the forward is compiled. AOTAutograd has listed the saved tensors that can be donated by then, and
    reads that list for the code of the backward and at run time. Goes when a partitioner can decide it.
    """
    metadata = compilers.forward_metadata()
    if getattr(metadata, "bw_donated_idxs", None):
        metadata.bw_donated_idxs = []


@functools.cache
def _aten_code_class() -> type:
    """The class of a graph that runs as it is, for torch's cache: generated Python, and its constants."""
    output_code = need("torch._inductor.output_code.OutputCode")

    class AtenCode(output_code):  # type: ignore[misc, valid-type]
        def __init__(self, run: Callable[[list[Any]], Any], graph_module: GraphModule | None) -> None:
            super().__init__()
            self.run = run
            self.graph_module: Any = graph_module
            self.stored: Any = None
            self._boxed_call = True

        def __call__(self, inputs: list[Any]) -> Any:
            return self.run(inputs)

        def __copy__(self) -> Any:
            return AtenCode(self.run, self.graph_module)

        def prepare_for_serialization(self) -> None:
            self.stored = _aten_as_data(self.graph_module)

        def __reduce__(self) -> Any:
            return _aten_from_data, self.stored

        def post_compile(self, *_args: Any, **_kwargs: Any) -> None: ...

        def set_triton_bundle(self, triton_bundle: Any) -> None: ...

    return AtenCode


def _aten_as_data(gm: GraphModule) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]:
    """Source, constants, globals, and globals that are modules. Bypasses torch's cache if a part is no plain data."""
    bypass = need("torch._functorch._aot_autograd.autograd_cache.BypassAOTAutogradCache")
    constants = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = getattr(gm, str(node.target), None)
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise bypass(f"'{node.target}' of the graph is a {type(value).__qualname__}")
            constants[str(node.target)] = value
        elif node.op in ("call_module", "call_method") or isinstance(node.target, HigherOrderOperator):
            raise bypass(f"the graph calls {node.target}")
    code = gm.graph.python_code("self")
    modules = {name: value.__name__ for name, value in code.globals.items() if inspect.ismodule(value)}
    others = {name: value for name, value in code.globals.items() if name not in modules}
    try:
        pickle.dumps(others)
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        raise bypass(f"a global of the graph's code cannot be stored: {e}") from e
    return code.src, constants, others, modules


def _aten_from_data(src: str, constants: dict[str, Any], others: dict[str, Any], modules: dict[str, str]) -> Any:
    space = {name: importlib.import_module(module) for name, module in modules.items()} | others
    forward = need("torch.fx.graph_module._forward_from_src")(src, space)
    owner = types.SimpleNamespace(**constants)
    return _aten_code_class()(functools.partial(forward, owner), None)


def is_stored() -> bool:
    """Whether torch's settings store graphs that run as they are, as torch 2.13 does for `aot_eager`."""
    config = need("torch._functorch.config")
    return bool(config.bundled_autograd_cache or config.force_autograd_cache)
