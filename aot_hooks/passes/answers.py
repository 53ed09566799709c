"""Decisions of the backward, made in the forward from unrounded numbers and stored in bits.

      forward                               backward, before               backward, after
        h = gelu(x)                           m = eq(amax, h)                (m is an input)
        m = eq(amax, h)     # copied here     g = mul(tangents, m)           g = mul(tangents, m)
        return ..., m       # one bit each

`add_answers` edits both graphs for the choices that round a value from which the backward decides (backward_reads.py
finds these decisions). What only decisions read is not saved any more. A float from which only tests of its numbers are
read (`threshold_backward`) is stored as their outcomes, see lossless.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from ..graphs.backward_reads import FoundRead
from ..graphs.nodes import op_name, source_line
from ..graphs.number_tests import tests_of
from ..graphs.read_tables import Test
from ..graphs.saved import Boundary, SavedTensor, SavedValue, shape_of
from ..graphs.value_ranges import value_range
from ..hook import KEEP, Hook
from ..library.bitmask import bitmask
from ..library.lossless import compare_hook, narrow_hook
from ..torch_private import values as torch_values
from .plan import Choice

__all__ = ["ANSWERS", "add_answers"]

ANSWERS = Hook("answers", lambda x: (), lambda p: p)
"""Stands in plans for the hook of a value that does not cross, because only decisions read it. Never run."""


def add_answers(
    fw: GraphModule, bw: GraphModule, boundary: Boundary, choices: list[Choice], *, for_inductor: bool
) -> list[Choice]:
    """Let the forward make the decisions that `choices` need, in place; gives the choices with those for the answers.

    Args:
        boundary: what crosses; the answers are added to its tensors.
        for_inductor: the forward will be fused, see `_as_stored`.
    """
    found: list[Choice] = []
    for choice in choices:
        found.append(choice)
        if not choice.packs:
            continue
        for node, users, tests, op in _wanted(choice):
            users = tuple(user for user in users if node in user.all_input_nodes)
            if not users:
                continue  # another value's answer, too
            if (
                node is choice.value.bw_node
                and tests
                and all(r in users or tests_of(node, r) == () for r in node.users)
            ):
                exact = compare_hook(tests, choice.value.row.dtype)
                readers = [r for r in node.users if r.op != "output"]
                choice.uses, choice.reason = [(exact, readers)], f"{choice.reason}; comparisons keep their answers"
                continue
            computed = _compute(fw, boundary, node, for_inductor)
            known = next((v for v in boundary.tensors if v.fw_node is computed), None) if not tests else None
            if known is None:
                value = _new_value(bw, boundary, choice.value, node, computed)
                hook = _exact_hook(value, tests)
                reason = f"the outcome of {op} for '{choice.value.row.name}'"
                answer = Choice(value, [(hook, list(users))], reason, settings=choice.settings, is_answer=True)
                found.append(answer)
            else:
                value = known
                _also_read_by(next(c for c in choices if c.value is known), users)
            for user in users:
                user.replace_input_with(node, value.bw_node)
            _erase_unread(node)
            choice.reason += "" if "answers" in choice.reason else "; comparisons keep their answers"
    _drop_unread(found)
    return found


def _also_read_by(choice: Choice, users: tuple[Node, ...]) -> None:
    (hook, readers), *others = choice.uses or [(KEEP, [])]
    choice.uses = [(hook, [*readers, *users]), *others]


def _wanted(choice: Choice) -> Iterator[tuple[Node, tuple[Node, ...], tuple[Test, ...] | None, str]]:
    """For each node of the backward that `choice` needs answers for: the node, who is to read these, the tests, if any,
    and the operator that decides."""
    by_node: dict[Node, list[FoundRead]] = {}
    for found in choice.answers:
        by_node.setdefault(choice.value.bw_node if found.answer is None else found.answer, []).append(found)
    for node, group in by_node.items():
        users = dict.fromkeys(u for f in group for u in ((f.reader,) if f.answer is None else f.users))
        tests = tuple(sorted({t for f in group for t in f.tests or ()}))
        yield node, tuple(users), tests or None, group[0].read.op


def _exact_hook(value: SavedValue, tests: tuple[Test, ...] | None) -> Hook:
    if tests:
        return compare_hook(tests, value.row.dtype)
    if value.row.dtype is torch.bool:
        return bitmask() if value.row.shape else KEEP
    return narrow_hook(*value.row.value_range) if value.row.value_range and value.row.shape else KEEP


def _compute(fw: GraphModule, boundary: Boundary, node: Node, for_inductor: bool) -> Node:
    """The node of the forward that computes what the backward's `node` does; made if there is none."""
    in_forward = boundary.reads.in_forward
    if node in in_forward:
        return in_forward[node]
    cone: dict[Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in cone and current not in in_forward:
            cone[current] = None
            stack += current.all_input_nodes
    position = {n: i for i, n in enumerate(fw.graph.nodes)}
    inputs = [in_forward[i] for n in cone for i in n.all_input_nodes if i in in_forward]
    last = max(inputs, key=position.__getitem__, default=next(iter(fw.graph.nodes)))
    while last.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    env: dict[Node, Node] = {}
    with fw.graph.inserting_before(last.next):
        for current in (n for n in node.graph.nodes if n in cone):
            for read in current.all_input_nodes:
                if read not in env:
                    env[read] = _as_stored(fw, in_forward[read]) if for_inductor else in_forward[read]
            args, kwargs = torch.fx.node.map_arg((current.args, current.kwargs), env.__getitem__)
            env[current] = fw.graph.create_node("call_function", current.target, args, kwargs, name=current.name)
            env[current].meta = dict(current.meta)
    return env[node]


def _as_stored(fw: GraphModule, node: Node) -> Node:
    """`node` rounded to its dtype.

    Inductor computes in float32 and hands a fused reader the number before it is rounded to 16 bits. The backward reads
    the rounded one, so a comparison with it must, too: else no number would equal its own maximum.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or value.dtype.itemsize != 2:
        return node
    for dtype in (torch.int16, value.dtype):
        new = fw.graph.call_function(torch.ops.aten.view.dtype, (node, dtype))
        with torch_values.tracing_on_fakes(value.fake_mode):  # type: ignore[attr-defined]
            new.meta["val"] = node.meta["val"].view(dtype)
        node = new
    return node


def _new_value(bw: GraphModule, boundary: Boundary, near: SavedValue, node: Node, computed: Node) -> SavedValue:
    """A saved value for `computed`, which the backward reads in place of its own `node`; crosses beside `near`."""
    with bw.graph.inserting_before(near.bw_node.next):
        placeholder = bw.graph.placeholder(node.name.replace("tangents", "tan") + "_answer")
    placeholder.target = placeholder.name
    placeholder.meta = {"val": computed.meta["val"]}
    if "desc" in near.bw_node.meta:
        placeholder.meta["desc"] = near.bw_node.meta["desc"]
    if near.fw_node.meta.get("saved_tensor_with_no_vc_check"):
        computed.meta["saved_tensor_with_no_vc_check"] = True
    result: torch.Tensor = computed.meta["val"]
    row: SavedTensor = replace(
        near.row,
        name=computed.name,
        op=op_name(computed),
        shape=shape_of(result),
        dtype=result.dtype,
        nbytes=torch_values.hint(result.untyped_storage().nbytes()),
        storage=max(v.row.storage for v in boundary.tensors) + 1,
        source_line=source_line(node) or near.row.source_line,
        is_input=False,
        is_output=False,
        is_static=False,
        backward_asks=None,
        value_range=value_range(computed),
        backward_reads=(),
    )
    value = SavedValue(computed, placeholder, row)
    boundary.reads.in_forward[placeholder] = computed
    boundary.tensors.insert(boundary.tensors.index(near) + 1, value)
    return value


def _erase_unread(node: Node) -> None:
    """Erase `node` and what only it read."""
    stack, erased = [node], set()
    while stack:
        current = stack.pop()
        if current.op == "call_function" and not current.users and current not in erased and not current.is_impure():
            erased.add(current)
            stack += current.all_input_nodes
            current.graph.erase_node(current)


def _drop_unread(choices: list[Choice]) -> None:
    """Take out the readers that are gone, and drop the values that have none left."""
    for choice in choices:
        choice.uses = [(hook, [r for r in rs if r in choice.value.bw_node.users]) for hook, rs in choice.uses]
    for choice in choices:
        views = [c for c in choices if c.view_of is choice.value]
        if choice.view_of is not None:
            continue
        if not any(readers for c in (choice, *views) for _, readers in c.uses):
            for each in (choice, *views):
                # what the backward never read, or is alive anyway, stays as torch saved it
                if each.had_readers and not (each.value.row.is_input or each.value.row.is_static):
                    each.is_dropped, each.uses, each.view_of = True, [], None
        elif not views:
            choice.uses = [(hook, readers) for hook, readers in choice.uses if readers]
