"""A hook may pack into a tensor subclass: its inner tensors cross."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from test_trace import round_trip, trace

pytestmark = pytest.mark.core


class Quantized(torch.Tensor):
    """int8 data and a scale; behaves as the tensor they stand for."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=scale.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data8, self.scale = data, scale

    def __tensor_flatten__(self) -> Any:
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Quantized:
        return Quantized(inner["data8"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(Quantized, Quantized.dequantize_, (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def dequantize_(self) -> torch.Tensor:
        return self.data8.to(self.scale.dtype) * self.scale


def quantize(x: torch.Tensor) -> Quantized:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return Quantized((x / scale).round().to(torch.int8), scale)


@pytest.mark.parametrize("dynamic", [(), (0,)])
def test_pack_into_a_tensor_subclass(dynamic: tuple[int, ...]) -> None:
    x = torch.randn(5, 6)
    traced = trace(quantize, lambda q: q.dequantize_(), x, dynamic)
    leaves = [leaf for leaf in traced.pack(x) if isinstance(leaf, torch.Tensor)]
    assert [(leaf.dtype, tuple(leaf.shape)) for leaf in leaves] == [(torch.int8, (5, 6)), (torch.float32, (5, 1))]
    assert not any(isinstance(leaf, Quantized) for leaf in leaves)
    torch.testing.assert_close(round_trip(traced, x), quantize(x).dequantize_(), rtol=0, atol=0)


def test_subclass_inside_a_structure_and_used_as_a_tensor() -> None:
    x = torch.randn(5, 6)
    traced = trace(lambda x: {"q": (quantize(x), 1.0)}, lambda p: p["q"][0] * p["q"][1], x)
    torch.testing.assert_close(round_trip(traced, x), quantize(x).dequantize_(), rtol=0, atol=0)
