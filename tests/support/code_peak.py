"""The bytes that generated CUDA code holds at each line, on a machine without CUDA; beside the plan's.

    python tests/support/code_peak.py blocks 0.8 0.6        a model, and budgets as shares of its peak without any
    python tests/support/code_peak.py odd 1 0.8             rows of odd lengths
    python tests/support/code_peak.py tied 1 0.8            tied weights
    python tests/support/code_peak.py loss 1 0.85           a loss over many words, with the logits as an output
    python tests/support/code_peak.py rotary 1 0.8          rotary embeddings; `masks`: dropout and ReLU
    python tests/support/code_peak.py split 1 0.7           blocks that tensor parallelism splits over four ranks
    python tests/support/code_peak.py tied 1 loss 0.85      one model after the other

A model is traced on the CPU. Its joint graph gets fake CUDA tensors before it is planned, so hooks, plan and Inductor's
code are those for CUDA. The code's `call` then runs on fake tensors, with kernels that do nothing, and after each line
the storages of its local variables are added up. Parameters and inputs count nothing, as in a plan.

In a process of its own, see triton_code.py. Prints a list of [model, share, phase, bytes of the code, bytes of the
plan, kernels that the code launches, kernels that a plan counts].
"""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch._inductor import async_compile, compile_fx
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton_code import pretend

import aot_hooks
from aot_hooks import partitioner
from aot_hooks.graphs.roofline import CALL_MS, COPY_MS, LAUNCH_MS, host_ms
from aot_hooks.graphs.speeds import Rates
from aot_hooks.planning.budget import ALLOWED
from aot_hooks.torch_private.aot import keeps_tangents

H200 = Rates(55e9, 55e9, 3.9e12, 8.2e14, 5.2e13)
CUDA = torch.device("cuda:0")
COPIES = {  # operators that hold device memory, or host memory, where fake tensors have a ticket
    "offload_start": lambda x, *_: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype),
    "offload_wait": lambda sent, *_: sent,
    "reload_start": lambda x, *_: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=CUDA),
    "reload_wait": lambda fetched, *_: fetched,
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Tied(nn.Module):
    """Its weight is read at both ends, so its gradient is a product at the start of the backward and a sum at its end.

    An embedding would be the usual one, but Inductor's embedding runs on a device while it is compiled.
    """

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(words, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.blocks(x + self.words.mean(0)) @ self.words.t()).float().logsumexp(-1).mean()


class Loss(nn.Module):
    """Its logits are an output beside the loss, as in transformers, so they have a gradient, of zeros.

    They are looked up in float32, which no kernel writes.
    """

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.words = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.words(self.blocks(x))
        labels = torch.arange(len(x), device=x.device) % logits.shape[-1]
        return nn.functional.cross_entropy(logits.float(), labels), logits


class Attention(nn.Module):
    """Attention written out, with a mask. Inductor would pad rows of 257, in memory of its own, without a plan."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (-1, 257))
        q, k, v = (y.unflatten(-1, (8, -1)).transpose(1, 2).float() for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
        at = torch.arange(257, device=x.device)
        scores = torch.where(at[:, None] >= at - 99, q @ k.mT, torch.full((257, 257), -1e9, device=x.device))
        y = (scores.softmax(-1) @ v).to(x.dtype)
        return (x + self.out(y.transpose(1, 2).flatten(2))).flatten(0, 1)


class Masked(nn.Module):
    """Its masks are read by the backward. ReLU's stands at the end of the forward, far from what it is computed of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.RMSNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.dropout(self.up(self.norm(x)).relu())))


class Rotary(nn.Module):
    """Attention with rotary embeddings as in transformers: halves are swapped by a concatenation of two slices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(width), nn.Linear(width, width, bias=False)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (-1, 256))
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (8, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        angle = torch.outer(torch.arange(256, device=x.device), torch.arange(32, device=x.device) / 32).repeat(1, 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        def rotated(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-second, first), dim=-1) * sin

        y = (rotated(q) @ rotated(k).mT).softmax(-1) @ v
        return (x + self.out(y.transpose(1, 2).flatten(2))).flatten(0, 1)


def split_over_ranks(model: nn.Module) -> None:
    """Split each block of `model` over four ranks, of which this process is one. What they exchange is never run."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    ways = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.children():
        parallelize_module(block, init_device_mesh("cpu", (4,)), ways)


LAYERS = {"blocks": Block, "split": Block, "odd": Attention, "masks": Masked, "rotary": Rotary}


def on_cuda(gm: GraphModule) -> None:
    """Give the nodes of `gm` fake CUDA tensors, in place."""

    def moved(x: Any) -> Any:
        if isinstance(x, FakeTensor):
            with x.fake_mode:
                return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=CUDA)
        return CUDA if isinstance(x, torch.device) else x

    for node in gm.graph.nodes:
        node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(moved, node.meta["val"])
    gm.recompile()


def compiled(
    model: nn.Module, x: torch.Tensor, policy: Any, **options: Any
) -> tuple[list[tuple[str, str, int]], list[aot_hooks.Plan]]:
    """The phase of each graph, its code, and the kernels that a plan counts; and the plans."""
    codes: list[tuple[str, str, int]] = []
    counted = 0
    carry_names, inner = partitioner.carry_names, compile_fx.compile_fx_inner

    def moved(graph: torch.fx.Graph) -> None:
        """Before anything is read off the joint graph, such as its split without hooks."""
        on_cuda(types.SimpleNamespace(graph=graph, recompile=lambda: None))  # type: ignore[arg-type]
        carry_names(graph)

    def compile_inner(gm: GraphModule, _: Any, **named: Any) -> Any:
        nonlocal counted
        counted = round(host_ms(gm, fused=True) / LAUNCH_MS)
        return inner(gm, [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")], **named)

    def keep_code(graph: GraphLowering) -> Any:
        codes.append(("backward" if graph.is_backward else "forward", str(graph.codegen()[0].value), counted))
        return types.SimpleNamespace(call=lambda _: None, __file__="")

    compiled = torch.compile(model, backend="aot_hooks", options={"policy": policy, **options})
    with (
        mock.patch.object(partitioner, "carry_names", moved),
        mock.patch.object(compile_fx, "compile_fx_inner", compile_inner),
        mock.patch.object(GraphLowering, "compile_to_module", keep_code),
        mock.patch("torch._inductor.async_compile.AsyncCompile.use_process_pool", lambda *_: False),
        torch._inductor.config.patch(force_disable_caches=True),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
    ):
        try:
            compiled(x)
        except Exception:
            if len(codes) < 2:
                raise
    return codes, aot_hooks.last_plans(compiled)


def storages(values: Iterable[Any]) -> Iterator[tuple[int, int]]:
    for value in pytree.tree_leaves(list(values)):
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            yield value.untyped_storage()._cdata, value.untyped_storage().nbytes()


class Kernel:
    def run(self, *_args: Any, **_named: Any) -> None: ...


def peak_of(code: str, free_names: tuple[str, ...] = ("primals",)) -> int:
    """The most bytes that `call` of `code` holds after any of its lines, but for inputs with `free_names`."""
    code = re.sub(r"torch\.ops\.aot_hooks\.(\w+load_\w+)\.default\(", r"\1(", code)
    slice_of_workspace = r"= workspace_\d+\[.*?\]\.view\(\d+, (\d+)\)\.sum\(dim=0\)"
    code = re.sub(slice_of_workspace, r"= empty_strided_cuda((\1,), (1,), torch.float32)", code)
    code = re.sub(r"from torch\._C import _cuda_getCurrentRawStream as get_raw_stream", "", code)

    def empty(size: Any, stride: Any, dtype: torch.dtype, device: Any = CUDA) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    most = 0
    inputs: dict[str, torch.Tensor] = {}

    def after_line(frame: types.FrameType, _event: str, _arg: Any) -> Any:
        nonlocal most
        held = dict(storages(frame.f_locals.values())) | kept
        most = max(most, sum(nbytes for key, nbytes in held.items() if key not in free))
        return after_line

    def trace(frame: types.FrameType, _event: str, _arg: Any) -> Any:
        own = frame.f_code.co_filename == "generated"
        if own and frame.f_code.co_name == "get_args":
            return lambda f, *_: inputs.update({k: v for k, v in f.f_locals.items() if isinstance(v, torch.Tensor)})
        return after_line if own and frame.f_code.co_name == "call" else None

    names: dict[str, Any] = {"__name__": "generated", "get_raw_stream": lambda _: 0, **COPIES}
    with FakeTensorMode(), mock.patch.object(async_compile.AsyncCompile, "triton", lambda *_args, **_named: Kernel()):
        exec(compile(code, "generated", "exec"), names)
        names |= {
            "empty_strided_cuda": empty,
            "reinterpret_tensor": lambda x, size, stride, offset=0: x.as_strided(size, stride, offset),
            "assert_size_stride": lambda *_: None,
            "assert_alignment": lambda *_: None,
            "extern_kernels": mock.MagicMock(),
        }
        with mock.patch("torch._dynamo.testing.rand_strided", empty):
            sys.settrace(trace)
            args = list(names["get_args"]())
            sys.settrace(None)
        free = dict(storages(v for name, v in inputs.items() if name.startswith(free_names)))
        kept = dict(storages(v for name, v in inputs.items() if name.startswith("tangents") and keeps_tangents()))
        inputs = {name: v for name, v in inputs.items() if name.startswith("primals")}  # their storages stay
        with mock.patch("torch.cuda._DeviceGuard"), mock.patch("torch.cuda.set_device"):
            sys.settrace(trace)
            names["call"](args)
            sys.settrace(None)
    return most


def launches_of(code: str) -> int:
    """The kernels that `call` of `code` launches; other operators count as the kernels that take the host as long."""
    call = code.split("def call(")[1]
    ours = re.findall(r"torch\.ops\.aot_hooks\.(\w+)\.default\(", call)
    copies = sum(name.endswith("load_start") for name in ours)
    others = sum(not name.endswith(("load_start", "_wait")) for name in ours)
    kernels = len(re.findall(r"\.run\(|extern_kernels\.|torch\.ops\.(?:aten|_c10d_functional)\.|\.sum\(dim=0\)", call))
    return kernels + round((copies * COPY_MS + others * CALL_MS) / LAUNCH_MS)


def seed(_seeds: torch.Tensor, _index: int) -> torch.Tensor:
    """What Inductor's operator for one of several seeds returns, but without a kernel, which the CPU build lacks."""
    return torch.empty((), dtype=torch.int64, device=CUDA)


def pretend_cuda() -> None:
    """That there is an H100, also while a program is traced."""
    pretend()
    for attribute, answer in {"get_rng_state": torch.zeros(16, dtype=torch.uint8), "_exchange_device": -1}.items():
        setattr(torch.cuda, attribute, lambda *_, answer=answer: answer)
    for attribute in ("set_rng_state", "_maybe_exchange_device", "_lazy_init", "synchronize"):
        setattr(torch.cuda, attribute, lambda *_: None)
    torch.ops.prims.inductor_lookup_seed.default.prim_meta_impl = seed  # rounds int4's codes at random


def rows_of(name: str, shares: list[float]) -> list[tuple[Any, ...]]:
    tied, tokens = name in ("tied", "loss"), 8 * 257 if name == "odd" else 8192
    whole: Any = {"tied": Tied, "loss": Loss}.get(name)
    model = (
        whole(512, 4096) if tied else nn.Sequential(*(LAYERS[name](512) for _ in range(8 if name == "masks" else 3)))
    )
    if name == "split":
        split_over_ranks(model)
    model, x = model.to(torch.bfloat16), torch.randn(tokens, 512, dtype=torch.bfloat16, requires_grad=True)
    stock = aot_hooks.plan(model, x, policy=aot_hooks.KEEP).peak_bytes
    # a part of a split weight may be saved as it is read, transposed
    free = ("primals", "permute") if name == "split" else ("primals",)
    found = []
    with mock.patch("aot_hooks.graphs.speeds._measured", lambda _: H200):
        for share in shares:
            torch._dynamo.reset()
            # int8 pads odd rows by a CUDA function; without recompute no mask is computed again
            no_int8 = ("recompute", "float8")
            allow = {"odd": no_int8, "rotary": no_int8, "masks": ("lossless", "float8")}.get(name, ALLOWED)
            policy = aot_hooks.budget(int(share * stock), allow=allow)
            codes, (plan,) = compiled(model, x, policy)
            for phase, code, launches in codes:
                planned = max(p.live_bytes for p in plan.live_after if p.phase == phase)
                # the output, which the program holds
                more = x.nbytes if phase == "backward" and not tied else 0
                found.append((name, share, phase, peak_of(code, free) + more, planned, launches_of(code), launches))
    return found


def main(arguments: list[str]) -> None:
    asked: dict[str, list[float]] = {}
    for argument in arguments:
        if argument[0].isalpha():
            shares = asked[argument] = []
        else:
            shares.append(float(argument))
    pretend_cuda()
    print(json.dumps([row for name, shares in asked.items() for row in rows_of(name, shares)]))


if __name__ == "__main__":
    main(sys.argv[1:])
