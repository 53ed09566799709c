"""Cuts a graph into captured and uncaptured parts, with as few captured parts as the order allows.

    graph, colours --split--> parts:   [capture | eager | capture]     a topological order of the graph, cut where the
                                                                       colour changes
    parts, a callable each --assemble--> one boxed callable            that frees each value after its last use

Colours: "capture", "eager", or "free" for operators that launch nothing and go wherever their inputs are ready. The
order keeps data flow, writes and reads of one memory, and side effects. Random operators keep their order, because each
one continues the random numbers of the last.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..placeholder import written_nodes
from ..torch_private import cuda as torch_cuda
from .blockers import attribute_of, is_free, tensors_in, value_of

__all__ = ["CAPTURE", "EAGER", "FREE", "Part", "assemble", "part_module", "split"]

CAPTURE, EAGER, FREE = "capture", "eager", "free"

MIN_KERNEL_COUNT = 2  # a captured part of a cut graph with fewer operators costs more than it saves


@dataclass(frozen=True, eq=False)
class Part:
    """A sequence of operators that is captured, or not, as a whole.

    Attributes:
        nodes: its operators, in order. Constants (`get_attr`) are in no part; each part that reads one gets it.
        inputs: values from before the part: inputs of the graph, or operators of earlier parts. A captured part also
            takes the sizes of its tensors, because a recording is for one size.
        written_later: inputs of the graph that later parts write to; none for an uncaptured part.
        outputs: its operators that later parts or the graph's output read.
        kernel_count: how many of `nodes` are not free.
    """

    captured: bool
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    kernel_count: int
    written_later: tuple[Node, ...] = ()

    @property
    def arguments(self) -> tuple[Node, ...]:
        """The arguments of its call: `inputs` and `written_later`.

        The call may end a step, which copies out outputs of graphs that are still held. An input that is written to
        later must be an argument, so that the caller's own tensor is moved and not a copy of it.
        """
        return (*self.inputs, *(node for node in self.written_later if node not in self.inputs))


def split(graph: Graph, colour: Callable[[Node], str], min_kernel_count: int = MIN_KERNEL_COUNT) -> tuple[Part, ...]:
    """The parts of `graph`. `colour(node)` is called once for each operator.

    Without an "eager" operator there is one part, whatever its size: captured if an operator is "capture".
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    colours = {node: colour(node) for node in nodes}
    before = _predecessors(nodes)
    if EAGER not in colours.values():
        captured = CAPTURE in colours.values()
        return _with_boundaries(graph, [(captured, nodes)], colours) if nodes else ()
    while True:
        runs = _fewest_runs(nodes, colours, before)
        small = [
            node
            for captured, run in runs
            if captured and sum(colours[n] == CAPTURE for n in run) < min_kernel_count
            for node in run
            if colours[node] == CAPTURE
        ]
        if not small:
            return _with_boundaries(graph, runs, colours)
        colours.update(dict.fromkeys(small, EAGER))


def _predecessors(nodes: Sequence[Node]) -> dict[Node, set[Node]]:
    """The operators that must come before each operator."""
    known = set(nodes)
    before = {node: {n for n in node.all_input_nodes if n in known} for node in nodes}
    memory = _memory(nodes)
    writer: dict[Any, Node] = {}  # the last write to a memory
    readers: dict[Any, list[Node]] = {}  # reads since then
    last: dict[str, Node] = {}
    for node in nodes:
        written = set().union(*(memory[n] for n in written_nodes(node)))
        touched = written.union(*(memory[n] for n in node.all_input_nodes))
        for key in touched:
            if key in writer:
                before[node].add(writer[key])
        for key in written:
            before[node].update(readers.pop(key, ()))
            writer[key] = node
        for key in touched - written:
            readers.setdefault(key, []).append(node)
        for kind in _side_effects(node):
            if kind in last:
                before[node].add(last[kind])
            last[kind] = node
        before[node].discard(node)
    return before


def _memory(nodes: Sequence[Node]) -> dict[Node, set[Any]]:
    """Keys for the memory of each value. Values that share a key may share memory.

    The keys are the storages of its fake tensors, and the values that it is a view of by the operators' schemas: the
    fake tensors of some views don't share a storage.
    """
    memory: dict[Node, set[Any]] = {}

    def of(node: Node) -> set[Any]:
        if node not in memory:  # an input or a constant
            memory[node] = {node} | _storages(node)
        return memory[node]

    for node in nodes:
        memory[node] = {node} | _storages(node)
        memory[node] = memory[node].union(*(of(n) for n in _viewed(node)))
        for source in node.all_input_nodes:
            of(source)
    return memory


def _viewed(node: Node) -> list[Node]:
    """The arguments that a result of `node` may be, or be a view of."""
    if not torch_cuda.is_operator(node.target):
        return list(node.all_input_nodes) if is_free(node) else []
    return [*written_nodes(node), *(node.all_input_nodes if torch_cuda.returns_views(node.target) else ())]


def _storages(node: Node) -> set[int]:
    keys = (torch_cuda.storage_key(t) for t in tensors_in(value_of(node)))
    return {key for key in keys if key is not None}


def _side_effects(node: Node) -> list[str]:
    """Kinds of side effects that an operator has. Operators with the same kind stay in their order."""
    kinds = []
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags or "rng_state" in str(node.target):
        kinds.append("random")
    if node.is_impure():
        kinds.append("effects")
    return kinds


def _fewest_runs(
    nodes: Sequence[Node], colours: dict[Node, str], before: dict[Node, set[Node]]
) -> list[tuple[bool, list[Node]]]:
    """Runs of one colour, beginning with the colour that leads to fewer captured runs.

    Taking all operators that are ready before changing colour is optimal for a given first colour: an operator in an
    earlier run never makes a later one necessary.
    """
    first = next(colours[n] for n in nodes if colours[n] != FREE)
    other = EAGER if first == CAPTURE else CAPTURE
    tries = [_runs(nodes, colours, before, begin) for begin in (first, other)]
    return min(tries, key=lambda runs: (sum(captured for captured, _ in runs), len(runs)))


def _runs(
    nodes: Sequence[Node], colours: dict[Node, str], before: dict[Node, set[Node]], begin: str
) -> list[tuple[bool, list[Node]]]:
    waiting = list(nodes)
    done: set[Node] = set()
    runs: list[tuple[bool, list[Node]]] = []
    now = begin
    while waiting:
        run, left = [], []
        for node in waiting:  # in the graph's order, which keeps memory as it was planned
            if colours[node] in (now, FREE) and before[node] <= done:
                run.append(node)
                done.add(node)
            else:
                left.append(node)
        if run:
            runs.append((now == CAPTURE, run))
        waiting = left
        now = EAGER if now == CAPTURE else CAPTURE
    return _without_idle(runs, colours)


def _without_idle(runs: list[tuple[bool, list[Node]]], colours: dict[Node, str]) -> list[tuple[bool, list[Node]]]:
    """Merge runs of free operators into the run before, or into the next if they are the first."""
    merged: list[tuple[bool, list[Node]]] = []
    carried: list[Node] = []
    for captured, run in runs:
        if all(colours[node] == FREE for node in run):
            (merged[-1][1] if merged else carried).extend(run)
        elif merged and merged[-1][0] == captured:
            merged[-1][1].extend(run)
        else:
            merged.append((captured, carried + run))
            carried = []
    return merged


def _with_boundaries(
    graph: Graph, runs: Iterable[tuple[bool, list[Node]]], colours: dict[Node, str]
) -> tuple[Part, ...]:
    parts = []
    sizes = {
        symbol: node for node in graph.find_nodes(op="placeholder") for symbol in torch_cuda.symbol_of(value_of(node))
    }
    for captured, run in runs:
        inside = set(run)
        inputs = {n: None for node in run for n in node.all_input_nodes if n not in inside and n.op != "get_attr"}
        if captured and sizes:
            tensors = (t for node in (*inputs, *run) for t in tensors_in(value_of(node)))
            symbols = set().union(*map(torch_cuda.free_symbols, tensors))
            inputs |= {node: None for symbol, node in sizes.items() if symbol in symbols}
        outputs = [node for node in run if any(user not in inside for user in node.users)]
        kernel_count = sum(colours[node] != FREE for node in run)
        parts.append(Part(captured, tuple(run), tuple(inputs), tuple(outputs), kernel_count))
    return tuple(_with_writes(graph, parts))


def _with_writes(graph: Graph, parts: Sequence[Part]) -> list[Part]:
    """`parts`, with `written_later` for those that are captured."""
    if len(parts) == 1:
        return list(parts)
    memory = _memory([node for part in parts for node in part.nodes])
    placeholders = [node for node in graph.find_nodes(op="placeholder") if node in memory]
    written: set[Any] = set()
    made: list[Part] = []
    for part in reversed(parts):
        later = tuple(node for node in placeholders if not memory[node].isdisjoint(written))
        made.append(replace(part, written_later=later) if part.captured else part)
        written = written.union(*(memory[target] for node in part.nodes for target in written_nodes(node)))
    return made[::-1]


def part_module(gm: GraphModule, part: Part) -> GraphModule:
    """`part` of `gm` as a graph of its own, which takes a list of arguments, empties it, and returns the outputs."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in part.arguments:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def copy_of(node: Node) -> Node:
        if node not in copies:  # a constant
            assert node.op == "get_attr", node
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in part.nodes:
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(tuple(copies[node] for node in part.outputs))
    graph.lint()
    made = GraphModule(gm, graph)
    torch_cuda.set_boxed(made)
    return made


def assemble(
    gm: GraphModule, parts: Sequence[Part], runs: Sequence[Callable[[list[Any]], Sequence[Any]]]
) -> Callable[[list[Any]], list[Any]]:
    """One boxed callable that calls `runs`, one for each part, in turn: generated straight-line code.

    It empties its list of inputs, and drops each value when it is passed to the last part that reads it.
    """
    (results,) = gm.graph.output_node().args
    assert isinstance(results, (list, tuple))
    names: dict[Node, str] = {}
    scope: dict[str, Any] = {}

    def name(node: Node) -> str:
        if node not in names:
            names[node] = f"v{len(names)}_{node.name}"
            if node.op == "get_attr":
                scope[names[node]] = attribute_of(node)
        return names[node]

    inputs = [name(node) for node in gm.graph.find_nodes(op="placeholder")]
    last_use: dict[Node, int] = {}
    for i, part in enumerate(parts):
        last_use.update(dict.fromkeys((*part.arguments, *part.outputs), i))
    last_use.update({node: len(parts) for node in results if isinstance(node, Node)})

    lines = ["def run(args):"]
    if inputs:
        lines += [f"    {', '.join(inputs)}{',' if len(inputs) == 1 else ''} = args"]
    lines += ["    args.clear()"]
    unread = [node for node in gm.graph.find_nodes(op="placeholder") if node not in last_use]
    if unread:
        lines += [f"    del {', '.join(map(name, unread))}"]
    for i, (part, run) in enumerate(zip(parts, runs, strict=True)):
        scope[f"part_{i}"] = run
        lines += [f"    args_{i} = [{', '.join(map(name, part.arguments))}]"]
        dead = [node for node in part.arguments if last_use[node] == i]
        if dead:
            lines += [f"    del {', '.join(map(name, dead))}"]
        targets = "".join(f"{name(node)}, " for node in part.outputs)
        lines += [f"    {targets and targets.rstrip() + ' = '}part_{i}(args_{i})  # {_what(part)}"]
    returned = [name(node) if isinstance(node, Node) else repr(node) for node in results]
    lines += [f"    return [{', '.join(returned)}]", ""]
    return _defined("\n".join(lines), scope)


def _what(part: Part) -> str:
    return f"{'captured' if part.captured else 'as it is'}: {part.kernel_count} operators"


_made = 0


def _defined(source: str, scope: dict[str, Any]) -> Callable[[list[Any]], list[Any]]:
    """The function `run` of `source`; tracebacks through it show its lines."""
    global _made
    _made += 1
    file = f"<cudagraph parts {_made}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), scope)
    run: Callable[[list[Any]], list[Any]] = scope["run"]
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
