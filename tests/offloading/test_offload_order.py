"""The order that the schedule asks for is the order of the code that Inductor generates."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import aot_hooks
from aot_hooks import Rates

pytestmark = pytest.mark.slow
SUPPORT = Path(__file__).parents[1] / "support"
RATES = Rates(to_host=1e9, to_device=1e9, memory=1e9, operations=1e10, operations32=1e9)
CALL = re.compile(r"torch\.ops\.aot_hooks\.(\w+)\.default\((?:buf\d+, )?(\w+_packed_\d+)?|(extern_kernels\.\w+)\(")


class Mlp(nn.Module):
    """Each layer has branches that could run in another order, and temporaries whose memory a scheduler would save."""

    def __init__(self, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.gate = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(3 * width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, gate, down in zip(self.up, self.gate, self.down, strict=True):
            # no residual connection: a product and a sum after it become one kernel, which stands where the sum does
            x = torch.tanh(down(torch.nn.functional.silu(gate(x)) * up(x)))
        return x


def planned(graph: torch.fx.Graph) -> list[str]:
    """Products and our operators in the graph's order; in the backward with the names of the tensors they fetch."""
    found = []
    for node in graph.nodes:
        ours = str(node.target).startswith("aot_hooks")
        if ours or str(node.target) in ("aten.mm.default", "aten.addmm.default"):
            slot = next((n.name for n in node.all_input_nodes if n.op == "placeholder"), "") if ours else ""
            found.append(
                f"{str(node.target).split('.')[1] if ours else 'mm'} {slot if '_packed_' in slot else ''}".strip()
            )
    return found


def generated(code: str) -> list[str]:
    """The same for the generated wrapper that calls the kernels."""
    body = code[code.index("def call(") :]
    lines = [line.split("#")[0] for line in body.splitlines() if "assert_" not in line]
    return [
        "mm" if m[3] else f"{m[1]} {m[2] or ''}".strip()  # addmm too: a product and the sum after it
        for line in lines
        if (m := CALL.search(line))
    ]


def both(hook: aot_hooks.Hook) -> list[tuple[list[str], list[str]]]:
    """The order in the graph that Inductor gets, and in the code that it generates: of the forward, of the backward."""
    plans: list[list[str]] = []
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(64, 32, requires_grad=True)
    options = {"inductor": {"post_grad_custom_post_pass": lambda graph: plans.append(planned(graph))}}
    fn = torch.compile(model, backend="aot_hooks", options=options)

    def step() -> None:
        with aot_hooks.saved_tensors_hooks(hook):
            y = fn(x)
        y.square().sum().backward()

    _, code = run_and_get_code(step)
    got = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    if hook.name == "offload":  # exact
        model(x).square().sum().backward()
        for p, grad in zip(model.parameters(), got, strict=True):
            torch.testing.assert_close(grad, p.grad, rtol=1e-4, atol=1e-5)
    assert len(code) == len(plans) == 2
    return list(zip(plans, map(generated, code), strict=True))


@pytest.mark.parametrize("then", [pytest.param(None, marks=pytest.mark.core), aot_hooks.int8(32)], ids=str)
def test_generated_code_keeps_the_planned_order(then: aot_hooks.Hook | None) -> None:
    (forward, forward_code), (backward, backward_code) = both(aot_hooks.offload(0, then, rates=RATES))
    assert forward_code == forward
    assert backward_code == backward
    ours = [line.split()[0] for line in (*forward, *backward) if "load" in line]
    assert ours.count("offload_start") == ours.count("offload_wait") == ours.count("reload_start") > 5
    # waits are not next to their starts: products stand between
    first = forward.index("offload_start")
    assert "mm" in forward[first : forward.index("offload_wait")]


@pytest.mark.parametrize("then", ["float8", "int8"])
def test_packing_is_part_of_the_kernel_that_reads_a_value_last(then: str) -> None:
    """silu(a) * b packs a and b, though a product stands between silu(a) and b. Further layers hold more: there a is
    packed before b is made, and b, too, in the last one, since this forward has the peak of the step."""
    command = [sys.executable, str(SUPPORT / "code_order.py"), then]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    calls = json.loads(done.stdout.splitlines()[-1])
    kernels = [call for call in calls if call.startswith("triton")]
    gates = [i for i, name in enumerate(kernels) if "silu" in name]
    alone = [bool(re.fullmatch(r"triton_[a-z]+_fused_\d+", name)) for name in kernels]
    between = [alone[i + 1 : j] for i, j in zip([-1, *gates[:-1]], gates, strict=True)]
    packed_before = [
        rows[::-1].index(False) for rows in between
    ]  # the norm's kernel is the last that packs none of them
    assert packed_before == [0, 1, 1, 2]
    assert sum(alone) == (4 if then == "float8" else 7)  # int8 packs what a layer adds to the residual stream alone
    first = calls.index("offload_start")
    assert "silu" in calls[first - 1]
    assert calls.count("offload_start") >= 4


def test_copies_of_what_is_not_packed_start_when_it_is_made() -> None:
    """The pack of a value that lies in memory in another order is a view: there is nothing to fuse."""
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())))
    x = torch.randn(4, 16, 32, 32).to(memory_format=torch.channels_last)
    policy = aot_hooks.offload(0, rates=Rates(1e9, 1e9, 1e9, 1e9, 1e8))
    plan = aot_hooks.plan(model.to(memory_format=torch.channels_last), x, policy=policy, inner="inductor")
    sent = [t for t in plan.transfers if t.placement.offloaded]
    assert sent and all(t.start == t.name for t in sent)


def test_a_pass_of_the_users_still_runs() -> None:
    seen: list[int] = []

    def count(nodes: list[Any]) -> list[Any]:
        seen.append(len(nodes))
        return nodes

    model, x = Mlp(1), torch.randn(64, 32, requires_grad=True)
    options = {"policy": aot_hooks.offload(0, rates=RATES), "inductor": {"_pre_fusion_custom_pass": count}}
    torch.compile(model, backend="aot_hooks", options=options)(x).sum().backward()
    assert len(seen) == 2


def test_sent_across_graphs_as_traced_and_packed_with_the_last_reader() -> None:
    """Inductor chose other strides for rotated queries, and the operator that sends copied them at each call."""
    done = subprocess.run([sys.executable, str(SUPPORT / "code_sent.py")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["strides"]) == 2
    assert all(stride == contiguous for stride, contiguous in found["strides"])
    norm, gated, gains = found["kernels"]
    assert "rsqrt" in norm and "silu" in gated and "poi" in gains  # the last copies the gains of the norm
