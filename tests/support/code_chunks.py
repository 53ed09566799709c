"""What generated CUDA code of a loss in chunks holds, on a machine without CUDA.

`python tests/support/code_chunks.py keep 2048` prints, as JSON, the number of layers in chunks of 2048 tokens, how
often a product is added in place, and the most bytes that forward and backward hold, and hold as planned. Further
arguments are the numbers of tokens, of hidden units, of words, and of blocks. In a process of its own, see
triton_code.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
from code_peak import H200, Block, compiled, on_cuda, peak_of, pretend_cuda
from torch import nn

import aot_hooks
from aot_hooks import partitioner

POLICIES = {
    "keep": lambda: None,
    "float8": aot_hooks.float8,
    "offload": lambda: aot_hooks.offload(then=aot_hooks.float8()),
}


class Model(nn.Module):
    """Blocks, a norm, and the loss of transformers: labels are shifted, logits are in float32."""

    def __init__(self, width: int, words: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(x))).float()
        labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)


def codes_of(policy: Any, chunk: Any, tokens: int, width: int, words: int, layers: int) -> Any:
    with torch.device("meta"):
        model = Model(width, words, layers).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    x = torch.empty(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1, tokens, dtype=torch.long)
    pretend_cuda()
    torch.accelerator.is_available = lambda: False  # type: ignore[assignment]
    in_chunks = partitioner.in_parts

    def in_chunks_on_cuda(options: Any, gm: Any, *rest: Any) -> Any:
        on_cuda(gm)
        return in_chunks(options, gm, *rest)

    with (
        mock.patch.object(partitioner, "in_parts", in_chunks_on_cuda),
        mock.patch("aot_hooks.graphs.speeds._measured", lambda _: H200),
    ):
        options = {} if policy is None else {"recompute_pointwise": True}
        codes, plans = compiled(lambda x: model(x, labels), x, policy or aot_hooks.KEEP, chunk=chunk, **options)
    return codes, plans


def main(policy: str, chunk: int, tokens: int = 8192, width: int = 4096, words: int = 128256, layers: int = 2) -> None:
    codes, (plan,) = codes_of(POLICIES[policy](), chunk, tokens, width, words, layers)
    sums = sum(code.count("aot_hooks.add_product_.default(") for _, code, _ in codes)
    held = {phase: peak_of(code) for phase, code, _ in codes}
    print(json.dumps({"layers": len(plan.chunked), "sums": sums, "code": held, "planned": plan.peak_bytes}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
