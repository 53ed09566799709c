"""What Inductor generates for a CUDA GPU that is not there: kernels in Triton's language, which nobody compiles.

code(f, make_inputs)      the generated code of `f` with our heuristics, as a graph of fake CUDA tensors

In a process of its own, because torch keeps what it found of devices: `python tests/support/triton_code.py` prints,
for each size of blocks, how many packings the largest kernel of a product holds, and how many kernels there are: with
scales of 16 bits, and with powers of two.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as config
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aot_hooks.library.blocks import broadcast_scales, in_blocks
from aot_hooks.library.loops import operators, ptx
from aot_hooks.torch_private.inductor import decompositions
from aot_hooks.torch_private.inductor_fusion import FROM_HOOK, choices, order_pass
from aot_hooks.torch_private.inductor_lowering import register_operators

NUMBERS: dict[str, Any] = {
    "major": 9,
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
}


def pretend() -> None:
    """That there is an H100, as far as generating code asks."""
    device = types.SimpleNamespace(name="H100", minor=0, total_memory=80 << 30, **NUMBERS)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": device,
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
    }
    torch.version.cuda = torch.version.cuda or "13.0"
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_args, answer=answer, **_named: answer)
        setattr(CudaInterface, name, staticmethod(lambda *_args, answer=answer, **_named: answer))
    for name, answer in {"get_compute_capability": 90, "is_triton_capable": True}.items():
        setattr(CudaInterface, name, staticmethod(lambda *_args, answer=answer, **_named: answer))
    CudaInterface.raise_if_triton_unavailable = staticmethod(lambda *_args: None)
    CudaInterface.Worker.get_device_properties = staticmethod(lambda *_args: device)  # type: ignore[attr-defined]
    CudaInterface.Worker.current_device = staticmethod(lambda: 0)  # type: ignore[attr-defined]
    DeviceProperties.create = classmethod(lambda cls, *_args: cls(type="cuda", index=0, cc=90, **NUMBERS))
    torch.utils._triton.has_triton = torch.utils._triton.has_triton_package = lambda *_args: True
    torch.utils._triton.triton_hash_with_backend = lambda *_args: ""
    with contextlib.suppress(AttributeError):
        torch._subclasses.fake_tensor.init_gpu_context = lambda _device: None


def code(f: Callable[..., Any], make_inputs: Callable[[], Sequence[torch.Tensor]]) -> str:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode, torch.no_grad():
        inputs = make_inputs()
        gm = make_fx(f, decomposition_table=decompositions())(*inputs)
    for node in gm.graph.nodes:
        if str(node.target).startswith("aot_hooks."):
            node.meta[FROM_HOOK] = "x"
    register_operators()
    patches = {"graph_partition": False, **order_pass({})}
    lowering = GraphLowering(gm, example_inputs=inputs, shape_env=mode.shape_env)
    with contextlib.ExitStack() as stack:
        for context in (
            config.patch(patches),
            mock.patch("torch._inductor.async_compile.AsyncCompile.use_process_pool", lambda *_: False),
            V.set_fake_mode(mode),
            V.set_choices_handler(choices()),
            V.set_graph_handler(lowering),
            V.set_extern_kernel_nodes([]),
            V.set_debug_handler(mock.MagicMock()),
        ):
            stack.enter_context(context)
        lowering.run(*inputs)
        return str(lowering.codegen()[0].value)


def of_a_product(block: int, power: bool) -> str:
    def pack(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (operators.amax_exponent if power else operators.amax_word)(in_blocks(x, block)).squeeze(-1)
        return operators.to_int8(*broadcast_scales(x, scale, block), x.dtype, power).view(x.shape), scale

    def f(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = (x @ w for w in weights[:2])
        product = torch.nn.functional.silu(a.view(2, 512, 2048)) * b.view(2, 512, 2048)
        product = product.view(1024, 2048)
        return (product @ weights[2], *pack(a), *pack(b), *pack(product))

    def inputs() -> list[torch.Tensor]:
        shapes = (1024, 256), (256, 2048), (256, 2048), (2048, 256)
        return [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]

    return code(f, inputs)


def main(blocks: Sequence[int]) -> None:
    pretend()
    found = {}
    for block in blocks:
        texts = [of_a_product(block, power) for power in (False, True)]
        packings = [max(kernel.count(ptx._TO_INT8) for kernel in t.split("async_compile.triton")) for t in texts]
        found[block] = packings, [text.count(".run(") for text in texts]
    print(json.dumps(found))


if __name__ == "__main__":
    main([int(block) for block in sys.argv[1:]])
