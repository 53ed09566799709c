"""Numbers that change between calls: read on the device, conditions of a recording, or counted by the step itself."""

from __future__ import annotations

import copy
import functools
import queue

import pytest
import torch
from torch.nn import functional as F
from whole_steps import OPTIMIZERS, Net, assert_equal, batches, steps

import cudagraph
from cudagraph.step import scalars

COMPUTED = {
    "a factor": lambda x, k: x * k + k * x,
    "a divisor": lambda x, k: x / k + k / x.exp(),
    "a summand": lambda x, k: (x + k) - (k - x) + x.sub(k),
    "in place": lambda x, k: x.clone().mul_(k).add_(k).div_(k),
    "an expression": lambda x, k: x * (1 - k / 2) * k**2 + -k,
    "alpha": lambda x, k: torch.add(x, x, alpha=k).sub_(x, alpha=k),
    "value": lambda x, k: torch.addcmul(x, x, x, value=k) + x.addcdiv(x, x.exp(), value=k),
    "lerp": lambda x, k: torch.lerp(x, x * 2, k / 8),
    "a base": lambda x, k: k ** x.clamp(-1, 1),
    "an exponent": lambda x, k: x.abs() ** k,
    "a comparison of a tensor": lambda x, k: x * (x > k) + x * (x <= k / 4),
    "a choice": lambda x, k: torch.where(x > 0, x, k),
    "lists": lambda x, k: sum(torch._foreach_mul(torch._foreach_add([x, x], k), k)),
    "lists with alpha": lambda x, k: sum(torch._foreach_add([x, x], [x, x * 2], alpha=k)),
    "bfloat16": lambda x, k: (x.bfloat16() * k).float() + x.bfloat16().div(k),
    "a summand of bfloat16": lambda x, k: x.bfloat16() + k,
    "float64": lambda x, k: x.double() * k,
    "int64": lambda x, k: (x * 4).long() * 3 * k * x,
    "an option of a function": lambda x, k: F.leaky_relu(x, k),
    "a limit": lambda x, k: x.clamp(max=k),
    "float()": lambda x, k: x * float(k),
    "text": lambda x, k: x * len(f"{k:.3f}"),
    "a tensor of it": lambda x, k: x * torch.tensor(k, device=x.device),
    "its type": lambda x, k: x * (k if type(k) is float else 7.0),
    "a size": lambda x, k: x[: int(k * 2)].sum() * x,
    "a slice": lambda x, k: x[: round(k * 4), ...].sum() * x,
    "min": lambda x, k: x * min(k, 0.3),
    "a branch": lambda x, k: x * 2 if k > 0.3 else x + k,
}
SETTLED = {
    "value",  # the backward computes in another order
    "a base",
    "an exponent",
    "an option of a function",
    "a limit",
    "float()",
    "text",
    "a tensor of it",
    "its type",
    "a size",
    "a slice",
    "a summand of bfloat16",
}
VALUES = (0.5, 0.7, 0.3, 0.1, 0.3, 0.7, 0.1, 0.9)


class Config:
    def __init__(self) -> None:
        self.k = 0.5


class AsksForItsType(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = 0.5

    @property
    def factor(self):
        return self.k if type(self.k) is float else 7.0

    def forward(self, x):
        return x * self.factor


def test_a_module_that_asks_for_the_type_of_a_number_gets_the_number(device):
    module, x = AsksForItsType(), torch.linspace(-2, 2, 6, device=device)
    step = cudagraph.whole_step(lambda x: module(x))
    for module.k in VALUES:
        assert torch.equal(step(x), x * module.k)


@pytest.mark.parametrize("name", COMPUTED)
def test_a_number_is_read_where_it_enters_arithmetic(device, name):
    """What is computed is that of eager mode, bit for bit, with the gradient. All else is recorded for each number."""
    weight, config, compute = torch.ones(6, device=device, requires_grad=True), Config(), COMPUTED[name]

    def run(x):
        weight.grad = None
        out = compute(x * weight, config.k)
        out.sum().backward()
        return out, weight.grad.clone()

    step, x = cudagraph.whole_step(run), torch.linspace(-2, 2, 6, device=device)
    if device.type == "cuda" and name == "a tensor of it":
        pytest.skip("a copy from the host is not captured")
    for value in (*VALUES, *VALUES):
        config.k = value
        ours, expected = step(x), run(x)
        for a, b in zip(ours, expected, strict=True):
            tolerance = 1e-6 if device.type == "cuda" else 0
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    recordings = cudagraph.stats()["recordings"]
    assert step.refused == "" and cudagraph.stats()["replays"] >= 15
    # A first one for the number as it is, until it changes.
    assert recordings == (5 if name in SETTLED else 2 if name in ("min", "a branch") else 1)


@pytest.mark.parametrize("kind", [int, float])
def test_a_count_that_the_step_keeps(device, kind):
    """As of tokens: each replay counts on, also when the host sets the count anew."""
    weight, config = torch.ones(2, device=device, requires_grad=True), Config()
    config.count = kind(0)

    @cudagraph.whole_step
    def step(x):
        config.count += x.numel()
        return x * weight * config.count, config.count

    total = 0
    for i in range(12):
        size = 2 if i % 3 else 4
        if i == 8:
            config.count = total = kind(100)
        x = torch.ones(size // 2, 2, device=device)
        out, count = step(x)
        total += size
        assert config.count == count == total and type(config.count) is type(count) is kind
        assert (out == total).all()
    assert step.refused == "" and cudagraph.stats()["recordings"] == 2


def test_a_count_that_decides_what_the_step_does(device):
    weight, config = torch.ones(2, device=device, requires_grad=True), Config()
    config.calls = 0

    @cudagraph.whole_step
    def step(x):
        config.calls += 1
        return x * weight * (2 if config.calls % 3 == 0 else 1)

    x = torch.ones(2, device=device)
    assert [step(x)[0].item() for _ in range(12)] == [1, 1, 2] * 4
    assert step.refused == "" and cudagraph.stats()["recordings"] == 2


def test_a_number_that_decides_is_recorded_up_to_the_limit_and_named(device, caplog):
    weight, config = torch.ones(2, device=device, requires_grad=True), Config()
    step = cudagraph.whole_step(lambda x: F.leaky_relu(x * weight, config.k), options={"rerecord_limit": 3})
    x = -torch.ones(2, device=device)
    for i in range(12):
        config.k = i / 16
        assert step(x)[0] == -i / 16
    assert cudagraph.stats()["recordings"] == 4 and step.refused == ""
    assert "recorded 4 times, last because <lambda>, config.k is another number than before" in caplog.text


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.temperature = torch.nn.Parameter(torch.ones(2)), 1.0

    def forward(self, x):
        return (x * self.weight / self.temperature * HIDDEN.inner.k).sum()


HIDDEN = Config()
HIDDEN.inner = Config()


@pytest.mark.parametrize("state", [{"hidden": HIDDEN}, HIDDEN, [1, HIDDEN.inner], None])
def test_numbers_of_a_module_and_of_declared_state(device, state):
    """The forward reads a global, which nothing leads to. Undeclared, it is what it was when the step was recorded."""
    model = Model().to(device)
    HIDDEN.inner.k = 1.0
    step = cudagraph.whole_step(model, None, torch.optim.SGD(model.parameters(), lr=0.0), state=state)
    of_ones = cudagraph.whole_step(state=state)(lambda x: model(x))
    x = torch.ones(2, device=device)
    for i in range(8):
        model.temperature, HIDDEN.inner.k = 2.0 ** (i % 3), 0.5 ** (i % 2)
        k = HIDDEN.inner.k if state is not None else 1.0 if i == 0 else 0.5
        assert step(x) == of_ones(x) == 2 / model.temperature * k
    assert step.refused == of_ones.refused == "" and cudagraph.stats()["recordings"] == 2


OPTIONS = {"lr": 0.75, "weight_decay": 0.5, "momentum": 0.875, "betas": 0.9, "eps": 0.5, "all": 0.9}
ON_DEVICE = ("adamw, foreach", "adam", "adam, foreach", "sgd with momentum", "sgd, foreach")
FUSED = {
    "adamw, fused": ("lr", "weight_decay"),
    "adam, fused": ("lr",),
    "sgd, fused": ("lr",),
    "muon and adamw": ("lr", "weight_decay", "momentum"),  # that AdamW is a fused one
}


def scheduled(group, option, i):
    """Other numbers than in the call before, of the kind that no float32 holds exactly."""
    for name, rate in OPTIONS.items():
        if name not in group or (option != name and (option, name == "eps") != ("all", False)):
            continue
        old, by = group[name], rate ** (1 + i % 5)
        group[name] = (by, 0.999 * by**0.1) if name == "betas" else old * rate if name != "momentum" else by


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", [*ON_DEVICE, *FUSED])
def test_options_of_an_optimizer_that_change_in_each_call(device, name, option):
    """All is that of eager mode, bit for bit. On CUDA a fused SGD has its rate in float32."""

    def make(model):
        made = OPTIMIZERS[name](model)
        for each in made if isinstance(made, list) else [made]:
            each.param_groups[0]["weight_decay"] = 0.0625
        return made

    step, expected, models, both = steps(device, make)
    optimizers = [one for each in both for one in (each if isinstance(each, list) else [each])]
    if option != "all" and option not in optimizers[0].param_groups[0]:
        return
    for i, (x, y) in enumerate(batches(device, 14)):
        for group in [group for each in optimizers for group in each.param_groups]:
            scheduled(group, option, i)
        ours, eager = step(x, y), expected(x, y)
        if (name, device.type) != ("sgd, fused", "cuda"):
            assert torch.equal(ours, eager), i
    for a, b in zip(*(each.state_dict().values() for each in models), strict=True):
        is_exact = (name, device.type) != ("sgd, fused", "cuda")
        torch.testing.assert_close(a, b, **{} if not is_exact else {"rtol": 0, "atol": 0})
    assert step.refused == ""
    if option != "eps" and option in FUSED.get(name, OPTIONS):
        assert step.update_refused == "" and cudagraph.stats()["recordings"] == 1
    else:
        assert step.update_refused == "" or step.update_refused.startswith("optimizer")


def test_options_are_plain_numbers_after_a_capture_that_fails(device):
    """The capture finds traced numbers in their places; nothing of them is left."""
    step, expected, models, optimizers = steps(device, OPTIMIZERS["adamw, foreach"])
    fail = []

    def hook(*_):
        if fail and step.driver.is_capturing():
            raise torch.OutOfMemoryError("planted")

    models[0].register_forward_hook(hook)
    for i, (x, y) in enumerate(batches(device, 10)):
        for each in optimizers:
            each.param_groups[0].update(lr=0.5 ** (4 + i % 3), betas=(0.5, 0.999), weight_decay=0.25)
        fail[:] = [1] if i in (1, 2) else []
        before = copy.deepcopy(optimizers[0].param_groups[0] | {"params": []})
        torch.testing.assert_close(step(x, y), expected(x, y))
        after = optimizers[0].param_groups[0] | {"params": []}
        assert before | {"capturable": True} == after and {*map(type, after["betas"])} == {float}
    assert_equal(*models)


def test_compiled_models_and_an_eager_optimizer(device):
    """No function mode is on around compiled code: only `optimizer.step()` reads numbers on the device."""
    step, expected, models, optimizers = steps(device, OPTIMIZERS["adamw, foreach"])
    ours, modes = models[0], queue.SimpleQueue()
    ours.register_forward_hook(lambda *_: modes.put(len(torch.overrides._get_current_function_mode_stack())))
    step = cudagraph.whole_step(torch.compile(ours, backend="eager"), F.mse_loss, optimizers[0])
    for i, (x, y) in enumerate(batches(device, 8)):
        for each in optimizers:
            each.param_groups[0]["lr"] = 0.5 ** (4 + i % 3)
        torch.testing.assert_close(step(x, y), expected(x, y))
    assert_equal(*models)
    assert step.refused == "" and cudagraph.stats()["recordings"] == 1
    assert {modes.get() for _ in range(modes.qsize())} == {0}


def step_of_one(optimizer, parameter):
    optimizer.step()
    optimizer.zero_grad()


def test_an_optimizer_that_steps_in_the_backward(device):
    """Hooks of a backward run without the function mode of the step."""

    def make(model):
        optimizers = [torch.optim.SGD([p], lr=0.5, momentum=0.5) for p in model.parameters()]
        for p, optimizer in zip(model.parameters(), optimizers, strict=True):
            p.register_post_accumulate_grad_hook(functools.partial(step_of_one, optimizer))

        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss.detach()

        return step, optimizers

    nets = [Net().to(device)]
    nets.append(copy.deepcopy(nets[0]))
    (ours, *ours_optimizers), (eager, *eager_optimizers) = map(make, nets)
    step = cudagraph.whole_step(ours)
    for i, (x, y) in enumerate(batches(device, 10)):
        for each in (*ours_optimizers[0], *eager_optimizers[0]):
            each.param_groups[0].update(lr=0.5 ** (3 + i % 4))
        assert torch.equal(step(x, y), eager(x, y))
        assert_equal(*nets)
    assert step.refused == "" and cudagraph.stats()["recordings"] == 1


@pytest.mark.parametrize("how", ["a hook", "a hook with alpha", "function modes off"])
def test_numbers_where_no_function_mode_is_on(device, how):
    """Such a number is a condition, or the numbers of the step are recorded each."""
    weight, config = torch.ones(3, device=device, requires_grad=True), Config()

    def run(x):
        weight.grad = None
        h = weight * 1
        if how == "a hook":
            h.register_hook(lambda g: g * config.k)
        elif how == "a hook with alpha":
            h.register_hook(lambda g: torch.add(g, g, alpha=config.k))
        else:
            with torch._C.DisableTorchFunction():
                h = h * config.k
        (h * x).sum().backward()
        return weight.grad.clone()

    step, x = cudagraph.whole_step(run, options={"rerecord_limit": 2}), torch.ones(3, device=device)
    for k in (0.5, 0.5, 0.25, 0.75, 0.125, 0.5, 0.5, 0.7):
        config.k = k
        assert (step(x) == (1 + k if "alpha" in how else k)).all()


def test_modules_and_optimizers_as_arguments(device):
    nets = [Net().to(device) for _ in range(2)]
    eager = copy.deepcopy(nets)
    optimizers, eager_optimizers = ([OPTIMIZERS["adamw, foreach"](m) for m in each] for each in (nets, eager))

    def train(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = cudagraph.whole_step(train)
    for i, (x, y) in enumerate(batches(device, 16)):
        n = i % 2
        if i == 9:
            nets[n].scale = eager[n].scale = 0.5
        assert torch.equal(step(nets[n], optimizers[n], x, y), train(eager[n], eager_optimizers[n], x, y))
        assert_equal(nets[n], eager[n])
    assert step.refused == "" and cudagraph.stats()["replays"] >= 12


@pytest.mark.parametrize("how", ["a counter that decides", "a number in a hook"])
def test_the_number_that_blocks_is_named_beside_a_schedule(device, how, caplog):
    """The learning rate changes, too, but that is read on the device."""
    net, config = Net().to(device), Config()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    @functools.partial(cudagraph.whole_step, options={"rerecord_limit": 3})
    def step(x, y):
        out = net(x)
        if how == "a number in a hook":
            out.register_hook(lambda g: torch.add(g, g, alpha=config.k))
        else:
            config.k += 1
            out = out[: int(config.k)]
        F.mse_loss(out, y[: len(out)]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for x, y in batches(device, 10):
        optimizer.param_groups[0]["lr"] *= 0.9
        if how == "a number in a hook":
            config.k *= 0.9
        step(x, y)
    assert "config.k" in step.refused + caplog.text and "['lr']" not in step.refused + caplog.text


AS_ON_CUDA = {
    "value": lambda x, k: torch.addcmul(x, x, x, value=k) + x.clone().addcdiv_(x, x.exp(), value=k),
    "value, lists": lambda x, k: torch._foreach_addcmul([x, x[:2]], [x, x[:2]], [x, x[:2]], value=k)[0],
    "a quotient, lists": lambda x, k: torch._foreach_addcdiv([x, x[:2]], [x, x[:2]], [x.exp(), x[:2]], value=k)[1],
    "a divisor, lists of two dtypes": lambda x, k: torch._foreach_div([x, x.double()], k)[0],
    "alpha": lambda x, k: torch.rsub(x, x.exp(), alpha=k) + torch.sub(x, x.bfloat16(), alpha=k),
    "alpha, lists": lambda x, k: torch._foreach_sub([x, x[:2]], [x.exp(), x[:2]], alpha=k)[0],
}


@pytest.mark.parametrize("name", AS_ON_CUDA)
def test_numbers_as_kernels_of_cuda_round_them(device, name, monkeypatch):
    """Also without a GPU, where its bits can't be: the same values, read from the device."""
    monkeypatch.setattr(scalars, "is_cuda", lambda x: True)
    config, compute = Config(), torch.no_grad()(AS_ON_CUDA[name])
    weight = torch.ones(6, device=device, requires_grad=True)
    step, x = cudagraph.whole_step(lambda x: compute(x * weight, config.k)), torch.linspace(-2, 2, 6, device=device)
    for config.k in (*VALUES, 1.0, *VALUES):
        torch.testing.assert_close(step(x), compute(x, config.k), rtol=1e-6, atol=1e-6)
    # A factor of 1 is left out by these kernels, which is another recording.
    assert step.refused == "" and cudagraph.stats()["recordings"] == (2 if "value" in name or "quotient" in name else 1)


def test_lists_are_divided_by_a_number_as_on_cuda(device, monkeypatch):
    """There they are multiplied with its reciprocal, which is rounded once from float64."""
    monkeypatch.setattr(scalars, "is_cuda", lambda x: True)
    config, on_cuda = Config(), device.type == "cuda"
    compute = torch.no_grad()(lambda x, k: torch._foreach_div([x, x[:2]], k)[0])
    weight = torch.ones(64, device=device, requires_grad=True)
    step, x = cudagraph.whole_step(lambda x: compute(x * weight, config.k)), torch.linspace(-2, 2, 64, device=device)
    for config.k in (*VALUES, *(0.01 * 0.75**i for i in range(8))):
        assert torch.equal(step(x), compute(x, config.k) if on_cuda else x * torch.tensor(1 / config.k))
    assert step.refused == "" and cudagraph.stats()["recordings"] == 1


def test_the_decay_of_a_fused_adamw_as_on_cuda(device, monkeypatch):
    monkeypatch.setattr(scalars, "is_cuda", lambda x: True)
    step, expected, models, optimizers = steps(device, OPTIMIZERS["adamw, fused"])
    for i, (x, y) in enumerate(batches(device, 10)):
        for each in optimizers:
            each.param_groups[0].update(lr=0.01 * 0.9**i, weight_decay=0.1 * 0.8**i)
        torch.testing.assert_close(step(x, y), expected(x, y), rtol=1e-5, atol=1e-6)
    for a, b in zip(*(each.state_dict().values() for each in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert (step.refused, step.update_refused) == ("", "") and cudagraph.stats()["recordings"] == 1
