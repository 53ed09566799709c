"""Nodes of autograd that a program holds from before a capture, and CUDA graphs that are freed during one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from ranks import group_of_one
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from whole_steps import Net, batches, sgd

import cudagraph
from cudagraph.step.accumulators import is_alive, is_referenced, renew
from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree import dispatch


def kept_loss_and_step(device, model=None):
    """A model, the loss of an eager forward whose graph stays alive, and a whole step."""
    torch.manual_seed(1)
    net = Net().to(device)
    model = net if model is None else model(net)
    kept = [F.mse_loss(model(x), y) for x, y in batches(device, 1)]

    def run(x, y):
        model.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss, [p.grad.clone() for p in net.parameters()]

    return net, kept, run


def step_of(model):
    def run(x, y):
        model.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return run


def test_the_loss_of_an_eager_step_stays_alive(device):
    """The capture has new accumulators. The backward of the old loss still adds to the same gradients."""
    net, kept, run = kept_loss_and_step(device)
    net.eval()  # statistics would change between the two runs
    expected = torch.autograd.grad(kept[0], [*net.parameters()], retain_graph=True)
    seen: dict[str, int] = {"hook": 0, "after": 0}
    net.first.weight.register_hook(lambda g: seen.update(hook=seen["hook"] + 1))
    net.last.bias.register_post_accumulate_grad_hook(lambda p: seen.update(after=seen["after"] + 1))
    step = cudagraph.whole_step(run)
    for x, y in batches(device, 4):
        (loss, grads), (eager_loss, eager_grads) = step(x, y), run(x, y)
        assert torch.equal(loss, eager_loss) and all(map(torch.equal, grads, eager_grads))
        kept.append(eager_loss)
    assert step.refused == "" and cudagraph.stats()["replays"] == 3
    before, versions = dict(seen), [p._version for p in net.parameters()]
    net.zero_grad()
    kept[0].backward()
    assert all(map(torch.equal, [p.grad for p in net.parameters()], expected))
    assert seen == {"hook": before["hook"] + 1, "after": before["after"] + 1}
    assert versions == [p._version for p in net.parameters()]


@pytest.mark.parametrize("how", ["a hook", "a hook before", "a reference"])
def test_a_node_that_the_program_uses_itself_is_not_replaced(device, how):
    net, kept, run = kept_loss_and_step(device)
    node, calls = get_gradient_edge(net.first.weight).node, []
    if how != "a reference":
        (node.register_hook if how == "a hook" else node.register_prehook)(lambda *_: calls.append(1))
        del node
    step = cudagraph.whole_step(run)
    for x, y in batches(device, 3):
        step(x, y)
    assert "accumulates the gradient of" in step.refused and "['first']._parameters['weight']" in step.refused
    assert len(calls) == (0 if how == "a reference" else 3)
    assert len(kept) == 1  # alive until here


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("kind", ["parameter", "view", "transposed", "empty"])
def test_a_leaf_forgets_its_accumulator_and_nothing_else(dtype, kind):
    base = torch.ones(4, 3, dtype=dtype)
    leaf = {"parameter": base, "view": base[1:3], "transposed": base.t(), "empty": base[:0]}[kind]
    x = nn.Parameter(leaf) if kind == "parameter" else leaf.requires_grad_()
    x.grad = gradient = torch.ones_like(x)
    x.detach().mul_(2)
    graph, state = x * 3, (x._version, x.untyped_storage()._cdata, x.stride(), x.storage_offset(), x.dtype)
    assert is_alive(x) and not is_referenced(x)
    renew(x)
    assert not is_alive(x) and x.grad is gradient and x.is_leaf and x.requires_grad
    assert state == (x._version, x.untyped_storage()._cdata, x.stride(), x.storage_offset(), x.dtype)
    graph.backward(torch.ones_like(x))
    (x * 2).backward(torch.ones_like(x))
    assert torch.equal(x.grad, torch.full_like(x, 6)) and (x == 2).all()


@pytest.fixture
def process_group(device):
    with group_of_one(device.type) as group:
        yield group


def test_a_replicated_model_whose_reducer_something_holds(device, process_group):
    """An eager loss has the reducer's nodes, and a snapshot of host values may have the reducer."""
    held = []

    def replicated(net):
        ddp = nn.parallel.DistributedDataParallel(net)
        held.append(ddp.reducer)
        return ddp

    _, kept, run = kept_loss_and_step(device, replicated)
    step = cudagraph.whole_step(run)
    for x, y in batches(device, 13):
        (loss, grads), (eager_loss, eager_grads) = step(x, y), run(x, y)
        torch.testing.assert_close(loss, eager_loss)
        torch.testing.assert_close(grads, eager_grads)
    assert step.refused == "" and cudagraph.stats()["replays"] >= 1 and kept and held


@pytest.mark.parametrize("frozen", [False, True])
def test_a_replicated_model_that_the_step_does_not_reach(device, process_group, frozen):
    """Its reducer has hooks on the nodes of the parameters, which only C++ sees: they are not lost.

    Objects that the garbage collector leaves alone are searched as well.
    """
    net, kept, run = kept_loss_and_step(device)
    replicated = nn.parallel.DistributedDataParallel(net)
    step = cudagraph.whole_step(run)
    if frozen:
        gc.freeze()
    try:
        for x, y in batches(device, 3):
            step(x, y)
    finally:
        gc.unfreeze()
    assert "of another DistributedDataParallel, which the step does not use" in step.refused and kept
    assert replicated.module is net


def test_a_model_whose_parameters_another_replicated_model_has(device, process_group):
    """Two models share a layer. New accumulators of one would lack the hooks of the other, which exchange gradients."""
    net = Net().to(device)
    step_model, other = (nn.parallel.DistributedDataParallel(nn.Sequential(net)) for _ in range(2))
    exchanged = []

    def hook(_, bucket):
        exchanged.append(bucket.buffer().numel())
        found = torch.futures.Future()
        found.set_result(bucket.buffer())
        return found

    other.register_comm_hook(None, hook)

    step = cudagraph.whole_step(step_of(step_model))
    for x, y in batches(device, 4):
        step(x, y)
        F.mse_loss(other(x), y).backward()
    assert "is a parameter of another DistributedDataParallel" in step.refused
    assert sum(exchanged) == 4 * sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("when", [1, 5])
def test_a_hook_that_comes_between_two_calls(device, process_group, when):
    """On a node that a new reducer would replace after the first call, or that the capture would have later."""
    net, kept, _ = kept_loss_and_step(device)
    replicated, calls = nn.parallel.DistributedDataParallel(net), []

    step = cudagraph.whole_step(step_of(replicated))
    for i, (x, y) in enumerate(batches(device, 16)):
        if i == when:
            get_gradient_edge(net.last.bias).node.register_hook(lambda *_: calls.append(1))
        step(x, y)
    assert "accumulates the gradient of" in step.refused and len(calls) == 16 - when
    assert cudagraph.stats()["recordings"] == 0 and kept


def test_no_python_code_runs_while_a_parameter_is_empty(device):
    """Under `torch.device` an assignment of data would run Python code, in which an interrupt may come."""
    x = nn.Parameter(torch.ones(3, device=device))
    graph, seen = x.clone(), []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append((func, x.dtype))
            return func(*args, **(kwargs or {}))

    with Mode():
        renew(x)
    assert seen and all(dtype == torch.float32 for _, dtype in seen)
    assert torch.equal(x, torch.ones(3, device=device)) and not is_alive(x)
    graph.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, device=device))


@pytest.fixture
def rare_collections():
    """Garbage is collected only where a test lowers the threshold."""
    old = gc.get_threshold()
    gc.set_threshold(1 << 30)
    yield
    gc.set_threshold(*old)


class Trainer:
    def __init__(self, device):
        self.net = Net().to(device)
        self.optimizer = sgd(self.net)
        self.step = cudagraph.whole_step(self.train)  # a cycle

    def train(self, x, y):
        loss = F.mse_loss(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def test_a_step_that_became_garbage_is_not_freed_in_the_capture_of_another(device, rare_collections):
    """A CUDA graph that is destroyed meanwhile breaks a capture."""
    other, garbage = Trainer(device), Trainer(device)

    def collect(*_):
        if other.step.driver.is_capturing():
            gc.set_threshold(1, 1, 1)

    other.net.first.register_forward_pre_hook(collect)
    data = [*batches(device, 3)]
    other.step(*data[0])
    for x, y in data:
        garbage.step(x, y)
    (recording,) = garbage.step.every_recording()
    graph = weakref.ref(recording.graph)
    del garbage, recording
    assert graph() is not None
    other.step(*data[1])
    assert other.step.refused == "" and cudagraph.stats()["replays"] == 3


def test_trees_with_collectives_are_freed_before_their_group_ends(place):
    """What the program still holds of them stays as it is. Other trees keep their recordings."""
    from torch.distributed import _functional_collectives as functional

    def talks(x):
        return functional.all_reduce(x * 2, "sum", torch.distributed.group.WORLD) + 1

    def is_silent(x):
        return (x * 3).sin()

    x = torch.arange(4.0, device=place.device)
    with torch.no_grad():
        for silent in (True, False):
            torch._dynamo.reset()
            cudagraph.reset()
            with group_of_one(place.device.type):
                run = torch.compile(is_silent if silent else talks, backend=place.backend())
                for _ in range(4):
                    out = run(x)
                before = cudagraph.stats()["recordings"]
            if not silent and torch_cuda.can_swap():
                assert torch.equal(out, x * 2 + 1)
            elif silent:
                run(x)
            recordings = [tree.root.children for trees in dispatch.every_thread for tree in trees.values()]
            assert before == 1 and any(recordings) is silent


def test_graphs_with_collectives_are_freed_before_their_group_ends(device):
    """NCCL would wait for them for ever. A step that sends nothing keeps its recordings."""
    silent, net = Trainer(device), Net().to(device)

    @cudagraph.whole_step
    def step(x):
        out = net(x).sum()
        torch.distributed.all_reduce(out.detach())
        return out

    for _ in range(2):  # the second time with another group
        with group_of_one(device.type):
            for x, y in batches(device, 4):
                silent.step(x, y)
                step(x)
            assert step.recordings and silent.step.recordings and step.refused == ""
        assert not step.recordings and silent.step.recordings
