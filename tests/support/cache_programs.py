"""The rows of cache_rows.py: one small program with hooks, and what each process changes of it.

A row fills `PROGRAM` with `DEFAULTS` and its own `text`; what is expected of the cache follows from what it changes.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from typing import Any

PROGRAM = string.Template("""
import os

import torch
from torch import nn
import aot_hooks
from aot_hooks import policies

$padding
GAIN = $gain_global


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.$attribute = nn.Linear(16, 32)
        self.last = nn.Linear(32, 16)

    def forward(self, $argument):
        $local = torch.nn.functional.gelu(self.$attribute($argument))
        $local = $name
        $region
            y = torch.nn.functional.silu(self.last($local))
        $region2
            return y.tanh() * y


def make_hooks($closure):
    def pack($packed_argument):
        $pack

    def unpack($unpacked_argument):
        value, dtype = $unpacked_argument
        return value.to(dtype) * $closure * GAIN * $constant

    return pack, unpack


def make_graph_hooks():
    def pack($packed_argument):
        return torch.ops.aten._to_copy.default($packed_argument, dtype=torch.float16)

    def unpack($unpacked_argument):
        return torch.ops.aten._to_copy.default($unpacked_argument, dtype=torch.float32) * $constant

    return torch.fx.symbolic_trace(pack), torch.fx.symbolic_trace(unpack)


HOOKS = $hooks
POLICY = $policy
""")

DEFAULTS = {
    "padding": "",
    "gain_global": "1.0",
    "attribute": "first",
    "argument": "x",
    "local": "h",
    "name": "h",
    "region": "if True:",
    "region2": "if True:",
    "closure": "gain",
    "packed_argument": "x",
    "unpacked_argument": "packed",
    "pack": "return x.to(torch.float16), x.dtype",
    "constant": "1.5",
    "hooks": "make_hooks(1.0)",
    "policy": "None",
}


@dataclass(frozen=True)
class Row:
    """One process.

    Attributes:
        name: of the row.
        expected: "hit", "miss" or "bypass".
        needs: the row whose entry it is about.
        text: what differs in the program.
        scope, batch, dynamic, options, config: of the compilation.
        environment: variables of the process.
        renamed: stock torch is asked too.
        captured: graphs are captured by the simulator of the tests, Inductor's code being calls of aten; a hit must do
            and say what the row that it needs did.
    """

    name: str
    expected: str
    needs: str = ""
    text: dict[str, str] = field(default_factory=dict)
    scope: str = "donated"
    batch: int = 8
    dynamic: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    renamed: bool = False
    captured: bool = False


GRAPH_HOOKS = {"hooks": "make_graph_hooks()"}
_T = {"packed_argument": "t", "unpacked_argument": "u"}

_REGION = {"region": "with aot_hooks.saved_tensors_hooks(*make_hooks(0.5)):", "hooks": "None"}

_LARGE = {"hooks": "None", "policy": "policies.larger_than(600, aot_hooks.Hook('h', *make_hooks(1.0)))"}

_NAMED = {
    "hooks": "None",
    "policy": "policies.only_these_names({'a': aot_hooks.Hook('h', *make_hooks(1.0))})",
    "name": "aot_hooks.checkpoint_name(h, 'a')",
}

_MODULE = {"hooks": "None", "policy": "policies.only_these_modules({'first': aot_hooks.Hook('h', *make_hooks(1.0))})"}

_FUNCTION = {
    "hooks": "None",
    "policy": "lambda saved: aot_hooks.Hook('h', *make_hooks(1.0)) if 'gelu' in saved.source_line else aot_hooks.KEEP",
}

_OPERATOR = {
    "padding": (
        "@torch.library.custom_op('cache_rows::pack', mutates_args=())\n"
        "def op(x: torch.Tensor) -> torch.Tensor:\n    return x.to(torch.float16)\n\n"
        "op.register_fake(lambda x: x.to(torch.float16))\n"
    ),
    "pack": "return torch.ops.cache_rows.pack(x), x.dtype",
}

_WRAPPED = {
    "padding": (
        "@torch.fx.wrap\ndef leaf(x):\n    return x.to(torch.float16)\n\n\n"
        "def wrapped():\n"
        "    return torch.fx.symbolic_trace(lambda x: leaf(x)), torch.fx.symbolic_trace(lambda x: x.float() * 1.5)\n"
    ),
    "hooks": "wrapped()",
}

_WRAPPED_OTHER = _WRAPPED | {"padding": _WRAPPED["padding"].replace("float16", "bfloat16")}

_CAPTURED: dict[str, Any] = {
    "captured": True,
    "options": {"cudagraphs": True},
    "config": {"torch._inductor.config.fallback_by_default": True},
}

# an operator that is cut out of the code, where Inductor takes the CPU for a GPU
_CUT = {
    "padding": (
        "import torch._inductor.scheduler as scheduler\n"
        "scheduler.BaseSchedulerNode.is_gpu = scheduler.FusedSchedulerNode.is_gpu = lambda self: True\n\n"
        "@torch.library.custom_op('cache_rows::same', mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))\n"
        "def same(x: torch.Tensor) -> torch.Tensor:\n    return x.clone()\n\n"
        "same.register_fake(torch.empty_like)\n"
        "same.register_autograd(lambda ctx, grad: same(grad), setup_context=lambda ctx, inputs, output: None)\n"
    ),
    "name": "same(h)",
}

_CUT_MOVED = _CUT | {"padding": _CUT["padding"] + "# moved\n" * 7, "attribute": "up"}

_CUT_TAGGED = _CUT | {"padding": _CUT["padding"].replace("cudagraph_unsafe,)", "cudagraph_unsafe, torch.Tag.core)")}

_ENVIRONMENT = {"pack": "return x.to(torch.float64 if 'CACHE_ROWS' in os.environ else torch.bfloat16), x.dtype"}


_SET = {"CACHE_ROWS": "1"}


def _operator(said: str) -> dict[str, str]:
    return _OPERATOR | {"hooks": f"(aot_hooks.Hook('op', *make_hooks(1.0), cache_hash={said!r}),)"}


ROWS = (
    Row("base", "miss"),
    Row("same again", "hit", "base"),
    Row("hooks as new objects", "hit", "base", {"hooks": "[make_hooks(2.0), make_hooks(1.0)][1]"}),
    Row("renamed hook arguments", "hit", "base", {"unpacked_argument": "stored"}),
    Row("renamed argument", "hit", "base", {"argument": "tokens"}, renamed=True),
    Row("renamed attribute", "hit", "base", {"attribute": "up"}, renamed=True),
    Row("renamed local", "hit", "base", {"local": "hidden", "name": "hidden"}, renamed=True),
    Row("renamed closure", "hit", "base", {"closure": "scale"}),
    Row("moved lines", "hit", "base", {"padding": "# a comment\n\n"}),
    Row("changed constant", "miss", "base", {"constant": "1.25"}),
    Row("changed closure value", "miss", "base", {"hooks": "make_hooks(0.75)"}),
    Row("changed global", "miss", "base", {"gain_global": "0.5"}),
    Row("changed scope", "miss", "base", scope="all"),
    Row("changed shape", "miss", "base", batch=12),
    Row("changed option", "miss", "base", options={"inductor": {"allow_buffer_reuse": True}}),
    Row("changed torch config", "miss", "base", config={"torch._inductor.config.max_fusion_size": 3}),
    Row("changed partitioner config", "miss", "base", config={"torch._functorch.config.activation_memory_budget": 0.5}),
    Row("graph hooks", "miss", "base", GRAPH_HOOKS),
    Row("graph hooks, renamed placeholders", "hit", "graph hooks", GRAPH_HOOKS | _T, renamed=True),
    Row("graph hooks, changed constant", "miss", "graph hooks", GRAPH_HOOKS | {"constant": "1.25"}),
    Row("dynamic", "miss", "base", dynamic=True),
    Row("dynamic, another batch", "hit", "dynamic", dynamic=True, batch=24),
    Row("dynamic, renamed argument", "hit", "dynamic", {"argument": "tokens"}, dynamic=True, renamed=True),
    Row("dynamic, renamed argument, another batch", "hit", "dynamic", {"argument": "t"}, dynamic=True, batch=24),
    Row("dynamic, changed constant", "miss", "dynamic", {"constant": "1.25"}, dynamic=True),
    Row("region", "miss", "base", _REGION),
    Row("region, same again", "hit", "region", _REGION),
    Row("region, changed hook", "miss", "region", _REGION | {"region": _REGION["region"].replace("0.5", "0.25")}),
    Row("region, elsewhere", "miss", "region", {"region2": _REGION["region"], "hooks": "None"}),
    Row("policy", "miss", "base", _LARGE),
    Row("policy, same again", "hit", "policy", _LARGE),
    Row("policy, changed number", "miss", "policy", {**_LARGE, "policy": _LARGE["policy"].replace("600", "400")}),
    Row("policy by name", "miss", "base", _NAMED),
    Row("policy by name, renamed attribute", "hit", "policy by name", _NAMED | {"attribute": "up"}),
    Row("policy by name, other name", "miss", "policy by name", _NAMED | {"name": "aot_hooks.checkpoint_name(h, 'b')"}),
    Row("policy by module", "miss", "base", _MODULE),
    Row("policy by module, renamed attribute", "miss", "policy by module", _MODULE | {"attribute": "up"}),
    Row("policy of the line", "miss", "base", _FUNCTION),
    Row("policy of the line, same again", "hit", "policy of the line", _FUNCTION),
    Row("policy of the line, line changed", "miss", "policy of the line", _FUNCTION | {"local": "z", "name": "z"}),
    Row("hook by the environment", "miss", "base", _ENVIRONMENT),
    Row("hook by the environment, same", "hit", "hook by the environment", _ENVIRONMENT),
    Row("hook by the environment, other", "miss", "hook by the environment", _ENVIRONMENT, environment=_SET),
    Row("hook by the environment, as at first", "hit", "hook by the environment, other", _ENVIRONMENT),
    Row("operator of a library", "bypass", "base", _OPERATOR),
    Row("operator with cache_hash", "miss", "base", _operator("1")),
    Row("operator with cache_hash, same", "hit", "operator with cache_hash", _operator("1")),
    Row("operator with cache_hash, other", "miss", "operator with cache_hash", _operator("2")),
    Row("fx.wrap leaf", "miss", "base", _WRAPPED),
    Row("fx.wrap leaf, same", "hit", "fx.wrap leaf", _WRAPPED),
    Row("fx.wrap leaf, other", "miss", "fx.wrap leaf", _WRAPPED_OTHER),
    Row("captured", "miss", "base", **_CAPTURED),
    Row("captured, same again", "hit", "captured", **_CAPTURED),
    Row("captured, renamed attribute", "hit", "captured", {"attribute": "up"}, **_CAPTURED),
    Row("captured, changed constant", "miss", "captured", {"constant": "1.25"}, **_CAPTURED),
    Row("captured, or_error", "miss", "captured", **_CAPTURED | {"options": {"cudagraphs": {"or_error": True}}}),
    Row("captured, size_limit", "hit", "captured", **_CAPTURED | {"options": {"cudagraphs": {"size_limit": 9}}}),
    Row("captured, CUDA", "miss", "captured", **_CAPTURED | {"captured": False}),
    Row("captured in pieces", "miss", "base", _CUT, **_CAPTURED),
    Row("captured in pieces, same again", "hit", "captured in pieces", _CUT, **_CAPTURED),
    Row("captured in pieces, moved, renamed", "hit", "captured in pieces", _CUT_MOVED, **_CAPTURED),
    Row("captured in pieces, other tags", "miss", "captured in pieces", _CUT_TAGGED, **_CAPTURED),
    Row("TORCHINDUCTOR_AUTOGRAD_CACHE=0", "bypass", "base", environment={"TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}),
    Row("force_disable_caches", "bypass", "base", environment={"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}),
    Row("TORCHINDUCTOR_FX_GRAPH_CACHE=0", "bypass", "base", environment={"TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}),
    Row("TORCH_COMPILE_CACHE_KEY_TAG", "miss", "base", environment={"TORCH_COMPILE_CACHE_KEY_TAG": "mine"}),
)  # fmt: skip
