"""Sums of chunks: in one tensor, in float32; and what CUDA code of a loss in chunks holds, seen without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aot_hooks
from aot_hooks.passes import chunk_loop, chunk_sums

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.mark.parametrize(("factor", "moves"), [("sin", True), ("rrelu", False)])
def test_factors_of_a_last_term_stand_beside_it_but_draws_keep_their_order(factor: str, moves: bool) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    other = graph.call_function(torch.ops.aten.neg.default, (x,))
    made = graph.call_function(getattr(torch.ops.aten, factor).default, (x,))
    total = graph.call_function(torch.ops.aten.add.Tensor, (made, made))
    total.meta[chunk_loop._SUM] = True
    expected = [x, made, total, other] if moves else [x, other, made, total]
    assert chunk_loop._with_early_sums([x, other, made, total]) == expected


def factors(dtype: torch.dtype, count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    make = torch.Generator().manual_seed(0)
    return [
        (torch.randn(8, 5, generator=make).to(dtype), torch.randn(5, 6, generator=make).to(dtype)) for _ in range(count)
    ]


def sums(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    total = torch.mm(*pairs[0])
    for a, b in pairs[1:]:
        total = chunk_sums.add_product(total, a, b)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_added(dtype: torch.dtype) -> None:
    pairs = factors(dtype)
    torch.testing.assert_close(sums(pairs), sum(a @ b for a, b in pairs))
    torch.library.opcheck(chunk_sums.add_product, (torch.mm(*pairs[0]), *pairs[1]), test_utils="test_faketensor")


def test_narrow_products_are_added_in_pieces_where_torch_can_not_add_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch has no such product, so one stands in for that of a GPU."""
    pairs = factors(torch.bfloat16)
    monkeypatch.setattr(chunk_sums, "_PIECE_BYTES", 3 * 4 * 6)  # three rows
    monkeypatch.setattr(chunk_sums, "_wide_product", lambda a, b, dtype: a.to(dtype) @ b.to(dtype))
    total = torch.ones(8, 6)
    chunk_sums.add_product_(total, *pairs[0])
    torch.testing.assert_close(total, 1 + pairs[0][0].float() @ pairs[0][1].float())


def test_a_graph_that_runs_as_it_is_writes_over_sums_that_nothing_else_reads() -> None:
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    add, mm = chunk_sums.add_product, torch.ops.aten.mm.default
    kept = graph.call_function(mm, (a, b))
    total = graph.call_function(add, (graph.call_function(add, (kept, a, b)), a, b))
    of_input = graph.call_function(add, (a, a, b))
    graph.output((kept, total, of_input))
    gm = chunk_sums.add_in_place(torch.fx.GraphModule(torch.nn.Module(), graph))
    targets = [node.target for node in gm.graph.nodes]
    assert targets.count(add) == 2 and targets.count(chunk_sums.add_product_) == 1
    x = torch.randn(4, 4)
    before = x.clone()
    found = gm(x, torch.eye(4))
    assert torch.equal(x, before)
    torch.testing.assert_close(found, (x, 3 * x, 2 * x))


class Gated(nn.Module):
    """A wide MLP with SiLU, and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(F.silu(self.gate(x))))


def test_the_exponential_of_an_mlp_is_no_loss() -> None:
    """Inductor decomposes SiLU into an exponential and a quotient."""
    x = torch.randn(64, 16, requires_grad=True)
    module = Gated()

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(module(x), labels)

    options = {"policy": aot_hooks.float8(), "chunk": 16}
    run = torch.compile(loss, backend="aot_hooks", options=options)
    (row,) = aot_hooks.plan(run, x, torch.randint(128, (64,))).chunked
    assert row.done and row.logits == "float32[64, 128]"


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build asks the driver")
@pytest.mark.parametrize("policy", ["keep", "offload"])
def test_cuda_code_holds_the_logits_of_one_chunk_and_one_sum(policy: str) -> None:
    tokens, width, words, chunks = 2048, 256, 16384, 8
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)])}
    arguments = map(str, (policy, tokens // chunks, tokens, width, words, 2))
    command = [sys.executable, str(SUPPORT / "code_chunks.py"), *arguments]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["layers"] == 1 and found["sums"] == chunks - 1
    held = max(found["code"].values())
    assert 0.99 * found["planned"] <= held <= 1.001 * found["planned"]
    logits, total = 2 * tokens * words // chunks, 4 * width * words
    saved = 2 * 8 * tokens * width * 2 if policy == "keep" else 0
    assert found["code"]["forward"] <= logits + total + saved + 21 * tokens * width  # gradients are over logits
