"""Whole programs through the backend and the tree, on the simulator of captures: replays give what eager gives.

The simulator runs each replay on raw memory and scribbles over what is freed, so a value that a cut forgot to hand
over, or that was freed too early, comes out as NaN. The same programs run on CUDA where there is one, with both inner
compilers; at the end are those that need two kinds of devices.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings

import pytest
import torch
from capture_simulator import Simulator
from pieces import scaled
from places import PLACES, backend_with
from torch import nn

import aot_hooks
import cudagraph
from aot_hooks import cudagraphs
from aot_hooks.backend import aot_hooks as hooks_backend
from cudagraph.compile.compilation import Compilation
from cudagraph.explain import explain_with
from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree import dispatch
from cudagraph.tree.driver import cuda_driver


def test_steps_in_inference_mode_and_of_training_take_turns(place):
    """The first call, which makes the tree, is in inference mode; backwards run twice, and over some outputs."""
    weight = torch.randn(8, 8, device=place.device).div_(3).requires_grad_()

    def forward(x):
        h = torch.tanh(x @ weight)
        return torch.tanh(h @ weight), h.sigmoid()

    compiled = torch.compile(forward, backend=place.backend())
    for i in range(6):
        cudagraph.mark_step_begin()
        x = torch.randn(4, 8, device=place.device)
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                torch.testing.assert_close(compiled(x), forward(x))
        got, expected = compiled(x), forward(x)
        for outputs in (got[:1], got[1:], got) if i % 2 else (got,):
            exact = sum(e.sum() for e, g in zip(expected, got, strict=True) if any(g is o for o in outputs))
            (a,) = torch.autograd.grad(sum(o.sum() for o in outputs), weight, retain_graph=True)
            (b,) = torch.autograd.grad(exact, weight, retain_graph=True)
            assert b.norm() > 0.1
            torch.testing.assert_close(a, b)
    assert cudagraph.stats()["replays"] > 6


class Net(nn.Module):
    """With `cut`, an operator in the middle of its forward and its backward can't be captured."""

    def __init__(self, cut: bool):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.register_buffer("seen", torch.zeros(()))
        self.cut = cut

    def forward(self, x):
        h = self.first(x)
        if self.cut:
            h = scaled(h, 0.5) + h
        self.seen += 1
        return self.second(h), h.mean()


def trained(module, forward, steps=6, policy=None, set_to_none=True):
    torch.manual_seed(1)
    device = module.seen.device
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        x = torch.randn(5, 8, device=device)
        with aot_hooks.saved_tensors_policy(policy or aot_hooks.KEEP):
            out, mean = forward(x)
        (out.square().mean() + mean).backward()
        seen += [out.detach().clone(), *(p.grad.clone() for p in module.parameters())]
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return [*seen, module.seen.clone()]


@pytest.mark.core
@pytest.mark.parametrize("cut", [False, True])
def test_training(place, cut):
    module = Net(cut).to(place.device)
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=place.backend())
    for a, b in zip(trained(module, compiled), trained(reference, reference), strict=True):
        torch.testing.assert_close(a, b)
    stats = cudagraph.stats()
    assert stats["replays"] >= (4 if cut else 2) * 3, stats  # the first steps warm up and record
    assert stats["skips"] == 0 and stats["rerecordings"] == 0, stats
    assert stats["partitions"] == (2 if cut else 0), stats


@pytest.mark.parametrize("cut", [False, True])
def test_gradients_that_stay_are_accumulated_into(place, cut):
    """`.grad` is the first backward's output, in the memory of its graph, and is held over the next steps."""
    if place.driver is not None and not place.driver.can_move:
        pytest.skip("the simulator can't move memory that is held on this torch")
    module = Net(cut).to(place.device)
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=place.backend())
    for a, b in zip(
        trained(module, compiled, set_to_none=False), trained(reference, reference, set_to_none=False), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cut", [False, True])
def test_two_forwards_in_flight(place, cut):
    module = Net(cut).to(place.device)
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=place.backend())
    for step in range(6):
        torch.manual_seed(step)
        xs = [torch.randn(5, 8, device=place.device) for _ in range(2)]
        for run in (compiled, reference):
            outs = [run(x)[0] for x in xs]
            for out in outs if step % 2 else reversed(outs):
                out.square().mean().backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
            p.grad = q.grad = None


@pytest.mark.parametrize("name", ["int8", "lossless"])
@pytest.mark.parametrize("cut", [False, True])
def test_training_with_hooks(place, monkeypatch, name, cut):
    if place.driver is not None:
        monkeypatch.setattr(cudagraphs, "compilation", lambda options: Compilation(options, place.driver))
    policy = aot_hooks.lossless() if name == "lossless" else aot_hooks.policies.everything(aot_hooks.int8())
    module = Net(cut).to(place.device)
    reference = copy.deepcopy(module)
    options = {"inner": place.inner}
    compiled = torch.compile(module, backend=hooks_backend, options=options | {"cudagraphs": True})
    plain = torch.compile(reference, backend=hooks_backend, options=options)
    results = [trained(m, f, policy=policy) for m, f in ((module, compiled), (reference, plain))]
    for a, b in zip(*results, strict=True):
        if cut and place.inner == "inductor":  # fuses otherwise where it cuts a graph: 6e-7 apart without hooks
            torch.testing.assert_close(a, b)
        else:
            assert torch.equal(a, b)
    assert cudagraph.stats()["replays"] > 4 and cudagraph.stats()["skips"] == 0


def test_an_item_alone_is_named_with_its_line(place, caplog):
    def f(x):
        return x.item() + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(f, backend=place.backend(), fullgraph=True)
        with caplog.at_level(logging.WARNING, logger="cudagraph"):
            for k in (3, 6):
                assert compiled(torch.tensor(k, device=place.device)) == k + 1
    told = "\n".join(r.getMessage() for r in caplog.records)
    assert "aten._local_scalar_dense.default waits for the device and reads its result on the host" in told
    assert "return x.item() + 1" in told and "all of it runs on the CPU" not in told


@pytest.mark.parametrize("place", PLACES[1:], indirect=True)
def test_an_item_of_the_cpu_is_named_with_its_line(place, caplog):
    def f(x):
        return x.sum().item() + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(f, backend=place.backend(), fullgraph=True)
        with caplog.at_level(logging.WARNING, logger="cudagraph"):
            assert compiled(torch.tensor([1, 2])) == 4
    (told,) = [r.getMessage() for r in caplog.records]
    assert "nothing to capture, all of it runs on the CPU" in told
    assert "aten._local_scalar_dense.default" in told and "return x.sum().item() + 1" in told


def test_a_graph_that_launches_nothing_is_told_once(place, caplog):
    f = torch.compile(lambda x: (x * 2, x.cos()), backend=place.backend())
    with torch.no_grad(), warnings.catch_warnings(), caplog.at_level(logging.WARNING, logger="cudagraph"):
        for call in range(5):
            out, _ = f(torch.randn(0, 3, device=place.device))
            assert out.shape == (0, 3)
            if call == 0:  # it is compiled
                warnings.simplefilter("error")  # torch's own words are not what users get
    if place.inner == "aten":
        assert cudagraph.stats()["recordings"] == 0
        (told,) = [r.getMessage() for r in caplog.records]
        assert "it launches nothing on the device, so the CUDA graph would be empty" in told


def test_a_meta_tensor_among_the_inputs(place):
    def f(x, shape):
        return x.sin() + shape.shape[0], shape * 2

    inputs = torch.randn(3, device=place.device), torch.randn(3, 2, device="meta")
    with torch.no_grad():
        assert explain_with(place.driver or cuda_driver(), f, inputs, {}).captured_whole
        compiled = torch.compile(f, backend=place.backend())
        for _ in range(4):
            x = torch.randn(3, device=place.device)
            out, shape = compiled(x, inputs[1])
            torch.testing.assert_close(out, x.sin() + 3)
            assert shape.is_meta and shape.shape == (3, 2)
    if place.inner == "aten":
        assert cudagraph.stats()["skips"] == 0 and cudagraph.stats()["replays"] == 2


def test_a_parameter_that_moves_is_named(place, caplog):
    module = Net(False).to(place.device)
    compiled = torch.compile(module, backend=place.backend())
    weight = module.first[0].weight
    before = weight.data_ptr()
    with caplog.at_level(logging.INFO, logger="cudagraph"):
        for step in range(5):
            if step == 3:
                assert not [r for r in caplog.records if "moved" in r.getMessage()]
                weight.data = weight.data.clone()
            (out, _) = compiled(torch.randn(5, 8, device=place.device))
            out.sum().backward()
    (told,) = [r.getMessage() for r in caplog.records if "moved" in r.getMessage()]
    assert f"moved from 0x{before:x} to 0x{weight.data_ptr():x}" in told and told.startswith("forward ")
    assert re.search(r"input \d+ \(primals_\d+, test_programs\.py:\d+: h = self\.first\(x\)\) moved", told)


def test_sizes_that_depend_on_values_go_around(place):
    def f(x):
        y = (x.sin() * 2).relu()
        found = y.nonzero()
        return y.exp().sum() + x.cos().sum(), found * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(f, backend=place.backend(), fullgraph=True)
        for _ in range(6):
            x = torch.randn(7, device=place.device)
            for a, b in zip(compiled(x), f(x), strict=True):
                torch.testing.assert_close(a, b)
    assert cudagraph.stats()["replays"] >= 4
    if place.inner == "aten":
        assert cudagraph.stats()["recordings"] == 1


@pytest.mark.core
@pytest.mark.parametrize("marked", [False, True])
def test_a_held_output_that_only_a_later_part_reads(place, marked):
    """The first part begins the step, and the output of the step before is no argument of it."""

    def step(x, state):
        return (scaled((x.cos() * 2).exp(), 1.5) + state).tanh() * 2

    compiled = torch.compile(step, backend=place.backend())
    state = expected = torch.ones(4, 4, device=place.device)
    for _ in range(8):
        if marked:
            cudagraph.mark_step_begin()
        x = torch.randn(4, 4, device=place.device)
        state, expected = compiled(x, state), step(x, expected)
        torch.testing.assert_close(state, expected)
    assert cudagraph.stats()["replays"] > 0 or not (torch_cuda.can_swap() or marked)


class Recurrent(nn.Module):
    """Its state is a buffer that a later part reads, and writes to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.ones(4, 4))

    def forward(self, x):
        h = scaled((x.cos() * 2).exp(), 1.5).tanh()
        new = (self.state + h).tanh()
        self.state.add_(h)
        return new.sin() + new


@pytest.mark.core
@pytest.mark.skipif(not torch_cuda.can_swap(), reason="this torch can't move a storage on the CPU")
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("moves", ["all", "made"])
def test_a_buffer_that_is_an_output_and_that_only_a_later_part_reads(marked, moves):
    """`made`: as before torch 2.13, where a storage can be moved once."""
    module = Recurrent()
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=backend_with(Simulator(moves=moves)))
    with torch.no_grad():
        for _ in range(10):
            if marked:
                cudagraph.mark_step_begin()
            x = torch.randn(4, 4)
            out, expected = compiled(x), reference(x)
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(module.state + 0, reference.state)
            module.state, reference.state = out, expected
            del out, expected
    assert cudagraph.stats()["replays"] > 0


between_parts = {"run": lambda x: None}


def calling(x):
    """An operator that can't be captured, and that runs `between_parts["run"]`."""
    between_parts["run"](x)
    return x * 1.5


library = torch.library.Library("cudagraph_tests_calling", "DEF")  # in a `custom_op` Dynamo is disabled
library.define("calling(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
library.impl("calling", calling, "CPU")
torch.library.register_fake("cudagraph_tests_calling::calling", torch.empty_like)


@pytest.mark.core
@pytest.mark.skipif(not torch_cuda.can_swap(), reason="this torch can't move a storage on the CPU")
@pytest.mark.parametrize("count", [3, 20])
def test_functions_that_run_between_the_parts_leave_what_later_parts_read(monkeypatch, count):
    """After many calls each begins a step, while the last part waits for an output of the first one."""
    backend = backend_with(Simulator())
    inner = torch.compile(lambda x, y: ((x.sin() * 2).exp() + y).tanh() * 2, backend=backend)
    held = [torch.ones(4, 4)]

    def run_inner(x):
        for _ in range(count):
            held[0] = inner(x, held[0])

    def step(x, state):
        a = (x.cos() * 2).exp()
        return (torch.ops.cudagraph_tests_calling.calling(a) + state).tanh() * 2 + a.sin()

    compiled = torch.compile(step, backend=backend)
    state = expected = torch.ones(4, 4)
    for _ in range(14):
        x = torch.randn(4, 4)
        monkeypatch.setitem(between_parts, "run", run_inner)
        state = compiled(x, state)
        monkeypatch.setitem(between_parts, "run", lambda x: None)
        expected = step(x, expected)
        torch.testing.assert_close(state + 0, expected)


def test_graph_breaks_and_dynamic_shapes(place):
    module = Net(cut=True).to(place.device)
    reference = copy.deepcopy(module)

    def program(net, x):
        out, mean = net(x)
        torch._dynamo.graph_break()
        return out * mean, mean

    compiled = torch.compile(program, backend=place.backend(), dynamic=True)
    for size in (4, 6, 4, 6, 4, 6, 3):
        x = torch.randn(size, 8, device=place.device)
        for run, net in ((compiled, module), (program, reference)):
            net.zero_grad()
            run(net, x)[0].square().sum().backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert cudagraph.stats()["replays"] > 0


def test_an_output_that_is_also_saved_waits_for_the_backward():
    """Inductor returns one tensor twice for `exp` and its like: to the user, and for the backward."""
    simulator = Simulator()

    def run(inputs):
        h = inputs.pop().exp()
        return [h, h]

    piece = dispatch.Piece("forward", run, torch.device("cpu"), is_inference=False, saved_outputs=(1,))
    call = dispatch.capture(piece, cudagraph.Options(), simulator)
    for _ in range(3):  # warm up, record, replay
        cudagraph.mark_step_begin()
        outputs = call([torch.randn(4)])
        del outputs
    cudagraph.mark_step_begin()
    x = torch.randn(4)
    shown, saved = call([x])
    del shown
    cudagraph.mark_step_begin()
    other = call([torch.randn(4)])  # a second forward in flight
    torch.testing.assert_close(simulator.read(saved), x.exp())
    del other, saved


# --- two kinds of devices ---

ON_CUDA = PLACES[1:]


@pytest.mark.parametrize("place", ON_CUDA, indirect=True)
def test_what_stands_on_the_cpu_goes_around(place):
    def f(x, number, table):
        y = (x * number).sin().exp()  # a number on the CPU: copied ahead
        rows = torch.arange(4).to(x.device)  # made where it is wanted
        z = y + table.cos().to(x.device)  # computed on the CPU
        return z[rows].sum() + torch.tensor(0.5, device=x.device), z.mean().cpu() + 1

    compiled = torch.compile(f, backend=place.backend())
    for step in range(6):
        x, table = torch.randn(4, 3, device=place.device), torch.randn(3)
        number = torch.tensor(float(step))
        for a, b in zip(compiled(x, number, table), f(x, number, table), strict=True):
            torch.testing.assert_close(a, b)
    stats = cudagraph.stats()
    assert stats["replays"] >= 4 and stats["skips"] == 0 and stats["partitions"] == 1, stats


@pytest.mark.parametrize("place", ON_CUDA, indirect=True)
def test_dropout_is_fresh_and_follows_the_seed(place):
    def f(x):
        return torch.nn.functional.dropout(x.exp(), 0.5)

    with torch._inductor.config.patch(fallback_random=True):
        compiled = torch.compile(f, backend=place.backend())
        x = torch.randn(64, 64, device=place.device)
        seen = []
        for step in range(6):
            torch.manual_seed(step // 2)
            seen.append((compiled(x).clone(), compiled(x).clone()))
            torch.manual_seed(step // 2)
            torch.testing.assert_close(seen[-1], (f(x), f(x)))
        assert not torch.equal(seen[-1][0], seen[-1][1])
    assert cudagraph.stats()["replays"] > 4


@pytest.mark.parametrize("place", ON_CUDA, indirect=True)
def test_offload_is_captured_whole(place):
    # every tensor of the model has a size of its own: blocks of the pinned pool don't fit others by chance
    module = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 128), nn.Tanh()).to(place.device)
    reference = copy.deepcopy(module)
    hook = aot_hooks.offload(min_bytes=1, max_stall_ms=float("inf"))
    compiled = torch.compile(
        module, backend=hooks_backend, options={"inner": place.inner, "cudagraphs": {"or_error": True}}
    )
    for step in range(8):
        torch.manual_seed(step)
        x = torch.randn(32, 64, device=place.device)
        with aot_hooks.saved_tensors_policy(aot_hooks.policies.everything(hook)):
            compiled(x).square().mean().backward()
        reference(x).square().mean().backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
            p.grad = q.grad = None
    stats = cudagraph.stats()
    assert aot_hooks.offload_stats()["sent_count"] > 0
    assert stats["replays"] >= 8 and stats["skips"] == 0 and stats["partitions"] == 0, stats
    cudagraph.reset()
    aot_hooks.reset()


@pytest.mark.gpu
def test_or_error_and_explain_on_cuda():
    def f(x):
        return (x.sin() * 2).cpu().sum()

    found = cudagraph.explain(f, torch.randn(3, device="cuda"))
    assert [part.captured for part in found.parts] == [True, False]
    assert (
        found.blockers[0].reason == "copies from cuda:0 to the CPU" and "cpu().sum()" in found.blockers[0].source_line
    )
    compiled = torch.compile(f, backend=cudagraph.cudagraph_tree, options={"or_error": True})
    with pytest.raises(Exception, match="copies from cuda:0 to the CPU"):
        compiled(torch.randn(3, device="cuda"))
