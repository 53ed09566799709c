"""`whole_step` against the same steps in eager mode: numbers, gradients, exceptions, what can't be captured."""

from __future__ import annotations

import copy
import gc
import io
import queue
import weakref

import pytest
import torch
from failing_captures import FailingDriver, Fault
from torch import nn
from torch.nn import functional as F
from whole_steps import OPTIMIZERS, Net, adamw, assert_equal, batches, eager_step, pair, run, steps

import cudagraph

# The others are more of the same: fused or foreach, with more state or less.
QUICK = {"adam, foreach", "muon and adamw"}


@pytest.mark.core
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in OPTIMIZERS]
)
def test_500_steps_are_those_of_eager_mode(device, name):
    ours, optimizer, eager, eager_optimizer = pair(device, OPTIMIZERS[name])
    step = cudagraph.whole_step(ours, F.mse_loss, optimizer, clip_grad_norm=0.5, accumulate=2)
    expected = eager_step(eager, F.mse_loss, eager_optimizer, clip_grad_norm=0.5, accumulate=2)
    for _ in range(5):
        run(step, expected, (ours, eager), [*batches(device, 99), *batches(device, 1, size=5)])
    counts = cudagraph.stats()
    assert step.refused == step.update_refused == ""
    assert counts["recordings"] == 2 and counts["warmups"] == 2 and counts["replays"] == 498


@pytest.mark.core
@pytest.mark.parametrize(
    "name",
    ["adamw, foreach", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd with momentum", "adamw, fused"))],
)
def test_500_steps_with_all_that_happens(device, name):
    """A schedule, clipping, accumulation, ragged batches, exceptions, out of memory in captures, save and load."""
    ours, optimizer, eager, eager_optimizer = pair(device, OPTIMIZERS[name])
    both = ((ours, optimizer), (eager, eager_optimizer))
    for _, each in both:
        each.param_groups[0]["lr"] = 0.0625  # halves of it are the same in float32, as the device has them
    schedules = [torch.optim.lr_scheduler.StepLR(each, 120, 0.5) for _, each in both]
    raises = []

    def loss_fn(out, y):
        if raises:
            raise KeyError("mine")
        return F.mse_loss(out, y)

    how = {"clip_grad_norm": 0.5, "accumulate": 2}
    step, expected = (
        cudagraph.whole_step(ours, loss_fn, optimizer, **how),
        eager_step(eager, loss_fn, eager_optimizer, **how),
    )
    step.driver = FailingDriver(step.driver)
    saved = io.BytesIO()
    data = [*batches(device, 39), *batches(device, 1, size=5)]
    for i in range(500):
        x, y = data[i % 40]
        if i in (1, 41, 121, 242):  # where the step is captured
            step.driver.armed(Fault("operator", 7, torch.OutOfMemoryError("planted")))
        if i in (0, 1, 100, 300):
            raises.append(1)
            for model, call in ((ours, step), (eager, expected)):
                with pytest.raises(KeyError, match="mine"):
                    call(x, y)
                model.zero_grad()
            raises.clear()
        if i == 200:
            torch.save({"model": ours.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        if i == 240:
            for model, each in both:
                saved.seek(0)
                state = torch.load(saved)
                model.load_state_dict(state["model"])
                each.load_state_dict(state["optimizer"])
        run(step, expected, (ours, eager), [(x, y)])
        for schedule in schedules:
            schedule.step()
    assert_equal(optimizer, eager_optimizer)
    assert optimizer.param_groups[0]["lr"] == eager_optimizer.param_groups[0]["lr"] < 0.0625
    assert step.refused == step.update_refused == "" and cudagraph.stats()["replays"] > 450


def test_optimizers_count_their_steps_on_the_device(device):
    """As with `capturable=True`, also those that have run before."""
    ours, _, eager, eager_optimizer = pair(device, adamw)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01, foreach=True)
    for model, each in ((ours, optimizer), (eager, eager_optimizer)):
        for x, y in batches(device, 2):
            F.mse_loss(model(x), y).backward()
            each.step()
            each.zero_grad()
    eager.load_state_dict(ours.state_dict())
    eager_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    eager_optimizer.param_groups[0]["capturable"] = True
    for state in eager_optimizer.state.values():
        state["step"] = state["step"].to(device)
    step, expected = cudagraph.whole_step(ours, F.mse_loss, optimizer), eager_step(eager, F.mse_loss, eager_optimizer)
    run(step, expected, (ours, eager), batches(device, 30))
    assert optimizer.param_groups[0]["capturable"] and step.update_refused == ""
    assert all(state["step"].device == device for state in optimizer.state.values())
    assert_equal(optimizer, eager_optimizer)


def test_an_update_that_reads_the_host_runs_outside_of_the_graph(device, caplog):
    def make(model):
        return torch.optim.Adafactor(model.parameters(), lr=0.01)

    step, expected, models, _ = steps(device, make)
    run(step, expected, models, batches(device, 50))
    assert "reads" in step.update_refused or "capturable" in step.update_refused  # on CUDA torch 2.11 raises first
    assert caplog.text.count("outside of the CUDA graph") == 1
    assert cudagraph.stats()["replays"] >= 40


def large_loss(out, y):
    return F.mse_loss(out, y) * 1000


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_skips_steps_with_infinite_gradients(device, fused):
    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused, capturable=True)

    ours, optimizer, eager, eager_optimizer = pair(device, make)
    scalers = [torch.amp.GradScaler(device.type, init_scale=2.0**127, growth_interval=5) for _ in range(2)]
    step = cudagraph.whole_step(ours, large_loss, optimizer, scaler=scalers[0], clip_grad_norm=1.0)
    expected = eager_step(eager, large_loss, eager_optimizer, scalers[1], clip_grad_norm=1.0)
    run(step, expected, (ours, eager), batches(device, 40))
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert scalers[0].get_scale() < 2.0**127
    assert bool(step.update_refused) is not fused and step.refused == ""
    before = cudagraph.stats()["recordings"]
    for scaler in scalers:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0, "growth_factor": 3.0})
    run(step, expected, (ours, eager), batches(device, 12))
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert cudagraph.stats()["recordings"] >= before


class TestBlockers:
    @pytest.mark.parametrize(
        "name, line, reason",
        [
            ("item", "loss * (1 + 0 * loss.item())", "waits for the device and reads its result on the host"),
            ("mask", "loss + out[out > 0].sum()", "has a size that depends on the values of a tensor"),
            ("input", "F.mse_loss(out, y.mul_(2))", "writes to input 1, which is the caller's own memory"),
        ],
    )
    def test_they_are_named_with_their_line_and_the_step_runs_as_it_is(self, device, caplog, name, line, reason):
        def loss_fn(out, y):
            if name == "input":
                return F.mse_loss(out, y.mul_(2))
            loss = F.mse_loss(out, y)
            if name == "item":
                return loss * (1 + 0 * loss.item())
            return loss + out[out > 0].sum()

        step, expected, models, _ = steps(device, adamw, loss_fn)
        for x, y in batches(device, 8):
            assert torch.equal(step(x, y.clone()), expected(x, y))
        assert_equal(*models)
        assert reason in step.refused and f"return {line}" in step.refused
        assert caplog.text.count("runs without a CUDA graph") == 1

    def test_or_error_raises(self, device):
        ours, optimizer, _, _ = pair(device, adamw)
        step = cudagraph.whole_step(ours, lambda o, y: o.sum() * o.max().item(), optimizer, options={"or_error": True})
        x, y = next(batches(device, 1))
        step(x, y)
        for _ in range(3):
            with pytest.raises(cudagraph.NotCapturableError, match="reads its result on the host"):
                step(x, y)

    def test_inputs_that_need_gradients_run_as_they_are(self, device, caplog):
        step, expected, _, _ = steps(device)
        for x, y in batches(device, 5):
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            assert torch.equal(step(a, y), expected(b, y)) and torch.equal(a.grad, b.grad)
        assert "input 0 requires a gradient" in caplog.text

    def test_too_many_shapes(self, device, caplog):
        step, expected, models, _ = steps(device, options={"size_limit": 2})
        data = [*batches(device, 4), *batches(device, 4, 5), *batches(device, 4, 3), *batches(device, 4, 7)]
        run(step, expected, models, data * 2)
        assert cudagraph.stats()["recordings"] == 2 and cudagraph.stats()["skips"] == 16
        assert caplog.text.count("2 shapes") == 1

    def test_too_many_values_are_said_once(self, device, caplog):
        step, expected, models, _ = steps(device, options={"rerecord_limit": 1})
        ours, eager = models

        def between(i):
            ours.name = eager.name = f"epoch {i // 3}"

        run(step, expected, models, batches(device, 24), between)
        assert caplog.text.count("runs without a CUDA graph") == 1
        assert "it was recorded 2 times, last because model.name: 'epoch 1' became 'epoch 2'" in caplog.text

    def test_a_value_that_changes_in_every_call(self, device):
        step, expected, models, _ = steps(device)
        ours, eager = models

        def between(i):
            ours.name = eager.name = f"batch {i}"

        run(step, expected, models, batches(device, 20), between)
        assert "model.name changes between calls: 'batch 4' became 'batch 5'" in step.refused


class TestExceptions:
    def test_in_the_middle_of_a_step(self, device):
        ours, optimizer, eager, eager_optimizer = pair(device, adamw)
        fail = []

        def loss_fn(out, y):
            loss = F.mse_loss(out, y)
            if fail:
                (loss * 2).backward(retain_graph=True)
                raise KeyError("mine")
            return loss

        step = cudagraph.whole_step(ours, loss_fn, optimizer)
        data = list(batches(device, 20))
        for i, (x, y) in enumerate(data):
            if i in (0, 1, 7, 8, 9):
                fail.append(1)
                before = copy.deepcopy(ours.norm.state_dict())
                with pytest.raises(KeyError, match="mine"):
                    step(x, y)
                fail.clear()
                ours.norm.load_state_dict(before)  # as eager mode does, the forward has changed it
                assert all(p.grad is None for p in ours.parameters())
            assert torch.equal(step(x, y), eager_step(eager, F.mse_loss, eager_optimizer)(x, y))
            assert_equal(ours, eager)
        assert cudagraph.stats()["replays"] > 8

    def test_in_the_capture_alone(self, device, monkeypatch, caplog):
        """Such as out of memory: the step runs as it is, and is captured another time."""
        step, expected, models, _ = steps(device)
        ours, _ = models
        failures = iter([torch.OutOfMemoryError("no room"), MemoryError("no room")])
        original = type(ours).forward

        def forward(self, x):
            out = original(self, x)
            if self is ours and step.driver.is_capturing():
                self.norm.training = False
                error = next(failures, None)
                self.norm.training = error is None
                if error is not None:
                    raise error
            return out

        monkeypatch.setattr(Net, "forward", forward)
        run(step, expected, models, batches(device, 10))
        assert cudagraph.stats()["recordings"] == 1 and ours.norm.training

    def test_saved_tensors_of_another_graph_are_protected_as_in_eager_mode(self, device):
        ours, optimizer, _, _ = pair(device, adamw)
        step = cudagraph.whole_step(ours, F.mse_loss, optimizer)
        for x, y in batches(device, 5):
            other = ours(x).sum()
            step(x, y)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                other.backward()
            ours.zero_grad()


def test_results_are_memory_of_their_own(device):
    ours, optimizer, _, _ = pair(device, adamw)
    step = cudagraph.whole_step(ours, F.mse_loss, optimizer)
    losses = [step(x, y) for x, y in batches(device, 8)]
    values = [loss.item() for loss in losses]
    assert len({loss.data_ptr() for loss in losses}) == 8 and len(set(values)) == 8
    losses[-1].zero_()
    for x, y in batches(device, 3):
        step(x, y)
    assert [loss.item() for loss in losses[:-1]] == values[:-1]


@pytest.mark.gpu  # the simulator is a dispatch mode, under which Dynamo uses no compiled code
@pytest.mark.parametrize(
    "backend", ["aot_hooks", "aot_hooks, offload", "aot_hooks, budget", "aot_hooks with graphs", "cudagraph_tree"]
)
def test_compiled_models_are_captured_with_their_hooks(backend):
    import aot_hooks
    import aot_hooks.backend

    policies = {
        "offload": aot_hooks.policies.everything(aot_hooks.offload(min_bytes=1, max_stall_ms=float("inf"))),
        "budget": aot_hooks.budget(max_slowdown=float("inf")),
        "": aot_hooks.policies.everything(aot_hooks.float8()),
    }
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 2)).to(device)
    eager = copy.deepcopy(ours)
    options = {"inner": "aten"}
    if backend != "cudagraph_tree":
        options |= {"cudagraphs": "with" in backend}
        options |= {"policy": policies[backend.partition(", ")[2]]}
    name = backend.replace(",", "").split()[0]
    backends = {"aot_hooks": aot_hooks.backend.aot_hooks, "cudagraph_tree": cudagraph.cudagraph_tree}
    models = [torch.compile(m, backend=backends[name], options=options) for m in (ours, eager)]
    optimizers = [adamw(m) for m in (ours, eager)]
    step, expected = (
        cudagraph.whole_step(models[0], F.mse_loss, optimizers[0]),
        eager_step(models[1], F.mse_loss, optimizers[1]),
    )
    run(step, expected, (ours, eager), batches(device, 12))
    assert step.refused == step.update_refused == "" and cudagraph.stats()["replays"] >= 10


@pytest.mark.gpu  # the simulator is a dispatch mode, under which Dynamo uses no compiled code
def test_compiled_code_is_what_is_captured():
    device = torch.device("cuda", torch.cuda.current_device())
    calls: queue.SimpleQueue[bool] = queue.SimpleQueue()  # a list that each step changes is a reason not to capture

    def counting(gm, inputs):
        def run(*args):
            calls.put(step.driver.is_capturing() if step.cursor is not None else False)
            return gm(*args)

        return run

    ours, optimizer, _, _ = pair(device, adamw)
    step = cudagraph.whole_step(torch.compile(ours, backend=counting), F.mse_loss, optimizer)
    for x, y in batches(device, 4):
        step(x, y)
    # the first call compiles, and a step is recorded after one that compiles nothing
    assert ([calls.get() for _ in range(calls.qsize())], step.refused) == ([False, False, True], "")


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_inputs_on_the_host_are_moved(pinned):
    device = torch.device("cuda", torch.cuda.current_device())
    step, expected, models, _ = steps(device)
    for x, y in batches(torch.device("cpu"), 200):
        ours_x = x.pin_memory() if pinned else x
        loss = step(ours_x, y.to(device))
        assert torch.equal(loss, expected(x.to(device), y.to(device)))
    assert_equal(*models)
    assert cudagraph.stats()["replays"] == 199


@pytest.mark.gpu
def test_another_stream_for_some_calls():
    device = torch.device("cuda", torch.cuda.current_device())
    step, expected, models, _ = steps(device)
    side = torch.cuda.Stream()
    for i, (x, y) in enumerate(batches(device, 40)):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if i % 3 == 2 else torch.cuda.current_stream()):
            loss = step(x, y)
        torch.cuda.synchronize()
        assert torch.equal(loss, expected(x, y))
    assert_equal(*models)


def test_shapes_in_turn_take_no_new_snapshot(device, monkeypatch):
    ours, optimizer, _, _ = pair(device, adamw)
    step = cudagraph.whole_step(ours, F.mse_loss, optimizer)
    for size in (6, 6, 5, 5):
        step(*next(batches(device, 1, size)))
    monkeypatch.setattr(step, "_host", None)
    for size in (6, 5, 6, 5):
        step(*next(batches(device, 1, size)))
    assert cudagraph.stats()["recordings"] == 2


def test_state_that_was_replaced_is_not_kept_alive(device):
    step, expected, models, optimizers = steps(device)
    ours, _ = models
    optimizer, _ = optimizers
    run(step, expected, models, [*batches(device, 4), *batches(device, 4, 5)])
    old = weakref.ref(optimizer.state[ours.last.weight]["exp_avg"])
    for each in optimizers:
        each.load_state_dict(copy.deepcopy(each.state_dict()))
    run(step, expected, models, batches(device, 4))
    gc.collect()
    assert old() is None
    run(step, expected, models, batches(device, 4, 5))


def test_reset_frees_recordings(device):
    step, expected, models, _ = steps(device)
    run(step, expected, models, batches(device, 4))
    cudagraph.reset()
    assert not step.recordings
    run(step, expected, models, batches(device, 4))
    assert cudagraph.stats()["recordings"] == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(accumulate=0), "accumulate must be an integer of at least 1, got 0"),
        (dict(clip_grad_norm=-1), "clip_grad_norm must be a positive number"),
        (
            dict(options={"held_outputs": "copy"}),
            "unknown option 'held_outputs' of a whole step; valid options: or_error",
        ),
        (dict(options={"size_limit": -1}), "size_limit"),
        (dict(optimizer=3), "must be a torch.optim.Optimizer"),
        (dict(optimizer=None), "need an optimizer"),
        (dict(loss_fn=torch.optim.SGD([nn.Parameter(torch.ones(1))])), "the optimizer is the third argument"),
        (dict(optimizer=nn.Linear(2, 2).parameters()), "must be a torch.optim.Optimizer or several"),
        (dict(optimizer=torch.optim.LBFGS(nn.Linear(2, 2).parameters())), "LBFGS calls a closure"),
        (dict(clip_grad_norm=True), "must be a positive number"),
        (dict(clip_grad_norm="1"), "must be a positive number"),
    ],
)
def test_wrong_arguments(arguments, message):
    model = nn.Linear(2, 2)
    arguments = {"loss_fn": F.mse_loss, "optimizer": torch.optim.SGD(model.parameters()), **arguments}
    with pytest.raises((cudagraph.OptionError, TypeError), match=message):
        cudagraph.whole_step(model, **arguments)


def test_microbatches_of_inputs_that_do_not_fit(device):
    ours, optimizer, _, _ = pair(device, adamw)
    step = cudagraph.whole_step(ours, F.mse_loss, optimizer, accumulate=4)
    with pytest.raises(ValueError, match=r"one size of at least 4 there; got shapes \[\(3, 4\), \(3, 2\)\]"):
        step(torch.randn(3, 4, device=device), torch.randn(3, 2, device=device))


def test_without_a_device_it_runs_as_it_is(caplog):
    if torch.cuda.is_available():
        pytest.skip("this machine has a device")
    step, expected, models, _ = steps(torch.device("cpu"), adamw_on_cpu)
    run(step, expected, models, batches(torch.device("cpu"), 4))
    assert caplog.text.count("runs without a CUDA graph") == 1


def adamw_on_cpu(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)
