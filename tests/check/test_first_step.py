"""`check=True`: the gradients of the first step beside those without hooks, and what stays unpacked after that."""

from __future__ import annotations

import functools
import gc
import logging
import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from steps import ATEN, BITS
from torch import nn

import aot_hooks
from aot_hooks import KEEP, Hook, SavedTensor, float8, last_plans
from aot_hooks.check import first_step
from aot_hooks.errors import GradientWarning, OptionError
from aot_hooks.hook import compiled_by
from aot_hooks.integrations.training import Training
from aot_hooks.torch_private import autograd, dynamo

# so coarse that the sine of what comes back has nothing to do with the sine of what was saved
COARSE = Hook("coarse", lambda x: (x / 8).round().to(torch.int8), lambda q: q.float() * 8)
DIM, ROWS, COUNT = 16, 24, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(self.up(x) * 3)
        return x + self.down(nn.functional.dropout(y, 0.1, self.training))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.blocks = nn.BatchNorm1d(DIM), nn.ModuleList(Block() for _ in range(COUNT))
        self.head = nn.Linear(DIM, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.gelu(self.head(x)).square().mean()


class Small(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor] = nn.functional.gelu) -> None:
        super().__init__()
        self.function = function
        self.up, self.down = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3)), nn.Linear(DIM, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up in self.up:
            x = self.function(up(x))
        return self.down(x).square().mean()


def sines(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x * 3)


SINES = functools.partial(Small, sines)


def coarse_angles(saved: SavedTensor) -> Hook:
    """`COARSE` for what the sines of the model are made of, KEEP for the rest."""
    sine = any(text in saved.source_line for text in ("sin(", "function("))
    return COARSE if saved.op == "aten.addmm.default" and sine else KEEP


def made(kind: Callable[[], nn.Module] = Model) -> Any:
    torch.manual_seed(0)
    return kind()


def batch(i: int, rows: int = ROWS) -> torch.Tensor:
    torch.manual_seed(100 + i)
    return torch.randn(rows, DIM)


def train(model: nn.Module, run: Callable[..., Any], steps: int = 3, rows: int = ROWS) -> list[Any]:
    """For each step the gradients, then the buffers and the random state that are left."""
    found = []
    for i in range(steps):
        run(batch(i, rows)).backward()
        state = [torch.get_rng_state(), *(b.clone() for b in model.buffers())]
        found.append(([None if p.grad is None else p.grad.clone() for p in model.parameters()], state))
        model.zero_grad()
    return found


@functools.cache
def expected(kind: Callable[[], nn.Module] = Model, inner: str = "aten") -> list[Any]:
    model = made(kind)
    return train(model, torch.compile(model, backend="aot_hooks", options={"inner": inner}))


def error(got: Any, right: Any) -> float:
    off = sum(float((a - b).norm()) ** 2 for a, b in zip(got[0], right[0], strict=True))
    return (off / sum(float(b.norm()) ** 2 for b in right[0])) ** 0.5


def same(got: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, right, strict=True))


def equal(got: Any, right: Any) -> bool:
    """Gradients, buffers and random states of all steps, bit for bit."""
    return all(same(a, b) for step, other in zip(got, right, strict=True) for a, b in zip(step, other, strict=True))


def checked(model: Any, policy: Any, check: Any = True, **options: Any) -> Any:
    return torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy, "check": check, **options})


class Lines:
    def __init__(self, caplog: Any) -> None:
        self.caplog = caplog

    def __call__(self) -> list[str]:
        """The lines of checks so far."""
        return [r.getMessage() for r in self.caplog.records if r.getMessage().startswith("check: ")]


@pytest.fixture
def lines(caplog: Any) -> Lines:
    caplog.set_level(logging.INFO, logger="aot_hooks")
    return Lines(caplog)


@pytest.fixture
def runs(monkeypatch: Any) -> list[Any]:
    """Each backward that was run for a check."""
    found: list[Any] = []
    run = autograd.Rerun.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(autograd.Rerun, "__call__", noted)
    return found


@pytest.fixture
def quiet() -> Iterator[None]:
    """No warning of a check."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradientWarning)
        yield


@pytest.mark.core
def test_a_hook_that_spoils_gradients_is_named_and_its_tensors_stay_unpacked(lines: Lines, runs: list[Any]) -> None:
    model = made()
    compiled = checked(model, coarse_angles)
    with pytest.warns(GradientWarning, match="limit 0.1") as found:
        got = train(model, compiled)
    right = expected()
    (warning,) = [str(w.message) for w in found if w.category is GradientWarning]
    assert re.search(r"'addmm' float32\[24, 64\] \(test_first_step\.py:\d+: y = torch\.sin.* and 1 like it", warning)
    assert "made by aten.addmm.default in blocks.0.up: " in warning and "'coarse' alone" in warning
    # the first step is right as well, and masks, statistics and random numbers are those of a run without a check
    assert equal(got, right)
    (plan,) = last_plans(compiled)
    left = [d for d in plan.decisions if d.reason.startswith("check: gradients were")]
    assert len(left) == COUNT and all(d.hook is KEEP for d in plan.decisions)
    # without hooks, and with equal layers rounded at once
    assert len(runs) == 2 and len(lines()) == 1
    assert first_step._unpacked.known
    torch._dynamo.reset()
    assert not first_step._unpacked.known


def test_only_the_causes_stay_unpacked(lines: Lines, runs: list[Any]) -> None:
    model = made()

    def both(saved: SavedTensor) -> Hook:
        hook = coarse_angles(saved)
        return float8() if hook is KEEP and saved.dtype.is_floating_point else hook

    compiled = checked(model, both)
    with pytest.warns(GradientWarning, match="'coarse' alone"):
        got = train(model, compiled)
    right = expected()
    assert same(got[0][0], right[0][0])
    assert 0.001 < error(got[2], right[2]) < 0.06
    hooks = {d.saved.op: d.hook.name for plan in last_plans(compiled) for d in plan.decisions if d.hook is not KEEP}
    assert hooks and all("float8" in name for name in hooks.values())
    first, second = lines()  # what was compiled then is compared, too
    assert float(first.split()[4]) > 0.1 > float(second.split()[4])


def test_multiples_of_a_cause_are_multiplied_again_as_with_hooks() -> None:
    """The second product reads a multiple of the first one's result. If that were saved, it would be exact."""

    def powers_of_two(x: torch.Tensor) -> torch.Tensor:
        return x.sign() * 2 ** x.abs().clamp(min=1e-30).log2().round()

    coarse = Hook("coarse", powers_of_two, lambda q: q * 1.0, lossy=True, error=0.3, digits=2, relative=True)
    model = made(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.RMSNorm(DIM), nn.Linear(DIM, DIM)))
    model[0].weight.data *= 100  # so its own gradients are small beside those of the second
    compiled = checked(lambda x: model(x).square().mean(), coarse, 0.05)
    with pytest.warns(GradientWarning, match="'coarse' alone") as seen:
        train(model, compiled, steps=1)
    (text,) = [str(each.message) for each in seen if each.category is GradientWarning]
    alone = [float(number) for number in re.findall(r"([\d.]+) off by", text)]
    assert len(alone) == 2 and min(alone) > 0.05


class Attention(nn.Module):
    """The gradient of the keys' bias is zero but for rounding."""

    def __init__(self, scale: float = 32.0) -> None:
        super().__init__()
        self.scale = scale
        self.queries, self.keys, self.values = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            q, k, v = (layer(x)[None, None] for layer in (self.queries, self.keys, self.values))
            attended = nn.functional.scaled_dot_product_attention(q, k, v, scale=self.scale / DIM**0.5)
            return attended.float().tanh().square().mean()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("scale", [1.0, 32.0])
@pytest.mark.parametrize("hook", [float8(), aot_hooks.int8()], ids=str)
def test_a_gradient_that_is_rounding_in_the_dtype_of_autocast_is_not_the_worst(
    lines: Lines, hook: Hook, scale: float
) -> None:
    """It was 2 to 15 times off, and the tensors that changed it most stayed unpacked."""
    model = made(lambda: Attention(scale))
    train(model, checked(model, hook, check=0.2), steps=1)
    (line,) = lines()
    assert "keys.bias" not in line
    report = aot_hooks.check_gradients(model, batch(0), policy=hook, inner="aten")
    assert [row.name for row in report.rows if row.vanishes] == ["keys.bias"]


class Padded(nn.Module):
    """Rows are nearly equal numbers, which a norm reads with the mean and variance that they had."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(self.norm(5.3 + 0.01 * self.first(x)))
        return torch.tanh(self.second(h)).square().mean()


@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_probabilities_that_a_cause_has_rounded_sum_to_one_as_with_hooks(inner: str) -> None:
    """Else they would be 12 times as far off alone as with hooks, and the first cause."""

    class Sharp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.keys, self.values = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = torch.softmax(self.queries(x) @ self.keys(x).t() * 16, -1)
            return torch.tanh(weights @ self.values(x)).square().mean()

    model = made(Sharp)
    policy = aot_hooks.policies.only_these_ops({"softmax": float8(), "_softmax": float8()})
    compiled = checked(model, policy, 1e-3, inner=inner)
    with pytest.warns(GradientWarning, match="' alone") as seen:
        train(model, compiled, steps=1)
    (text,) = [str(each.message) for each in seen if each.category is GradientWarning]
    (together,) = re.findall(r"are ([\d.e+-]+) off", text)
    (alone,) = re.findall(r"([\d.e+-]+) off by", text)
    assert float(alone) == pytest.approx(float(together), rel=0.1)


@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hook", [float8(), aot_hooks.int4(stochastic=False)], ids=str)
def test_a_norm_reads_what_a_cause_has_rounded_as_with_hooks(hook: Hook, inner: str) -> None:
    """Else the input of the norm would be 100 times as far off alone as with all other tensors."""
    model = made(Padded)
    with pytest.warns(GradientWarning, match="' alone") as seen:
        train(model, checked(model, hook, inner=inner), steps=1)
    (text,) = [str(each.message) for each in seen if each.category is GradientWarning]
    (together,) = re.findall(r"are ([\d.e+]+) off", text)
    alone = re.findall(r"([\d.e+]+) off by", text)
    assert len(alone) == 1 and float(alone[0]) == pytest.approx(float(together), rel=0.1)


@pytest.mark.core
@pytest.mark.usefixtures("quiet")
def test_a_model_that_is_fine_has_one_line_with_the_figures_of_check_gradients(lines: Lines, runs: list[Any]) -> None:
    model = made()
    reference = aot_hooks.check_gradients(model, batch(0), policy=aot_hooks.int8(), inner="aten")
    compiled = checked(model, aot_hooks.int8())
    got = train(model, compiled)
    (line,) = lines()
    figures = re.fullmatch(
        r"check: gradients are within (\S+) of those without hooks; worst (blocks\.\d\.\S+|(?:head|norm)\.\w+) (\S+)",
        line,
    )
    assert figures is not None
    assert float(figures[1]) == pytest.approx(error(got[0], expected()[0]), rel=0.06)
    assert float(figures[1]) == pytest.approx(reference.error, rel=0.5)  # of other dropout masks
    assert len(runs) == 1  # one more forward and backward, in the first step alone
    assert all(same(a[1], b[1]) for a, b in zip(got, expected(), strict=True))


@pytest.mark.usefixtures("quiet")
def test_an_exact_hook_gives_the_same_bits(lines: Lines) -> None:
    model = made(Small)
    got = train(model, checked(model, BITS))
    assert equal(got, expected(Small)) and " within 0 of those " in lines()[0]


@pytest.mark.usefixtures("quiet")
def test_blocks_that_are_compiled_one_by_one_have_one_line_together(lines: Lines, runs: list[Any]) -> None:
    model = made()
    for block in model.blocks:
        block.compile(backend="aot_hooks", options={**ATEN, "policy": float8(), "check": True})
    got = train(model, model)
    (line,) = lines()
    assert re.search(r"worst blocks\.\d\.\w+\.\w+ \S+ \(2 compiled calls, compared one by one\)$", line)
    assert len(runs) == COUNT
    plain = made()
    assert all(same(a[1], b[1]) for a, b in zip(got, train(plain, plain), strict=True))


def test_blocks_that_share_a_graph_are_compiled_once_more_together(runs: list[Any]) -> None:
    model = made()
    for block in model.blocks:
        block.compile(backend="aot_hooks", options={**ATEN, "policy": coarse_angles, "check": True})
    with pytest.warns(GradientWarning) as found:
        got = train(model, model)
    assert len([w for w in found if w.category is GradientWarning]) == 1
    plain = made()
    for block in plain.blocks:
        block.compile(backend="aot_hooks", options=ATEN)
    right = train(plain, plain)
    assert equal(got, right)


class Doubled:
    """A hook that gives twice the tensor in graphs, and the tensor itself where it just runs."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if compiled_by() == "eager" else 2.0)


def doubled(saved: SavedTensor) -> Hook:
    return KEEP if coarse_angles(saved) is KEEP else Hook("doubled", Doubled(), lambda p: p * 1.0, cache_hash="1")


@pytest.mark.core
@pytest.mark.parametrize("policy", [None, float8()], ids=["region alone", "policy around it"])
def test_a_context_inside_the_function_is_checked_too(lines: Lines, policy: Any) -> None:
    model, right = made(Small), expected(Small)

    def run(x: torch.Tensor, hook: Any) -> torch.Tensor:
        for up in model.up[:-1]:
            x = nn.functional.gelu(up(x))
        with aot_hooks.saved_tensors_hooks(hook):
            x = nn.functional.gelu(model.up[-1](x))
        return model.down(x).square().mean()

    (found,) = train(model, functools.partial(checked(run, policy), hook=float8()), steps=1)
    (line,) = lines()
    assert 0 < error(found, right[0]) < 0.06 and float(line.split()[4]) < 0.06
    with pytest.warns(GradientWarning, match="'coarse'"):
        (found,) = train(model, functools.partial(checked(run, policy), hook=COARSE), steps=1)
    assert error(found, right[0]) < (1e-6 if policy is None else 0.06)
    assert "worst up.2.weight" in lines()[-1]


def test_what_rounding_does_not_explain_leaves_the_graph_unpacked() -> None:
    model = made(SINES)
    compiled = checked(model, doubled)
    with pytest.warns(GradientWarning, match="Rounding explains only 0 of it, so the graph stays unpacked as a whole"):
        got = train(model, compiled)
    assert all(same(a[0], b[0]) for a, b in zip(got, expected(SINES), strict=True))
    (plan,) = last_plans(compiled)
    assert any("no rounding explains that" in d.reason for d in plan.decisions)


def test_a_function_that_cannot_be_compiled_again_runs_without_hooks(monkeypatch: Any) -> None:
    monkeypatch.setattr(dynamo, "compile_anew", lambda *_, **__: False)
    model = made(SINES)
    with pytest.warns(GradientWarning, match="can't be compiled again now, so its graph runs without hooks"):
        got = train(model, checked(model, coarse_angles))
    right = expected(SINES)
    assert equal(got, right)


@pytest.mark.parametrize(
    "raised, said",
    [(torch.OutOfMemoryError("CUDA out of memory"), "memory ran out.*compile the blocks"), (RuntimeError("no"), "no")],
)
def test_a_second_run_that_fails_is_a_warning_and_the_training_goes_on(
    monkeypatch: Any, lines: Lines, raised: Exception, said: str
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise raised

    monkeypatch.setattr(autograd.Rerun, "__call__", fails)
    model = made(Small)
    with pytest.warns(GradientWarning, match=f"1 calls? of compiled functions? .*{said}"):
        got = train(model, checked(model, float8()))
    assert lines() == [] and 0 < error(got[0], expected(Small)[0]) < 0.1


@pytest.mark.usefixtures("quiet")
def test_the_first_backward_is_compared_whatever_comes_before_it(lines: Lines, runs: list[Any]) -> None:
    model = made(Small)
    compiled = checked(model, float8())
    with torch.no_grad():
        compiled(batch(0))
    out = compiled(batch(0))
    del out  # no backward
    loss = compiled(batch(1))
    failing = loss * torch.ones((), requires_grad=True)
    failing.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.backward()
    assert lines() == []
    one, other = compiled(batch(2)), compiled(batch(3))
    one.backward(retain_graph=True)
    assert len(lines()) == 1
    one.backward()
    other.backward()
    assert len(lines()) == len(runs) == 1


def test_a_backward_that_makes_a_graph_is_not_compared() -> None:
    model = made(Small)
    x = batch(0)
    loss = checked(model, float8())(x)
    with pytest.warns(GradientWarning, match="makes a graph"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@pytest.mark.usefixtures("quiet")
def test_each_graph_for_other_sizes_is_compared(lines: Lines) -> None:
    model = made(Small)
    compiled = checked(model, float8())
    for rows in (24, 10, 12):  # static, then one with a symbolic size
        train(model, compiled, 1, rows)
    assert len(lines()) == 2


@pytest.mark.usefixtures("quiet")
def test_frozen_and_tied_parameters_and_gradients_of_inputs(lines: Lines) -> None:
    model = made()
    model.blocks[0].up.requires_grad_(False)
    model.blocks[0].down = model.blocks[1].down
    x = batch(0).requires_grad_()
    compiled = checked(model, float8())
    model.blocks[1].up.weight.grad = torch.ones(4 * DIM, DIM)  # gradients that accumulate
    compiled(x).backward()
    assert len(lines()) == 1 and x.grad is not None
    assert model.blocks[0].up.weight.grad is None
    assert float((model.blocks[1].up.weight.grad - 1).norm()) < 1


def test_a_gradient_that_only_the_hook_makes_infinite_is_above_any_limit() -> None:
    endless = Hook("endless", lambda x: x * torch.inf, lambda q: q)
    model = made(SINES)
    compiled = checked(model, lambda saved: KEEP if coarse_angles(saved) is KEEP else endless, 1e9)
    with pytest.warns(GradientWarning, match="inf off"):
        got = train(model, compiled)
    assert all(same(a[0], b[0]) for a, b in zip(got, expected(SINES), strict=True))


@pytest.mark.usefixtures("quiet")
def test_a_limit_of_ones_own(lines: Lines) -> None:
    model = made(SINES)
    train(model, checked(model, coarse_angles, 100.0))
    assert len(lines()) == 1


def test_a_budget_rounds_nothing_that_is_a_cause(lines: Lines) -> None:
    model = made(Small)
    compiled = checked(model, aot_hooks.budget(max_slowdown=math.inf, allow=("float8",)), 1e-6)
    with pytest.warns(GradientWarning, match="limit 1e-06"):
        got = train(model, compiled)
    assert all(same(a[0], b[0]) for a, b in zip(got, expected(Small), strict=True))
    (plan,) = last_plans(compiled)
    assert all(d.hook is KEEP for d in plan.decisions)
    assert any("; check: gradients were" in d.reason for d in plan.decisions)


def test_hooks_that_draw_random_numbers_are_compared_in_a_run_of_their_own(lines: Lines) -> None:
    noisy = Hook("noisy", lambda x: x + 0.02 * torch.randn_like(x), lambda q: q * 1.0)
    model = made(SINES)
    compiled = checked(model, lambda saved: KEEP if coarse_angles(saved) is KEEP else noisy)
    train(model, compiled)
    (line,) = lines()
    assert 0 < float(line.split()[4]) < 0.1


@pytest.mark.usefixtures("quiet")
def test_what_is_switched_on_for_a_trainer(lines: Lines) -> None:
    model = made(Small)
    training = Training(float8(), options=ATEN, check=True)
    training.start()
    train(model, torch.compile(model), 2)
    training.batch_done()
    training.stop()
    assert len(lines()) == 1
    torch._dynamo.reset()  # an equal model under an equal `enable` runs the graphs that are there
    model = made(Small)
    with aot_hooks.enable(float8(), options={**ATEN, "check": True}):
        train(model, torch.compile(model), 2)
    assert len(lines()) == 2


def test_check_is_given_once() -> None:
    with pytest.raises(OptionError, match="options has 'check', which is an argument"):
        aot_hooks.enable(float8(), options={"check": True}, check=True)
    with pytest.raises(OptionError, match="check must be True"):
        Training(float8(), check="yes")


@pytest.mark.slow
def test_inductor_finds_the_same_cause(lines: Lines) -> None:
    model = made()
    compiled = checked(model, coarse_angles, inner="inductor")
    with pytest.warns(GradientWarning, match=r"made by aten\.addmm\.default in blocks\.0\.up: .* 'coarse' alone"):
        got = train(model, compiled)
    for a, b in zip(got, expected(inner="inductor"), strict=True):
        assert error(a, b) < 1e-5 and same(a[1], b[1])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"cudagraphs": True}, ATEN], ids=["inductor", "cudagraphs", "aten"])
def test_on_a_gpu(lines: Lines, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = made().cuda(), batch(0).cuda()
    compiled = torch.compile(model, backend="aot_hooks", options={**options, "policy": coarse_angles, "check": True})
    plain = torch.compile(model, backend="aot_hooks", options=options)
    with pytest.warns(GradientWarning, match="'coarse' alone"):
        for _ in range(4):
            state = torch.cuda.get_rng_state()
            compiled(x).backward()
            got = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            after = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(state)
            plain(x).backward()
            right = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            assert torch.equal(after, torch.cuda.get_rng_state())
            assert error([got], [right]) < 1e-4
    assert len(lines()) == 1


def test_forwards_that_wait_take_gradients_without_hooks_once_one_has_failed() -> None:
    """Micro-batches of a pipeline: all forwards come before the first backward, which shows that the hook is wrong."""
    torch.manual_seed(0)
    model, batches = Small(), [torch.randn(ROWS, DIM) for _ in range(3)]
    for x in batches:
        model(x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    shrinks = Hook("shrinks", lambda x: x * 0.3, lambda packed: packed)
    call = torch.compile(model, backend="aot_hooks", options=ATEN | {"policy": shrinks, "check": True})
    with pytest.warns(GradientWarning, match="shrinks") as seen:
        for loss in [call(x) for x in batches]:
            loss.backward()
    assert [w.category for w in seen].count(GradientWarning) == 1
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_a_second_backward_of_a_failed_call_takes_gradients_without_hooks() -> None:
    torch.manual_seed(0)
    model, x = Small(), torch.randn(ROWS, DIM)
    expected = torch.autograd.grad(model(x), [*model.parameters()])
    shrinks = Hook("shrinks", lambda x: x * 0.3, lambda packed: packed)
    call = torch.compile(model, backend="aot_hooks", options=ATEN | {"policy": shrinks, "check": True})
    loss = call(x)
    with pytest.warns(GradientWarning, match="shrinks") as seen:
        for i in range(3):
            found = torch.autograd.grad(loss, [*model.parameters()], retain_graph=i < 2)
            for g, e in zip(found, expected, strict=True):
                torch.testing.assert_close(g, e)
    assert len([w for w in seen if w.category is GradientWarning]) == 1


def test_a_check_under_enable_warns_again_after_each_reset_of_dynamo() -> None:
    """Also while it stays enabled, with an unchanged hook of the user's own."""
    shrinks = Hook("shrinks", lambda x: x * 0.3, lambda packed: packed)
    model = made(Small)
    compiled = torch.compile(model)
    right = expected(Small)[0]
    with aot_hooks.enable(shrinks, check=True, options=ATEN):
        for _ in range(3):
            with pytest.warns(GradientWarning, match="shrinks"):
                first, second = train(model, compiled, steps=1), train(model, compiled, steps=1)
            for got in (first, second):
                assert error(got[0], right) < 1e-5
            torch._dynamo.reset()
            assert not first_step._unpacked.known


def test_calls_without_a_backward_keep_nothing() -> None:
    """By reference counts alone: on a GPU nobody waits for the garbage collector."""
    call = torch.compile(Small(), backend="aot_hooks", options=ATEN | {"policy": float8(), "check": True})
    x = torch.randn(ROWS, DIM)
    call(x)
    loss = call(x)
    node = weakref.ref(loss.grad_fn)
    gc.disable()
    try:
        del loss
        assert node() is None
    finally:
        gc.enable()
