"""Cuts a graph into captured and uncaptured parts, with as few captured parts as the order allows.

    graph, colours --split--> parts:   [capture | eager | capture]     cut where the colour changes
    parts, a callable each --assemble--> one boxed callable            that frees each value after its last use

Operators that launch nothing are "free": they go wherever their inputs are ready. The order keeps data flow, writes and
reads of one memory, and side effects: each random operator continues the random numbers of the last.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..placeholder import results_of, written_nodes
from ..torch_private import cuda as torch_cuda
from .blockers import attribute_of, is_free, tensors_of, value_of

CAPTURE, EAGER, FREE = "capture", "eager", "free"  # the colours of operators

MIN_KERNEL_COUNT = 2  # a captured part of a cut graph with fewer operators costs more than it saves

Run = tuple[bool, list[Node]]  # whether it is captured, its operators

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Part:
    """A sequence of operators that is captured, or not, as a whole."""

    captured: bool
    kernel_count: int  # how many of `nodes` are not free
    # Operators, in order. Constants (`get_attr`) are in no part; each part that reads one gets it.
    nodes: tuple[Node, ...] = ()
    # Values from before the part: inputs of the graph, or operators of earlier parts. A captured part also takes the
    # sizes of its tensors, because a recording is for one size.
    inputs: tuple[Node, ...] = ()
    outputs: tuple[Node, ...] = ()  # operators of the part that later parts or the graph's output read


def split(graph: Graph, colour: Callable[[Node], str], min_kernel_count: int = MIN_KERNEL_COUNT) -> tuple[Part, ...]:
    """The parts of `graph`. `colour(node)` is called once for each operator.

    Without an "eager" operator there is one part, whatever its size: captured if an operator is "capture". Else the
    first part has the colour that leads to fewer captured parts.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    colours = {node: colour(node) for node in nodes}
    if EAGER not in colours.values():
        captured = CAPTURE in colours.values()
        return _parts(graph, [(captured, nodes)], colours) if nodes else ()
    before = _predecessors(nodes, memory_of(nodes))
    while True:
        first = next(colours[n] for n in nodes if colours[n] != FREE)
        tries = [_runs(nodes, colours, before, captured) for captured in (first == CAPTURE, first != CAPTURE)]
        runs = min(tries, key=lambda runs: (sum(captured for captured, _ in runs), len(runs)))
        kernels = [[node for node in run if colours[node] == CAPTURE] for captured, run in runs if captured]
        small = [node for run in kernels if len(run) < min_kernel_count for node in run]
        if not small:
            return _parts(graph, runs, colours)
        colours.update(dict.fromkeys(small, EAGER))


def _predecessors(nodes: Sequence[Node], memory: dict[Node, set[Any]]) -> dict[Node, set[Node]]:
    """The operators that must come before each operator."""
    known = set(nodes)
    before = {node: {n for n in node.all_input_nodes if n in known} for node in nodes}
    writer: dict[Any, Node] = {}  # the last write to a memory
    readers: dict[Any, list[Node]] = {}  # reads since then
    last: dict[str, Node] = {}  # with a side effect: operators with the same one stay in their order
    for node in nodes:
        written = set().union(*(memory[n] for n in written_nodes(node)))
        touched = written.union(*(memory[n] for n in node.all_input_nodes))
        before[node].update(writer[key] for key in touched if key in writer)
        for key in written:
            before[node].update(readers.pop(key, ()))
            writer[key] = node
        for key in touched - written:
            readers.setdefault(key, []).append(node)
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        effects = {"random": random or "rng_state" in str(node.target), "other": node.is_impure()}
        for effect in filter(effects.get, effects):
            if effect in last:
                before[node].add(last[effect])
            last[effect] = node
        before[node].discard(node)
    return before


def memory_of(nodes: Iterable[Node]) -> dict[Node, set[Any]]:
    """Keys for the memory of each node's value and inputs. Values that share a key may share memory.

    The keys are the storages of its fake tensors, and the values that it is a view of by the operators' schemas: the
    fake tensors of some views don't share a storage.
    """
    memory: dict[Node, set[Any]] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in memory:  # an input or a constant
                memory[source] = {source, *storages_of(source)}
        is_view = torch_cuda.returns_views(node.target) if torch_cuda.is_operator(node.target) else is_free(node)
        viewed = node.all_input_nodes if is_view else written_nodes(node)
        memory[node] = {node, *storages_of(node)}.union(*(memory[n] for n in viewed))
    return memory


def storages_of(node: Node) -> set[int]:
    """Keys for the storages of the tensors in the value of `node`."""
    return {key for t in tensors_of(node) if (key := torch_cuda.storage_key(t)) is not None}


def _runs(nodes: Sequence[Node], colours: dict[Node, str], before: dict[Node, set[Node]], captured: bool) -> list[Run]:
    """Runs of one colour, the first one `captured` or not; captured and uncaptured ones alternate.

    Taking all operators that are ready before changing colour is optimal for a given first colour: an operator in an
    earlier run never makes a later one necessary.
    """
    waiting = list(nodes)
    done: set[Node] = set()
    runs: list[Run] = []
    free: list[Node] = []  # before the first run
    while waiting:
        run, left = [], []
        for node in waiting:  # in the graph's order, which keeps memory as it was planned
            if colours[node] in (CAPTURE if captured else EAGER, FREE) and before[node] <= done:
                run.append(node)
                done.add(node)
            else:
                left.append(node)
        if runs or any(colours[node] != FREE for node in run):
            runs.append((captured, free + run))
            free = []
        else:
            free = run
        waiting, captured = left, not captured
    return runs


def _parts(graph: Graph, runs: Sequence[Run], colours: dict[Node, str]) -> tuple[Part, ...]:
    sizes = {s: node for node in graph.find_nodes(op="placeholder") for s in torch_cuda.symbol_of(value_of(node))}
    parts = []
    for captured, run in runs:
        inside = set(run)
        inputs = {n: None for node in run for n in node.all_input_nodes if n not in inside and n.op != "get_attr"}
        if captured and sizes:
            symbols = set().union(*map(torch_cuda.free_symbols, tensors_of(*inputs, *run)))
            inputs |= {node: None for symbol, node in sizes.items() if symbol in symbols}
        part = Part(
            captured,
            sum(colours[node] != FREE for node in run),
            nodes=tuple(run),
            inputs=tuple(inputs),
            outputs=tuple(node for node in run if any(user not in inside for user in node.users)),
        )
        parts.append(part)
    return tuple(parts)


def part_module(gm: GraphModule, part: Part) -> GraphModule:
    """`part` of `gm` as a graph of its own, which takes a list of arguments, empties it, and returns the outputs."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in part.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in part.nodes:
        for source in node.all_input_nodes:
            if source not in copies:  # a constant
                assert source.op == "get_attr", source
                copies[source] = graph.node_copy(source)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in part.outputs))
    graph.lint()
    made = GraphModule(gm, graph)
    torch_cuda.set_boxed(made)
    return made


def assemble(
    gm: GraphModule, parts: Sequence[Part], runs: Sequence[Callable[[list[Any]], Sequence[Any]]]
) -> Callable[[list[Any]], list[Any]]:
    """One boxed callable that calls `runs`, one for each part, in turn.

    It empties its list of inputs, and drops each value when it is passed to the last part that reads it. Generated
    code takes 1 us for 60 values through 5 parts, a loop over lists 18 us.
    """
    results = results_of(gm.graph)
    placeholders = gm.graph.find_nodes(op="placeholder")
    names: dict[Node, str] = {}
    scope: dict[str, Any] = {f"part_{i}": run for i, run in enumerate(runs)}

    def name(node: Node) -> str:
        if node not in names:
            names[node] = f"v{len(names)}_{node.name}"
            if node.op == "get_attr":
                scope[names[node]] = attribute_of(node)
        return names[node]

    def listed(nodes: Sequence[Node]) -> str:
        return ", ".join(map(name, nodes))

    last_use: dict[Node, int] = {}
    for i, part in enumerate(parts):
        last_use.update(dict.fromkeys((*part.inputs, *part.outputs), i))
    last_use.update({node: len(parts) for node in results if isinstance(node, Node)})

    lines = ["def run(args):", f"    [{listed(placeholders)}] = args", "    args.clear()"]
    unread = [node for node in placeholders if node not in last_use]
    if unread:
        lines.append(f"    del {listed(unread)}")
    for i, part in enumerate(parts):
        lines.append(f"    args_{i} = [{listed(part.inputs)}]")
        dead = [node for node in part.inputs if last_use[node] == i]
        if dead:
            lines.append(f"    del {listed(dead)}")
        what = f"{'captured' if part.captured else 'as it is'}: {part.kernel_count} operators"
        lines.append(f"    [{listed(part.outputs)}] = part_{i}(args_{i})  # {what}")
    returned = [name(node) if isinstance(node, Node) else repr(node) for node in results]
    source = "\n".join([*lines, f"    return [{', '.join(returned)}]", ""])
    file = f"<cudagraph parts {next(_numbers)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # tracebacks show its lines
    exec(compile(source, file, "exec"), scope)
    run: Callable[[list[Any]], list[Any]] = scope["run"]
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
