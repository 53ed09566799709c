"""What the backward of two gated blocks holds with `recompute_pointwise`, with its kernels split and held, and without.

    python tests/support/code_split.py      prints both peaks, as multiples of the widest tensor

CUDA code, generated without a GPU. In a process of its own, because torch keeps what it found of devices.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
from code_order import codes_of
from code_peak import Block, peak_of, pretend_cuda
from torch import nn

import aot_hooks
from aot_hooks import partitioner


def as_inductor_likes(*_graphs: Any, **_of_outputs: Any) -> None:
    """In place of `split_and_hold`."""


def main() -> None:
    width, tokens = 512, 8192
    model = nn.Sequential(Block(width), Block(width)).to(torch.bfloat16)
    x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    pretend_cuda()
    found = []
    for in_force in (partitioner.split_and_hold, as_inductor_likes):
        torch._dynamo.reset()
        with mock.patch.object(partitioner, "split_and_hold", in_force):
            code = codes_of(model, x, aot_hooks.float8())["backward"]
        found.append(peak_of(code) / (tokens * 3 * width * 2))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
