"""`aot_hooks.enable`: functions compiled by torch's own backend "inductor" follow contexts, policies and budgets."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame as eval_frame
from oracle import total_error
from ranks import group_of_one
from steps import ATEN, BITS
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks import (
    budget,
    enable,
    errors,
    float8,
    int8,
    last_plans,
    lossless,
    offload,
    saved_tensors_hooks,
    saved_tensors_policy,
)
from aot_hooks.settings.byte_sizes import size_text
from aot_hooks.torch_private import inductor
from aot_hooks.torch_private.aot import compile_graph

pytestmark = pytest.mark.core


class Block(nn.Module):
    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x))).tanh())).relu()


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def gradients(fn: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    fn(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def packed(fn: Any) -> int:
    return sum(plan.saved_bytes - plan.packed_bytes for plan in last_plans(fn))


def graph_count() -> int:
    return int(counters["stats"]["unique_graphs"])


def hooks_of(fn: Any) -> set[str]:
    """The names of the hooks in the plan made last, without arguments."""
    return {str(d.hook).partition("(")[0] for d in last_plans(fn)[-1].decisions}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    counters.clear()
    before = eval_frame._callback_from_stance
    yield
    assert eval_frame._callback_from_stance is before


# --- what it does ----------------------------------------------------------------------------------------------------

POLICIES = [
    (float8(), 0.05),
    (lossless(), 0),
    pytest.param(offload(min_bytes=0), 0, marks=pytest.mark.slow),
    pytest.param(budget(max_slowdown=1.0), 0.1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("policy", "tolerance"), POLICIES, ids=lambda p: repr(p))
def test_gradients_are_those_of_eager_in_many_steps_of_changing_shapes(policy: Any, tolerance: float) -> None:
    model = Net()
    compiled = torch.compile(model)
    with enable(policy, options=ATEN):
        for rows in (32, 32, 48, 16, 48, 7):
            x = torch.randn(rows, 32)
            found, exact = gradients(compiled, model, x), gradients(model, model, x)
            assert total_error(found, exact) <= (tolerance or 1e-6)
        assert packed(compiled) > 0
        assert graph_count() <= 2  # the second is for any number of rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "least"),
    [(float8(), 1e-6), (budget(max_slowdown=1.0), 0.0)],  # the budget may choose exact means
    ids=repr,
)
def test_with_inductor_too(policy: Any, least: float) -> None:
    model, x = Net(1), torch.randn(32, 32)
    compiled = torch.compile(model, options={"fallback_random": True})
    with enable(policy):
        found = gradients(compiled, model, x)
    assert least < total_error(found, gradients(model, model, x)) < 0.06
    assert packed(compiled) > 0


def test_without_a_policy_contexts_say() -> None:
    model, x = Net(), torch.randn(8, 32)
    compiled = torch.compile(model)
    exact = gradients(model, model, x)
    with enable(options=ATEN):
        assert total_error(gradients(compiled, model, x), exact) < 1e-6
        assert last_plans(compiled) == ()
        with saved_tensors_hooks(BITS):
            assert total_error(gradients(compiled, model, x), exact) < 1e-6
        assert "bits" in hooks_of(compiled)


def test_a_context_wins_over_the_policy_around_the_call_and_inside() -> None:
    weight = torch.randn(32, 32, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        h = (x @ weight).tanh()
        with saved_tensors_hooks(int8()):
            h = (h @ weight).tanh()
        return (h @ weight).sin()

    compiled = torch.compile(f, fullgraph=True)
    with enable(float8(), options=ATEN):
        compiled(torch.randn(8, 32)).sum().backward()
        assert {"float8", "int8"} <= hooks_of(compiled)
        with saved_tensors_policy(lossless()):
            compiled(torch.randn(8, 32)).sum().backward()
        assert "float8" not in hooks_of(compiled) and "int8" in hooks_of(compiled)


@pytest.mark.parametrize("how", ["Module.compile", "regional", "decorator"])
def test_each_way_to_compile(how: str) -> None:
    model, x = Net(4), torch.randn(8, 32)
    exact = gradients(model, model, x)
    run: Any = model
    if how == "Module.compile":
        model.compile()
    elif how == "regional":
        for block in model.blocks:
            block.compile()
    else:
        run = torch.compile(lambda x: model(x))
    with enable(int8(), options=ATEN):
        assert 1e-6 < total_error(gradients(run, model, x), exact) < 0.02
    if how == "regional":
        assert graph_count() == 2  # the first block's input needs no gradient; the others share a graph
        assert packed(model.blocks[0]) > 0
    else:
        assert packed(run) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_and_dropout_are_those_of_the_function(dtype: torch.dtype) -> None:
    model = nn.Sequential(Block(dropout=0.5), Block(dropout=0.5))
    compiled = torch.compile(lambda x: model(x))
    with enable(lossless(), options=ATEN), torch.autocast("cpu", dtype):
        torch.manual_seed(3)
        found = gradients(compiled, model, torch.ones(16, 32))
        torch.manual_seed(3)
        exact = gradients(model, model, torch.ones(16, 32))
    assert total_error(found, exact) < 0.01
    assert packed(compiled) > 0  # masks


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_compiled_blocks_recompute_with_the_same_graphs(reentrant: bool) -> None:
    model, x = Net(3), torch.randn(8, 32, requires_grad=True)
    exact = gradients(model, model, x)
    for block in model.blocks:
        block.compile()

    def run(x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    with enable(lossless(), options=ATEN):
        for _ in range(3):
            assert total_error(gradients(run, model, x), exact) < 1e-6


# --- which graphs are used -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stock_is_aten")
def test_each_policy_has_graphs_of_its_own_and_equal_ones_share_them() -> None:
    model, x = Net(1), torch.randn(8, 32)
    compiled = torch.compile(model)
    exact = gradients(compiled, model, x)
    assert graph_count() == 1

    def run(policy: Any, scope: str | None = None) -> tuple[int, float]:
        with enable(policy, scope=scope, options=ATEN):
            found = gradients(compiled, model, x)
        return graph_count(), total_error(found, exact)

    count, of_float8 = run(float8())
    assert count == 2
    count, of_int8 = run(int8())
    assert count == 3 and 0 < of_int8 < of_float8
    assert run(float8(), "no_static")[0] == 4
    for _ in range(3):  # each is found again, without hooks too
        assert run(float8()) == (4, of_float8)
        assert run(int8()) == (4, of_int8)
        assert total_error(gradients(compiled, model, x), exact) == 0
    assert graph_count() == 4


@pytest.mark.usefixtures("stock_is_aten")
def test_nested_ones_end_in_any_order() -> None:
    model, x = Net(1), torch.randn(8, 32)
    compiled = torch.compile(model)
    exact = gradients(compiled, model, x)
    outer = enable(float8(), options=ATEN)
    of_outer = total_error(gradients(compiled, model, x), exact)
    inner = enable(int8(), options=ATEN)
    of_inner = total_error(gradients(compiled, model, x), exact)
    assert 0 < of_inner < of_outer
    outer.disable()
    assert inner.is_enabled and not outer.is_enabled
    assert total_error(gradients(compiled, model, x), exact) == of_inner
    inner.disable()
    inner.disable()
    assert total_error(gradients(compiled, model, x), exact) == 0


def test_runs_are_counted_with_their_plans() -> None:
    model = Net(3)
    for block in model.blocks:
        block.compile()
    x = torch.randn(8, 32, requires_grad=True)
    with enable(float8(), options=ATEN) as outer:
        for _ in range(2):
            gradients(model, model, x)
        ((plan, count),) = outer.runs()
        assert count == 6 and plan.packed_bytes < plan.saved_bytes
        assert outer.runs() == []
        with enable(int8(), options=ATEN) as inner:
            gradients(model, model, x)
            with torch.no_grad():
                model(x)
        assert outer.runs() == [] and [count for _, count in inner.runs()] == [3]
    with enable(float8(), options=ATEN) as again:
        gradients(model, model, x)
        assert again.runs() == [(plan, 3)]


def test_runs_of_a_budget_are_counted_after_its_plan_for_the_step() -> None:
    first, second = nn.Linear(64, 256), nn.Linear(256, 64)

    def function(x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(first(x))
        torch._dynamo.graph_break()
        return second(h).tanh().square().mean()

    compiled = torch.compile(function)
    policy = budget("2.2MiB", allow=("recompute", "float8", "int4"), max_error=1)
    with enable(policy, options=ATEN) as hooks:
        for _ in range(5):  # after the third a plan for both graphs replaces those of each alone
            compiled(torch.randn(512, 64)).backward()
            runs = hooks.runs()
            assert len(runs) == 2 and sum(plan.saved_bytes for plan, _ in runs) > 0
    assert [plan for plan, _ in runs] == list(last_plans(compiled))


def test_a_model_made_anew_has_the_plans_of_the_graphs_that_it_runs() -> None:
    plans = []
    for _ in range(3):
        torch.manual_seed(0)
        compiled = torch.compile(Net(1))
        with enable(float8(), options=ATEN) as hooks:
            compiled(torch.randn(8, 32)).sum().backward()
            ((plan, count),) = hooks.runs()
        assert count == 1 and last_plans(compiled) == (plan,)
        plans.append(plan)
    assert plans[0] is plans[1] is plans[2]


@pytest.mark.usefixtures("stock_is_aten")
def test_a_lost_switch_can_be_ended() -> None:
    x, compiled = torch.randn(8, 32), torch.compile(Net(1))
    for _ in range(2):  # as a cell of a notebook that runs twice
        hooks = enable(float8(), options=ATEN)
        compiled(x)
    hooks.disable()
    assert not hooks.is_enabled
    aot_hooks.disable()
    compiled(x).sum().backward()
    with enable(int8(), options=ATEN) as last:
        compiled(x).sum().backward()
    assert len(last.runs()) == 1


def test_too_many_policies_for_one_function_are_said() -> None:
    compiled, x = torch.compile(Net(1)), torch.randn(8, 32)
    with torch._dynamo.config.patch(recompile_limit=2):
        for i in range(2):
            with enable(offload(min_bytes=i), options=ATEN):
                compiled(x).sum().backward()
        with pytest.warns(errors.UnusedWarning, match="recompile_limit"), enable(offload(min_bytes=9), options=ATEN):
            compiled(x).sum().backward()


def test_a_function_that_dynamo_left_to_python_is_named() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0])  # type: ignore[no-any-return]

    for module in (Recurrent(), nn.LSTM(8, 8)):
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as caught, enable(float8(), options=ATEN) as hooks:
            warnings.simplefilter("always")
            torch.compile(module)(torch.ones(2, 4, 8))
            count = hooks.run_count
        said = [str(each.message) for each in caught if "had no effect" in str(each.message)]
        # From torch 2.15 Dynamo goes on behind the LSTM: the head has a graph, which has hooks.
        assert len(said) == (count == 0) and (count == 0 or isinstance(module, Recurrent))
        for text in said:
            assert "left it to Python" in text and "RNN, GRU, or LSTM" in text and "recompile_limit" not in text


def test_the_warning_says_whether_nothing_or_another_backend_was_called() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    other = torch.compile(lambda x: x.sin(), backend="aot_eager")
    for call, said in ((other, "are compiled for another backend, 'aot_eager'."), (torch.sin, "No compiled function")):
        with pytest.warns(errors.UnusedWarning, match=re.escape(said)), enable(float8(), options=ATEN):
            call(x)


def test_an_exception_ends_it() -> None:
    with contextlib.suppress(ValueError), enable(float8(), options=ATEN):
        raise ValueError


def test_what_dynamo_skips_has_no_hooks_and_that_is_said() -> None:
    """Before torch 2.15 it skips frames of torch.nn, so `nn.Sequential(...).compile()` runs in eager mode."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh()), torch.randn(8, 8)
    model.compile()
    with warnings.catch_warnings(record=True) as caught, enable(int8(), options=ATEN):
        warnings.simplefilter("always")
        gradients(model, model, x)
    said = [str(each.message) for each in caught if "had no effect" in str(each.message)]
    assert len(said) == (graph_count() == 0) and all("nn.Sequential(...).compile()" in text for text in said)


def test_the_log_says_after_the_first_step_and_at_the_end_that_it_works(caplog: pytest.LogCaptureFixture) -> None:
    first_block, second_block, x = torch.compile(Block()), torch.compile(Block(64)), torch.randn(8, 32)

    def step() -> torch.Tensor:
        return second_block(first_block(x).repeat(1, 2)).square().sum()

    with caplog.at_level("INFO", logger="aot_hooks"), enable(float8(), options=ATEN):
        with torch.no_grad():
            step()
        step().backward()
        first = [r.getMessage() for r in caplog.records if "first step" in r.getMessage()]
        step().backward()
    lines = [r.getMessage() for r in caplog.records if re.search("first step|ended", r.getMessage())]
    plans = [plan for block in (first_block, second_block) for plan in last_plans(block)]
    saved, packed = sum(plan.saved_bytes for plan in plans), sum(plan.packed_bytes for plan in plans)
    count = f"{len(plans)} graphs, {size_text(saved)} -> {size_text(packed)} saved"
    if not torch.cuda.is_available():
        count += ", on a CPU, whose memory is seldom what limits training"
    assert packed < saved and first == lines[:1]
    assert lines == [f"aot_hooks: enable(float8()): first step: {count}", f"aot_hooks: enable(float8()) ended: {count}"]


def test_on_a_gpu_the_line_has_the_peak_and_the_predicted_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 41 << 30)
    compiled, x = torch.compile(Net(2)), torch.randn(8, 32)
    with caplog.at_level("INFO", logger="aot_hooks"), enable(float8(), options=ATEN):
        compiled(x).sum().backward()
    (plan,) = last_plans(compiled)
    (line,) = [r.getMessage() for r in caplog.records if "first step" in r.getMessage()]
    assert plan.step_ratio > 1 and line.endswith(f"peak of the process 41 GiB, predicted step {plan.step_ratio:.3f}")


def test_the_line_has_the_peaks_of_a_step_of_one_graph_as_plan_predicts_them(caplog: pytest.LogCaptureFixture) -> None:
    net, x = Net(2), torch.randn(256, 32)
    predicted = aot_hooks.plan(net, x, policy=float8(), inner="aten")
    with caplog.at_level("INFO", logger="aot_hooks"), enable(float8(), options=ATEN):
        torch.compile(net)(x).sum().backward()
    (line,) = [r.getMessage() for r in caplog.records if "first step" in r.getMessage()]
    stock = max(point.live_bytes for point in predicted.live_before)
    assert predicted.peak_bytes < stock == predicted.stock_peak_bytes
    assert f"start {size_text(predicted.peak_bytes)} (stock about {size_text(stock)})" in line


@pytest.mark.parametrize("policy", [float8(), budget("1MiB")], ids=repr)
def test_peaks_of_a_step_of_many_calls_are_in_the_line_if_a_budget_plans_them(
    caplog: pytest.LogCaptureFixture, policy: Any
) -> None:
    net = nn.Sequential(*(Net(1) for _ in range(4)))
    blocks, x = [torch.compile(block) for block in net], torch.randn(256, 32, requires_grad=True)
    with caplog.at_level("INFO", logger="aot_hooks"), enable(policy, options=ATEN):
        for _ in range(4):
            functools.reduce(lambda y, block: block(y), blocks, x).sum().backward()
    first, last = (r.getMessage() for r in caplog.records if re.search("first step: |ended: ", r.getMessage()))
    assert "stock" not in first
    peaks = [(p.peak_bytes, p.stock_peak_bytes) for p in last_plans(blocks[0]) if p.in_step is not None]
    assert [f"start {size_text(most)} (stock about {size_text(stock)})" in last for most, stock in peaks] == (
        [] if policy == float8() else [True]
    )


def test_an_evaluation_alone_warns_of_nothing() -> None:
    model, x = Net(1), torch.randn(8, 32)
    compiled = torch.compile(model)
    for _ in range(2):
        with warnings.catch_warnings(), torch.no_grad(), enable(float8(), options=ATEN):
            warnings.simplefilter("error")
            compiled(x)


def test_an_outer_one_without_effect_names_the_inner_one() -> None:
    compiled, x = torch.compile(Net(1)), torch.randn(8, 32)
    says = "while it was the innermost.*Only the innermost counts, and enable(int8()) was enabled inside"
    with pytest.warns(errors.UnusedWarning, match=says.replace("(", r"\(").replace(")", r"\)")):
        with enable(float8(), options=ATEN), enable(int8(), options=ATEN):
            compiled(x).sum().backward()


def test_other_backends_are_left_alone() -> None:
    model, x = Net(1), torch.randn(8, 32)
    eager = torch.compile(model, backend="eager")
    ours = torch.compile(model, backend="aot_hooks", options=ATEN | {"policy": int8()})
    with pytest.warns(errors.UnusedWarning, match="had no effect"), enable(float8(), options=ATEN):
        assert total_error(gradients(eager, model, x), gradients(model, model, x)) < 1e-6
        gradients(ours, model, x)
    assert hooks_of(ours) == {"int8", "compare", "keep"}


def test_mode_options_and_fullgraph_of_the_function_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def compile_with_hooks(gm: Any, inputs: Any, patches: dict[str, Any], *_: Any) -> Any:
        seen.append(patches)
        return compile_graph(gm, inputs, patches["custom_partitioner_fn"])

    monkeypatch.setattr(inductor, "compile_with_hooks", compile_with_hooks)
    model = Net(1)
    settings = {"inductor": {"max_fusion_size": 7, "epilogue_fusion": False}}
    with enable(float8(), options=settings):
        torch.compile(model, mode="max-autotune-no-cudagraphs")(torch.randn(8, 32))
        assert seen[-1]["max_autotune"] is True and seen[-1]["max_fusion_size"] == 7
        torch.compile(model, options={"max_fusion_size": 9})(torch.randn(8, 32))
        assert seen[-1]["max_fusion_size"] == 9 and seen[-1]["epilogue_fusion"] is False

        @torch.compile(fullgraph=True)
        def broken(x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            torch._dynamo.graph_break()
            return x.cos()

        with pytest.raises(torch._dynamo.exc.Unsupported):
            broken(torch.randn(3, requires_grad=True))


@pytest.mark.usefixtures("stock_is_aten")
def test_stances_of_torch_keep_their_meaning() -> None:
    model, x = Net(1), torch.randn(8, 32)
    compiled = torch.compile(model)
    with enable(float8(), options=ATEN):
        of_hooks = gradients(compiled, model, x)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert total_error(gradients(compiled, model, x), of_hooks) == 0
        with torch.compiler.set_stance("force_eager"):
            assert total_error(gradients(compiled, model, x), gradients(model, model, x)) == 0
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
        compiled(x)


@pytest.mark.slow
def test_torchs_caches_miss_for_another_policy_and_hit_for_an_equal_one() -> None:
    def run(policy: Any) -> tuple[float, int, int]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net(1)
        compiled, x = torch.compile(model), torch.randn(16, 32)
        before = aot_hooks.cache_stats()
        with enable(policy) if policy is not None else contextlib.nullcontext():
            found = gradients(compiled, model, x)
        after = aot_hooks.cache_stats()
        return (
            total_error(found, gradients(model, model, x)),
            after["hits"] - before["hits"],
            after["misses"] - before["misses"],
        )

    stock, *_ = run(None)
    of_float8, *counts = run(float8())
    assert counts == [0, 1] and of_float8 > 100 * stock
    of_int8, *counts = run(int8())
    assert counts == [0, 1] and 100 * stock < of_int8 < of_float8
    assert run(float8()) == (of_float8, 1, 0)
    assert run(int8()) == (of_int8, 1, 0)
    assert run(None)[0] == stock


def test_it_counts_in_other_threads() -> None:
    model, x = Net(1), torch.randn(8, 32)
    compiled = torch.compile(model)
    with enable(float8(), options=ATEN):
        thread = threading.Thread(target=lambda: gradients(compiled, model, x))
        thread.start()
        thread.join()
    assert packed(compiled) > 0


def test_ddp_cuts_graphs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch compiles each bucket of DDP by the backend of the function, with its own way of exchanging backends."""
    monkeypatch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 1 << 14)
    with group_of_one():
        model, x = Net(3), torch.randn(8, 32)
        exact = gradients(model, model, x)
        parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
        compiled = torch.compile(parallel)
        with enable(float8(), options=ATEN):
            found = gradients(compiled, model, x)
        assert 1e-6 < total_error(found, exact) < 0.05
        assert packed(compiled) > 0 and len(last_plans(compiled)) > 1


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("policy", [float8(), offload(then=float8(), min_bytes=0), budget(max_slowdown=1.0)], ids=repr)
def test_less_stays_alive_on_a_gpu(policy: Any) -> None:
    def run(enabled: contextlib.AbstractContextManager[Any]) -> tuple[int, list[torch.Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(1024) for _ in range(4))).to("cuda", torch.bfloat16)
        compiled, x = torch.compile(model), torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
        with enabled:
            for _ in range(3):
                model.zero_grad()
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                loss = compiled(x).float().square().mean()
                torch.cuda.synchronize()
                alive = torch.cuda.memory_allocated() - before
                loss.backward()
        return alive, [p.grad for p in model.parameters() if p.grad is not None]

    stock, exact = run(contextlib.nullcontext())
    alive, found = run(enable(policy))
    assert alive < 0.75 * stock
    assert total_error(found, exact) < 0.1
