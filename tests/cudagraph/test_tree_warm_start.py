"""Compiled functions whose graphs are captured, started again from torch's cache: a warm start says and does what the
cold one did, or compiles again and says why.

Programs are compiled by Inductor into calls of aten (`fallback_by_default`): no C++ is built, and the simulator can
capture them. Inductor's scheduler cuts operators out where all devices are said to be GPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from capture_simulator import Simulator
from pieces import Noted, gate, piece_as_data
from places import backend_with
from torch import nn
from torch._higher_order_ops import triton_kernel_wrap
from torch.utils.checkpoint import checkpoint

import aot_hooks
import cudagraph
from aot_hooks import cudagraphs
from aot_hooks.backend import aot_hooks as hooks_backend
from aot_hooks.cache import lookup
from aot_hooks.errors import CacheWarning
from cudagraph.compile import compilation, entry
from cudagraph.compile.compilation import Compilation
from cudagraph.tree import dispatch
from cudagraph.tree.driver import cuda_driver

# --- compiled, and taken from torch's cache --------------------------------------------------------------------------


def gated(y: torch.Tensor) -> torch.Tensor:
    return y * gate(y.detach())


class Net(nn.Module):
    """With a residual connection, where gradients are added up. With `cut`, an operator that can't be captured stands
    in the middle of its forward and its backward, which computes it again."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.last = nn.Linear(16, 4)
        self.cut = cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x) * torch.tensor([2.0, 1.0] * 8, device=x.device)
        if self.cut:
            y = checkpoint(gated, y, use_reentrant=False)
        return x + self.last(nn.functional.dropout(y, 0.5)).sigmoid()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Keys that no other run has; a cache directory of its own would make Inductor try out the compiler again."""
    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        with torch._inductor.config.patch(fallback_by_default=True):
            yield
    torch._dynamo.reset()


@dataclasses.dataclass
class Run:
    """One start: what came out, and all that was said and done."""

    values: list[torch.Tensor]
    pieces: list[dict[str, Any]]
    stats: dict[str, int]
    log: str
    cache: dict[str, int]


class Starts:
    """Starts the same program again and again, as if each were a process: nothing is left but torch's cache."""

    def __init__(self, hooks: bool, cut: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
        self.hooks, self.cut, self.monkeypatch, self.caplog = hooks, cut, monkeypatch, caplog
        self.backend: Any = None  # another than ours
        self.device = "cpu"

    def __call__(self, dynamic: bool | None = None, **options: Any) -> Run:
        torch._dynamo.reset()
        cudagraph.reset()
        aot_hooks.reset()
        torch._dynamo.utils.counters.clear()
        self.caplog.clear()
        driver: Any = None if self.device == "cuda" else Noted() if self.cut else Simulator()
        pieces: list[dispatch.Piece] = []
        with self.monkeypatch.context() as m:
            capture = driver.capture if isinstance(driver, Noted) else dispatch.capture

            def noting(piece: dispatch.Piece, *given: Any) -> Any:
                pieces.append(piece)
                return capture(piece, *given)

            m.setattr(dispatch, "capture", noting)
            m.setattr(cudagraphs, "compilation", lambda asked: Compilation(asked, driver or cuda_driver()))
            m.setattr(compilation, "_numbers", itertools.count())
            if self.cut and self.device == "cpu":
                import torch._inductor.scheduler as scheduler

                for kind in (scheduler.BaseSchedulerNode, scheduler.FusedSchedulerNode):
                    m.setattr(kind, "is_gpu", lambda self: True)
            values = self.trained(driver, dynamic, options)
        counters = torch._dynamo.utils.counters["aot_autograd"]
        cache = {k: counters[f"autograd_cache_{k}"] for k in ("hit", "miss", "bypass")}
        log = "\n".join(r.getMessage() for r in self.caplog.records if r.name == "cudagraph")
        return Run(values, list(map(piece_as_data, pieces)), cudagraph.stats(), log, cache)

    def trained(self, driver: Any, dynamic: bool | None, options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Net(self.cut).to(self.device)
        if self.hooks:
            kept = {"options": {"cudagraphs": options or True}}
            compiled: Any = torch.compile(model, backend=hooks_backend, dynamic=dynamic, **kept)
        else:
            ours = backend_with(driver, {"inner": "inductor", **options})
            compiled = torch.compile(model, backend=self.backend or ours, dynamic=dynamic)
        seen = []
        for number in range(4):
            torch.manual_seed(number)
            x = torch.randn(6, 4, device=self.device, requires_grad=True)
            with aot_hooks.saved_tensors_policy(aot_hooks.cast(torch.bfloat16) if self.hooks else aot_hooks.KEEP):
                y = compiled(x)
            y.square().sum().backward()
            seen += [y.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
        return seen + [b.clone() for b in model.buffers()]


HIT, MISS = {"hit": 1, "miss": 0, "bypass": 0}, {"hit": 0, "miss": 1, "bypass": 0}


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.parametrize(("hooks", "cut"), [(False, True), (True, False)])
def test_a_warm_start_says_and_does_what_the_cold_one_did(fresh, monkeypatch, caplog, hooks, cut) -> None:
    monkeypatch.setattr(lookup, "_warned", set())
    start = Starts(hooks, cut, monkeypatch, caplog)
    cold, warm = start(), start()
    assert (cold.cache, warm.cache) == (MISS, HIT)
    stats = aot_hooks.cache_stats()
    assert (stats["hits"], stats["misses"], stats["bypasses"]) == (int(hooks), 0, 0)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        uncached = start()
    for a, b, c in zip(cold.values, warm.values, uncached.values, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert warm.pieces == cold.pieces == uncached.pieces
    assert warm.stats == cold.stats == uncached.stats
    assert warm.log == cold.log == uncached.log
    if cut:
        names = [f"{word} 0, part {i} of 2" for word in ("forward", "backward") for i in (1, 2)]
        assert [piece["name"] for piece in warm.pieces] == names
        assert "y * gate(y.detach())" in warm.log and "2 parts of it captured" in warm.log
    else:
        assert [piece["name"] for piece in warm.pieces] == ["forward 0", "backward 0"]
        assert (warm.stats["recordings"], warm.stats["replays"], warm.stats["skips"]) == (2, 4, 0)
        assert any(piece["constants"] for piece in warm.pieces) and warm.log == ""
    assert sum(len(piece["static_inputs"]) for piece in warm.pieces) > 0
    if not hooks:
        return

    def refuse(*_: Any) -> Any:
        raise entry.Refused("it is for a test")

    monkeypatch.setattr(entry.Store, "load", refuse)
    with pytest.warns(CacheWarning, match="compiled anew in each process, because it is for a test"):
        again = start()
    assert again.cache == {"hit": 0, "miss": 0, "bypass": 1} and again.pieces == warm.pieces
    assert all(map(torch.equal, again.values, warm.values))
    assert aot_hooks.cache_stats()["reasons"] == {"bypass: it is for a test": 1}


@pytest.mark.slow
def test_options_that_act_when_graphs_run_act_on_what_was_loaded(fresh, monkeypatch, caplog) -> None:
    start = Starts(False, False, monkeypatch, caplog)
    cold = start(dynamic=True)
    warm = start(dynamic=True, warmup_steps=2, held_outputs="copy")
    assert (cold.cache["hit"], warm.cache["hit"]) == (0, 1)  # torch begins such graphs anew: there are misses, too
    assert all(map(torch.equal, cold.values, warm.values)) and cold.pieces == warm.pieces
    assert (cold.stats["warmups"], warm.stats["warmups"]) == (2, 4)
    strict = [start(or_error=True, dynamic=True) for _ in range(2)]
    assert [run.cache["hit"] for run in strict] == [0, 1]  # what it lets pass is another matter
    blocked = Starts(False, True, monkeypatch, caplog)
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="can't be captured whole") as raised:
            blocked(or_error=True)
        assert "y * gate(y.detach())" in str(raised.value)


@pytest.mark.slow
def test_entries_of_stock_inductor_are_not_ours_and_ours_not_its(fresh, monkeypatch, caplog) -> None:
    ours, stock = Starts(False, False, monkeypatch, caplog), Starts(False, False, monkeypatch, caplog)
    stock.backend = "inductor"
    with torch._inductor.config.patch({"triton.cudagraphs": False}):  # as ours is: else the keys differ by that alone
        first = stock()
        runs = [ours(), stock(), ours()]
    assert [run.cache for run in (first, *runs)] == [MISS, MISS, HIT, HIT]
    assert [len(run.pieces) for run in (first, *runs)] == [0, 2, 0, 2]
    assert all(map(torch.equal, first.values, runs[2].values))


# --- on CUDA: Triton code, real graphs -------------------------------------------------------------------------------


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


if triton is not None:

    @triton.jit
    def doubling(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(target + at, tl.load(source + at, mask=at < count) * 2, mask=at < count)


def doubled(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    doubling[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), block=64)
    return out.sin() + x


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("hooks", [False, True])
def test_on_cuda_a_warm_start_says_and_does_what_the_cold_one_did(monkeypatch, caplog, hooks, cut) -> None:
    start = Starts(hooks, cut, monkeypatch, caplog)
    start.device = "cuda"
    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        cold, warm = start(), start()
        with torch._functorch.config.patch(enable_autograd_cache=False):
            uncached = start()
    assert (cold.cache, warm.cache) == (MISS, HIT)
    for a, b, c in zip(cold.values, warm.values, uncached.values, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert warm.pieces == cold.pieces == uncached.pieces and len(warm.pieces) == (4 if cut else 2)
    assert warm.stats == cold.stats == uncached.stats and warm.stats["replays"] > 0
    assert warm.log == cold.log == uncached.log and ("y * gate(y.detach())" in warm.log) == cut


@pytest.mark.gpu
@pytest.mark.slow
def test_on_cuda_a_kernel_of_the_users_survives(monkeypatch) -> None:
    x = torch.randn(1000, device="cuda")
    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex):
        for expected in (MISS, HIT):
            torch._dynamo.reset()
            cudagraph.reset()
            # torch's key holds a number for each call of a kernel that was traced; a process begins at 0
            triton_kernel_wrap.kernel_side_table.reset_table()
            torch._dynamo.utils.counters.clear()
            compiled = torch.compile(doubled, backend="cudagraph_tree", options={"inner": "inductor"})
            for _ in range(4):
                torch.testing.assert_close(compiled(x), (x * 2).sin() + x)
            counters = torch._dynamo.utils.counters["aot_autograd"]
            assert {k: counters[f"autograd_cache_{k}"] for k in expected} == expected
            assert cudagraph.stats()["replays"] > 0
