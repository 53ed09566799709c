"""Steps of several sizes under a budget: with graphs of their own for each, or with symbolic sizes."""

from __future__ import annotations

import warnings

import many_blocks
import pytest
import torch
from many_blocks import WIDTH, Block, assert_equal, compile_blocks, gradients, model_of, peak_of, train
from profiled import most_allocated
from small_budgets import budget
from steps import ATEN
from torch import nn

import aot_hooks
from aot_hooks.errors import BudgetWarning
from aot_hooks.planning import many, sizes

x, compiled_kinds = many_blocks.x, many_blocks.compiled_kinds  # fixtures


def test_more_sizes_than_steps_are_remembered(x, compiled_kinds, monkeypatch):
    """The graphs of each size wait for their second step, after those of all others have been planned."""
    monkeypatch.setattr(many, "_MOST_TRACES", 3)
    model = model_of(*[Block] * 4)
    sizes = [len(x) - 8 * i for i in range(many._MOST_TRACES + 3)]
    batches = [x[:size].detach().requires_grad_() for size in sizes]
    expected = [gradients(model, batch) for batch in batches]
    peak = peak_of(model, x, 0.6)
    for block in model:
        options = {**ATEN, "policy": budget(peak, max_error=0)}
        block.compile(backend="aot_hooks", dynamic=False, options=options)
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(4):
            for batch, right in zip(batches, expected, strict=True):
                assert_equal(train(model, batch), right)
        count = len(compiled_kinds)
        assert compiled_kinds.count("planned") >= 3
        train(model, batches[0])
    assert len(compiled_kinds) == count


def batch(rows: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, requires_grad=True)


@pytest.mark.core
def test_larger_sizes_of_one_graph_are_planned_anew(x, compiled_kinds, tmp_path):
    model = model_of(*[Block] * 4)
    peak = peak_of(model, x, 0.7)
    compiled = torch.compile(
        model, backend="aot_hooks", dynamic=True, options={**ATEN, "policy": budget(peak, max_error=0)}
    )
    counts = []
    for rows in (256, 200, 300, len(x), 400, 64, len(x)):
        y = batch(rows)
        assert_equal(train(compiled, y), gradients(model, y))
        assert many_blocks.measured(compiled, y, tmp_path) <= peak
        counts.append(len(compiled_kinds))
    assert counts == [1, 1, 1, 2, 2, 2, 2]
    assert aot_hooks.last_plans(compiled)[-1].peak_bytes <= peak


@pytest.mark.core
def test_larger_sizes_of_many_calls_are_planned_anew(x, compiled_kinds, tmp_path):
    model, plain = model_of(*[Block] * 6), model_of(*[Block] * 6)
    peak = peak_of(model, x, 0.6)
    compile_blocks(model, budget(peak, max_error=0), dynamic=True)
    for rows in (250, 200, 150, len(x), 200, 100, 500, len(x), 40):
        y = batch(rows)
        assert_equal(train(model, y), gradients(plain, y))
        count = len(compiled_kinds)
        assert many_blocks.measured(model, y, tmp_path) <= peak, rows
        assert count == len(compiled_kinds) or rows in (250, len(x))  # nothing is compiled for smaller ones
    assert compiled_kinds == ["alone", "least", "planned", "alone", "least", "planned"]


def test_calls_that_fit_as_they_are_fit_with_larger_sizes_too(x, compiled_kinds, tmp_path):
    """Each call is small, so nothing but the whole step tells when sizes are too large."""
    model = model_of(*[Block] * 6)
    peak = peak_of(model, x, 0.6)
    compile_blocks(model, budget(peak, max_error=0), dynamic=True)
    for _ in range(3):
        train(model, batch(16))
    assert compiled_kinds == ["alone", "planned"]
    for _ in range(3):
        train(model, batch(len(x)))
    assert many_blocks.measured(model, batch(len(x)), tmp_path) <= peak


def test_sizes_that_grow_slowly(x, compiled_kinds, tmp_path):
    model = model_of(*[Block] * 4)
    compile_blocks(model, budget(peak_of(model, x, 0.5), max_error=0), dynamic=True)
    over = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in range(160, len(x), 16):
            y = batch(rows)
            train(model, y)
            over.append(many_blocks.measured(model, y, tmp_path) > peak_of(model, x, 0.5))
    assert not any(over)
    assert compiled_kinds.count("alone") <= 1 + sizes.MOST_GROWN
    assert not [w for w in caught if issubclass(w.category, BudgetWarning)]


def warnings_of(compiled: nn.Module, rows: int) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        many_blocks.loss_of(compiled, batch(rows)).backward()
    return [str(w.message) for w in seen if w.category is BudgetWarning]


def test_a_user_who_bounds_sizes_is_warned_once(x):
    """torch refuses guards that are tighter than the user's bounds."""
    model = model_of(*[Block] * 3)
    policy = budget(peak_of(model, x, 0.4), max_error=0)
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy})
    y = batch(128)
    torch._dynamo.mark_dynamic(y, 0, min=2, max=4096)
    many_blocks.loss_of(compiled, y).backward()
    assert warnings_of(compiled, 128) == []
    (said,) = warnings_of(compiled, 512)
    assert "512 in place of 128" in said and "Run the largest sizes first" in said
    assert warnings_of(compiled, 1024) == []


def test_larger_sizes_that_nothing_fits_take_the_least_with_a_warning(x):
    model = model_of(*[Block] * 3)
    policy = budget(peak_of(model, x, 0.5), max_error=0)
    compiled = torch.compile(model, backend="aot_hooks", dynamic=True, options={**ATEN, "policy": policy})
    assert warnings_of(compiled, 200) == []
    (said,) = warnings_of(compiled, 4 * len(x))
    assert "larger sizes" in said and "the least" in said.lower()


def test_a_stored_plan_is_for_the_sizes_that_it_was_made_at(x, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = model_of(*[Block] * 4)
    policy = budget(peak_of(model, x, 0.7), max_error=0)

    def misses(rows: int) -> int:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_hooks", dynamic=True, options={**ATEN, "policy": policy})
        train(compiled, batch(rows))
        assert many_blocks.measured(compiled, batch(rows), tmp_path) <= policy.peak
        return aot_hooks.cache_stats()["misses"]

    with torch._functorch.config.patch(bundled_autograd_cache=True):
        assert (misses(200), misses(200), misses(len(x)), misses(200)) == (1, 0, 1, 0)


def test_inductor_bounds_sizes_itself_which_changes_nothing(x, compiled_kinds):
    model = model_of(Block, Block)
    policy = budget(peak_of(model, x, 0.7), max_error=0)
    for _ in range(2):  # the second time from torch's cache, which adds the bounds that were found
        torch._dynamo.reset()
        compiled_kinds.clear()
        compiled = torch.compile(model, backend="aot_hooks", dynamic=True, options={"policy": policy})
        for rows in (128, 100, len(x), 200):
            train(compiled, batch(rows))
        assert len(compiled_kinds) == 2
        assert aot_hooks.last_plans(compiled)[-1].peak_bytes <= policy.peak


def test_sizes_that_grow_before_the_step_is_planned(compiled_kinds, tmp_path):
    """Bytes of a graph at small sizes say nothing of large ones: its least may not have been looked for."""
    kinds = (Block, many_blocks.Other, many_blocks.Other)
    model, plain = model_of(*kinds), model_of(*kinds)
    peak = peak_of(model, batch(512), 0.7)
    compile_blocks(model, budget(peak, max_error=0), dynamic=True)
    for rows in (100, 512, 512, 512):
        y = batch(rows)
        assert_equal(train(model, y), gradients(plain, y))
    assert compiled_kinds[-2:] == ["planned", "planned"]
    assert many_blocks.measured(model, batch(512), tmp_path) <= peak


def test_two_lengths_of_which_one_shrinks(tmp_path):
    model = model_of(*[Block] * 2)

    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x).sin().sum() + model(y).sin().sum()

    peak = int(0.8 * aot_hooks.plan(both, batch(200), batch(190), policy=aot_hooks.KEEP, inner="aten").peak_bytes)
    compiled = torch.compile(
        both, backend="aot_hooks", dynamic=True, options={**ATEN, "policy": budget(peak, max_error=0)}
    )
    for a, b in ((200, 190), (320, 24), (24, 320)):
        first, second = batch(a), batch(b)
        compiled(first, second).backward()
        model.zero_grad(set_to_none=True)
        first.grad = second.grad = None
        taken = most_allocated(lambda x=first, y=second: compiled(x, y).backward(), tmp_path)
        assert taken <= peak, (a, b)


def test_a_number_that_makes_sizes(compiled_kinds, x, tmp_path):
    model = model_of(*[Block] * 3)
    peak = peak_of(model, x, 0.7)

    def repeated(y: torch.Tensor, count: int) -> torch.Tensor:
        return model(y.repeat(count, 1))

    policy = budget(peak, max_error=0)
    compiled = torch.compile(repeated, backend="aot_hooks", dynamic=True, options={**ATEN, "policy": policy})
    for count in (3, 8):
        y = batch(64)
        compiled(y, count).sin().sum().backward()
        model.zero_grad(set_to_none=True)
        y.grad = None
        taken = most_allocated(lambda y=y, count=count: compiled(y, count).sin().sum().backward(), tmp_path)
        assert taken <= peak
    assert compiled_kinds == ["alone", "alone"]


def test_sizes_that_nobody_knows_are_said(x):
    model = model_of(*[Block] * 2)
    policy = budget(peak_of(model, x, 1.0), max_error=0)
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy})
    y = batch(64)
    torch._dynamo.decorators.mark_unbacked(y, 0)
    with pytest.warns(BudgetWarning, match="nobody knows"):
        many_blocks.loss_of(compiled, y).backward()


def test_versions_of_a_function_never_reach_dynamos_limit(x, compiled_kinds):
    model = model_of(*[Block] * 2)

    def scaled(y: torch.Tensor, flag: str) -> torch.Tensor:
        return model(y) * len(flag)

    policy = budget(peak_of(model, x, 0.8), max_error=0)
    compiled = torch.compile(scaled, backend="aot_hooks", dynamic=True, options={**ATEN, "policy": policy})
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        for rows in (100, 400, 500, 600, 700):
            for flag in ("a", "bb", "ccc", "dddd"):
                compiled(batch(rows), flag).sin().sum().backward()
    assert 4 < len(compiled_kinds) <= 8


def test_a_number_that_is_no_size_changes_nothing(x, compiled_kinds):
    model = model_of(*[Block] * 3)

    def scaled(y: torch.Tensor, number: int) -> torch.Tensor:
        return model(y) * number

    policy = budget(peak_of(model, x, 0.7), max_error=0)
    compiled = torch.compile(scaled, backend="aot_hooks", dynamic=True, options={**ATEN, "policy": policy})
    for number in (3, 30, 300, 3000):
        compiled(x, number).sin().sum().backward()
    assert compiled_kinds == ["alone"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, values = self.both(x).chunk(2, -1)
        return x + self.out((x @ keys.transpose(-1, -2)).softmax(-1) @ values)


def test_bytes_that_grow_as_the_square_of_a_length(compiled_kinds, tmp_path):
    """2 x 190 rows are fewer than 4 x 100, but attention holds more."""
    model = model_of(*[Attention] * 3)

    def sequences(batch: int, length: int) -> torch.Tensor:
        return torch.randn(batch, length, WIDTH, requires_grad=True)

    peak = peak_of(model, sequences(4, 100), 0.9)
    compiled = torch.compile(
        model, backend="aot_hooks", dynamic=True, options={**ATEN, "policy": budget(peak, max_error=0)}
    )
    for batch, length in ((4, 100), (5, 70), (2, 190), (3, 20)):
        y = sequences(batch, length)
        assert_equal(train(compiled, y), gradients(model, y))
        assert many_blocks.measured(compiled, y, tmp_path) <= peak, (batch, length)
    assert len(compiled_kinds) <= 4
