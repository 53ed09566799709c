"""Plans that travel with compiled graphs: they come back as they were, or are refused with the reason."""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

import aot_hooks
from aot_hooks import policies
from aot_hooks.cache.entry import Checks, EntryRefused, ForAnother, Unusable, pack_up, unpack
from aot_hooks.cache.key import Key
from aot_hooks.identity.frozen import described
from aot_hooks.settings.setting import Setting

pytestmark = pytest.mark.core


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.dropout(self.up(x).relu(), 0.5)).tanh()


def plans_of(rule: Any) -> list[aot_hooks.Plan]:
    return [aot_hooks.plan(Mlp(), torch.randn(8, 16, requires_grad=True), policy=rule)]


def key_for(*rules: Any) -> Key:
    made = tuple(None if rule is None else Setting(rule, "donated") for rule in rules)
    return Key((), made)


def places(plans: list[aot_hooks.Plan]) -> list[tuple[str, str]]:
    return [("", ""), *((d.saved.module_path, d.saved.source_line) for p in plans for d in p.decisions)]


@functools.cache
def half(gain: float = 1.0) -> aot_hooks.Hook:
    def pack(x: torch.Tensor) -> Any:
        return (x.half(), x.dtype) if x.dtype == torch.float32 else x

    return aot_hooks.Hook("half", pack, lambda p: p if isinstance(p, torch.Tensor) else p[0].to(p[1]) * gain)


def small(saved: aot_hooks.SavedTensor) -> aot_hooks.Hook:
    return half() if saved.nbytes < 3000 else aot_hooks.KEEP


RULES = [
    aot_hooks.float8(),
    half(),
    aot_hooks.lossless(),
    policies.first_match(aot_hooks.lossless(), half()),
    small,
    lambda saved: half(),
]


@pytest.mark.parametrize("rule", RULES)
def test_plans_come_back_as_they_were(rule: Any) -> None:
    plans = plans_of(rule)
    key = key_for(rule)
    found = unpack(pack_up(plans, Checks(key), lambda: places(plans)), Checks(key), lambda: places(plans))
    assert [[dataclasses.replace(d, hook=aot_hooks.KEEP) for d in p.decisions] for p in found] == [
        [dataclasses.replace(d, hook=aot_hooks.KEEP) for d in p.decisions] for p in plans
    ]
    hooks = [
        (a.hook, b.hook)
        for p, q in zip(found, plans, strict=True)
        for a, b in zip(p.decisions, q.decisions, strict=True)
    ]
    assert all(
        described(a).text == described(b).text and (a is aot_hooks.KEEP) == (b is aot_hooks.KEEP) for a, b in hooks
    )
    assert any(a is not aot_hooks.KEEP for a, _ in hooks)
    assert (found[0].saved_bytes, found[0].packed_bytes) == (plans[0].saved_bytes, plans[0].packed_bytes)


def test_a_hook_among_the_means_of_a_budget_is_stored_by_its_number() -> None:
    own = aot_hooks.Hook("own", lambda x: x.half(), lambda p: p.float(), lossy=True, error=3e-4)  # can't be pickled
    policy = aot_hooks.budget(max_slowdown=math.inf, allow=("lossless", aot_hooks.int8(8), own))
    key = key_for(policy)
    (plan,) = plans_of(own)
    rows = tuple(dataclasses.replace(d, settings=(key.settings[0].key,)) for d in plan.decisions)
    plans = [dataclasses.replace(plan, decisions=rows)]
    assert any(d.hook is own for d in rows)
    (found,) = unpack(pack_up(plans, Checks(key), lambda: places(plans)), Checks(key), lambda: places(plans))
    assert [d.hook for d in found.decisions] == [d.hook for d in rows]


def test_rows_have_the_places_of_the_program_that_reads_them() -> None:
    plans = plans_of(half())
    data = pack_up(plans, Checks(key_for(half())), lambda: places(plans))
    there = [(f"new.{module}" if module else "", f"new {line}") for module, line in places(plans)]
    (found,) = unpack(data, Checks(key_for(half())), lambda: there)
    for new, old in zip(found.decisions, plans[0].decisions, strict=True):
        assert new.saved.source_line == f"new {old.saved.source_line}"
        assert new.saved.module_path == (f"new.{old.saved.module_path}" if old.saved.module_path else "")
    assert b"test_stored.py:" not in data


def test_symbolic_sizes_are_stored_with_their_expressions() -> None:
    compiled = torch.compile(Mlp(), backend="aot_hooks", dynamic=True, options={"inner": "aten", "policy": half()})
    compiled(torch.randn(8, 16, requires_grad=True))
    plans = list(aot_hooks.last_plans(compiled))
    assert any("s" in str(d.saved.shape) for d in plans[0].decisions)
    shapes = [str(d.saved.shape) for d in plans[0].decisions]
    (symbol,) = {name for shape in shapes for name in re.findall(r"s\d+", shape)}
    key = dataclasses.replace(key_for(half()), sizes=(symbol,))
    data = pack_up(plans, Checks(key), lambda: places(plans))
    (found,) = unpack(data, Checks(key), lambda: places(plans))
    assert [str(d.saved.shape) for d in found.decisions] == shapes
    (found,) = unpack(data, Checks(dataclasses.replace(key, sizes=("s99",))), lambda: places(plans))
    assert [str(d.saved.shape) for d in found.decisions] == [shape.replace(symbol, "s99") for shape in shapes]


def test_damage_is_refused_and_nothing_else_is_raised() -> None:
    plans = plans_of(half())
    key = key_for(half())
    data = pack_up(plans, Checks(key), lambda: places(plans))
    cuts = [data[:n] for n in range(0, len(data), 37)]
    flipped = [data[:n] + bytes([data[n] ^ 0x55]) + data[n + 1 :] for n in range(5, len(data), 101)]
    refused = 0
    for broken in [
        b"",
        b"nothing",
        pickle.dumps((2, None)),
        pickle.dumps((1, "text")),
        pickle.dumps(3),
        *cuts,
        *flipped,
    ]:
        try:
            unpack(broken, Checks(key), lambda: places(plans))
        except EntryRefused:
            refused += 1
    assert refused == len(cuts) + len(flipped) + 5
    with pytest.raises(EntryRefused, match="nodes that this graph does not have"):
        unpack(data, Checks(key), lambda: [])
    assert unpack(data, Checks(key), lambda: places(plans))


def test_a_policy_that_depends_on_something_outside_is_refused() -> None:
    nbytes = [1000]

    def policy(saved: aot_hooks.SavedTensor) -> aot_hooks.Hook:
        return aot_hooks.float8() if saved.nbytes < nbytes[0] else aot_hooks.KEEP

    plans, key = plans_of(policy), key_for(policy)
    data = pack_up(plans, Checks(key), lambda: places(plans))
    assert unpack(data, Checks(key), lambda: places(plans))
    nbytes[0] = 4000
    with pytest.raises(EntryRefused, match="the policy chooses otherwise"):
        unpack(data, Checks(key), lambda: places(plans))


def test_a_hook_that_depends_on_something_outside_is_refused() -> None:
    def pack(x: torch.Tensor) -> Any:
        if x.dtype == torch.bool:
            return x, x.dtype
        return x.to(torch.float16 if torch.get_float32_matmul_precision() == "highest" else torch.bfloat16), x.dtype

    hook = aot_hooks.Hook("by precision", pack, lambda p: p[0].to(p[1]))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        plans, key = plans_of(hook), key_for(hook)
        data = pack_up(plans, Checks(key), lambda: places(plans))
        assert unpack(data, Checks(key), lambda: places(plans))
        torch.set_float32_matmul_precision("high")
        with pytest.raises(EntryRefused, match="hook 'by precision' traces to another program on 'mul"):
            unpack(data, Checks(key), lambda: places(plans))
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_hook_that_left_a_tensor_alone_is_asked_again() -> None:
    """What it left alone is stored as kept, and it may take it now."""
    said = {"no": True}

    def declining() -> aot_hooks.Hook:
        return dataclasses.replace(half(), declines=lambda saved: "not now" if said["no"] else None)

    def giving_back() -> aot_hooks.Hook:
        return aot_hooks.Hook("half", lambda x: x if said["no"] else half().pack(x), half().unpack)

    for hook in (declining(), giving_back()):
        said["no"] = True
        plans = plans_of(hook)
        assert all(d.hook is aot_hooks.KEEP for p in plans for d in p.decisions)
        key = key_for(hook)
        data = pack_up(plans, Checks(key), lambda plans=plans: places(plans))
        unpack(data, Checks(key), lambda plans=plans: places(plans))
        said["no"] = False
        with pytest.raises(EntryRefused, match="traces to another program"):
            unpack(data, Checks(key), lambda plans=plans: places(plans))


def test_only_settings_that_were_asked_are_asked_again() -> None:
    """A policy of a region may be made for the rows of that region only."""

    def upset(saved: aot_hooks.SavedTensor) -> aot_hooks.Hook:
        raise ValueError(saved.name)

    plans = plans_of(half())
    key = key_for(half(), upset)
    (found,) = unpack(pack_up(plans, Checks(key), lambda: places(plans)), Checks(key), lambda: places(plans))
    asked = [d.settings for d in found.decisions]
    assert asked == [d.settings for d in plans[0].decisions]
    assert {key.settings[0].key} == {name for settings in asked for name in settings}


def test_a_hook_that_cannot_be_checked_is_never_taken() -> None:
    """It refuses the layout that the rows name."""

    def pack(x: torch.Tensor) -> Any:
        if x.dim() == 2 and x.stride(0) >= x.stride(1):
            raise RuntimeError("this is for columns")
        return (x.half() if torch.get_float32_matmul_precision() == "highest" else x.bfloat16()), x.dtype

    hook = aot_hooks.Hook("columns", pack, lambda p: p[0].to(p[1]))
    key = key_for(hook)
    (plan,) = plans_of(half())
    rows = [
        dataclasses.replace(d, hook=hook, settings=(Setting(hook, "donated").key,))
        for d in plan.decisions
        if d.hook.name != "keep"
    ]
    plans = [dataclasses.replace(plan, decisions=tuple(rows))]
    with pytest.raises(Unusable, match=r"'columns' cannot be traced on a tensor like .*for columns"):
        unpack(pack_up(plans, Checks(key), lambda: places(plans)), Checks(key), lambda: places(plans))


def transposed(w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    h = torch.tanh((w @ w).t()).t().contiguous().t()
    return h.sin() @ h + u


def repeated(w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    rows = (w @ w).sum(0, keepdim=True) + w.detach() @ w
    return rows.repeat_interleave(4, 0) @ u


@pytest.mark.parametrize(
    ("function", "is_other"),
    [(transposed, lambda x: x.stride(-1) != 1), (repeated, lambda x: x.shape[0] == 32)],
    ids=["order in memory", "transpose"],
)
def test_a_hook_is_checked_on_what_it_saw(function: Any, is_other: Any) -> None:
    gain = [2.0]
    hook = aot_hooks.Hook("gain", lambda x: x * gain[0] if is_other(x) else x, lambda x: x)
    plans = [aot_hooks.plan(function, *(torch.randn(8, 8, requires_grad=True) for _ in "wu"), policy=hook)]
    key = key_for(hook)
    data = pack_up(plans, Checks(key), lambda: places(plans))
    assert unpack(data, Checks(key), lambda: places(plans))
    gain[0] = 3.0
    with pytest.raises(ForAnother, match="'gain' traces to another program"):
        unpack(data, Checks(key), lambda: places(plans))


@torch.library.custom_op("test_stored::half", mutates_args=())
def operator(x: torch.Tensor) -> torch.Tensor:
    return x.half()


operator.register_fake(lambda x: x.half())


def test_an_operator_of_others_is_never_taken_unless_somebody_answers_for_it() -> None:
    hook = aot_hooks.Hook("op", lambda x: (operator(x), x.dtype), lambda p: p[0].to(p[1]))
    plans, key = plans_of(hook), key_for(hook)
    with pytest.raises(Unusable, match=r"calls operator test_stored\.half.*cache_hash='1'"):
        unpack(pack_up(plans, Checks(key), lambda: places(plans)), Checks(key), lambda: places(plans))
    hook = dataclasses.replace(hook, cache_hash="1")
    plans, key = plans_of(hook), key_for(hook)
    assert unpack(pack_up(plans, Checks(key), lambda: places(plans)), Checks(key), lambda: places(plans))
