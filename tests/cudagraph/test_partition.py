"""Cutting graphs: the same results, as few captured parts as order allows, values freed after their last use."""

from __future__ import annotations

import itertools
import random
import weakref

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from cudagraph.graph.blockers import is_free
from cudagraph.graph.partition import CAPTURE, EAGER, FREE, assemble, part_module, split

pytestmark = pytest.mark.core
aten = torch.ops.aten


def run_parts(gm: GraphModule, colour, min_kernel_count: int = 1):
    """The parts, and what runs them; each part checks that it is given what it says."""
    parts = split(gm.graph, colour, min_kernel_count)
    runs = []
    for part in parts:
        module = part_module(gm, part)

        def run(args, forward=module.forward, part=part):
            assert len(args) == len(part.inputs)
            outputs = forward(args)
            assert args == [] and len(outputs) == len(part.outputs)
            return outputs

        runs.append(run)
    return parts, assemble(gm, parts, runs)


def captured_count(parts) -> int:
    return sum(part.captured for part in parts)


def random_graph(rng: random.Random, size: int, inputs: int = 3) -> GraphModule:
    """Operators on random earlier values, with views, tuples, writes and random numbers among them."""

    def fn(*xs):
        values = list(xs)
        for _ in range(size):
            a, b = rng.choice(values), rng.choice(values)
            kind = rng.randrange(9)
            if kind < 3:
                values.append(a + b)
            elif kind == 3:
                values.append(a.sin())
            elif kind == 4:
                values.append(a.t())
            elif kind == 5:
                values.extend(aten.var_mean.correction(a, [0], keepdim=True, correction=0))
                values[-2:] = [v.expand(4, 4) for v in values[-2:]]
            elif kind == 6:
                values.append(torch.rand_like(a) * b)
            elif kind == 7:
                fresh = b.clone(memory_format=torch.contiguous_format)
                aten.add_.Tensor(fresh, a)  # a write to what is in the graph
                values.append(fresh)
                values.append(aten.mul_.Tensor(fresh.t(), 0.5))
            else:
                values.append(torch.bernoulli(a.sigmoid()) + b)
        chosen = [rng.choice(values) for _ in range(4)]
        aten.copy_.default(xs[0], values[-1].clone())  # what AOTAutograd leaves of x.copy_(...)
        return (*chosen, xs[1])

    return make_fx(fn)(*(torch.randn(4, 4) for _ in range(inputs)))


@pytest.mark.parametrize("seed", range(60))
def test_any_cut_gives_what_the_graph_gives(seed):
    rng = random.Random(seed)
    gm = random_graph(rng, size=rng.randrange(1, 25))
    share = rng.choice([0.1, 0.5, 0.9])
    colours = {node: FREE if is_free(node) else (CAPTURE if rng.random() < share else EAGER) for node in gm.graph.nodes}
    _, run = run_parts(gm, colours.__getitem__, rng.choice([1, 2, 3]))
    inputs = [torch.randn(4, 4) for _ in range(3)]
    expected_inputs = [x.clone() for x in inputs]
    torch.manual_seed(seed)
    expected = gm(*expected_inputs)
    torch.manual_seed(seed)
    given = list(inputs)
    out = run(given)
    assert given == []
    for a, b in zip((*out, *inputs), (*expected, *expected_inputs), strict=True):
        assert torch.equal(a, b)


def fewest_captured_runs(nodes, colours, edges) -> int:
    """By trying every topological order."""
    best = len(nodes)
    for order in itertools.permutations(nodes):
        place = {n: i for i, n in enumerate(order)}
        if all(place[a] < place[b] for a, b in edges):
            runs = [colour for colour, _ in itertools.groupby(colours[n] for n in order)]
            best = min(best, runs.count(CAPTURE))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_as_few_captured_parts_as_order_allows(seed):
    rng = random.Random(seed)
    graph = Graph()
    x = graph.placeholder("x")
    nodes = []
    for _ in range(6):
        a, b = rng.choice([x, *nodes]), rng.choice([x, *nodes])
        nodes.append(graph.call_function(aten.add.Tensor, (a, b)))
    graph.output(tuple(nodes))
    colours = {node: rng.choice([CAPTURE, EAGER]) for node in nodes}
    edges = [(a, b) for b in nodes for a in b.all_input_nodes if a is not x]
    parts = split(graph, colours.__getitem__, min_kernel_count=1)
    assert captured_count(parts) == fewest_captured_runs(nodes, colours, edges)


def test_whole_graphs_are_one_part_whatever_their_size():
    gm = make_fx(lambda x: x.sin())(torch.randn(3))
    (part,) = split(gm.graph, lambda n: CAPTURE)
    assert part.captured
    (part,) = split(gm.graph, lambda n: EAGER)
    assert not part.captured
    gm = make_fx(lambda x: x.t())(torch.randn(3, 3))
    (part,) = split(gm.graph, lambda n: FREE)
    assert not part.captured


def test_a_write_stays_behind_what_reads_the_old_value_in_another_part():
    def fn(x, y):
        d = y.exp()
        total = aten.add.Tensor(x, d)
        aten.add_.Tensor(x, y)
        return total, d.sin()

    gm = make_fx(fn)(torch.randn(3), torch.randn(3))
    _, run = run_parts(gm, lambda node: EAGER if node.target is aten.add.Tensor else CAPTURE)
    x, y = torch.randn(3), torch.randn(3)
    assert all(map(torch.equal, run([x.clone(), y]), fn(x, y)))


def test_small_parts_are_not_captured():
    def fn(x):
        a = x.sin()
        b = a.cos()
        return ((b.exp() + 1).abs().sqrt(),)

    gm = make_fx(fn)(torch.randn(3))
    blocked = {aten.cos.default}
    parts, run = run_parts(gm, lambda n: EAGER if n.target in blocked else CAPTURE, 2)
    assert [(p.captured, p.kernel_count) for p in parts] == [(False, 2), (True, 4)]
    x = torch.randn(3)
    assert torch.equal(run([x])[0], fn(x)[0])


def test_values_are_freed_after_their_last_use():
    alive = []
    seen: list[weakref.ref] = []

    def watch(x):
        alive.append([r() is not None for r in seen])
        seen.append(weakref.ref(x))
        return (x + 1,)

    graph = Graph()
    x = graph.placeholder("x")
    unused = graph.placeholder("unused")
    a = graph.call_function(aten.sin.default, (x,))
    b = graph.call_function(aten.cos.default, (a,))
    c = graph.call_function(aten.exp.default, (b,))
    graph.output((c, None, 3))
    gm = GraphModule({}, graph)
    parts = split(graph, {a: CAPTURE, b: EAGER, c: CAPTURE}.__getitem__, 1)
    assert len(parts) == 3 and unused not in parts[0].inputs
    run = assemble(gm, parts, [lambda args: watch(args.pop())] * 3)
    given = [torch.randn(3), torch.randn(2)]
    dropped = weakref.ref(given[1])
    (out, nothing, three) = run(given)
    assert alive == [[], [False], [False, False]]  # each gone when the next part runs
    assert dropped() is None and nothing is None and three == 3 and out.shape == (3,)


def test_constants_go_with_the_parts_that_read_them():
    constant = torch.randn(3)

    def fn(x):
        return (x + constant).sin().cos() * constant, constant

    gm = make_fx(fn)(torch.randn(3))
    assert list(gm.graph.find_nodes(op="get_attr"))
    parts, run = run_parts(gm, lambda n: EAGER if n.target is aten.cos.default else CAPTURE)
    assert [p.captured for p in parts] == [True, False, True] and [len(p.inputs) for p in parts] == [1, 1, 1]
    x = torch.randn(3)
    out, same = run([x])
    assert torch.equal(out, fn(x)[0]) and same is constant


def test_a_traceback_shows_the_generated_line():
    gm = make_fx(lambda x: (x.sin().cos(),))(torch.randn(3))
    parts = split(gm.graph, lambda n: EAGER if n.target is aten.cos.default else CAPTURE, 1)

    def fails(args):
        raise ZeroDivisionError

    run = assemble(gm, parts, [part_module(gm, parts[0]).forward, fails])
    with pytest.raises(ZeroDivisionError) as caught:
        run([torch.randn(3)])
    assert any("part_1(args_1)  # as it is: 1 operators" in str(line) for line in caught.traceback)
