"""The order of a CUDA program with `offload(then=...)`, generated without a GPU: kernels, products, copies out.

`python tests/support/code_order.py float8` prints the forward's, for layers whose copies a link hides in part. In a
process of its own, because torch keeps what it found of devices.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any
from unittest import mock

import torch
from code_peak import H200, Block, compiled, on_cuda, pretend_cuda
from torch import nn

import aot_hooks
from aot_hooks import partitioner


def codes_of(model: nn.Module, x: torch.Tensor, policy: Any, *, again: bool = True) -> dict[str, str]:
    """The code of both graphs, by phase. `again`: with what a product reads computed again."""
    torch.accelerator.is_available = lambda: False  # type: ignore[assignment]
    cut = partitioner.aot.min_cut_partition

    def cut_on_cuda(joint: Any, *args: Any, **named: Any) -> Any:
        on_cuda(joint)
        return cut(joint, *args, **named)

    with (
        mock.patch.object(partitioner.aot, "min_cut_partition", cut_on_cuda),
        mock.patch("aot_hooks.graphs.speeds._measured", lambda _: H200),
    ):
        codes, _ = compiled(model, x, policy, recompute_pointwise=again)
    return {phase: code for phase, code, _ in codes}


def main(then: aot_hooks.Hook) -> None:
    with torch.device("meta"):
        layers = nn.Sequential(*(Block(2048) for _ in range(4))).to(torch.bfloat16)
    model, x = layers.to_empty(device="cpu"), torch.empty(16384, 2048, dtype=torch.bfloat16, requires_grad=True)
    pretend_cuda()
    forward = codes_of(model, x, aot_hooks.offload(then=then))["forward"]
    calls = re.finditer(r"(triton_\w+)\.run\(|(extern_kernels\.\w+)\(|(offload_start)\.default\(", forward)
    print(json.dumps([next(filter(None, m.groups())) for m in calls]))


if __name__ == "__main__":
    main({"float8": aot_hooks.float8(), "int8": aot_hooks.int8(128)}[sys.argv[1]])
