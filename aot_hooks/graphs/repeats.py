"""What the backward computes that the forward computes, too; and which operators may not be computed twice.

forward                          backward
  r = bernoulli(e, .7)             r = bernoulli(e, .7)         other numbers: r draws
  m = gt(r, 0)                     m = gt(r, 0)                 the twin of the forward's m, if r were the same
  out = mul(x, m)                  grad_x = mul(tangents, m)    no twin: it is computed from a tangent
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..torch_private import values as torch_values
from .nodes import is_tagged, target_name
from .saved import crossing_nodes

# the arguments of these say which numbers come: a state of the generator, or its seed and offset
_WITH_STATE = (
    "run_and_save_rng_state",
    "run_with_rng_state",
    "graphsafe_run_with_rng_state",
    "rngprims.philox_rand.default",
)
# with these arguments an operator draws nothing: without dropout, or called for evaluation
_WITHOUT_DRAWS = {"dropout_p": 0, "p": 0, "train": False, "training": False}


def draws(node: Node) -> bool:
    """Whether `node` takes numbers from a random generator, by its operator or in a graph that it calls.

    What torch runs with a state of the generator that it passes to the backward does not count.
    """
    if node.op != "call_function" or target_name(node) in _WITH_STATE:
        return False
    if isinstance(node.target, torch_values.HigherOrderOperator):
        return any(_draws_inside(node, argument) for argument in (*node.args, *node.kwargs.values()))
    return _draws(node.target, node.args, node.kwargs)


def _draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the operator `target` draws random numbers if it is called so."""
    if not is_tagged(target, torch.Tag.nondeterministic_seeded):
        return False
    schema = torch_values.schema_of(target)
    for i, argument in enumerate(() if schema is None else schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        if argument.name in _WITHOUT_DRAWS and value == _WITHOUT_DRAWS[argument.name]:
            return False
    return True


def draw_counts(gm: GraphModule, *, with_state: bool = False) -> Counter[Any]:
    """How many nodes of `gm` draw random numbers, by operator; `with_state`: also those with a state of the generator.

    In the forward the latter are operators of the joint graph, too. In the backward they draw the same once more.
    """
    counts = Counter(node.target for node in gm.graph.nodes if draws(node))
    for node in gm.graph.nodes if with_state else ():
        if target_name(node) not in _WITH_STATE:
            continue
        position = next((i for i, argument in enumerate(node.args) if torch_values.is_operator(argument)), None)
        if position is None:
            counts[node.target] += 1
        elif _draws(node.args[position], node.args[position + 1 :], node.kwargs):
            counts[node.args[position]] += 1
    return counts


def twins(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int) -> dict[Node, Node]:
    """For each node of `bw` that has the value of a node of `fw`: that node.

    Nodes correspond if they call the same operator with corresponding arguments. Those that draw random numbers
    correspond by name: partitioners copy nodes with their names.
    """
    numbers = {node: f"%{i}" for i, node in enumerate(fw.graph.nodes)}
    known = {_key(node, fw, numbers): node for node in reversed(fw.graph.nodes) if not draws(node)}
    drawn = {node.name: node for node in fw.graph.nodes if draws(node)}
    found = {slot: node for node, slot in crossing_nodes(fw, bw, num_fwd_outputs)}
    for node in bw.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        twin = None
        if draws(node):  # whatever its arguments are: a part of them may be computed with a state
            twin = drawn.get(node.name)
        elif all(n in found for n in node.all_input_nodes):
            twin = known.get(_key(node, bw, {n: numbers[found[n]] for n in node.all_input_nodes}))
        if twin is not None and twin.target == node.target:
            found[node] = twin
    return found


def _key(node: Node, gm: GraphModule, numbers: dict[Node, str]) -> Any:
    """What the value of `node` is computed by, and from: nodes stand by their `numbers`."""
    if node.op == "get_attr":
        return node.op, id(functools.reduce(getattr, str(node.target).split("."), gm))
    if node.op != "call_function":
        return node.op, node.name
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: _Number(numbers[n]))
    return node.op, node.target, repr(args), repr(kwargs)


class _Number(str):
    def __repr__(self) -> str:
        return str(self)


def _draws_inside(call: Node, argument: Any) -> bool:
    """Whether `argument` of a higher-order operator draws: a random operator that it runs, or a graph of nodes."""
    if isinstance(argument, Node) and argument.op == "get_attr":
        root = call.graph.owning_module
        inner = functools.reduce(lambda m, name: getattr(m, name, None), target_name(argument).split("."), root)
        return isinstance(inner, GraphModule) and any(map(draws, inner.graph.nodes))
    return torch_values.is_operator(argument) and torch.Tag.nondeterministic_seeded in getattr(argument, "tags", ())


def results(node: Node) -> list[Node]:
    """The nodes that stand for the value of `node`: its items, if it is a tuple."""
    value = node.meta.get("val")
    return [node] if isinstance(value, torch.Tensor) else [u for u in node.users if u.target is operator.getitem]
