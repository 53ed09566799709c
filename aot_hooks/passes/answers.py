"""Decisions of the backward, made in the forward from unrounded numbers and stored in bits.

      forward                               backward, before               backward, after
        h = gelu(x)                           m = eq(amax, h)                (m is an input)
        m = eq(amax, h)     # copied here     g = mul(tangents, m)           g = mul(tangents, m)
        return ..., m       # one bit each

backward_reads.py finds the decisions by values that a hook rounds. A value that only decisions read is not saved any
more. A float that the backward only tests (`threshold_backward`) is stored as the outcomes of the tests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import after_inputs

from ..graphs.backward_reads import FoundRead, tests_of
from ..graphs.nodes import op_name, source_line, storage_bytes
from ..graphs.read_tables import Test
from ..graphs.saved import Boundary, SavedTensor, SavedValue, sizes_of
from ..graphs.value_ranges import value_range
from ..hook import KEEP, Hook
from ..library.bitmask import bitmask
from ..library.lossless import compare_hook, narrow_hook
from .edits import call, insert_backward_input, with_inputs
from .plan import Choice, stand_in

ANSWERS = stand_in("answers")  # only decisions read the value


def add_answers(
    fw: GraphModule, bw: GraphModule, boundary: Boundary, choices: Sequence[Choice], *, for_inductor: bool
) -> tuple[Boundary, tuple[Choice, ...]]:
    """Move the decisions that `choices` need to the forward; returns the boundary and the choices with the answers.

    Edits both graphs in place.
    """
    tensors = list(boundary.tensors)
    forward_node_of = dict(boundary.reads.forward_node_of) if any(c.answers for c in choices) else {}
    current = {choice.value: choice for choice in choices}
    new: dict[SavedValue, list[Choice]] = {}  # the answers, each beside the value whose reader decides
    alone = {c.value for c in choices if c.view_of is None} - {c.view_of for c in choices}  # packed for no other value
    for choice in choices:
        value, is_answered = choice.value, False
        for node, users, tests, op in _wanted(choice) if choice.packs else ():
            users = tuple(user for user in users if node in user.all_input_nodes)
            if not users:
                continue  # another value had the same answer
            is_answered = True
            choice = current[value]
            if tests and node is value.bw_node and value in alone and _only_read_by(node, users):
                # nobody needs the numbers: the hook stores the outcomes in their place
                readers = tuple(r for r in node.users if r.op != "output")
                current[value] = replace(choice, uses=((compare_hook(tests, value.row.dtype), readers),))
                continue
            computed = _compute(fw, forward_node_of, node, for_inductor)
            answer = next((v for v in tensors if v.fw_node is computed), None) if not tests else None
            if answer is None:
                answer = _new_value(bw, value, node, computed, max(v.row.storage for v in tensors) + 1)
                forward_node_of[answer.bw_node] = computed
                tensors.insert(tensors.index(value) + 1, answer)
                uses = ((_exact_hook(answer, tests), users),)
                reason = f"the outcome of {op} for '{value.row.name}'"
                new.setdefault(value, []).append(Choice(answer, uses, reason, settings=choice.settings, is_answer=True))
            else:
                (hook, readers), *others = current[answer].uses or ((KEEP, ()),)
                current[answer] = replace(current[answer], uses=((hook, (*readers, *users)), *others))
            for user in users:
                user.replace_input_with(node, answer.bw_node)
            _erase_unread(node)
        if is_answered:
            reason = f"{current[value].reason}; comparisons keep their answers"
            current[value] = replace(current[value], reason=reason)
    found = [c for value, choice in current.items() for c in (choice, *new.get(value, ()))]
    return replace(boundary, tensors=tensors), _drop_unread(found)


def _only_read_by(node: Node, users: Collection[Node]) -> bool:
    """Whether no reader of `node` but `users` reads numbers of it: others read its shape."""
    return all(user in users or tests_of(node, user) == () for user in node.users)


def _wanted(choice: Choice) -> Iterator[tuple[Node, tuple[Node, ...], tuple[Test, ...] | None, str]]:
    """The nodes of the backward that `choice` needs answers for: each with the users that are to read the answer, the
    tests, if any, and the operator that decides."""
    by_node: dict[Node, list[FoundRead]] = {}
    for found in choice.answers:
        by_node.setdefault(choice.value.bw_node if found.answer is None else found.answer, []).append(found)
    for node, group in by_node.items():
        users = dict.fromkeys(u for f in group for u in ((f.reader,) if f.answer is None else f.users))
        tests = tuple(sorted({t for f in group for t in f.tests or ()}))
        yield node, tuple(users), tests or None, group[0].read.op


def _exact_hook(value: SavedValue, tests: tuple[Test, ...] | None) -> Hook:
    """The hook that stores an answer in the fewest bits."""
    if tests:
        return compare_hook(tests, value.row.dtype)
    if value.row.dtype is torch.bool:
        return bitmask() if value.row.shape else KEEP
    return narrow_hook(*value.row.value_range) if value.row.value_range and value.row.shape else KEEP


def _compute(fw: GraphModule, forward_node_of: Mapping[Node, Node], node: Node, for_inductor: bool) -> Node:
    """The forward's node that computes the same as the backward's `node`; a copy of `node` if there is none."""
    if node in forward_node_of:
        return forward_node_of[node]
    cone = with_inputs([node], forward_node_of.__contains__)
    inputs = [forward_node_of[i] for n in cone for i in n.all_input_nodes if i in forward_node_of]
    last = after_inputs(max(inputs, default=next(iter(fw.graph.nodes))))
    env: dict[Node, Node] = {}
    with fw.graph.inserting_before(last.next):
        for current in (n for n in node.graph.nodes if n in cone):
            for read in current.all_input_nodes:
                if read not in env:
                    env[read] = _rounded_to_dtype(fw, forward_node_of[read]) if for_inductor else forward_node_of[read]
            args, kwargs = torch.fx.node.map_arg((current.args, current.kwargs), env.__getitem__)
            env[current] = fw.graph.create_node("call_function", current.target, args, kwargs, name=current.name)
            env[current].meta = dict(current.meta)
    return env[node]


def _rounded_to_dtype(fw: GraphModule, node: Node) -> Node:
    """`node` rounded to its dtype, for Inductor: it computes in float32, and a fused reader gets the unrounded number.

    The backward reads the rounded number, so a comparison must read it too: else none would equal its own maximum.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or value.dtype.itemsize != 2:
        return node
    bits = call(fw.graph, torch.ops.aten.view.dtype, node, torch.int16)
    return call(fw.graph, torch.ops.aten.view.dtype, bits, value.dtype)


def _new_value(bw: GraphModule, near: SavedValue, node: Node, computed: Node, storage: int) -> SavedValue:
    """A saved value for `computed`: it crosses beside `near`, and the backward reads it in place of its own `node`."""
    name = node.name + "_answer"
    placeholder = insert_backward_input(bw, near.bw_node.next, name, computed, near)
    result: torch.Tensor = computed.meta["val"]
    row: SavedTensor = replace(
        near.row,
        name=computed.name,
        op=op_name(computed),
        shape=sizes_of(result),
        dtype=result.dtype,
        nbytes=storage_bytes(result),
        storage=storage,
        source_line=source_line(node) or near.row.source_line,
        value_range=value_range(computed),
        backward_asks=None,
        backward_reads=(),
        is_input=False,
        is_output=False,
        is_static=False,
    )
    return SavedValue(computed, placeholder, row)


def _erase_unread(node: Node) -> None:
    """Erase `node` and all that it is computed from, as far as nothing reads it."""
    for current in sorted(with_inputs([node]), reverse=True):
        if current.op == "call_function" and not current.users and not current.is_impure():
            current.graph.erase_node(current)


def _drop_unread(choices: list[Choice]) -> tuple[Choice, ...]:
    """Take out the readers that are gone, and drop the values that have none left."""
    had_readers = {c.value for c in choices if c.readers}
    left = [
        replace(c, uses=tuple((hook, tuple(r for r in rs if r in c.value.bw_node.users)) for hook, rs in c.uses))
        for c in choices
    ]
    found = {c.value: c for c in left}
    for head in left:
        if head.view_of is not None:
            continue
        views = [c for c in left if c.view_of is head.value]
        if not any(c.readers for c in (head, *views)):
            for c in (head, *views):
                # a value that the backward never read, or that is alive anyway, stays as torch saved it
                if c.value in had_readers and not (c.value.row.is_input or c.value.row.is_static):
                    found[c.value] = replace(c, is_dropped=True, uses=(), view_of=None)
                else:
                    found[c.value] = c.kept(c.reason)
        elif not views:
            found[head.value] = replace(head, uses=tuple((hook, readers) for hook, readers in head.uses if readers))
    return tuple(found.values())
