"""Gradients of embeddings in low precision are made in slices of columns, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from profiled import most_allocated
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from aot_hooks.graphs import workspaces
from aot_hooks.passes import row_sums
from aot_hooks.passes.row_sums import sum_rows, sum_rows_in_slices

WORDS, WIDTH = 50, 24


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of five columns, the last of four."""
    monkeypatch.setattr(workspaces, "ROW_SUMS_BYTES", 4 * WORDS * 5)
    monkeypatch.setattr(row_sums, "ROW_SUMS_BYTES", 4 * WORDS * 5)


def backward(dtype: torch.dtype, padding: int, *, shape: tuple[int, ...] = (2, 9)) -> tuple[GraphModule, list[Any]]:
    """The backward of an embedding as Inductor decomposes it, with its inputs."""
    make = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, shape, generator=make)
    ids[0, :3] = torch.tensor([7, 7, 0])  # a repeat
    inputs = [torch.randn(*shape, WIDTH, generator=make).to(dtype), ids]

    def gradient(grad: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.embedding_dense_backward(grad * 3, ids, WORDS, padding, False)

    gm = make_fx(gradient, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    return gm, inputs


def test_slices_are_bitwise_the_whole() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for padding in (-1, 7):
            gm, inputs = backward(dtype, padding)
            expected = gm(*inputs)
            sum_rows_in_slices(gm)
            (node,) = gm.graph.find_nodes(op="call_function", target=sum_rows)
            assert not any("index_put" in str(n.target) for n in gm.graph.nodes)
            found = gm(*inputs)
            assert found.dtype == dtype and torch.equal(found, expected) and expected.any()
            assert not found[7].any() or padding != 7
            masked = 4 * 18 * 5 if node.args[2] is not None else 0
            assert workspaces.workspace_bytes(node) == 4 * WORDS * 5 + masked


def test_operator_takes_negative_ids_and_has_a_fake() -> None:
    rows, ids = torch.randn(3, WIDTH), torch.tensor([-1, 4, -1])
    expected = torch.zeros(WORDS, WIDTH).index_put((ids,), rows, accumulate=True).bfloat16()
    assert torch.equal(sum_rows(rows, ids, None, WORDS, torch.bfloat16), expected)
    torch.library.opcheck(sum_rows, (rows, ids, None, WORDS, torch.bfloat16), test_utils="test_faketensor")


@pytest.mark.parametrize("why", ["float32", "few words", "many tokens", "read otherwise"])
def test_others_are_left_alone(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gm, _ = backward(
        torch.float32 if why == "float32" else torch.bfloat16, -1, shape=(2, 30) if why == "many tokens" else (2, 9)
    )
    if why == "few words":
        monkeypatch.setattr(row_sums, "ROW_SUMS_BYTES", 4 * WORDS * WIDTH)
    if why == "read otherwise":
        output = gm.graph.output_node()
        output.args = ((output.args[0], output.args[0].args[0]),)
    before = str(gm.graph)
    sum_rows_in_slices(gm)
    assert str(gm.graph) == before


PROGRAM = """
import torch
import aot_hooks
from aot_hooks.graphs import workspaces
from aot_hooks.passes import row_sums

torch._inductor.config.force_disable_caches = True
words = torch.nn.Embedding(600, 32, padding_idx=3).bfloat16()
head = torch.nn.Linear(32, 16).bfloat16()
ids = torch.randint(600, (4, 40))
found = []
for nbytes in (1 << 30, 4 * 600 * 7):
    workspaces.ROW_SUMS_BYTES = row_sums.ROW_SUMS_BYTES = nbytes
    torch._dynamo.reset()
    words.weight.grad = None
    loss = torch.compile(lambda ids: head(words(ids).sin()).float().square().mean(), backend="aot_hooks",
        options={"policy": aot_hooks.budget("64MiB")})
    loss(ids).backward()
    (plan,) = aot_hooks.last_plans(loss)
    found.append((words.weight.grad, max(p.live_bytes for p in plan.live_after if p.phase == "backward")))
assert torch.equal(found[0][0], found[1][0]) and found[0][0].any()
whole, sliced = 6 * 600 * 32, 2 * 600 * 32 + 4 * 600 * 7
assert found[0][1] >= whole and sliced <= found[1][1] < whole, (found[0][1], found[1][1])
"""


@pytest.mark.slow
def test_inductor_makes_the_same_gradient_and_the_plan_counts_one_slice() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]


def test_one_slice_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    count, width = 4096, 5
    monkeypatch.setattr(workspaces, "ROW_SUMS_BYTES", 4 * count * width)
    rows, ids = torch.randn(3, 4 * width), torch.tensor([1, 4, 1])
    most = most_allocated(lambda: sum_rows(rows, ids, None, count, torch.bfloat16), tmp_path)
    result, sums = 2 * count * 4 * width, 4 * count * width
    assert result + sums <= most < result + 1.5 * sums
