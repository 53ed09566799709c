"""Functions, modules and operators that torch's cache key of a graph holds by name only (2.11 to 2.15).

torch looks for functions that its key can't describe in the outermost graph only. A function in the body of a
checkpoint or of an autograd function would enter the key by its name. So `keyed_by_name` walks all graphs.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .cuda import overloads_of
from .symbols import need

# namespaces of torch's own operators, which its version covers
TORCH_OPERATORS = frozenset(
    "aten prims prim rngprims inductor inductor_prims quantized quantized_decomposed higher_order ao mkldnn "
    "mkldnn_prepacked onednn mkl c10d _c10d_functional _c10d_functional_autograd sparse _quantized debugprims profiler "
    "streams image debug_mode_ops".split()
)
# AOTAutograd traces through these kernels: the compiled graph holds their operators as they were at that time. The
# graph calls all other kernels, so a new version of such a kernel takes effect at once.
_TRACED_KERNELS = ("CompositeImplicitAutograd", "Autograd", "AutogradCPU", "AutogradCUDA")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), slice, range)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def keyed_by_name(gm: GraphModule, inputs: Iterable[Any] = ()) -> str:
    """What of Dynamo's graph `gm` is in no cache key but by its name; "" if everything is there by its content.

    Args:
        inputs: the inputs of the graph; the class of a tensor subclass is traced with it.
    """
    for x in inputs:
        kind = type(x)
        traced = isinstance(x, torch.Tensor) and hasattr(kind, "__tensor_flatten__")
        if traced and not _is_of_torch(kind) and not hasattr(kind, "_stable_hash_for_caching"):
            return f"tensor subclass {kind.__module__}.{kind.__qualname__}"
    for name, module in gm.named_modules():
        # the pair of hooks that Dynamo puts there: torch examines it like the outermost graph
        if isinstance(module, GraphModule) and not name.startswith("saved_tensors_hooks_"):
            for node in module.graph.nodes:
                if what := _by_name(module, node):
                    return what
    return ""


def _by_name(gm: GraphModule, node: Node) -> str:
    if node.op == "call_function" and (what := _target_by_name(node)):
        return what
    if node.op == "call_module" and not _is_module_of_torch(module := gm.get_submodule(str(node.target))):
        return f"module {type(module).__module__}.{type(module).__qualname__}"
    if node.op == "get_attr":
        value: Any = gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor | GraphModule) and (what := _value_by_name(value)):
            return what
    found: list[str] = []

    def look(value: Any) -> Any:
        if not isinstance(value, Node):
            found.append(_value_by_name(value))
        return value

    torch.fx.node.map_aggregate((node.args, node.kwargs), look)
    return next(filter(None, found), "")


def _target_by_name(node: Node) -> str:
    """The name of the function that `node` calls, if its name is all that a key has of it."""
    target: Any = node.target
    if operators := overloads_of(target):
        return _operator_by_name(operators)
    if isinstance(target, need("torch._ops.HigherOrderOperator")):  # torch refuses those that its key can't describe
        return "" if _is_of_torch(type(target)) else f"higher-order operator {target}"
    name = f"function {getattr(target, '__module__', None)}.{getattr(target, '__qualname__', target)}"
    if isinstance(target, types.BuiltinFunctionType):
        return "" if _is_unbound(target) else name
    if isinstance(target, types.MethodDescriptorType):  # Tensor.set_, say: torch's own check asks it for a module
        return "" if _is_of_torch(target.__objclass__) else name
    if node.meta.get("is_wrapped"):  # torch.fx.wrap: its `user_cache_hash` is in no key of torch's
        return name
    try:
        need("torch._functorch._aot_autograd.autograd_cache.check_node_safe")(node)
    except need("torch._functorch._aot_autograd.autograd_cache.BypassAOTAutogradCache"):
        return "" if _is_of_torch(target) else name
    return ""


def _value_by_name(value: Any) -> str:
    """The name of an argument or attribute, if its name is all that a key has of it."""
    if isinstance(value, _PLAIN + _PLAIN_OF_TORCH) or isinstance(value, torch.ScriptObject):
        return ""
    if operators := overloads_of(value):
        return _operator_by_name(operators)
    if isinstance(value, types.BuiltinFunctionType) and _is_unbound(value):
        return ""
    if isinstance(value, type | types.FunctionType) and (_is_of_torch(value) or value.__module__ == "builtins"):
        return ""
    kind = type(value)
    if _is_of_torch(kind) and not callable(value):
        return ""
    return f"{kind.__module__}.{kind.__qualname__} object {getattr(value, '__qualname__', '')}".rstrip()


def _operator_by_name(operators: Sequence[Any]) -> str:
    """The name of an operator of another library, if AOTAutograd traces through a kernel of it."""
    for each in operators:
        if each.namespace in TORCH_OPERATORS:
            continue
        definition = need("torch._library.custom_ops.OPDEFS").get(f"{each.namespace}::{each._opname}")
        if definition is not None:  # made by torch.library.custom_op, which always registers a kernel for "Autograd"
            traced = definition._backward_fn is not None or bool(definition._torch_dispatch_fns)
        else:
            has_kernel = need("torch._C._dispatch_has_kernel_for_dispatch_key")
            traced = any(has_kernel(each.name(), key) for key in _TRACED_KERNELS)
        if traced:
            return f"operator {each}"
    return ""


def _is_unbound(function: types.BuiltinFunctionType) -> bool:
    """Whether a function of C belongs to a module or class, and so to torch's or Python's version, or to an object."""
    owner: Any = function.__self__
    return owner is None or isinstance(owner, types.ModuleType | type) or type(owner).__module__ == "pybind11_builtins"


def _is_of_torch(value: Any) -> bool:
    """Whether torch defines the function or class `value` under its name, so that torch's version covers it."""
    module = getattr(value, "__module__", None) or ""
    if module.split(".")[0] != "torch":
        return False
    found: Any = sys.modules.get(module)
    for part in (getattr(value, "__qualname__", None) or "?").split("."):  # numpy's functions in a graph have none
        found = getattr(found, part, None)
    return found is value


def _is_module_of_torch(module: torch.nn.Module) -> bool:
    """Whether torch's key holds what `module` computes: its class is torch's, and so are those in it; no hooks."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return all(
        (isinstance(each, GraphModule) or _is_of_torch(type(each))) and not any(getattr(each, name) for name in hooks)
        for each in module.modules()
    )
