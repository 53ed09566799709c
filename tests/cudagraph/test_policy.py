"""`cudagraph.Policy` for Inductor's own users: how Inductor asks it, and that it captures whole graphs or their pieces.

Inductor captures nothing on the CPU and does not ask there; the tests have it believe that it may.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import cudagraph
from cudagraph.torch_private import cuda as torch_cuda

HAS_POLICY = torch_cuda.has("torch._inductor.config.cudagraph_policy")
needs_policy = pytest.mark.skipif(not HAS_POLICY, reason="this torch asks no policy")


@pytest.mark.core
@pytest.mark.skipif(HAS_POLICY, reason="this torch asks a policy")
def test_an_older_torch_is_told_clearly():
    with pytest.raises(cudagraph.UnsupportedTorchError, match="cudagraph_policy; this is torch 2"):
        cudagraph.Policy()


@needs_policy
@pytest.mark.core
def test_it_is_what_inductor_takes():
    from torch._inductor.cudagraph_utils import CUDAGraphPolicy

    policy = cudagraph.Policy({"held_outputs": "copy"})
    assert isinstance(policy, CUDAGraphPolicy) and policy.options.held_outputs == "copy"
    with torch._inductor.config.patch(cudagraph_policy=policy):
        assert torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2)).sum() == 4
    with pytest.raises(cudagraph.OptionError, match="unknown option"):
        cudagraph.Policy({"warmup": 1})
    other = object()
    assert policy.wrap_output(other) is other


def asked_by_inductor(monkeypatch) -> None:
    """Have `post_compile` ask on the CPU what it asks on CUDA: it asks where graphs may be captured at all."""
    import torch._inductor.cudagraph_utils as utils
    from torch._inductor.output_code import CompiledFxGraph

    monkeypatch.setattr(utils, "check_lowering_disable_cudagraph", lambda devices: None)
    made = CompiledFxGraph.__init__

    def with_a_device(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.device_idxs = type(self.device_idxs)([0])

    monkeypatch.setattr(CompiledFxGraph, "__init__", with_a_device)


@contextlib.contextmanager
def policy_in_force(driver, *, partition, caches):
    policy = {"cudagraph_policy": cudagraph.Policy(driver=driver), "triton.cudagraphs": True}
    with torch._inductor.config.patch({**policy, "graph_partition": partition, "fx_graph_cache": caches}):
        with torch._functorch.config.patch(enable_autograd_cache=caches):
            yield


@needs_policy
@pytest.mark.slow
@pytest.mark.parametrize("partition", [False, True])
def test_plain_inductor_is_captured(monkeypatch, noted, partition):
    import torch._inductor.scheduler as scheduler

    asked_by_inductor(monkeypatch)
    if partition:
        for kind in (scheduler.BaseSchedulerNode, scheduler.FusedSchedulerNode):
            monkeypatch.setattr(kind, "is_gpu", lambda self: True)
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    reference = copy.deepcopy(module)
    with policy_in_force(noted, partition=partition, caches=False):
        compiled = torch.compile(module)
        for _ in range(3):
            x = torch.randn(5, 4, requires_grad=True)
            y = x.detach().clone().requires_grad_()
            for run, given in ((compiled, x), (reference, y)):
                run(given).square().sum().backward()
            torch.testing.assert_close(x.grad, y.grad)
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    forward, backward = noted.pieces
    assert forward.name.startswith("forward") and backward.name.startswith("backward")
    assert len(forward.static_inputs) == 4
    static = {backward.placeholders[i].name for i in backward.static_inputs}
    assert static == {forward.placeholders[i].name for i in forward.static_inputs} & {
        info.name for info in backward.placeholders
    }
    assert set(noted.call_counts.values()) == {3}


@needs_policy
@pytest.mark.slow
def test_what_torchs_caches_give_is_captured_too(monkeypatch, noted, tmp_path):
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    asked_by_inductor(monkeypatch)
    counters.clear()
    with policy_in_force(noted, partition=False, caches=True):
        for _ in range(2):
            torch.compiler.reset()
            torch.manual_seed(0)
            weight = nn.Parameter(torch.randn(4, 4))

            @torch.compile
            def f(x, weight=weight):
                return (x @ weight).sin()

            x = torch.randn(3, 4)
            f(x).sum().backward()
            torch.testing.assert_close(weight.grad, x.t() @ (x @ weight).cos())
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1, dict(counters["aot_autograd"])
    assert [piece.is_backward for piece in noted.pieces] == [False, True] * 2
    first, second = noted.pieces[::2]
    assert first.static_inputs == second.static_inputs and first.placeholders == second.placeholders
    assert noted.pieces[1].static_inputs == noted.pieces[3].static_inputs
    assert set(noted.call_counts.values()) == {1} and len(noted.call_counts) == 4
