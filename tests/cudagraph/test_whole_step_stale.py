"""Changes between calls that a replay must not miss: in modules, classes, functions, containers, and in memory."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from torch import nn

import cudagraph

PACKAGE = "users_package_of_a_test"


@pytest.fixture
def w(device):
    return torch.ones(4, device=device, requires_grad=True)


@pytest.fixture
def x(device):
    return torch.ones(4, device=device)


@pytest.fixture
def config(monkeypatch):
    """A module of a package of the user's."""
    package, module = types.ModuleType(PACKAGE), types.ModuleType(f"{PACKAGE}.config")
    for each in (package, module):
        each.__file__ = __file__
        monkeypatch.setitem(sys.modules, each.__name__, each)
    package.config, module.scale = module, 2.0
    monkeypatch.setitem(globals(), "package", package)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    return module


class Slotted:
    __slots__ = "scale"


class Private:
    __slots__ = ("__scale",)

    def set(self, scale):
        self.__scale = scale

    def get(self):
        return self.__scale


class Settings(dict):
    pass


class Base(nn.Module):
    def forward(self, x):
        return x * 2


class Derived(Base):
    pass


class Other(Base):
    def forward(self, x):
        return x * 3


@contextlib.contextmanager
def scaled():
    yield SCALE  # noqa: F821


def recorded(step, *args):
    for _ in range(4):
        step(*args)
    assert cudagraph.stats()["replays"] > 0, step.refused
    return step


def in_a_submodule(w, config):
    return lambda x: x * w * package.config.scale, lambda: setattr(config, "scale", 3.0)  # noqa: F821


def in_a_closure(w, config):
    return lambda x: x * w * config.scale, lambda: setattr(config, "scale", 3.0)


def in_an_attribute(w, config):
    module = nn.Module()
    module.settings = config
    return lambda x: x * w * module.settings.scale, lambda: setattr(config, "scale", 3.0)


def imported_inside(w, config):
    def step(x):
        from users_package_of_a_test import config

        return x * w * config.scale

    return step, lambda: setattr(config, "scale", 3.0)


def beside_a_global_of_that_name(w, config):
    config.SCALE = 2.0
    return lambda x: x * w * config.SCALE * (SCALE / 2), lambda: setattr(config, "SCALE", 3.0)  # noqa: F821


def behind_a_decorator(w, config):
    return torch.no_grad()(lambda x: x * w * SCALE), lambda: globals().update(SCALE=3.0)  # noqa: F821


def behind_a_context_manager(w, config):
    def step(x):
        with scaled() as scale:
            return x * w * scale

    return step, lambda: globals().update(SCALE=3.0)


def in_slots(w, config):
    holder = Slotted()
    holder.scale = 2.0
    return lambda x: x * w * holder.scale, lambda: setattr(holder, "scale", 3.0)


def in_private_slots(w, config):
    holder = Private()
    holder.set(2.0)
    return lambda x: x * w * holder.get(), lambda: holder.set(3.0)


def in_an_attribute_of_a_dict(w, config):
    settings = Settings()
    settings.scale = 2.0
    return lambda x: x * w * settings.scale, lambda: setattr(settings, "scale", 3.0)


def from_one_list_to_the_next(w, config):
    a, b = [1.0, 1.0], [0.0]
    return lambda x: x * w * (2 * sum(a) + 3 * sum(b)) / 2, lambda: b.insert(0, a.pop()) or a.append(0.5)


def in_defaults(w, config):
    def scale(x, k=2.0):
        return x * w * k

    return lambda x: scale(x), lambda: setattr(scale, "__defaults__", (3.0,))


def in_code(w, config):
    def scale(x):
        return x * w * 2.0

    return lambda x: scale(x), lambda: setattr(scale, "__code__", (lambda x: x * w * 3.0).__code__)


def in_another_class(w, config):
    model = Base()
    return lambda x: model(x) * w, lambda: setattr(model, "__class__", Other)


def in_hooks_of_all_modules(w, config):
    model = Base()

    def change():
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 1.5)
        config.undo = handle.remove

    return lambda x: model(x) * w, change


CHANGES = [
    in_a_submodule, in_a_closure, in_an_attribute, imported_inside, beside_a_global_of_that_name, behind_a_decorator,
    behind_a_context_manager, in_slots, in_private_slots, in_an_attribute_of_a_dict, in_defaults, in_code,
    in_another_class, in_hooks_of_all_modules,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(device, change, w, x, config):
    run, change = change(w, config)
    step = recorded(cudagraph.whole_step(run), x)
    assert step(x)[0] == 2
    try:
        change()
        assert step(x)[0] == 3
    finally:
        getattr(config, "undo", lambda: None)()


def test_elements_that_move_from_one_list_to_the_next(device, w, x):
    a, b = [1.0, 2.0], [3.0]
    step = recorded(cudagraph.whole_step(lambda x: x * w * sum(a) * 10 + sum(b)), x)
    b.insert(0, a.pop())
    assert step(x)[0] == 15


def test_a_method_that_was_inherited(device, x, w):
    model = Derived()
    step = recorded(cudagraph.whole_step(lambda x: model(x) * w), x)
    Derived.forward = lambda self, x: x * 7
    try:
        assert step(x)[0] == 7
    finally:
        del Derived.forward


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


def test_a_tensor_that_nothing_leads_to_is_not_captured(device, x, w):
    """A table in a cache, say: nobody would see that it moved, or that another one took its place."""
    table = functools.lru_cache(lambda: torch.full((4,), 2.0, device=device))
    table()
    step = cudagraph.whole_step(lambda x: x * w * table())
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


def test_modules_that_are_odd_are_left_alone(device, x, w, monkeypatch):
    class Stub(types.ModuleType):
        def __getattr__(self, name):
            raise RuntimeError("not installed")

    monkeypatch.setitem(sys.modules, "fancy", Stub("fancy"))
    holder = types.SimpleNamespace(fancy=1.0, main=sys.modules["fancy"])

    def run(x):
        import fancy

        return x * w * (1.0 if fancy is None else holder.fancy)

    assert recorded(cudagraph.whole_step(run), x).refused == ""


def test_only_what_code_imports_and_names_in_modules_is_compared(device, x, w, config):
    """`model.train()` names no module `train`, and a table that nobody reads is none of the step's."""
    config.table = [f"word {i}" for i in range(150_000)]
    holder, model = types.SimpleNamespace(settings=config), nn.Linear(4, 4)
    train = sys.modules[f"{__package__}.train" if __package__ else "train"] = types.ModuleType("train")
    train.__file__, train.loss = __file__, 0.0
    step = cudagraph.whole_step(lambda x: (model.train(), x * w * holder.settings.scale)[1])
    try:
        for i in range(5):
            train.loss = step(x)[0].item() + i
    finally:
        del sys.modules[train.__name__ if not __package__ else f"{__package__}.train"]
    assert step.refused == "" and cudagraph.stats()["replays"] > 0


def test_a_tensor_from_a_cache_stays_unknown_when_it_is_detached(device, x, w):
    table = functools.lru_cache(lambda: torch.full((4,), 2.0, device=device))
    table()
    step = cudagraph.whole_step(lambda x: x * w * table().detach_())
    for _ in range(4):
        assert step(x)[0] == 2
    assert "reads a tensor that was not found" in step.refused


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


def test_a_step_that_reaches_too_much_runs_once_in_that_call(device, x):
    parameter = nn.Parameter(torch.zeros(4, device=device))
    optimizer, state = torch.optim.SGD([parameter], lr=1.0), types.SimpleNamespace(table=None)

    @cudagraph.whole_step
    def step(x):
        if state.table is None:
            state.table = numpy.zeros(200_000)
        optimizer.zero_grad()
        (parameter * x).sum().backward()
        optimizer.step()

    for n in range(1, 4):
        step(x)
        assert parameter[0] == -n
    assert "too many to compare" in step.refused


def test_a_view_of_an_array_is_put_back(device, x):
    counts, parameter = numpy.zeros(8)[::2], nn.Parameter(torch.ones(4, device=device))

    @cudagraph.whole_step
    def step(x):
        counts[0] += 1
        loss = (parameter * x).sum()
        loss.backward()
        return loss

    for n in range(1, 5):
        step(x)
        assert counts[0] == n and type(parameter.grad) is torch.Tensor
    assert "counts" in step.refused


def test_attributes_of_a_class_are_put_back(device, x, w):
    class Counter:
        n = 0

    def run(x):
        Counter.n += 1
        Counter.last = Counter.n
        return x * w

    step = cudagraph.whole_step(run)
    for n in range(1, 5):
        step(x)
        assert Counter.n == Counter.last == n


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


def test_results_are_in_memory_of_their_own_from_the_first_call(device):
    total = torch.zeros((), device=device)

    @cudagraph.whole_step
    def step(x):
        total.add_(x.sum())
        return total

    assert [result.item() for result in [step(torch.ones(1, device=device)) for _ in range(5)]] == [1, 2, 3, 4, 5]


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
