"""`options["tile"]`: parts of layers in tiles of tokens give the same gradients in less memory."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import fuzz_tile
import pytest
import torch
import torch.nn.functional as F
from fuzz_parts import distance
from profiled import most_allocated
from torch import nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks import errors, partitioner
from aot_hooks.passes.tile import Tiled
from aot_hooks.report.text import report_as_data

ATEN = {"inner": "aten"}
WIDTH, WIDE = 16, 56


class Layer(nn.Module):
    """A part that is 3.5 times as wide as its input."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, WIDE, bias=False) for _ in range(2))
        self.down, self.dropout = nn.Linear(WIDE, WIDTH), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        h = F.silu(self.gate(y)) * self.up(y)
        return x + self.down(F.dropout(h, self.dropout))


class Model(nn.Module):
    def __init__(self, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def example(count: int = 50, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, count // 2, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def compiled(module: Any, tile: Any = 20, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_hooks", options=ATEN | {"tile": tile} | options)


def gradients(module: nn.Module, run: Any, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.requires_grad_()
    x.grad = None
    loss = run(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def rows(run: Any) -> list[Tiled]:
    return [row for plan in aot_hooks.last_plans(run) for row in plan.tiled]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.stride() == b.stride() and float((a - b).norm()) <= tolerance * float(b.norm())


@pytest.mark.slow
def test_random_parts_are_right_in_tiles_or_left_alone_with_the_reason() -> None:
    outcomes = [fuzz_tile.check(fuzz_tile.generate(seed)) for seed in range(20)]
    assert [o for o in outcomes if o.wrong] == []
    assert sum(o.done for o in outcomes) >= 10


@pytest.mark.parametrize(("first", "count"), [(4000, 2), pytest.param(4002, 40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("again", [True, False])
def test_random_joint_graphs_are_right_in_tiles(first: int, count: int, again: bool) -> None:
    outcomes = [fuzz_tile.check_joint(fuzz_tile.generate(seed), again=again) for seed in range(first, first + count)]
    assert [o for o in outcomes if o.wrong] == []
    assert sum(o.done for o in outcomes) >= count // 2


def test_wide_values_of_one_tile_are_alive(tmp_path: Path) -> None:
    """Two layers need less than with checkpoints around each, whose backward has all wide values of one layer."""
    count = 1024
    module, x = Model(2), example(count)
    wide = 4 * count * WIDE
    found, peaks = {}, {}
    for name in ("whole", "checkpoint", "tile"):

        def program(x: torch.Tensor, name: str = name) -> torch.Tensor:
            for layer in module.layers:
                x = checkpoint(layer, x, use_reentrant=False) if name == "checkpoint" else layer(x)
            return x.square().mean()

        run = compiled(program, 256 if name == "tile" else False, policy=aot_hooks.KEEP)
        run(x).backward()
        found[name] = [p.grad for p in module.parameters()]
        module.zero_grad()
        peaks[name] = most_allocated(lambda run=run: run(x).backward(), tmp_path)
        if name == "tile":
            assert [(row.done, row.count, row.tokens) for row in rows(run)] == [(True, 4, 256)] * 2
            assert all(wide * 4 <= row.working_bytes <= wide * 8 for row in rows(run))
            assert all(row.tile_bytes * row.count == row.working_bytes for row in rows(run))
        module.zero_grad()
        assert_close(found[name], found["whole"])
    assert peaks["tile"] <= 0.5 * peaks["whole"] and peaks["tile"] <= 0.75 * peaks["checkpoint"]


@pytest.mark.slow
def test_inductor_computes_tiles_one_after_the_other(tmp_path: Path) -> None:
    module, x = Model(), example(2048)
    found, peaks = [], []
    for tile in (False, 512):
        run = compiled(module, tile, inner="inductor", policy=aot_hooks.KEEP)
        run(x).backward()
        found.append([p.grad for p in module.parameters()])
        module.zero_grad()
        peaks.append(most_allocated(lambda run=run: run(x).backward(), tmp_path))
        module.zero_grad()
    assert [row.count for row in rows(run)] == [4]
    assert_close(found[1], found[0])
    assert peaks[1] <= 0.7 * peaks[0]


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 2, as PEFT makes it."""

    def __init__(self, width: int, made: int) -> None:
        super().__init__()
        self.whole = nn.Linear(width, made, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, made, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x) + self.b(self.a(x)) * 2.0


class AdaptedLayer(nn.Module):
    """Attention and an MLP. Each linear layer has an adapter, whose second product makes its input wider."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.o = (Adapted(WIDTH, WIDTH) for _ in range(2))
        self.gate, self.up = (Adapted(WIDTH, WIDE) for _ in range(2))
        self.down = Adapted(WIDE, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q = self.q(y)
        x = x + self.o(F.softmax(q @ q.mT, -1) @ y)
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def test_parts_with_adapters_are_in_tiles_and_adapters_begin_none() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(AdaptedLayer(), AdaptedLayer())
    x = example()
    trained = [p for p in module.parameters() if p.requires_grad]

    def results(run: Any) -> list[torch.Tensor]:
        module.zero_grad()
        loss = run(x).square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in trained if p.grad is not None)]

    run = compiled(module, 10, policy=aot_hooks.KEEP)
    expected = results(module)
    assert len(expected) == 1 + len(trained)
    assert_close(results(run), expected)
    assert [(row.done, row.wide) for row in rows(run)] == [(True, f"float32[50, {WIDE}]")] * 2


@pytest.mark.slow
def test_no_tile_waits_for_the_end_of_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input of `down` is computed again for its adapter's gradient alone, and nothing but the output reads that.

    With Inductor's decompositions, which cut SiLU and its gradient into operators of their own.
    """
    torch.manual_seed(0)
    module = nn.Sequential(*(AdaptedLayer() for _ in range(2))).bfloat16()
    backwards: list[torch.fx.GraphModule] = []
    finished = partitioner.finished
    monkeypatch.setattr(partitioner, "finished", lambda fw, bw: backwards.append(bw) or finished(fw, bw))
    run = compiled(module, 10, policy=aot_hooks.KEEP, inner="inductor")
    with torch._inductor.config.patch(force_disable_caches=True):
        run(example(dtype=torch.bfloat16).requires_grad_()).sum().backward()
    (bw,) = backwards
    nodes = list(bw.graph.nodes)
    alive = [0] * len(nodes)
    for i, node in enumerate(nodes):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.shape[-1:] == (WIDE,) and 10 in value.shape:
            for at in range(i, max(nodes.index(user) for user in node.users)):
                alive[at] += 1
    assert 4 <= max(alive) <= 8  # one tile has 7, and the last tile of the other layer 4 that wait


def test_tiles_of_the_backward_keep_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer saves gate and up. Its backward has gradients of one tile beside them."""
    count = 2048
    module, x = Model(1), example(count)
    monkeypatch.setattr("aot_hooks.passes.tile._LEAST_BYTES", 1)
    peaks, saved, found = [], [], []
    for tile in (False, "backward"):
        run = compiled(module, tile, policy=aot_hooks.KEEP)
        loss = run(x)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in module.parameters())])
        module.zero_grad()
        peaks.append(most_allocated(lambda run=run: run(x).backward(), tmp_path))
        module.zero_grad()
        (plan,) = aot_hooks.last_plans(run)
        saved.append(plan.saved_bytes)
    assert [row.done for row in rows(run)] == [True] and "products stay saved" in rows(run)[0].how
    assert saved[1] <= saved[0] and peaks[1] <= 0.85 * peaks[0]
    assert_close(found[1], found[0])
    assert torch.equal(found[1][0], found[0][0])  # the forward is as it was


@pytest.mark.parametrize(
    ("tile", "dtype"),
    [
        (64, torch.bfloat16),
        *(pytest.param(64, dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16)),
        pytest.param("backward", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_at_least_as_near_to_float64(
    dtype: torch.dtype, tile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 products of other sizes round otherwise, by some percent."""
    monkeypatch.setattr("aot_hooks.passes.tile._LEAST_BYTES", 1)
    monkeypatch.setattr("aot_hooks.passes.tile._LEAST_TOKENS", {"cpu": 64})
    module, x = Model().to(dtype), example(128, dtype)
    exact = gradients(wide := Model().to(dtype).double(), wide, x.double())
    run = compiled(module, tile, policy=aot_hooks.KEEP)
    mine, theirs = (
        [distance(a, b) for a, b in zip(gradients(module, each, x), exact, strict=True)]
        for each in (run, compiled(module, False))
    )
    assert [row.done for row in rows(run)] == [True]
    assert all(a <= b * (1.1 if dtype == torch.float32 else 1.0) for a, b in zip(mine, theirs, strict=True))


def test_dropout_inside_is_left_alone_with_the_reason() -> None:
    run = compiled(Model(dropout=0.5))
    with pytest.warns(errors.UnusedWarning, match="not in tiles.*(random|native_dropout)"):
        run(example()).backward()
    assert [row.done for row in rows(run)] in ([], [False])


def test_wide_values_that_are_returned_are_left_alone() -> None:
    layer = Layer()

    def program(x: torch.Tensor) -> Any:
        h = F.gelu(layer.up(x))
        return layer.down(h), h

    run = compiled(program)
    with pytest.warns(errors.UnusedWarning, match="the program returns float32"):
        run(example())[0].sum().backward()


def test_other_numbers_of_tokens_need_no_other_graph() -> None:
    module = Model()
    run = compiled(module, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.UnusedWarning)
        for count in (50, 110):
            torch._dynamo.mark_dynamic(x := example(count).requires_grad_(), 1)
            with torch._dynamo.config.patch(error_on_recompile=count != 50):
                assert_close(gradients(module, run, x), gradients(module, module, x))


@pytest.mark.parametrize(
    "policy",
    [aot_hooks.float8(), pytest.param(aot_hooks.offload(min_bytes=0), marks=pytest.mark.slow)],
    ids=["float8", "offload"],
)
def test_hooks_pack_what_a_part_reads(policy: Any) -> None:
    module, x = Model(1), example(64)
    expected = gradients(module, module, x)
    run = compiled(module, 32, policy=policy)
    found = gradients(module, run, x)
    assert_close(found, expected, 0.08 if policy == aot_hooks.float8() else 1e-5)
    (plan,) = aot_hooks.last_plans(run)
    assert all(row.done for row in plan.tiled) and any(d.hook is not aot_hooks.KEEP for d in plan.decisions)
    assert all(d.saved.shape[-1] != WIDE or d.saved.is_static for d in plan.decisions)  # nothing wide is saved


class Scaled(nn.Module):
    """An MLP behind a norm of pointwise operators and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE, bias=False), nn.Linear(WIDE, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x + self.down(F.gelu(self.up(y)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_tiles_read_is_computed_again_and_may_be_rounded(dynamic: bool) -> None:
    """The backward reads slices of the norm's result, which it computes from what the layer before made."""
    torch.manual_seed(0)
    module, x = nn.Sequential(Scaled(), Scaled()), example(64)
    torch._dynamo.reset()
    options = ATEN | {"tile": 20, "recompute_pointwise": True, "policy": aot_hooks.cast(torch.bfloat16)}
    run = torch.compile(module, backend="aot_hooks", options=options, dynamic=dynamic)
    found = gradients(module, lambda x: run(x).square().mean(), x)
    (plan,) = aot_hooks.last_plans(run)
    assert [row.count for row in plan.tiled] == [4, 4]
    large = [d for d in plan.decisions if not (d.saved.is_static or d.saved.is_input) and d.saved.shape[-1] == WIDTH]
    assert all(64 in d.saved.shape or d.saved.shape[:2] == (2, 32) for d in large), "no slice is saved"
    assert any(d.hook.lossy for d in large)
    assert_close(found, gradients(module, lambda x: module(x).square().mean(), x), 0.01)


class Gated(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x + self.down(F.relu(self.up(y)))


def test_a_decision_in_a_tile_keeps_what_the_tile_reads() -> None:
    """A tile waits for gradients of the one before: what it reads is followed beyond that to the decisions of ReLU."""
    torch.manual_seed(0)
    module, x = nn.Sequential(Gated(), Scaled(), Gated()), example(64)
    run = compiled(module, recompute_pointwise=True, policy=aot_hooks.int8())
    found = gradients(module, lambda x: run(x).square().mean(), x)
    (plan,) = aot_hooks.last_plans(run)
    assert [row.count for row in plan.tiled] == [4, 4, 4] and any(d.hook.lossy for d in plan.decisions)
    module.double()
    expected = gradients(module, lambda x: module(x).square().mean(), x.detach().double())
    assert_close(found, [each.float() for each in expected], 0.01)


def test_checkpoints_compute_tiles_again(tmp_path: Path) -> None:
    module, x = Model(1), example(64)
    expected = gradients(module, module, x)

    def program(x: torch.Tensor) -> torch.Tensor:
        for layer in module.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.float().square().mean()

    saved = []
    for tile in (False, 32):
        run = compiled(program, tile, policy=aot_hooks.KEEP)
        assert_close(gradients(module, run, x), expected)
        saved.append(aot_hooks.last_plans(run)[0].saved_bytes)
    assert [row.done for row in rows(run)] == [True]
    assert saved[1] <= saved[0]


def test_without_gradients_the_forward_is_in_tiles(tmp_path: Path) -> None:
    module, x = Model(1), example(2048)
    peaks, results = [], []
    for tile in (False, 256):
        run = compiled(module, tile)
        with torch.no_grad():
            results.append(run(x))
            peaks.append(most_allocated(lambda run=run: run(x), tmp_path))
    assert torch.allclose(*results)
    assert peaks[1] <= 0.7 * peaks[0]


def test_tiles_and_chunks_of_one_program() -> None:
    head = nn.Linear(WIDTH, 4 * WIDE, bias=False)
    module, x = nn.ModuleList([Layer(), head]), example(64)

    def program(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(module[0](x)).flatten(0, 1), torch.arange(64) % 50)

    expected = gradients(module, program, x)
    run = compiled(program, chunk=16, policy=aot_hooks.KEEP)
    assert_close(gradients(module, run, x), expected)
    (plan,) = aot_hooks.last_plans(run)
    assert [row.done for row in (*plan.chunked, *plan.tiled)] == [True, True]


def test_reports_say_what_is_in_tiles() -> None:
    module, x = Model(2), example()
    run = compiled(module, 17, policy=aot_hooks.KEEP)
    run(x).backward()
    (plan,) = aot_hooks.last_plans(run)
    text = aot_hooks.format_report(plan)
    assert "2 parts in 4 tiles, wide values again in the backward: 14 tokens" in text
    assert "test_tile.py" in text
    data = json.loads(json.dumps(report_as_data(plan)))
    assert [row["count"] for row in data["tiled"]] == [4, 4] and data["tiled"][0]["working_bytes"] > 0
    left = dataclasses.replace(plan, tiled=tuple(row.left("of a reason") for row in plan.tiled))
    assert "2 parts of a layer not in tiles" in aot_hooks.format_report(left)
    assert "  of a reason" in aot_hooks.format_report(left)


@pytest.mark.parametrize("value", [-1, "forward", 1.5, None])
def test_a_wrong_option_names_the_valid_values(value: Any) -> None:
    with pytest.raises(Exception, match="options\\['tile'\\] must be True, False, the number of tokens"):
        compiled(Model(), value)(example())


def test_a_graph_that_is_small_is_left_alone_without_a_number() -> None:
    run = compiled(Model(), True, policy=aot_hooks.KEEP)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.UnusedWarning)
        run(example()).backward()
    assert rows(run) == []
