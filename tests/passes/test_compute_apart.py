"""What a backward computes again for a product is not fused with gradients, and is gone before these are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aot_hooks.passes import early
from aot_hooks.torch_private.inductor_fusion import ALONE, FROM_HOOK

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build asks the driver, tests with a GPU measure it")
@pytest.mark.slow
def test_it_is_not_alive_beside_the_gradients() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)])}
    command = [sys.executable, str(SUPPORT / "code_apart.py")]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    apart, fused = json.loads(run.stdout.splitlines()[-1])
    assert fused - apart > 0.9, "one of the widest tensors less"


def backward(tangents, weight, gate, up, x):  # type: ignore[no-untyped-def]
    """Of a gated layer. Computed again are `h` and `normed` for products, and `cast` for a product of the forward's."""
    h = gate.sigmoid() * up
    normed, cast = x.sin(), weight.cos()
    d = tangents @ weight
    d_up, d_gate, d_x = d * gate.sigmoid(), d * up, d * x.cos()
    products = [h.t() @ tangents, normed.t() @ tangents, x @ cast]
    return [*products, d_up.t() @ x, d_gate.t() @ x, d_x.t() @ gate]


def test_only_a_value_beside_several_gradients_of_its_size_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "on_cuda", lambda _nodes: True)
    inputs = [torch.randn(8, 8) for _ in range(5)]
    gm = make_fx(backward, tracing_mode="fake")(*inputs)
    (h,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[:1]
    early.compute_apart(gm)
    assert [node for node in gm.graph.nodes if ALONE in node.meta] == [h], gm.code
    del h.meta[ALONE]
    h.meta[FROM_HOOK] = True
    early.compute_apart(gm)
    assert not any(ALONE in node.meta for node in gm.graph.nodes), "what a hook unpacks is fused as without this"
