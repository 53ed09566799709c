"""The kernels as operators, so that graphs can hold them: `torch.ops.aot_hooks.*`.

      hook --has_kernel()--> torch.ops.aot_hooks.pack_int8(x, ...)    one Triton kernel
           --otherwise-----> plain tensor code                        Inductor fuses it; CPUs run it

Hooks call an operator on CUDA where nothing would fuse the plain code: in eager mode and in graphs with inner="aten".
Under Inductor they call it where the fused plain code is slower than a kernel that reads and writes memory once. That
is int4, whose two codes a byte Inductor materializes apart, and stochastic rounding, where its Philox costs more than
the bytes and a minute of compiling.

An operator of its own draws the seed of stochastic rounding from torch's generator. So the seed follows
`torch.manual_seed`, and CUDA graphs draw a new one in each replay.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from ...hook import compiled_by

__all__ = ["has_kernel", "seed_for"]


@functools.cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None and torch.version.hip is None


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def has_kernel(x: torch.Tensor, dtype: torch.dtype | None = None, *, beats_inductor: bool = False) -> bool:
    """Whether `x` should go through an operator of this file; `dtype` is the float8 format that it is converted to."""
    if x.device.type != "cuda" or (compiled_by() == "inductor" and not beats_inductor) or not _triton():
        return False
    return _capability(x.device) >= ((8, 9) if dtype is torch.float8_e4m3fn else (8, 0))


def seed_for(x: torch.Tensor, stochastic: bool) -> torch.Tensor | None:
    """A new random int64[1] for stochastic rounding of `x`; None if it is not stochastic."""
    return torch.randint(1 << 62, (1,), device=x.device) if stochastic else None


_op = functools.partial(torch.library.custom_op, mutates_args=(), device_types="cuda")


@_op("aot_hooks::pack_int8")
def pack_int8(x: torch.Tensor, block: int, power: bool, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    from . import kernels8

    return kernels8.pack_int8(x, block, power, seed)


@pack_int8.register_fake
def _(x: torch.Tensor, block: int, power: bool, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), _scales(x, block, torch.uint8 if power else torch.bfloat16)


@_op("aot_hooks::unpack_int8")
def unpack_int8(q: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    from . import kernels8

    return kernels8.unpack_int8(q, scale, block, dtype)


@_op("aot_hooks::pack_float8")
def pack_float8(x: torch.Tensor, block: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., m] to (float8[..., m], float32[..., ceil(m / block)]); a block of 0 is the row."""
    from . import kernels8

    return kernels8.pack_float8(x, block, dtype)


@pack_float8.register_fake
def _(x: torch.Tensor, block: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _scales(x, block, torch.float32) if block else x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scale


@_op("aot_hooks::unpack_float8")
def unpack_float8(q: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    from . import kernels8

    return kernels8.unpack_float8(q, scale, block, dtype)


@unpack_int8.register_fake
@unpack_float8.register_fake
def _(q: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty(q.shape, dtype=dtype)


@_op("aot_hooks::pack_int4")
def pack_int4(x: torch.Tensor, block: int, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    from . import kernels4

    return kernels4.pack_int4(x, block, seed)


@pack_int4.register_fake
def _(x: torch.Tensor, block: int, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    q = x.new_empty((*x.shape[:-1], (x.shape[-1] + 1) // 2), dtype=torch.uint8)
    return q, _scales(x, block, torch.int16)


@_op("aot_hooks::unpack_int4")
def unpack_int4(q: torch.Tensor, scale: torch.Tensor, length: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    from . import kernels4

    return kernels4.unpack_int4(q, scale, length, block, dtype)


@unpack_int4.register_fake
def _(q: torch.Tensor, scale: torch.Tensor, length: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], length), dtype=dtype)


@_op("aot_hooks::pack_bits")
def pack_bits(x: torch.Tensor) -> torch.Tensor:
    from . import kernels8

    return kernels8.pack_bits(x)


@pack_bits.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


@_op("aot_hooks::unpack_bits")
def unpack_bits(q: torch.Tensor, shape: list[int]) -> torch.Tensor:
    from . import kernels8

    return kernels8.unpack_bits(q, tuple(shape))


@unpack_bits.register_fake
def _(q: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return q.new_empty(shape, dtype=torch.bool)


def _scales(x: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], (x.shape[-1] + block - 1) // block), dtype=dtype)
