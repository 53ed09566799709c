"""`whole_step` in the loops that people write: torch's schedulers and optimizers, scalers, checkpoints, averages."""

from __future__ import annotations

import functools
import io
import itertools
import random
import threading
import weakref
from collections import deque

import numpy
import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from whole_steps import OPTIMIZERS, assert_equal, batches, eager_step, pair, run

import aot_hooks
import cudagraph


def adamw_fused(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def steps_are_equal(device, make_step, make=adamw_fused, count=12, **kw):
    """Runs a step of the user's own beside the same in eager mode, and returns it. `make_step(model, optimizer)`."""
    ours, optimizer, eager, eager_optimizer = pair(device, make, **kw)
    step, expected = cudagraph.whole_step(make_step(ours, optimizer)), make_step(eager, eager_optimizer)
    for i, (x, y) in enumerate(batches(device, count)):
        results = []
        for each in (step, expected):
            torch.manual_seed(i)
            results.append(each(x, y).detach())
        assert torch.equal(*results), i
        assert_equal(ours, eager)
    return step


def train(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.95**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.95),
    "StepLR": lambda o: schedulers.StepLR(o, 7, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [5, 15], 0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 8),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, 1.0, 12),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 20),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 20),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 7),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.001, 0.01, 5),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, 40),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1, 5), schedulers.CosineAnnealingLR(o, 20)], [5]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 4), schedulers.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, 0.001, 5),
}
CYCLE_MOMENTUM = ("CyclicLR", "OneCycleLR")


def test_every_scheduler_of_torch_is_here():
    assert {*schedulers.__all__} - {"LRScheduler"} == {*SCHEDULERS} - {"SWALR"}


@pytest.mark.parametrize("name", ["adamw, fused", "sgd with momentum"])
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_every_scheduler(device, schedule, name):
    ours, optimizer, eager, eager_optimizer = pair(device, OPTIMIZERS[name])
    step, expected = cudagraph.whole_step(ours, F.mse_loss, optimizer), eager_step(eager, F.mse_loss, eager_optimizer)
    both = [SCHEDULERS[schedule](o) for o in (optimizer, eager_optimizer)]
    for x, y in batches(device, 30):
        losses = [step(x, y), expected(x, y)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for each in both:
            each.step(losses[1]) if schedule == "ReduceLROnPlateau" else each.step()
    for a, b in zip(ours.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert step.refused == "" and cudagraph.stats()["replays"] > 20
    if name == "adamw, fused":
        assert bool(step.update_refused) is (schedule in CYCLE_MOMENTUM)


@pytest.mark.parametrize(("name", "value"), [("adamw, fused", "betas"), ("sgd, fused", "momentum")])
def test_the_value_that_keeps_the_update_out_is_named(device, name, value):
    """A learning rate alone would not."""
    ours, optimizer, _, _ = pair(device, OPTIMIZERS[name])
    step = cudagraph.whole_step(ours, F.mse_loss, optimizer)
    schedule = schedulers.OneCycleLR(optimizer, 0.1, 40)
    for x, y in batches(device, 12):
        step(x, y)
        schedule.step()
    assert step.update_refused.startswith(f"optimizer.param_groups[0]['{value}']")


@pytest.mark.parametrize("schedule", ["StepLR", "CosineAnnealingLR", "SequentialLR", "ReduceLROnPlateau"])
@pytest.mark.parametrize("name", ["adamw, fused", "sgd with momentum"])
def test_a_scheduler_inside_of_the_step_is_named_and_goes_on(device, name, schedule):
    """Its counters are Python values, which a replay would leave as they are."""

    def make_step(model, optimizer):
        scheduler = SCHEDULERS[schedule](optimizer)

        def step(x, y):
            loss = train(F.mse_loss(model(x), y), optimizer)
            scheduler.step(1.0) if schedule == "ReduceLROnPlateau" else scheduler.step()
            return loss

        return step

    step = steps_are_equal(device, make_step, OPTIMIZERS[name], count=24)
    assert "changes step, scheduler" in step.refused or "param_groups" in step.refused


class Trainer:
    """A loop as a class, with its scheduler beside its step."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scheduler = schedulers.LinearLR(optimizer, 1.0, 0.5, 8)

    @cudagraph.whole_step
    def train(self, x, y):
        "Trains."
        return train(F.mse_loss(self.model(x), y), self.optimizer)


def test_a_scheduler_that_steps_outside_does_not_matter(device):
    ours, optimizer, eager, eager_optimizer = pair(device, OPTIMIZERS["adamw, fused"])
    mine, other = Trainer(ours, optimizer), Trainer(eager, eager_optimizer)
    for x, y in batches(device, 24):
        torch.testing.assert_close(mine.train(x, y), Trainer.train.run(other, x, y).detach(), rtol=1e-4, atol=1e-5)
        for each in (mine, other):
            each.scheduler.step()
    assert mine.train.refused == "" and cudagraph.stats()["replays"] > 20


def test_a_decorated_method_has_a_step_for_each_object(device):
    trainers = [Trainer(*pair(device, adamw_fused)[:2]) for _ in range(2)]
    x, y = next(batches(device, 1))
    losses = [[each.train(x, y) for _ in range(6)] for each in trainers]
    assert all(map(torch.equal, *losses)) and cudagraph.stats()["replays"] == 10
    first, second = trainers
    assert first.train is first.train is not second.train
    assert Trainer.train.__name__ == "train" and Trainer.train.__doc__ == "Trains."


OTHERS = ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_of_torch(device, name):
    def make(model):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
        return optimizer

    ours, optimizer, eager, eager_optimizer = pair(device, make)
    step, expected = cudagraph.whole_step(ours, F.mse_loss, optimizer), eager_step(eager, F.mse_loss, eager_optimizer)
    run(step, expected, (ours, eager), batches(device, 20))
    assert step.refused == "" and cudagraph.stats()["replays"] > 8
    assert bool(step.update_refused) is (name in ("Adagrad", "Adafactor"))


def test_accumulation_in_a_step_of_ones_own(device):
    def make_step(model, optimizer):
        def step(x, y):
            losses = []
            for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
                loss = F.mse_loss(model(a), b) / 3
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses).sum()

        return step

    assert steps_are_equal(device, make_step).refused == ""


HOOKS = {
    "float8": lambda: aot_hooks.saved_tensors_hooks(aot_hooks.float8()),
    "lossless": lambda: aot_hooks.saved_tensors_policy(aot_hooks.lossless()),
    "offload": lambda: aot_hooks.saved_tensors_hooks(aot_hooks.offload(min_bytes=1)),
    "functions": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.bfloat16() if x.is_floating_point() else x, lambda x: x.float() if x.is_floating_point() else x
    ),
}


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_in_eager_mode(device, name, where):
    def make_step(model, optimizer):
        def step(x, y):
            with HOOKS[name]():
                loss = F.mse_loss(model(x), y)
            return train(loss, optimizer)

        return step

    if where == "inside":
        step = steps_are_equal(device, make_step)
    else:
        ours, optimizer, eager, eager_optimizer = pair(device, adamw_fused)
        step = cudagraph.whole_step(ours, F.mse_loss, optimizer)
        expected = eager_step(eager, F.mse_loss, eager_optimizer)
        for x, y in batches(device, 12):
            with HOOKS[name]():
                assert torch.equal(step(x, y), expected(x, y))
            assert_equal(ours, eager)
    assert name == "offload" or (step.refused == "" and cudagraph.stats()["replays"] > 8)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("keeps_random_state", [True, False])
def test_checkpoints_in_eager_mode(device, reentrant, keeps_random_state):
    """In a capture torch puts random states back by offsets, which is right in each replay."""

    def make_step(model, optimizer):
        def step(x, y):
            first = model.first(x)
            rest = lambda h: model.last(model.dropout(F.gelu(model.norm(h))))  # noqa: E731
            out = checkpoint(rest, first, use_reentrant=reentrant, preserve_rng_state=keeps_random_state)
            return train(F.mse_loss(out, y), optimizer)

        return step

    step = steps_are_equal(device, make_step, dropout=0.5 if keeps_random_state else 0.0)
    if device.type == "cuda" and keeps_random_state and step.refused:
        assert "capturing it raised" in step.refused
    else:
        assert step.refused == "" and cudagraph.stats()["replays"] > 8


DRAWS = {
    "a generator of NumPy's": lambda: numpy.random.default_rng(3).random,
    "an old generator of NumPy's": lambda: numpy.random.RandomState(3).rand,
    "a generator of Python's": lambda: random.Random(3).random,
    "NumPy's own": lambda: lambda: numpy.random.rand(),
    "Python's own": lambda: lambda: random.random(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_the_host_are_drawn_in_each_step(device, name):
    """As for mixup. A replay would draw none, so the step runs as it is, and the capture has drawn none."""
    ours, optimizer, eager, eager_optimizer = pair(device, adamw_fused)
    refused = ""
    for model, each, wrap in ((ours, optimizer, cudagraph.whole_step), (eager, eager_optimizer, lambda step: step)):
        numpy.random.seed(3)
        random.seed(3)
        draw = DRAWS[name]()

        def step(x, y, model=model, each=each, draw=draw):
            return train(F.mse_loss(model(x), y) * float(draw()), each)

        wrapped = wrap(step)
        for x, y in batches(device, 8):
            wrapped(x, y)
        refused = refused or getattr(wrapped, "refused", "")
    assert_equal(ours, eager)
    assert refused == "draws random numbers on the host"


@pytest.mark.parametrize("name", [*DRAWS, "one without a state"])
def test_random_numbers_that_are_drawn_between_steps_do_not_matter(device, name):
    ours, optimizer, _, _ = pair(device, adamw_fused)
    draw, draws = {**DRAWS, "one without a state": lambda: random.SystemRandom().random}[name](), False

    @cudagraph.whole_step
    def step(x, y):
        return train(F.mse_loss(ours(x), y) * (draw() if draws else 1.0), optimizer)

    for x, y in batches(device, 6):
        draw()
        step(x, y)
    assert step.refused == "" and cudagraph.stats()["replays"] == 5


def doubled(numbers):
    for number in numbers:
        yield 2 * number


def passed_on(numbers):
    yield from numbers


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return i + 1.0


class Counting:
    """An iterator of the user's."""

    def __init__(self):
        self.taken = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.taken += 1
        return float(self.taken)


class WithoutLength:
    def __getitem__(self, i):
        return 1.0 + i

    def __len__(self):
        raise NotImplementedError("a stream has no length")


def loader():
    return torch.utils.data.DataLoader(Batches(), batch_size=1)


def forever(batches):
    while True:
        yield from batches


def of_several_types():
    factor = torch.ones(2)
    while True:
        yield float(torch.as_tensor(factor).sum())
        factor = torch.ones(2) if type(factor) is int else 1


def in_its_second_round():
    factors = itertools.cycle(FACTORS[:3])
    for _ in range(4):
        next(factors)
    return factors


FACTORS = [1.0 + i for i in range(20)]
LINES = "".join(f"{each}\n" for each in FACTORS)
ITERATORS = {
    "a list's": lambda: iter(FACTORS),
    "a dict's": lambda: iter(dict.fromkeys(FACTORS)),
    "a deque's": lambda: iter(deque(FACTORS)),
    "reversed": lambda: reversed(FACTORS),
    "a map of a zip": lambda: map(max, zip(FACTORS, [0.0] * 20, strict=True)),
    "enumerate": lambda: map(sum, enumerate(FACTORS)),
    "itertools.count": lambda: itertools.count(1),
    "itertools.cycle": lambda: itertools.cycle(FACTORS),
    "itertools.cycle in its second round": in_its_second_round,
    "a map of a file in memory": lambda: map(float, io.StringIO(LINES)),
    "itertools.islice": lambda: itertools.islice(itertools.chain(FACTORS), 1, None),
    "a generator": lambda: doubled(FACTORS),
    "a generator that passes on": lambda: passed_on(iter(FACTORS)),
    "a generator whose variable changes its type": of_several_types,
    "a sequence's without a length": lambda: iter(WithoutLength()),
    "one of two of itertools.tee": lambda: itertools.tee(FACTORS)[0],
    "a map of the user's": lambda: map(abs, Counting()),
    "a function's": lambda: iter(iter(FACTORS).__next__, 0.0),
    "a data loader's": lambda: iter(loader()),
    "enumerate of a data loader": lambda: map(max, enumerate(loader())),
    "zip of data loaders": lambda: map(max, zip(loader(), loader(), strict=True)),
    "itertools.islice of a data loader": lambda: itertools.islice(loader(), 30),
    "a generator that passes on a data loader": lambda: forever(loader()),
}


@pytest.mark.parametrize("is_begun", [False, True], ids=["new", "begun"])
@pytest.mark.parametrize("name", ITERATORS)
def test_a_step_that_takes_items_from_an_iterator(device, name, is_begun):
    """A replay would take none, and go on with the one of the capture."""

    def make_step(model, optimizer):
        factors = ITERATORS[name]()
        if is_begun:
            next(factors)
        return lambda x, y: train(F.mse_loss(model(x), y) * float(next(factors)), optimizer)

    step = steps_are_equal(device, make_step, count=8)
    assert step.refused.startswith("takes items from <lambda>, factors"), step.refused


@pytest.mark.parametrize(
    "how", [lambda it: it.__next__, lambda it: functools.partial(next, it)], ids=["bound", "partial"]
)
@pytest.mark.parametrize("name", ["a list's", "a generator", "itertools.count"])
def test_a_step_that_takes_items_by_a_method(device, name, how):
    def make_step(model, optimizer):
        take = how(ITERATORS[name]())
        return lambda x, y: train(F.mse_loss(model(x), y) * float(take()), optimizer)

    step = steps_are_equal(device, make_step, count=8)
    assert step.refused.startswith("takes items from <lambda>, take"), step.refused


@pytest.mark.parametrize("how", ["readline", "__next__"])
@pytest.mark.parametrize("kind", ["text", "bytes", "in memory"])
def test_a_step_that_reads_a_file(device, tmp_path, kind, how):
    (tmp_path / "factors").write_text(LINES)

    def make_step(model, optimizer):
        file = (
            io.StringIO(LINES) if kind == "in memory" else (tmp_path / "factors").open("rb" if kind == "bytes" else "r")
        )
        take = getattr(file, how)
        return lambda x, y: train(F.mse_loss(model(x), y) * float(take()), optimizer)

    step = steps_are_equal(device, make_step, count=8)
    assert step.refused.startswith("takes items from <lambda>, take"), step.refused
    assert "read and write it outside of the step" in step.refused


def test_a_log_that_a_step_writes_is_no_reason(device, tmp_path):
    ours, optimizer, _, _ = pair(device, adamw_fused)
    with (tmp_path / "log").open("w") as log:

        @cudagraph.whole_step
        def step(x, y):
            log.write("a step")
            return train(F.mse_loss(ours(x), y), optimizer)

        for x, y in batches(device, 4):
            step(x, y)
    assert step.refused == "" and cudagraph.stats()["replays"] == 3


def test_items_that_a_thread_takes_meanwhile_are_said_to_be_perhaps_its_own(device):
    ours, optimizer, _, _ = pair(device, adamw_fused)
    factors, goes_on, taken = itertools.count(), threading.Event(), threading.Event()

    def prefetch():
        while not goes_on.is_set():
            next(factors)
            taken.set()

    @cudagraph.whole_step
    def step(x, y):
        taken.clear()
        taken.wait()
        return train(F.mse_loss(ours(x), y) * (1.0 if factors else 2.0), optimizer)

    thread = threading.Thread(target=prefetch)
    thread.start()
    try:
        for x, y in batches(device, 2):
            step(x, y)
    finally:
        goes_on.set()
        thread.join()
    assert "or another thread does meanwhile" in step.refused, step.refused


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_among_the_inputs(device, name, caplog):
    """The step runs as it is. To close over the iterator would be no way out."""
    ours, optimizer, eager, eager_optimizer = pair(device, adamw_fused)

    def make_step(model, optimizer):
        return lambda x, y, factors: train(F.mse_loss(model(x), y) * float(next(factors)), optimizer)

    step, expected = cudagraph.whole_step(make_step(ours, optimizer)), make_step(eager, eager_optimizer)
    both = ITERATORS[name](), ITERATORS[name]()
    for x, y in batches(device, 4):
        assert torch.equal(step(x, y, both[0]).detach(), expected(x, y, both[1]).detach())
    assert_equal(ours, eager)
    assert cudagraph.stats()["replays"] == 0 and "give it an item" in caplog.text


def test_items_that_are_first_taken_in_a_capture(device):
    """None was taken in the warm-up. The item that the capture takes is lost."""
    ours, optimizer, _, _ = pair(device, adamw_fused)
    factors, calls = iter(FACTORS), itertools.count()

    class Unseen(Exception):
        late = False

    def step(x, y):
        factor = next(factors) if Unseen.late else 1.0
        return train(F.mse_loss(ours(x), y) * factor, optimizer)

    step = cudagraph.whole_step(step)
    for x, y in batches(device, 4):
        Unseen.late = next(calls) > 0
        step(x, y)
    assert step.refused.startswith("takes items from step, factors")


@pytest.mark.parametrize("name", ITERATORS)
def test_items_that_are_taken_between_steps_do_not_matter(device, name):
    ours, optimizer, _, _ = pair(device, adamw_fused)
    factors, takes = ITERATORS[name](), False

    @cudagraph.whole_step
    def step(x, y):
        return train(F.mse_loss(ours(x), y) * (float(next(factors)) if takes else 1.0), optimizer)

    for x, y in batches(device, 6):
        next(factors)
        step(x, y)
    assert step.refused == "" and cudagraph.stats()["replays"] == 5


def test_a_list_that_grows_under_an_iterator(device):
    """The iterator is where it was."""
    ours, optimizer, _, _ = pair(device, adamw_fused)
    seen = [0.0]
    reads, grows = iter(seen), seen.append

    @cudagraph.whole_step
    def step(x, y):
        grows(1.0)
        return train(F.mse_loss(ours(x), y) * (1.0 if reads else 2.0), optimizer)

    for x, y in batches(device, 8):
        step(x, y)
    assert len(seen) == 9 and next(reads) == 0.0
    assert "takes items" not in step.refused


def test_a_generator_keeps_no_variable_of_before(device):
    """Reading its position holds none of the batches that it has given out."""
    ours, optimizer, _, _ = pair(device, adamw_fused)

    def made():
        while True:
            batch = torch.ones(3)
            yield weakref.ref(batch)

    factors = made()

    @cudagraph.whole_step
    def step(x, y):
        return train(F.mse_loss(ours(x), y) * (1.0 if factors else 2.0), optimizer)

    given_out = []
    for x, y in batches(device, 4):
        given_out.append(next(factors))
        step(x, y)
    next(factors)
    assert [ref() for ref in given_out] == [None] * 4
    assert step.refused == "" and cudagraph.stats()["replays"] == 3


def test_what_dynamo_notes_on_parameters_does_not_matter(device):
    """It does so when an evaluation is compiled, and a compiled optimizer notes something else."""
    ours, optimizer, eager, eager_optimizer = pair(device, adamw_fused)
    step, expected = cudagraph.whole_step(ours, F.mse_loss, optimizer), eager_step(eager, F.mse_loss, eager_optimizer)

    def compile_evaluation(i):
        if i in (3, 5):
            for parameter in ours.parameters():
                parameter._dynamo_static_input_type = "guarded"
        if i in (2, 4, 7):
            torch._dynamo.reset()
            with torch.no_grad():
                torch.compile(lambda x: ours.first(x), backend="eager")(x)
            assert ours.first.weight._dynamo_static_input_type == "unguarded"

    x, _ = next(batches(device, 1))
    run(step, expected, (ours, eager), batches(device, 10), compile_evaluation)
    assert step.refused == "" and cudagraph.stats()["recordings"] == 1 and cudagraph.stats()["replays"] == 9


def test_a_generator_that_calls_the_step(device):
    """It is reached by the step, and is where it was when the step has run."""
    ours, optimizer, _, _ = pair(device, adamw_fused)

    class Trainer:
        def __init__(self):
            self.step, self.losses = cudagraph.whole_step(self.train), self.run()

        def train(self, x, y):
            return train(F.mse_loss(ours(x), y), optimizer)

        def run(self):
            for x, y in batches(device, 6):
                yield self.step(x, y)

    trainer = Trainer()
    assert len([*trainer.losses]) == 6
    assert trainer.step.refused == "" and cudagraph.stats()["replays"] == 5


OWN_ITERATORS = {
    "loops over lists": lambda layers: [layer for pair in zip(layers, [*layers], strict=True) for layer in pair[:1]],
    "enumerate": lambda layers: [layer for _, layer in enumerate(layers)],
    "a generator": lambda layers: [*passed_on(iter(layers))],
    "one that is not exhausted": lambda layers: [next(iter(layers)), *itertools.islice(iter(layers), 1, None)],
    "itertools": lambda layers: [*itertools.islice(itertools.cycle(layers), len(layers))],
}


@pytest.mark.parametrize("name", OWN_ITERATORS)
def test_iterators_of_the_steps_own(device, name):
    def make_step(model, optimizer):
        layers = torch.nn.ModuleList(model.children())

        def step(x, y):
            penalty = sum(p.square().sum() for layer in OWN_ITERATORS[name](layers) for p in layer.parameters())
            return train(F.mse_loss(model(x), y) + 0.01 * penalty, optimizer)

        return step

    step = steps_are_equal(device, make_step)
    assert step.refused == "" and cudagraph.stats()["replays"] == 11


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_an_average_of_the_weights(device, where):
    averages = []

    def make_step(model, optimizer):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        averages.append(average)

        def step(x, y):
            loss = train(F.mse_loss(model(x), y), optimizer)
            if where == "inside":
                average.update_parameters(model)  # reads on the host whether it is the first
            return loss

        return step

    step = steps_are_equal(device, make_step)
    if where == "inside":
        assert "average.update_parameters(model)" in step.refused
        assert_equal(*averages)
    else:
        for average in averages:
            average.update_parameters(average.module)
        assert step.refused == "" and cudagraph.stats()["replays"] > 8


def test_what_blocks_in_an_installed_package_is_named_with_both_lines(device, tmp_path, monkeypatch):
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "losses_of_others.py").write_text("def scaled(loss):\n    return loss * (1 + 0 * loss.item())\n")
    monkeypatch.syspath_prepend(str(package))
    from losses_of_others import scaled

    ours, optimizer, _, _ = pair(device, adamw_fused)
    step = cudagraph.whole_step(ours, lambda out, y: scaled(F.mse_loss(out, y)), optimizer)
    for x, y in batches(device, 4):
        step(x, y)
    assert "(losses_of_others.py:2: return loss * (1 + 0 * loss.item()), called from test_whole_step" in step.refused


def test_batches_as_dicts(device):
    """As trainers of language models pass them: `step(**batch)`."""
    ours, optimizer, eager, eager_optimizer = pair(device, adamw_fused)

    def loss_of(model):
        return lambda inputs, labels: {"loss": F.mse_loss(model(inputs), labels)}["loss"]

    step = cudagraph.whole_step(loss_of(ours), None, optimizer)
    for x, y in batches(device, 12):
        loss = step(inputs=x, labels=y)
        assert torch.equal(loss, eager_step_of(loss_of(eager), eager_optimizer, x, y))
    assert_equal(ours, eager)
    assert step.refused == "" and cudagraph.stats()["replays"] > 8


def eager_step_of(loss_of, optimizer, x, y):
    return train(loss_of(x, y), optimizer).detach()
