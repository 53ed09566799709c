"""A saved value that is part of its storage stays if the backward reads beside it: unpacking brings its own numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import aot_hooks

SEED = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(36, 36, generator=SEED)
COPIED = aot_hooks.Hook("copied", lambda x: (x.clone(),), lambda packed: packed[0])


def columns(x: torch.Tensor) -> torch.Tensor:
    h, _ = (x @ WEIGHT).split([32, 4], 1)
    return h.as_strided((8, 32), (1, 8)) * h


def later_rows(x: torch.Tensor) -> torch.Tensor:
    _, h = (x @ WEIGHT).split([2, 6], 0)
    return h.as_strided((6, 32), (36, 1), 72) * h[:, :32]


def rows_from_the_start(x: torch.Tensor) -> torch.Tensor:
    _, h = (x @ WEIGHT).split([2, 6], 0)
    return h.as_strided((6, 32), (36, 1), 0) * h[:, :32]


def rows_before_others(x: torch.Tensor) -> torch.Tensor:
    h, _ = (x @ WEIGHT).split([2, 6], 0)
    return h.as_strided((8, 32), (36, 1)) * h[:1, :32]


def of_a_view(x: torch.Tensor) -> torch.Tensor:
    h, _ = (x @ WEIGHT).split([32, 4], 1)
    return h.t().as_strided((32, 8), (1, 32)) * h.t()


def written_in_place(x: torch.Tensor) -> torch.Tensor:
    h = (x @ WEIGHT)[:, :32].relu_()
    return h.as_strided((8, 32), (1, 8)) * h.tanh()


PROGRAMS = [columns, later_rows, rows_from_the_start, rows_before_others, of_a_view, written_in_place]


def gradient(f: Callable[[torch.Tensor], torch.Tensor], rows: int = 8) -> torch.Tensor:
    x = torch.randn(rows, 36, generator=torch.Generator().manual_seed(1), requires_grad=True)
    (found,) = torch.autograd.grad(f(x).sum(), x)
    return found


@pytest.mark.core
@pytest.mark.parametrize("hook", [COPIED, aot_hooks.offload(min_bytes=0), aot_hooks.float8()], ids=repr)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_read_beside_a_value_is_there(program: Callable[..., torch.Tensor], hook: aot_hooks.Hook) -> None:
    compiled = torch.compile(program, backend="aot_hooks", options={"inner": "aten", "policy": hook})
    expected, found = gradient(program), gradient(compiled)
    if hook.lossy:
        assert (found - expected).norm() <= 2**-4 * expected.norm()
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_input_with_gaps(dynamic: bool) -> None:
    def f(view: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return view.as_strided(view.shape, (1, 8)) * x

    options = {"inner": "aten", "policy": COPIED, "scope": "all"}
    compiled = torch.compile(f, backend="aot_hooks", dynamic=dynamic, options=options)
    base = torch.randn(8, 36, generator=torch.Generator().manual_seed(1))
    for rows in (8, 6):
        x = torch.randn(rows, 32, requires_grad=True)
        (found,) = torch.autograd.grad(compiled(base[:rows, :32], x).sum(), x)
        (expected,) = torch.autograd.grad(f(base[:rows, :32], x).sum(), x)
        assert torch.equal(found, expected)


def test_all_of_a_storage_is_packed_and_the_report_says_why_a_part_is_not() -> None:
    def whole(x: torch.Tensor) -> torch.Tensor:
        h = x @ WEIGHT
        return h.as_strided((8, 32), (1, 8)) * h[:, :32]

    def whole_transposed(x: torch.Tensor) -> torch.Tensor:
        h = (x @ WEIGHT).t()
        return h.as_strided((32, 8), (1, 36)) * h[:32]

    for program, packs in ((whole, True), (whole_transposed, True), (columns, False)):
        options = {"inner": "aten", "policy": COPIED}
        compiled = torch.compile(program, backend="aot_hooks", options=options)
        assert torch.equal(gradient(compiled), gradient(program))
        decisions = [d for plan in aot_hooks.last_plans(compiled) for d in plan.decisions]
        assert any(d.hook == COPIED for d in decisions) is packs
        assert any("by as_strided" in d.reason for d in decisions) is not packs
