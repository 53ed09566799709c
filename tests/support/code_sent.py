"""What `offload(across_graphs=True)` sends in CUDA code that is generated without a GPU.

`python tests/support/code_sent.py` prints the strides of each tensor that attention with rotary embeddings sends,
beside those of a contiguous one; and the kernels of a gated layer's forward under `offload(then=float8())`, as a budget
compiles it for a step of many calls. In a process of its own, because torch keeps what it found of devices.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from unittest import mock

import torch
from code_order import codes_of
from code_peak import Block, pretend_cuda
from torch import nn

import aot_hooks
from aot_hooks.passes import rewrite
from aot_hooks.passes.units import choose_positions


class Rotary(nn.Module):
    """As rotary embeddings: halves of rows are put together by `cat`, in another order of dimensions than in memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def rotated(y: torch.Tensor) -> torch.Tensor:
            a, b = y.unflatten(-1, (8, -1)).transpose(0, 1).chunk(2, dim=-1)
            return torch.cat((a * 0.6 - b * 0.8, a * 0.8 + b * 0.6), dim=-1)

        return rotated(self.q(x)) @ rotated(self.k(x)).mT


def strides_of_sent(code: str) -> list[tuple[list[int], list[int]]]:
    """The strides of each buffer that goes to `offload_together`, and those of a contiguous one of its size."""
    made = dict(re.findall(r"(buf\d+) = empty_strided_cuda\((\(.*?\), \(.*?\))", code))
    found = []
    for tensors in re.findall(r"offload_together\.default\(\[(.*?)\]", code):
        for name in re.findall(r"\bbuf\d+", tensors):
            size, stride = ast.literal_eval(f"({made[name]})")
            found.append((list(stride), list(torch.empty(size, device="meta").stride())))
    return found


def main() -> None:
    with torch.device("meta"):
        rotary, gated = Rotary(512).to(torch.bfloat16), Block(2048).to(torch.bfloat16)
    pretend_cuda()
    x = torch.empty(4096, 512, dtype=torch.bfloat16, requires_grad=True)
    strides = strides_of_sent(
        codes_of(rotary.to_empty(device="cpu"), x, aot_hooks.offload(across_graphs=True))["forward"]
    )
    x = torch.empty(16384, 2048, dtype=torch.bfloat16, requires_grad=True)
    policy = aot_hooks.offload(then=aot_hooks.float8(), across_graphs=True)
    as_in_a_step = functools.partial(choose_positions, early=False)  # as a budget has it for many calls
    with mock.patch.object(rewrite, "choose_positions", lambda units, fw, **_: as_in_a_step(units, fw)):
        code = codes_of(gated.to_empty(device="cpu"), x, policy, again=False)["forward"]
    kernels = re.findall(r"(triton_\w+)\.run\(", code)
    print(json.dumps({"strides": strides, "kernels": kernels}))


if __name__ == "__main__":
    main()
