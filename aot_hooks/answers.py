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

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from . import _compat
from .hook import KEEP, Hook
from .library.bitmask import bitmask
from .lossless import compare_hook, narrow_hook
from .nodes import op_name, source_line
from .plan import Choice
from .ranges import value_range
from .read_tables import Test
from .saved import Boundary, SavedTensor, SavedValue

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
        for node, users, tests in _wanted(choice):
            users = tuple(user for user in users if node in user.all_input_nodes)
            if not users:
                continue  # another value's answer, too
            if node is choice.value.bw_node and tests and set(users) == set(node.users):
                exact = compare_hook(tests, choice.value.row.dtype)
                choice.uses, choice.reason = [(exact, list(users))], f"{choice.reason}; comparisons keep their answers"
                continue
            computed = _compute(fw, boundary, node, for_inductor)
            known = next((v for v in boundary.tensors if v.fw_node is computed), None) if not tests else None
            if known is None:
                value = _new_value(bw, boundary, choice.value, node, computed)
                hook = _exact_hook(value, tests)
                reason = f"the outcome of {op_name(users[0] if tests else node)} for '{choice.value.row.name}'"
                answer = Choice(value, [(hook, list(users))], reason, settings=choice.settings, is_answer=True)
                found.append(answer)
            else:
                value = known
            for user in users:
                user.replace_input_with(node, value.bw_node)
            _erase_unread(node)
            choice.reason += "" if "answers" in choice.reason else "; comparisons keep their answers"
    _drop_unread(found)
    return found


def _wanted(choice: Choice) -> Iterable[tuple[Node, tuple[Node, ...], tuple[Test, ...] | None]]:
    """The nodes of the backward that `choice` needs answers for, who is to read these, and the tests, if any."""
    wanted: dict[Node, tuple[dict[Node, None], set[Test] | None]] = {}
    for found in choice.answers:
        node = choice.value.bw_node if found.answer is None else found.answer
        users = (found.reader,) if found.answer is None else found.users
        readers, tests = wanted.setdefault(node, ({}, None if found.tests is None else set()))
        readers.update(dict.fromkeys(users))
        if tests is not None:
            tests.update(found.tests or ())
    return [(n, tuple(users), None if t is None else tuple(sorted(t))) for n, (users, t) in wanted.items()]


def _exact_hook(value: SavedValue, tests: tuple[Test, ...] | None) -> Hook:
    if tests:
        return compare_hook(tests, value.row.dtype)
    if value.row.dtype is torch.bool:
        return bitmask() if value.row.shape else KEEP
    return narrow_hook(*value.row.value_range) if value.row.value_range and value.row.shape else KEEP


def _compute(fw: GraphModule, boundary: Boundary, node: Node, for_inductor: bool) -> Node:
    """The node of the forward that computes what the backward's `node` does; made if there is none."""
    in_forward = boundary.reads.in_forward
    known = in_forward(node)
    if known is not None:
        return known
    cone: dict[Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in cone and in_forward(current) is None:
            cone[current] = None
            stack += current.all_input_nodes
    position = {n: i for i, n in enumerate(fw.graph.nodes)}
    inputs = [f for n in cone for i in n.all_input_nodes if (f := in_forward(i)) is not None]
    last = max(inputs, key=position.__getitem__, default=next(iter(fw.graph.nodes)))
    while last.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    env: dict[Node, Node] = {}
    with fw.graph.inserting_before(last.next):
        for current in (n for n in node.graph.nodes if n in cone):
            for read in current.all_input_nodes:
                if read not in env:
                    source = in_forward(read)
                    assert source is not None
                    env[read] = _as_stored(fw, source) if for_inductor else source
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
        with _compat.tracing_on_fakes(value.fake_mode):  # type: ignore[attr-defined]
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
        shape=tuple(near.row.shape) if computed is near.fw_node else tuple(_compat.hint(s) for s in result.shape),
        dtype=result.dtype,
        nbytes=_compat.hint(result.numel()) * result.element_size(),
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
        if choice.view_of is None and not any(rs for c in (choice, *views) for _, rs in c.uses):
            for each in (choice, *views):
                # what the backward never read stays, as torch saved it
                each.is_dropped = bool(each.answers) or each.had_readers
                each.view_of = None if each.is_dropped else each.view_of
        elif not views and choice.view_of is None:
            choice.uses = [(hook, rs) for hook, rs in choice.uses if rs]
