"""What the backward of attention works with beside the gradients it returns, by kernel and shape. CUDA only.

python benchmarks/bench_attention_memory.py --json PATH

Plans count it in `workspace_bytes` of aot_hooks/graphs/workspaces.py.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import torch
from _measure import MIB, conditions
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = (  # batch, heads, length, width
    (2, 32, 8192, 128),
    (2, 32, 4096, 128),
    (1, 32, 8192, 128),
    (2, 16, 8192, 128),
    (2, 32, 8192, 64),
    (4, 12, 1024, 64),
)
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def row(shape: tuple[int, int, int, int], name: str) -> dict[str, Any]:
    batch, heads, length, width = shape
    inputs = [
        torch.randn(batch, length, heads, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]
    with sdpa_kernel(KERNELS[name]):
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    beside = []
    for gradient in (torch.randn_like(out), torch.randn_like(out, memory_format=torch.contiguous_format)):
        torch.cuda.reset_peak_memory_stats()
        gradients = torch.autograd.grad(out, inputs, gradient, retain_graph=True)
        beside.append((torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) / MIB)
        del gradients
    return {
        "batch, heads, length, width": shape,
        "kernel": name,
        "dtype": "bfloat16",
        "result_mib": out.nbytes / MIB,
        "beside_gradients_mib": beside[0],
        "of_contiguous_gradient_mib": beside[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
    options = parser.parse_args()
    rows = [row(shape, name) for shape in SHAPES for name in KERNELS]
    for found in rows:
        print(found)
    if options.json is not None:
        header = conditions(torch.device("cuda"))
        options.json.write_text(json.dumps({"header": header, "attention_backward": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
