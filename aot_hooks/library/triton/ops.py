"""The kernels as operators, so that graphs can hold them: `torch.ops.aot_hooks.*`.

      hook --has_kernel()--> torch.ops.aot_hooks.pack_int8(x, ...)    one Triton kernel
           --otherwise-----> plain tensor code                        Inductor fuses it; CPUs run it

Hooks call an operator on CUDA where nothing would fuse the plain code: in eager mode and in graphs with inner="aten".
Under Inductor they call it where the fused plain code is slower than a kernel that reads and writes memory once. That
is int4, whose two codes a byte Inductor materializes apart, and stochastic rounding, where its Philox costs more than
the bytes and a minute of compiling.

The caller draws the seed of stochastic rounding from torch's generator, by an operator of its own. So it follows
`torch.manual_seed`, and CUDA graphs draw a new one in each replay.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from ...hook import compiled_by


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device; (0, 0) for a GPU of AMD's, or without Triton."""
    has_triton = importlib.util.find_spec("triton") is not None and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if has_triton else (0, 0)


def has_kernel(x: torch.Tensor, dtype: torch.dtype | None = None, *, beats_inductor: bool = False) -> bool:
    """Whether `x` should go through an operator of this file; `dtype` is the float8 format that it is converted to."""
    if x.device.type != "cuda" or (compiled_by() == "inductor" and not beats_inductor):
        return False
    return _capability(x.device) >= ((8, 9) if dtype is torch.float8_e4m3fn else (8, 0))


def _operator(file: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes an operator of a function that only allocates the results. On CUDA its namesake in `file` runs."""

    def define(fake: Callable[..., Any]) -> Any:
        name = fake.__name__

        def run(*args: Any) -> Any:  # imports Triton, which not every torch comes with
            return getattr(importlib.import_module(f"{__package__}.{file}"), name)(*args)

        schema = torch.library.infer_schema(fake, mutates_args=())
        op = torch.library.custom_op(f"aot_hooks::{name}", run, mutates_args=(), device_types="cuda", schema=schema)
        op.register_fake(fake)
        return op

    return define


def packed_like(
    x: torch.Tensor, length: Any, dtype: torch.dtype, block: int, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialized codes [..., length] of `x` [..., m] and scales [..., ceil(m / block)]; a block of 0 is the row."""
    count = (x.shape[-1] + block - 1) // block if block else 1
    return x.new_empty((*x.shape[:-1], length), dtype=dtype), x.new_empty((*x.shape[:-1], count), dtype=scale_dtype)


@_operator("kernels8")
def pack_int8(x: torch.Tensor, block: int, power: bool, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return packed_like(x, x.shape[-1], torch.int8, block, torch.uint8 if power else torch.bfloat16)


@_operator("kernels8")
def pack_float8(x: torch.Tensor, block: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return packed_like(x, x.shape[-1], dtype, block, torch.float32)


@_operator("kernels8")
def unpack8(q: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty(q.shape, dtype=dtype)


@_operator("kernels4")
def pack_int4(x: torch.Tensor, block: int, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return packed_like(x, (x.shape[-1] + 1) // 2, torch.uint8, block, torch.int16)


@_operator("kernels4")
def unpack_int4(q: torch.Tensor, scale: torch.Tensor, length: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], length), dtype=dtype)


@_operator("kernels8")
def pack_bits(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


@_operator("kernels8")
def unpack_bits(q: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return q.new_empty(shape, dtype=torch.bool)
