"""options["cudagraphs"]: graphs with hooks inlined, captured; values that cross are classified one by one."""

from __future__ import annotations

import copy

import pytest
import torch
from pieces import CUDA, Noted, traced
from torch import nn

import aot_hooks
import cudagraph
from aot_hooks import cudagraphs
from aot_hooks.backend import aot_hooks as backend
from aot_hooks.offloading import stats, transfers
from aot_hooks.options import Options
from cudagraph.compile.compilation import Compilation
from cudagraph.compile.pieces import whole_piece
from cudagraph.graph.analyse import Kind, analyse
from cudagraph.graph.blockers import is_host_operator
from cudagraph.tree import dispatch


@pytest.fixture
def noted(monkeypatch) -> Noted:
    driver = Noted()
    monkeypatch.setattr(dispatch, "capture", driver.capture)
    monkeypatch.setattr(cudagraphs, "compilation", lambda options: Compilation(options, driver))
    return driver


class Net(nn.Module):
    def __init__(self, small=False):
        super().__init__()
        more = () if small else (nn.LayerNorm(32), nn.Linear(32, 8), nn.ReLU())  # C++ takes its time
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), *more)

    def forward(self, x):
        return self.layers(x).square().mean()


def gradients(module, forward, hook, steps=3):
    torch.manual_seed(1)
    seen = []
    for _ in range(steps):
        x = torch.randn(6, 16, requires_grad=True)
        with aot_hooks.saved_tensors_policy(hook):
            loss = forward(x)
        loss.backward()
        seen += [loss.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
        module.zero_grad()
    return seen


HOOKS = {
    "none": lambda: aot_hooks.KEEP,
    "bitmask": lambda: aot_hooks.lossless(),
    "cast": lambda: aot_hooks.cast(torch.bfloat16),
    "int8": lambda: aot_hooks.int8(),
    "int8 stochastic": lambda: aot_hooks.int8(stochastic=True),
    "offload": lambda: aot_hooks.offload(min_bytes=1, max_stall_ms=1e9),
}


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        *(("aten", name) for name in HOOKS),
        # one lossy hook and offload are enough of Inductor's time
        *(pytest.param("inductor", name, marks=pytest.mark.slow) for name in ("cast", "offload")),
    ],
)
def test_hooks_are_captured_with_their_graphs(noted, inner, name):
    module = Net(small=inner == "inductor")
    reference = copy.deepcopy(module)
    policy = aot_hooks.policies.everything(HOOKS[name]()) if name not in ("none", "bitmask") else HOOKS[name]()
    plain = torch.compile(reference, backend=backend, options={"inner": "aten"})
    torch.manual_seed(0)
    expected = gradients(reference, plain, policy)
    assert noted.pieces == []
    compiled = torch.compile(module, backend=backend, options={"inner": inner, "cudagraphs": True})
    torch.manual_seed(0)
    for a, b in zip(gradients(module, compiled, policy), expected, strict=True):
        if inner == "aten":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b)
    forward, backward = noted.pieces
    assert set(noted.call_counts.values()) == {3}
    # of what crosses, only parameters are said to stay where they are
    names = {backward.placeholders[i].name for i in backward.static_inputs}
    assert names <= {forward.placeholders[i].name for i in forward.static_inputs}
    assert (
        inner != "aten" or aot_hooks.last_plans(compiled)[0].packed_bytes == aot_hooks.last_plans(plain)[0].packed_bytes
    )


@pytest.mark.core
def test_a_graph_whose_only_host_tensors_are_offloaded_is_captured_whole():
    cudagraphs.compilation(cudagraph.Options())  # declares the operators

    def forward(x, w):
        y = (x @ w).sin()
        ticket = transfers.offload_start(y, transfers.NO_LIMIT)
        z = y.exp() @ w
        return z, transfers.offload_wait(ticket, y)

    def backward(host, w, tangent):
        ticket = transfers.reload_start(host, CUDA)
        g = tangent @ w.t()
        return transfers.reload_wait(ticket, host, CUDA) * g

    def on_cuda():
        return torch.empty(4, 4, device="cuda")

    made = traced(forward, lambda: (on_cuda(), on_cuda()))
    found = analyse(made, Kind("forward", 0, static_inputs=(1,)), cudagraph.Options(), "cuda")
    assert found.whole and found.blockers == ()
    made = traced(lambda *given: (backward(*given),), lambda: (torch.empty(4, 4), on_cuda(), on_cuda()))
    kind = Kind("backward", 0, static_inputs=(1,))
    found = analyse(made, kind, cudagraph.Options(), "cuda")
    assert found.whole
    # pinned memory is never copied elsewhere; it is static beside the parameter
    assert whole_piece(made, kind, CUDA, made).static_inputs == (0, 1)


@pytest.mark.core
def test_offload_is_left_out_where_a_graph_is_cut():
    cudagraphs.compilation(cudagraph.Options())

    def forward(x, s):
        y = x.sin().cos()
        ticket = transfers.offload_start(y, transfers.NO_LIMIT)
        z = torch.ops.aten._to_copy.default(y.exp().sqrt(), device=torch.device("cpu"))
        back = torch.ops.aten._to_copy.default(z + s, device=CUDA)
        return (back.exp() + 1).sqrt(), transfers.offload_wait(ticket, y)

    made = traced(forward, lambda: (torch.empty(4, device="cuda"), torch.empty(4)))
    found = analyse(made, Kind("forward", 0), cudagraph.Options(), "cuda")
    assert found.captured_count == 2 and len(found.blockers) == 3
    for part in found.parts:
        assert not (part.captured and any(is_host_operator(node) for node in part.nodes))


@pytest.mark.core
def test_options():
    assert cudagraphs.capture_options("aten", False) is None
    given = cudagraphs.capture_options("inductor", {"held_outputs": "copy", "warmup_steps": 2})
    assert (given.inner, given.held_outputs, given.warmup_steps) == ("inductor", "copy", 2)
    for wrong in ({"warmups": 1}, {"inner": "aten"}, 3, "yes"):
        with pytest.raises(aot_hooks.errors.OptionError, match="cudagraphs"):
            Options.parse({"cudagraphs": wrong})


def test_without_cuda_it_runs(caplog):
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    cudagraph.reset()
    module = Net()
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=backend, options={"inner": "aten", "cudagraphs": True})
    plain = torch.compile(reference, backend=backend, options={"inner": "aten"})
    policy = aot_hooks.policies.everything(aot_hooks.int8())
    for a, b in zip(gradients(module, compiled, policy), gradients(reference, plain, policy), strict=True):
        assert torch.equal(a, b)
    assert caplog.text.count("nothing to capture") == 1


def test_reset_forgets_recordings_before_host_memory_goes(monkeypatch):
    order = []
    monkeypatch.setattr(cudagraph, "reset", lambda: order.append("recordings"))
    monkeypatch.setattr(stats, "reset", lambda: order.append("host memory"))
    backend.reset()
    assert order == ["recordings", "host memory"]
