"""Changes between calls that a replay must not miss, and what a step may hold, read and be copied as."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import io
import types
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import cudagraph

register_hook_of_all = importlib.import_module("torch.optim.optimizer").register_optimizer_step_post_hook


@pytest.fixture
def w(device):
    return torch.ones(4, device=device, requires_grad=True)


@pytest.fixture
def x(device):
    return torch.ones(4, device=device)


class Base(nn.Module):
    def forward(self, x):
        return x * 2


class Other(Base):
    def forward(self, x):
        return x * 3


class Negative(nn.Module):
    def forward(self, x):
        return -x


class AddThree(nn.Module):
    def forward(self, x):
        return x + 3


@contextlib.contextmanager
def scaled():
    yield SCALE  # noqa: F821


def recorded(step, *args):
    for _ in range(4):
        step(*args)
    assert cudagraph.stats()["replays"] > 0, step.refused
    return step


# --- changes: each returns a function that is 2 before and 3 after, and what changes it


def a_global():
    return lambda x: x * SCALE, lambda: globals().update(SCALE=3.0)  # noqa: F821


def behind_a_decorator():
    return torch.no_grad()(lambda x: x * SCALE), lambda: globals().update(SCALE=3.0)  # noqa: F821


def behind_a_context_manager():
    def step(x):
        with scaled() as scale:
            return x * scale

    return step, lambda: globals().update(SCALE=3.0)


def in_an_inner_function():
    def step(x):
        return (lambda: x * SCALE)()  # noqa: F821

    return step, lambda: globals().update(SCALE=3.0)


def in_defaults():
    def scale(x, k=2.0):
        return x * k

    return lambda x: scale(x), lambda: setattr(scale, "__defaults__", (3.0,))


def in_code():
    def scale(x):
        return x * 2.0

    return lambda x: scale(x), lambda: setattr(scale, "__code__", (lambda x: x * 3.0).__code__)


def in_an_attribute_of_a_function():
    def scale(x):
        return x * getattr(scale, "k", 2.0)

    return lambda x: scale(x), lambda: setattr(scale, "k", 3.0)


def in_an_attribute_of_a_tensor():
    table = torch.ones(4)
    table.scale = 2.0
    return lambda x: x * table.scale, lambda: setattr(table, "scale", 3.0)


def in_a_later_attribute_of_a_tensor():
    table = torch.ones(4)
    return lambda x: x * getattr(table, "scale", 2.0), lambda: setattr(table, "scale", 3.0)


def in_an_object():
    holder = argparse.Namespace(scale=2.0)
    return lambda x: x * holder.scale, lambda: setattr(holder, "scale", 3.0)


def all_attributes():
    holder = argparse.Namespace(scale=2.0)
    return lambda x: x * holder.scale, lambda: setattr(holder, "__dict__", {"scale": 3.0})


def in_an_object_of_a_module():
    model = Base()
    model.config = types.SimpleNamespace(scale=2.0)
    return lambda x: model(x) * model.config.scale / 2, lambda: setattr(model.config, "scale", 3.0)


def from_one_list_to_the_next():
    a, b = [1.0, 1.0], [0.0]
    return lambda x: x * (2 * sum(a) + 3 * sum(b)) / 2, lambda: b.insert(0, a.pop()) or a.append(0.5)


def in_another_class():
    model = Base()
    return lambda x: model(x), lambda: setattr(model, "__class__", Other)


def a_global_that_comes_later():
    return lambda x: x * (LATE if "LATE" in globals() else 2.0), lambda: globals().update(LATE=3.0)  # noqa: F821


def a_name_of_pythons():
    return lambda x: abs(x * 2), lambda: globals().update(abs=lambda x: x * 1.5)


def late_closure():
    def step(x):
        try:
            return x * late
        except NameError:
            return x * 2

    def change():
        nonlocal late
        late = 3.0

    late = 0.0
    del late
    return step, change


CHANGES = [
    a_global, behind_a_decorator, behind_a_context_manager, in_an_inner_function, in_defaults, in_code,
    in_an_attribute_of_a_function, in_an_attribute_of_a_tensor, in_a_later_attribute_of_a_tensor, in_an_object,
    all_attributes, in_an_object_of_a_module, from_one_list_to_the_next, in_another_class, a_global_that_comes_later,
    a_name_of_pythons, late_closure,
]  # fmt: skip


@pytest.mark.parametrize("make", CHANGES)
def test_a_change_is_seen(device, make, w, x, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    for late in ("LATE", "abs"):
        monkeypatch.setitem(globals(), late, None)
        monkeypatch.delitem(globals(), late)
    run, change = make()
    step = recorded(cudagraph.whole_step(lambda x: run(x * w)), x)
    assert step(x)[0] == 2
    change()
    assert step(x)[0] == 3


def module_dict():
    layers = nn.ModuleDict({"add": AddThree(), "negative": Negative()})
    return layers, lambda: layers.update({"add": layers.pop("add")})


def moved_to_end():
    layers = OrderedDict(add=lambda x: x + 3, negative=lambda x: -x)
    return layers, lambda: layers.move_to_end("add")


@pytest.mark.parametrize("make", [module_dict, moved_to_end])
def test_the_order_of_entries(device, make, w, x):
    layers, change = make()

    @cudagraph.whole_step
    def step(x):
        x = -x * w
        for layer in layers.values():
            x = layer(x)
        return x

    assert recorded(step, x)(x)[0] == -2
    change()
    assert step(x)[0] == 4


@pytest.mark.parametrize("kind", ["module", "optimizer"])
def test_hooks_of_all_modules_and_optimizers(device, kind, w, x):
    model, optimizer = Base(), torch.optim.SGD([w], 1.0)

    @cudagraph.whole_step
    def step(x):
        optimizer.zero_grad()
        out = model(x * w)
        out.sum().backward()
        optimizer.step()
        return out

    recorded(step, x)
    if kind == "module":
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 0)
    else:
        handle = register_hook_of_all(lambda *_: w.data.zero_())
    try:
        out = step(x)
        assert (out if kind == "module" else w)[0] == 0
    finally:
        handle.remove()


def test_a_step_around_a_step(device, x):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.ones(4)), 1.0

        def forward(self, x):
            return x * self.weight * self.scale

    model, ema = Model().to(device), torch.zeros(4, device=device)
    inner = cudagraph.whole_step(model, lambda out: out.sum(), torch.optim.SGD(model.parameters(), lr=0.0))

    @cudagraph.whole_step
    def outer(x):
        ema.add_(x)
        return inner(x)

    for _ in range(4):
        assert outer(x) == 4
    assert cudagraph.stats()["recordings"] == 1, "the step inside is a part of the one around it"
    model.scale = 5.0
    assert outer(x) == 20


@pytest.mark.parametrize("read", [lambda table: table, torch.Tensor.detach_])
def test_a_tensor_that_nothing_leads_to_is_not_captured(device, x, w, read):
    """A table in a cache, say: nobody would see that it moved, or that another one took its place."""
    table = functools.lru_cache(lambda: torch.full((4,), 2.0, device=device))
    table()
    step = cudagraph.whole_step(lambda x: x * w * read(table()))
    for _ in range(4):
        assert step(x)[0] == 2
    assert "reads a tensor that was not found" in step.refused


@pytest.mark.parametrize("kind", ["distribution", "dataset", "vmap", "partial in vmap", "gradient", "traced"])
def test_tensors_in_objects_of_torch_are_found(device, x, kind):
    model = nn.Linear(4, 4).to(device).eval()
    if kind == "distribution":
        prior = torch.distributions.Normal(torch.zeros_like(x), torch.ones_like(x), validate_args=False)
        run = lambda x: prior.log_prob(x)  # noqa: E731
    elif kind == "dataset":
        data = torch.utils.data.TensorDataset(torch.ones(3, 4, device=device))
        run = lambda x: data.tensors[0].sum(0) * x  # noqa: E731
    elif kind == "vmap":
        batched = torch.vmap(model)
        run = lambda x: batched(x.expand(2, 4))  # noqa: E731
    elif kind == "partial in vmap":
        batched = torch.vmap(functools.partial(nn.functional.linear, weight=model.weight.detach().clone()))
        run = lambda x: batched(x.expand(2, 4))  # noqa: E731
    elif kind == "gradient":
        master = torch.ones_like(x)
        master.grad = torch.zeros_like(x)
        run = lambda x: (master.grad.copy_(x), master.sub_(master.grad))[1].clone()  # noqa: E731
    else:
        norm = nn.Sequential(model, nn.BatchNorm1d(4).to(device)).eval()
        traced = torch.jit.trace(norm, x.expand(2, 4), check_trace=False)
        run = lambda x: traced(x.expand(2, 4))  # noqa: E731
    anchor = torch.zeros_like(x)
    step = cudagraph.whole_step(lambda x: run(x) + anchor)
    recorded(step, x)
    assert step.refused == ""


def test_a_traced_module_with_another_buffer(device):
    norm = nn.BatchNorm1d(4).to(device).eval()
    traced, x = torch.jit.trace(norm, torch.ones(2, 4, device=device)), torch.ones(2, 4, device=device)
    step = recorded(cudagraph.whole_step(lambda x: traced(x)), x)
    traced.running_mean = torch.ones(4, device=device)
    assert torch.equal(step(x), torch.zeros(2, 4, device=device))


def test_tensors_that_a_step_makes_are_its_own(device, x, w):
    step = cudagraph.whole_step(lambda x: x * w * torch.full((1,), 2.0, device=device) + x.new_ones(1))
    assert recorded(step, x)(x)[0] == 3 and step.refused == ""


def test_a_number_copied_to_a_device_in_the_step(device, x, w):
    step = cudagraph.whole_step(lambda x: x * w * torch.tensor([2.0], device=device))
    assert [step(x)[0] for _ in range(4)] == [2] * 4
    assert ("Cannot copy between CPU and CUDA" in step.refused) == (device.type == "cuda")


def test_an_input_in_memory_that_the_step_writes_to(device, x, w):
    count = torch.zeros(4, device=device)
    step = recorded(cudagraph.whole_step(lambda x: (count.add_(1), x * w)[1]), x)
    for n in range(5, 8):
        assert step(count)[0] == n
    assert step(x)[0] == 1 and step.refused == ""
    parameter = nn.Parameter(torch.ones(4, device=device))
    parameter.grad = torch.zeros(4, device=device)
    adds = recorded(cudagraph.whole_step(lambda g: ((parameter * 2).sum().backward(), g * 1)[1]), x)
    assert torch.equal(adds(parameter.grad), parameter.grad)
    always = cudagraph.whole_step(lambda x: (count.add_(1), x * w)[1])
    for n in range(9, 14):
        assert always(count)[0] == n


def test_anomaly_mode_finds_a_nan_after_the_step_was_recorded(device, x):
    w = torch.ones(4, device=device, requires_grad=True)
    step = cudagraph.whole_step(lambda x: torch.autograd.grad((w * 0 + x).sqrt().sum(), w)[0])
    for _ in range(4):
        step(x)
    assert cudagraph.stats()["replays"] > 0, step.refused
    with (
        pytest.warns(UserWarning),  # of anomaly mode itself
        pytest.raises(RuntimeError, match="SqrtBackward0' returned nan"),
        torch.autograd.detect_anomaly(),
    ):
        step(x - 2)


def test_the_rate_of_a_scheduler_is_that_of_now(device, x):
    w = torch.ones(4, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([w], 0.5, capturable=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    @cudagraph.whole_step
    def step(x):
        optimizer.zero_grad()
        (w * x).sum().backward()
        optimizer.step()
        return x * scheduler.get_last_lr()[0]

    for _ in range(8):
        assert step(x)[0] == scheduler.get_last_lr()[0]
        scheduler.step()
    assert step.refused


SCRIPT = """
import types
@whole_step
def step(x):
    "train"
    out = types.SimpleNamespace(loss=x * w)
    return {"loss": out.loss}

for epoch in range(12):
    train = torch.zeros(())
    x = torch.ones(4, device=w.device)
    loss = step(x)["loss"]
"""


def test_names_of_a_script_that_the_step_has_as_strings_or_attributes_are_no_matter(device):
    w = torch.ones(4, device=device, requires_grad=True)
    space = {"w": w, "torch": torch, "whole_step": cudagraph.whole_step}
    exec(compile(SCRIPT, __file__, "exec"), space)
    assert not space["step"].refused and cudagraph.stats()["replays"] >= 8


def test_a_step_that_reads_another_tensor_in_each_call_is_refused(device, x):
    w, holder = torch.ones(4, device=device, requires_grad=True), argparse.Namespace()

    @cudagraph.whole_step
    def step(x):
        return x * w * holder.mask

    for i in range(12):
        holder.mask = torch.full((4,), float(i), device=device)
        assert step(x)[0] == i
    assert "holder.mask is another tensor in each call" in step.refused


class Odd:
    """Makes its `__dict__` anew, as proxies do."""

    __slots__ = ()
    __dict__ = property(lambda self: {})

    def __setattr__(self, name, value):
        raise RuntimeError("locked")


def test_objects_whose_dict_can_not_be_set_are_no_matter(device, x):
    w, odd = torch.ones(4, device=device, requires_grad=True), Odd()
    step = cudagraph.whole_step(lambda x: x * w * len(vars(odd) or "a"))
    for _ in range(6):
        assert step(x)[0] == 1
    assert not step.refused and cudagraph.stats()["replays"] >= 3


class Raises:
    __dict__ = property(lambda self: 1 // 0)

    def __eq__(self, other):
        raise ValueError("not comparable")


class RaisesKey(str):
    def __repr__(self):
        raise ValueError("no repr")


@pytest.mark.parametrize("make", [Raises, lambda: {RaisesKey("a"): 1, RaisesKey("b"): 2}])
def test_a_step_that_reaches_what_raises_runs_as_it_is(device, x, make):
    w, odd = torch.ones(4, device=device, requires_grad=True), make()
    step = cudagraph.whole_step(lambda x: x * w * (2 if odd is not None else 3))
    for _ in range(4):
        assert step(x)[0] == 2
    assert "which raises" in step.refused


class Trainer:
    def __init__(self, w):
        self.w, self.scale = w, 2.0

    @cudagraph.whole_step
    def step(self, x):
        return x * self.w * self.scale


def test_a_copy_of_an_object_has_a_step_of_its_own(device, x, w):
    trainer = Trainer(w)
    recorded(trainer.step, x)
    other = copy.copy(trainer)
    other.scale = 5.0
    assert other.step(x)[0] == 5 and trainer.step(x)[0] == 2
    buffer = io.BytesIO()
    torch.save(trainer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for _ in range(4):
        assert loaded.step(x)[0] == 2
    assert loaded.step.refused == ""


def test_a_step_in_compiled_code_runs_beside_it(device, x, w):
    step = cudagraph.whole_step(lambda x: x * w)
    compiled = torch.compile(lambda x: step(x) + 1, backend="eager")
    for _ in range(5):
        assert compiled(x)[0] == 2
    assert step.refused == "" and cudagraph.stats()["replays"] > 0


def test_threads_that_call_one_step_get_their_own_results(device, w):
    step = recorded(cudagraph.whole_step(lambda x: x * w), torch.ones(4, device=device))

    def work(number):
        x = torch.full((4,), float(number), device=device)
        return {step(x)[0].item() for _ in range(100)}

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(work, range(4))] == [{0.0}, {1.0}, {2.0}, {3.0}]


def test_precision_of_convolutions(device, x, w):
    step = recorded(cudagraph.whole_step(lambda x: x * w), x)
    recordings = cudagraph.stats()["recordings"]
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = not before
        for _ in range(4):
            step(x)
        assert cudagraph.stats()["recordings"] > recordings
    finally:
        torch.backends.cudnn.allow_tf32 = before
