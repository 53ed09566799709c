"""The table of ways: hooks by name, and every way in which the benchmarks run the block stack.

    HOOKS[name]()                                          a hook of the library; made at use, so that one fails alone
    WAYS[name] = Way                                       rows of bench_memory.py, peers of bench_budget.py
      Way.compile(stack, inner) -> callable(x) -> y        a `torch.compile` of its own, or the stack itself
      Way.context()                                        entered around every forward
      patched(way)                                         torch's settings for it, in force whenever it runs

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
from measure import MIB
from model import Stack
from torch import Tensor, fx, nn

import aot_hooks
from aot_hooks import Hook, cast, float8, int4, int8, offload

E5M2 = torch.float8_e5m2
HOOKS: dict[str, Callable[[], Hook]] = {
    "float8": float8,
    "float8 tensorwise": lambda: float8(scaling="tensorwise"),
    "float8 blockwise": lambda: float8(scaling="blockwise"),
    "float8 e5m2": lambda: float8(E5M2),
    "int8": int8,
    "int8(128)": lambda: int8(128),
    "int8(128, power of two)": lambda: int8(128, power_of_two=True),
    "int8(32, power of two)": lambda: int8(32, power_of_two=True),
    "int8(16, power of two)": lambda: int8(16, power_of_two=True),
    "int4": int4,
    "int4 to the nearest": lambda: int4(stochastic=False),
    "offload": offload,
    "offload all": lambda: offload(max_stall_ms=math.inf),
    "offload(then=float8)": lambda: offload(then=float8()),
    "offload(then=int8)": lambda: offload(then=int8()),
}


def lossy_hooks() -> dict[str, Hook]:
    """Every setting of the lossy hooks, under its own name: the rows of bench_error.py."""
    found = [cast(torch.bfloat16)]
    for dtype in (torch.float8_e4m3fn, E5M2):
        found += [float8(dtype, scaling) for scaling in ("tensorwise", "rowwise", "blockwise")]
    for stochastic in (False, True):
        found += [int8(block, stochastic) for block in (256, 128, 64, 32)]
        found += [int8(block, stochastic, power_of_two=True) for block in (128, 64, 32, 16)]
    for stochastic in (False, True):
        found += [int4(block, stochastic) for block in (64, 32, 16)]
    return {hook.name: hook for hook in found}


Context = Callable[[], contextlib.AbstractContextManager[Any]]
Forward = Callable[[Tensor], Tensor]


def own_code(function: Any, name: str) -> Any:
    """`function` with a code object of its own: Dynamo keeps what it compiled by code object, and its limits too."""
    code = function.__code__.replace(co_name="".join(c if c.isalnum() else "_" for c in name))
    return types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


@dataclasses.dataclass(frozen=True)
class Way:
    """Attributes:
    backend: "stock", "aot_hooks", or None for eager mode.
    functorch, inductor: settings of torch while it compiles and runs.
    options: more of the backend's, with "aot_hooks".
    name: of its row; also of the code that Dynamo compiles.
    """

    backend: str | None
    context: Context = contextlib.nullcontext
    functorch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checkpointed: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""

    def compile(self, stack: Stack, inner: str) -> Forward:
        """`inner` is "inductor" or "aten", and means the same work for torch's backends and for ours."""
        if self.inductor and inner != "inductor":
            raise ValueError(f"{self.name!r} is a pass of Inductor: it needs --inner inductor")
        checkpointed = self.checkpointed

        def forward(x: Tensor) -> Tensor:
            return stack(x, checkpointed)

        if self.backend is None:
            return forward
        own = own_code(forward, f"forward_{self.name}")
        if self.backend == "aot_hooks":
            return torch.compile(own, backend="aot_hooks", fullgraph=True, options={"inner": inner, **self.options})
        stock = {"inductor": "inductor", "aten": "aot_eager"}[inner]
        return torch.compile(own, backend=stock, fullgraph=True)


@contextlib.contextmanager
def patched(way: Way, **inductor: Any) -> Iterator[None]:
    """torch's settings as the way wants them."""
    with contextlib.ExitStack() as stack:
        if way.functorch:
            stack.enter_context(functorch_config.patch(dict(way.functorch)))
        if way.inductor or inductor:
            stack.enter_context(inductor_config.patch({**way.inductor, **inductor}))
        yield


# ----------------------------------------------------------------------------------- float8 by way of torch's own hooks

FLOAT8 = torch.float8_e4m3fn
MIN_PACKED_ELEMENTS = 1 << 10  # leaves out what is one number a row, such as the reciprocal root mean squares


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
            node.meta["user_cache_hash"] = "benchmarks/ways.py: float8 rowwise"  # what torch's caches go by
    return graph_module


PACK, UNPACK = traced(Pack()), traced(Unpack())  # once: Dynamo guards on the very objects


def torch_traced_hooks() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(PACK, UNPACK)


def torch_python_hooks() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(pack_rows, unpack_rows)


def pack_by_cast(x: Tensor) -> Tensor:
    return x.to(FLOAT8) if x.dtype == torch.bfloat16 and x.numel() >= MIN_PACKED_ELEMENTS else x


def unpack_by_cast(packed: Tensor) -> Tensor:
    return packed.to(torch.bfloat16) if packed.dtype == FLOAT8 else packed


def save_on_cpu() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def mark_for_offloading(graph: fx.Graph) -> None:
    """Inductor's offloading moves only what a pass over the joint graph marked; here all of a MiB and more."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor) and value.nbytes >= MIB:
            node.meta["should_offload"] = True


# ----------------------------------------------------------------------------------------------------------- the table


def ours(hook: str, **settings: Any) -> Way:
    return Way("aot_hooks", lambda: aot_hooks.saved_tensors_hooks(HOOKS[hook]()), **settings)


DONATED = {"saved_tensors_hooks_filtering_mode": "donated"}
QUANTIZATION_PASS = {
    "quant_type": "torch.float8_e4m3fn",
    "size_in_mb": 1,
    "use_scaling": True,
    "allowed_dtypes": "torch.bfloat16",
}
OFFLOADING_PASS = {"joint_custom_post_pass": mark_for_offloading}
BUDGET_07 = {"activation_memory_budget": 0.7}
TILE = {"tile": True}
AGAIN = {"recompute_pointwise": True}

_WAYS = {
    "eager": Way(None),
    "stock": Way("stock"),
    "ours_no_hooks": Way("aot_hooks"),
    "ours_float8_rowwise": ours("float8"),
    "ours_float8_tensorwise": ours("float8 tensorwise"),
    "ours_float8_cast": Way("aot_hooks", lambda: aot_hooks.saved_tensors_hooks(pack_by_cast, unpack_by_cast)),
    "ours_float8_blockwise": ours("float8 blockwise"),
    "ours_int8": ours("int8"),
    "ours_int8_128": ours("int8(128)"),
    "ours_int8_128_power": ours("int8(128, power of two)"),
    "ours_int8_32_power": ours("int8(32, power of two)"),
    "ours_int8_16_power": ours("int8(16, power of two)"),
    "ours_int4": ours("int4"),
    "ours_int4_nearest": ours("int4 to the nearest"),
    "torch_inlined_float8": Way("stock", torch_traced_hooks, functorch=DONATED),
    "inductor_float8_pass": Way(
        "stock", inductor={"post_grad_fusion_options": {"activation_quantization_aten_pass": QUANTIZATION_PASS}}
    ),
    "python_hooks_float8": Way("stock", torch_python_hooks),
    **{
        f"budget_{share}": Way("stock", functorch={"activation_memory_budget": share})
        for share in (0.1, 0.3, 0.5, 0.7, 0.9)
    },
    "budget_0.7_torch_inlined_float8": Way("stock", torch_traced_hooks, functorch={**BUDGET_07, **DONATED}),
    "budget_0.7_ours_float8": ours("float8", functorch=BUDGET_07),
    "checkpoint_blocks": Way("stock", checkpointed=True),
    "ours_offload": ours("offload"),
    "ours_offload_all": ours("offload all"),
    "ours_float8_offload": ours("offload(then=float8)"),
    "ours_int8_offload": ours("offload(then=int8)"),
    "ours_tile": Way("aot_hooks", options=TILE),
    "ours_float8_tile": ours("float8", options=TILE),
    "ours_float8_offload_again": ours("offload(then=float8)", options=AGAIN),
    "ours_float8_offload_again_tile": ours("offload(then=float8)", options={**AGAIN, **TILE}),
    "save_on_cpu": Way("stock", save_on_cpu),
    "inductor_offload": Way("stock", functorch={"enable_activation_offloading": True}, inductor=OFFLOADING_PASS),
}
WAYS = {name: dataclasses.replace(way, name=name) for name, way in _WAYS.items()}
