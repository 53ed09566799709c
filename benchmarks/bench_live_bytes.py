"""How much of what float8 saves is left at the worst moment of the backward, over many layers.

    24 blocks, AOTAutograd's graphs run as they are (inner "aten")
        |  without hooks, with float8
        v
    bytes alive after the forward, and at most during the backward      <- every allocation and release of one step

An unpacked tensor is as large as it ever was: if all were unpacked before the backward begins, its peak would be that
of a run without hooks. So the ratio of the peaks tells whether each is unpacked where it is needed. Needs no GPU.

    python benchmarks/bench_live_bytes.py
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import sys
from typing import Any

import torch
from _measure import StepBytes, conditions, measure_bytes
from model import Stack
from torch import Tensor

import aot_hooks

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def measure(hook: aot_hooks.Hook | None, stack: Stack, x: Tensor) -> StepBytes:
    """One step after the one that compiles."""
    compiled = torch.compile(stack, backend="aot_hooks", fullgraph=True, options={"inner": "aten"})

    def forward() -> Tensor:
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if hook is not None:
            context = aot_hooks.saved_tensors_hooks(hook.pack, hook.unpack)
        with context:
            y = compiled(x)
        return y.float().pow(2).mean()

    def clear() -> None:
        stack.zero_grad(set_to_none=True)
        x.grad = None

    forward().backward()
    clear()
    measured, _ = measure_bytes(forward, Tensor.backward, x.device)
    clear()
    return measured


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Bytes alive in the backward with and without float8.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--hook", default="float8", help="a hook's name in aot_hooks")
    parser.add_argument("--json", type=pathlib.Path, help="write the result there as well")
    options = parser.parse_args(arguments)
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    sizes = {"width": 64, "head_count": 4, "kv_head_count": 2, "hidden": 224}  # weights are few beside activations

    torch.manual_seed(0)
    with device:
        stack = Stack(options.layers, token_count=options.tokens, **sizes).to(dtype)
        x = torch.randn(options.batch, options.tokens, sizes["width"], dtype=dtype, requires_grad=True)
    without = measure(None, stack, x)
    packed = measure(getattr(aot_hooks, options.hook)(), stack, x)
    result = {
        "header": conditions(device, layers=options.layers, shape=list(x.shape), dtype=options.dtype, **sizes),
        "without_hooks_bytes": dataclasses.asdict(without),
        f"{options.hook}_bytes": dataclasses.asdict(packed),
        "after_forward_ratio": packed.after_forward / without.after_forward,
        "ratio": packed.backward_peak / without.backward_peak,
    }
    text = json.dumps(result, indent=1)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
