"""What several passes share: small edits of graphs, and the log. A new node gets its value by running it on fakes.

Graphs go to the log "aot_hooks" (`TORCH_LOGS="+aot_hooks"`) and to torch's structured trace.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from cudagraph.placeholder import nearest_first, results_of

from ..graphs.nodes import NO_VERSION_CHECK, storage_of
from ..graphs.saved import SavedValue
from ..torch_private import values as torch_values

log = logging.getLogger("aot_hooks")


def show(title: str, gm: GraphModule) -> None:
    """Writes `gm` as text to the log, at level DEBUG, and to torch's structured trace, if one of them is on."""

    def text() -> str:
        return str(gm.print_readable(print_output=False))

    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s\n%s", title, text())
    torch_values.trace_structured("aot_hooks_" + title.replace(" ", "_").replace("'", ""), text)


def finished(fw: GraphModule, bw: GraphModule) -> tuple[GraphModule, GraphModule]:
    """Both graphs, checked, with code for what the passes made of them."""
    for gm in (fw, bw):
        gm.graph.lint()
        gm.recompile()
    return fw, bw


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call of `target`, and give it its fake value."""
    node = graph.call_function(target, args, kwargs)
    run_on_fakes(node)
    return node


def computed(
    graph: Graph, fn: Callable[..., torch.Tensor], *inputs: Node, decompositions: Mapping[Any, Any] | None = None
) -> Node:
    """Insert the calls that `fn` makes on the values of `inputs`; returns its result."""
    values = [node.meta["val"] for node in inputs]
    with torch_values.tracing_on_fakes(values[0].fake_mode), torch_values.python_dispatcher():
        traced = make_fx(fn, decomposition_table=decompositions)(*values).graph
    made: dict[Any, Node] = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
    for node in traced.nodes:
        if node.op == "call_function":
            made[node] = graph.node_copy(node, made.__getitem__)
    return made[traced.output_node().args[0]]


def set_saved(
    fw: GraphModule, num_fwd_outputs: int, saved: Iterable[Any], like: Mapping[Any, Any] | None = None
) -> None:
    """Have `fw` save `saved` in place of what it saves. A value keeps AOTAutograd's description of it.

    `like`: values that are new, each with one that was saved, whose description it gets.
    """
    old, output, saved = results_of(fw.graph), fw.graph.output_node(), list(saved)
    descriptions = output.meta.get("desc")
    output.args = ((*old[:num_fwd_outputs], *saved),)
    if descriptions is not None and len(descriptions) == len(old):
        known = dict(zip(old[num_fwd_outputs:], descriptions[num_fwd_outputs:], strict=True))
        own = [known.get(node, known.get((like or {}).get(node))) for node in saved]
        output.meta["desc"] = [*descriptions[:num_fwd_outputs], *own]


def run_on_fakes(node: Node, mode: Any = None) -> None:
    """Give `node` its fake value, that of its operator on the fake values of its inputs; in `mode` if it has none."""

    def value(n: Node) -> Any:
        return n.meta["val"]

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
    fakes: list[Any] = [v for v in torch_values.pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    mode = fakes[0].fake_mode if fakes else mode
    if mode is None:  # it computes with sizes
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        return
    with torch_values.tracing_on_fakes(mode):
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


@contextlib.contextmanager
def described_as(like: Node) -> Iterator[None]:
    """A context in which new nodes of the graph of `like` get its meta, such as its line, but for their values."""
    known = set(like.graph.nodes)
    yield
    for node in set(like.graph.nodes) - known:
        node.meta = {key: value for key, value in like.meta.items() if key not in ("val", "tensor_meta")} | node.meta


def last_use(node: Node) -> Node:
    """The last node of the forward that reads the storage of `node`, through views as well; not the output."""
    key = storage_of(node)

    def readers(n: Node) -> list[Node]:
        return [user for user in n.users if user.op != "output"] if storage_of(n) == key else []

    return max(nearest_first([node], readers))


def with_inputs(nodes: Iterable[Node], stops: Callable[[Node], bool] = lambda node: False) -> dict[Node, None]:
    """`nodes` and all that they are computed from, without what `stops`."""

    def inside(some: Iterable[Node]) -> list[Node]:
        return [n for n in some if not stops(n)]

    return dict.fromkeys(nearest_first(inside(nodes), lambda n: inside(n.all_input_nodes)))


def clean_name(name: str) -> str:
    """`name` without "tangents" and "primals": AOTAutograd tells a graph's inputs apart by these words."""
    return name.replace("tangents", "tan").replace("primals", "prim")


def insert_backward_input(bw: GraphModule, before: Node, name: str, node: Node, like: SavedValue) -> Node:
    """A new input of the backward for the forward's `node`, described to AOTAutograd as the one of `like`.

    If torch saves `like` without its check of versions, it saves `node` so as well.
    """
    with bw.graph.inserting_before(before):
        placeholder = bw.graph.placeholder(clean_name(name))
    placeholder.target = placeholder.name  # the argument's name in the code; two packings of one value need two
    placeholder.meta = {"val": node.meta["val"]}
    if "desc" in like.bw_node.meta:
        placeholder.meta["desc"] = like.bw_node.meta["desc"]
    if like.fw_node.meta.get(NO_VERSION_CHECK):
        node.meta[NO_VERSION_CHECK] = True
    return placeholder
