"""What `bench_memory.py` compares: each way to run the block stack's forward and backward, and how to set it up.

    Variant.compile(stack, inner) -> callable(x) -> y      a `torch.compile` of its own, or the stack itself
    Variant.context()                                      entered around every forward
    patched(variant)                                       torch's settings for it, in force whenever it runs

torch's own ways are set up as its documentation and tests do it. All that pack to float8 with rowwise scales compute
the same thing; they differ in who decides, and in what the code is compiled together with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from _measure import MIB
from model import Stack
from torch import Tensor, fx, nn

import aot_hooks

__all__ = ["VARIANTS", "Variant", "patched"]

FLOAT8 = torch.float8_e4m3fn
MIN_PACKED_ELEMENTS = 1 << 10  # leaves out what is one number a row, such as the reciprocal root mean squares
Context = Callable[[], contextlib.AbstractContextManager[Any]]
Forward = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Variant:
    name: str
    backend: str | None  # "stock", "aot_hooks", or None: eager
    context: Context = contextlib.nullcontext
    functorch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checkpointed: bool = False

    def compile(self, stack: Stack, inner: str) -> Forward:
        """`inner` is "inductor" or "aten", and means the same work for torch's backends and for ours."""
        if self.inductor and inner != "inductor":
            raise ValueError(f"variant {self.name!r} is a pass of Inductor: it needs --inner inductor")
        checkpointed = self.checkpointed

        def forward(x: Tensor) -> Tensor:
            return stack(x, checkpointed)

        if self.backend is None:
            return forward
        # Dynamo keeps what it compiled by code object: with one each, no variant sees the guards of another.
        code = forward.__code__.replace(co_name=f"forward_{self.name}".replace(".", "_"))
        own = types.FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__)
        if self.backend == "aot_hooks":
            return torch.compile(own, backend="aot_hooks", fullgraph=True, options={"inner": inner})
        stock = {"inductor": "inductor", "aten": "aot_eager"}[inner]
        return torch.compile(own, backend=stock, fullgraph=True)


@contextlib.contextmanager
def patched(variant: Variant, **inductor: Any) -> Iterator[None]:
    """torch's settings as the variant wants them."""
    with contextlib.ExitStack() as stack:
        if variant.functorch:
            stack.enter_context(functorch_config.patch(dict(variant.functorch)))
        if variant.inductor or inductor:
            stack.enter_context(inductor_config.patch({**variant.inductor, **inductor}))
        yield


# ----------------------------------------------------------------------------------- float8 by way of torch's own hooks


def pack_rows(x: Tensor) -> Any:
    """bf16[..., n] -> (float8[..., n], f32[..., 1]); anything else stays as it is."""
    if x.dtype != torch.bfloat16 or x.numel() < MIN_PACKED_ELEMENTS:
        return x
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448.0
    return (x.float() / scale).to(FLOAT8), scale


def unpack_rows(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    values, scale = packed
    return (values.float() * scale).to(torch.bfloat16)


@fx.wrap
def pack_leaf(x: Tensor) -> Any:
    return pack_rows(x)


@fx.wrap
def unpack_leaf(packed: Any) -> Tensor:
    return unpack_rows(packed)


class Pack(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return pack_leaf(x)


class Unpack(nn.Module):
    def forward(self, packed: Any) -> Tensor:
        return unpack_leaf(packed)


def traced(module: nn.Module) -> fx.GraphModule:
    """One call of a leaf that torch traces anew for each tensor: so the leaf may ask for dtype and size."""
    graph_module = fx.symbolic_trace(module)
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            node.meta["user_cache_hash"] = "benchmarks/variants.py: float8 rowwise"  # what torch's caches go by
    return graph_module


PACK, UNPACK = traced(Pack()), traced(Unpack())  # once: Dynamo guards on the very objects


def torch_traced_hooks() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(PACK, UNPACK)


def torch_python_hooks() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(pack_rows, unpack_rows)


# -------------------------------------------------------------------------------------------------------------- our own


def pack_by_cast(x: Tensor) -> Tensor:
    return x.to(FLOAT8) if x.dtype == torch.bfloat16 and x.numel() >= MIN_PACKED_ELEMENTS else x


def unpack_by_cast(packed: Tensor) -> Tensor:
    return packed.to(torch.bfloat16) if packed.dtype == FLOAT8 else packed


def ours(make: Callable[[], aot_hooks.Hook]) -> Context:
    """A context for the hook that `make` makes; made at use, so that a hook not there yet fails its variant alone."""

    def context() -> contextlib.AbstractContextManager[Any]:
        hook = make()
        return aot_hooks.saved_tensors_hooks(hook)

    return context


def save_on_cpu() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def mark_for_offloading(graph: fx.Graph) -> None:
    """Inductor's offloading moves only what a pass over the joint graph marked; here all of a MiB and more."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor) and value.nbytes >= MIB:
            node.meta["should_offload"] = True


float8_rowwise = ours(lambda: aot_hooks.float8(FLOAT8, scaling="rowwise"))
DONATED = {"saved_tensors_hooks_filtering_mode": "donated"}
QUANTIZATION_PASS = {
    "quant_type": "torch.float8_e4m3fn",
    "size_in_mb": 1,
    "use_scaling": True,
    "allowed_dtypes": "torch.bfloat16",
}

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("eager", None),
        Variant("stock", "stock"),
        Variant("ours_no_hooks", "aot_hooks"),
        Variant("ours_float8_rowwise", "aot_hooks", float8_rowwise),
        Variant("ours_float8_tensorwise", "aot_hooks", ours(lambda: aot_hooks.float8(FLOAT8, scaling="tensorwise"))),
        Variant(
            "ours_float8_cast",
            "aot_hooks",
            lambda: aot_hooks.saved_tensors_hooks(pack_by_cast, unpack_by_cast),
        ),
        Variant("ours_float8_blockwise", "aot_hooks", ours(lambda: aot_hooks.float8(FLOAT8, scaling="blockwise"))),
        Variant("ours_int8", "aot_hooks", ours(lambda: aot_hooks.int8())),
        Variant("ours_int8_128", "aot_hooks", ours(lambda: aot_hooks.int8(128))),
        Variant("ours_int8_128_power", "aot_hooks", ours(lambda: aot_hooks.int8(128, power_of_two=True))),
        Variant("ours_int8_32_power", "aot_hooks", ours(lambda: aot_hooks.int8(32, power_of_two=True))),
        Variant("ours_int8_16_power", "aot_hooks", ours(lambda: aot_hooks.int8(16, power_of_two=True))),
        Variant("ours_int4", "aot_hooks", ours(lambda: aot_hooks.int4())),
        Variant("ours_int4_nearest", "aot_hooks", ours(lambda: aot_hooks.int4(stochastic=False))),
        Variant("torch_inlined_float8", "stock", torch_traced_hooks, functorch=DONATED),
        Variant(
            "inductor_float8_pass",
            "stock",
            inductor={"post_grad_fusion_options": {"activation_quantization_aten_pass": QUANTIZATION_PASS}},
        ),
        Variant("python_hooks_float8", "stock", torch_python_hooks),
        *(
            Variant(f"budget_{share}", "stock", functorch={"activation_memory_budget": share})
            for share in (0.1, 0.3, 0.5, 0.7, 0.9)
        ),
        Variant(
            "budget_0.7_torch_inlined_float8",
            "stock",
            torch_traced_hooks,
            functorch={"activation_memory_budget": 0.7, **DONATED},
        ),
        Variant(
            "budget_0.7_ours_float8",
            "aot_hooks",
            float8_rowwise,
            functorch={"activation_memory_budget": 0.7},
        ),
        Variant("checkpoint_blocks", "stock", checkpointed=True),
        Variant("ours_offload", "aot_hooks", ours(lambda: aot_hooks.offload())),
        Variant("ours_offload_all", "aot_hooks", ours(lambda: aot_hooks.offload(max_stall_ms=math.inf))),
        Variant("ours_float8_offload", "aot_hooks", ours(lambda: aot_hooks.offload(then=aot_hooks.float8()))),
        Variant("ours_int8_offload", "aot_hooks", ours(lambda: aot_hooks.offload(then=aot_hooks.int8()))),
        Variant("save_on_cpu", "stock", save_on_cpu),
        Variant(
            "inductor_offload",
            "stock",
            functorch={"enable_activation_offloading": True},
            inductor={"joint_custom_post_pass": mark_for_offloading},
        ),
    )
}
