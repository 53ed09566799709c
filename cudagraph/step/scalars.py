"""Torch's functions that take a number, rewritten to take a tensor of no dimensions with the same result.

    x * 0.5                     x * tensor             a factor or summand, in the dtype in which kernels have numbers
    x.add_(y, alpha=0.5)        x.addcmul_(y, tensor)  both round once, after the sum
    half: x * 0.5               (x.float() * tensor).half()      kernels for half and bfloat16 have numbers in float32
    CUDA: x / 2.0               x * tensor of 1 / 2.0            as its kernel does, in float32; for lists in float64
    CUDA: x.addcmul_(y, z, value=0.5)    x.addcmul_(y * z, tensor)    as its kernel does; a CPU multiplies y first

Each function returns `NotImplemented` where it can't. What is not in `REWRITES` gets the number as it is.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..torch_private import cuda as torch_cuda

HALVES = (torch.float16, torch.bfloat16)
SINGLES = {torch.float32, torch.float64}
DIVISIONS = ("div", "divide", "true_divide", "truediv", "idiv", "itruediv")


def is_traced(x: Any) -> bool:
    return isinstance(x, (torch.SymFloat, torch.SymInt)) and hasattr(x, "numbers")


def is_cuda(x: torch.Tensor) -> bool:
    """Whether CUDA's kernels compute with `x`, which round elsewhere than those of a CPU. Tests replace it."""
    return x.is_cuda


def _on_device(number: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The tensor for `number` beside `x`; None if there is none."""
    if x.device.type != number.numbers.device.type or x.dtype.is_complex:
        return None
    is_int = isinstance(number, torch.SymInt)
    dtype: torch.dtype = x.dtype
    if dtype in HALVES:
        dtype = torch.float32
    elif not dtype.is_floating_point and (not is_int or dtype is torch.bool):
        dtype = torch.int64 if is_int else torch.get_default_dtype()
    return number.numbers.on_device(number, dtype)  # type: ignore[no-any-return]


def _binary(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x * number` and the like. The tensor stands first, also for `number - x`."""
    if len(args) != 2 or kwargs or not isinstance(args[0], torch.Tensor) or not is_traced(args[1]):
        return NotImplemented
    x, number = args
    name = func.__name__.strip("_")
    if name in DIVISIONS and is_cuda(x):
        if not x.dtype.is_floating_point:
            return NotImplemented
        number = number.derived(_inverse if x.dtype is torch.float64 else _inverse_in_float32, number)
        func = torch.Tensor.mul_ if _is_in_place(func) else torch.Tensor.mul
    tensor = _on_device(number, x)
    if tensor is None:
        return NotImplemented
    if x.dtype in HALVES:
        result = func(x.float(), tensor)
        if result.dtype is torch.bool:  # of a comparison
            return result
        return x.copy_(result) if _is_in_place(func) else result.to(x.dtype)
    return func(x, tensor)


def _inverse(value: float) -> float:
    return 1.0 / value if value else math.copysign(math.inf, value)


def _inverse_in_float32(value: float) -> float:
    return _inverse(ctypes.c_float(value).value)  # the quotient is rounded when it is written to the device


def _is_in_place(func: Any) -> bool:
    name = func.__name__
    return bool(name.startswith("__i") or (name.endswith("_") and not name.endswith("__")))


def _sum(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x + number`; `torch.add(x, y, alpha=number)`."""
    if set(kwargs) == {"alpha"} and is_traced(kwargs["alpha"]) and len(args) == 2:
        return _sum_with_alpha(func, *args, kwargs["alpha"])
    if args and isinstance(args[0], torch.Tensor) and args[0].dtype in HALVES:
        return NotImplemented  # some kernels round such a summand before, others don't
    return _binary(func, args, kwargs)


def _sum_with_alpha(func: Callable[..., Any], x: Any, y: Any, alpha: Any) -> Any:
    """`x + alpha * y`, `x - alpha * y` of tensors, which kernels compute as `torch.addcmul` does."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return NotImplemented
    name, dtype = func.__name__.strip("_"), torch.result_type(x, y)
    if dtype not in SINGLES or (_is_in_place(func) and x.dtype is not dtype):
        return NotImplemented
    x, y = (y, x) if name == "rsub" else (x, y)
    x, y = x.to(dtype), y.to(dtype)  # itself, if it has that dtype
    tensor = _on_device(alpha if name == "add" else -alpha, x)
    if tensor is None:
        return NotImplemented
    return x.addcmul_(y, tensor) if _is_in_place(func) else torch.addcmul(x, y, tensor)


def _dtype_of(*lists: Any) -> torch.dtype | None:
    """The dtype of all tensors in some lists; None if they have several, or one in which kernels round more often."""
    dtypes = {x.dtype if isinstance(x, torch.Tensor) else None for each in lists for x in each}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= SINGLES else None


def _filled_like(xs: Sequence[torch.Tensor], tensor: torch.Tensor) -> list[torch.Tensor]:
    """`tensor` in the shape of each of `xs`: fast kernels of lists take equal shapes only. Equal shapes share one."""
    made: dict[Any, torch.Tensor] = {}
    for x in xs:
        key = x.shape, x.stride()
        if key not in made:
            made[key] = torch.empty_like(x, requires_grad=False).copy_(tensor)
    return [made[x.shape, x.stride()] for x in xs]


def _is_one(value: float) -> bool:
    return value == 1


def _has_history(*tensors: Any) -> bool:
    """Whether a backward follows. That of some functions has a number in float64, and a tensor would be rounded."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _weighted(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.addcmul(x, y, z, value=number)`, `torch.addcdiv`, also of lists."""
    values = {**kwargs, **({"value": args[3]} if len(args) == 4 else {})}
    if set(values) != {"value"} or not is_traced(values["value"]) or len(args) < 3:
        return NotImplemented
    (x, y, z), value = args[:3], values["value"]
    is_list = isinstance(x, (list, tuple))
    lists = (x, y, z) if is_list else ([x], [y], [z])
    if _dtype_of(*lists) is None or _has_history(*lists[0], *lists[1], *lists[2]):
        return NotImplemented
    if (tensor := _on_device(value, lists[0][0])) is None:
        return NotImplemented
    if not is_cuda(lists[0][0]):
        return func(x, torch_cuda.foreach_mul(y, tensor) if is_list else y * tensor, z)
    if value.derived(_is_one, value):  # kernels leave out that product
        return func(x, y, z)
    is_quotient = "addcdiv" in func.__name__
    if not is_list:
        other = y / z if is_quotient else y * z
        return x.addcmul_(other, tensor) if _is_in_place(func) else torch.addcmul(x, other, tensor)
    others = (torch_cuda.foreach_div if is_quotient else torch_cuda.foreach_mul)(y, z)
    add = torch_cuda.foreach_addcmul_ if _is_in_place(func) else torch_cuda.foreach_addcmul
    return add(x, others, _filled_like(others, tensor))


def _lerp(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.lerp(x, y, number)`."""
    values = {**kwargs, **({"weight": args[2]} if len(args) == 3 else {})}
    if set(values) != {"weight"} or not is_traced(values["weight"]) or args[0].dtype in HALVES:
        return NotImplemented
    tensor = _on_device(values["weight"], args[0])
    return NotImplemented if tensor is None else func(args[0], args[1], tensor)


def _power(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`number ** x`. Kernels know some exponents, so `x ** number` gets the number as it is."""
    if func.__name__ == "__rpow__" and len(args) == 2 and is_traced(args[1]):
        x, number = args
    elif len(args) == 2 and is_traced(args[0]) and isinstance(args[1], torch.Tensor):
        number, x = args
    else:
        return NotImplemented
    if x.dtype in HALVES or not x.dtype.is_floating_point or _has_history(x):
        return NotImplemented
    if (tensor := _on_device(number, x)) is None:
        return NotImplemented
    return torch.pow(tensor, x)


def _copied_number(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.where(mask, x, number)`, `x.fill_(number)`: the number goes to the result as it is."""
    if kwargs or not args or not isinstance(args[0], torch.Tensor):
        return NotImplemented
    like = next((x for x in (args if func.__name__ != "where" else args[1:]) if isinstance(x, torch.Tensor)), None)
    if like is None or like.dtype in HALVES or not like.dtype.is_floating_point:
        return NotImplemented
    new = [_on_device(x, like) if is_traced(x) else x for x in args]
    return NotImplemented if any(x is None for x in new) else func(*new)


def _one_by_one(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of lists tensor by tensor, where its kernel of lists takes no tensor in place of the number.

    `torch._foreach_lerp(xs, ys, number)` becomes `[torch.lerp(x, y, number) for x, y in zip(xs, ys)]`.
    """
    lists = [x for x in args if isinstance(x, (list, tuple))]
    if not lists or any(is_traced(x) for each in lists for x in each):
        return NotImplemented
    name = func.__name__.removeprefix("_foreach_")
    if name.startswith("addc") and len(args) == 4:  # those of tensors take `value` by its name only
        *args, value = args
        kwargs = {"value": value}
    of_tensors = getattr(torch.Tensor, name) if name.endswith("_") else getattr(torch, name)
    rows = [tuple(x[i] if isinstance(x, (list, tuple)) else x for x in args) for i in range(len(lists[0]))]
    results = [called(of_tensors, row, kwargs) for row in rows]
    return args[0] if name.endswith("_") else results


def _weighted_lists(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _weighted(func, args, kwargs)
    return _one_by_one(func, args, kwargs) if result is NotImplemented else result


def _arithmetic_of_lists(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch._foreach_mul_(xs, number)`, and with `alpha`."""
    of_one = func.__name__.removeprefix("_foreach_").strip("_")
    if set(kwargs) == {"alpha"} and len(args) == 2 and is_traced(kwargs["alpha"]):
        xs, ys, alpha = *args, kwargs["alpha"]
        if not isinstance(ys, (list, tuple)) or _dtype_of(xs, ys) is None:
            return _one_by_one(func, args, kwargs)
        if (tensor := _on_device(alpha if of_one == "add" else -alpha, xs[0])) is None:
            return NotImplemented
        add = torch_cuda.foreach_addcmul_ if _is_in_place(func) else torch_cuda.foreach_addcmul
        return add(xs, ys, _filled_like(ys, tensor))
    if kwargs or len(args) != 2 or not is_traced(args[1]):
        return NotImplemented
    xs, number = args
    if of_one == "div" and is_cuda(xs[0]):
        number = number.derived(_inverse, number)
        func, args = torch_cuda.foreach_mul_ if _is_in_place(func) else torch_cuda.foreach_mul, (xs, number)
    dtypes = {x.dtype for x in xs}
    if of_one in ("add", "sub") or len(dtypes) != 1 or not dtypes <= SINGLES:
        return _one_by_one(func, args, kwargs)
    tensor = _on_device(number, xs[0])
    return NotImplemented if tensor is None else func(xs, tensor)


def _fused(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fused optimizer reads its learning rate from a tensor. The decay of AdamW is computed before it.

    On CUDA the tensor is in float32, which is what kernels of Adam and AdamW compute with. Those of SGD compute in
    float64, so they lose digits of the rate, as they do if the program gives it as a tensor.
    """
    rate: Any = kwargs.get("lr")
    decay: Any = kwargs.get("weight_decay")
    if not args[0] or args[0][0].dtype is torch.float64:
        return NotImplemented
    first, on_cuda = args[0][0], is_cuda(args[0][0])
    states = args[2:4]  # behind parameters and gradients: moments of Adam, momenta of SGD, sums and counts of Adagrad
    if any(each and each[0].dtype is not first.dtype for each in states):
        return NotImplemented  # such kernels compute in float64
    if (
        is_traced(decay)
        and func.__name__ == "_fused_adamw_"
        and not isinstance(rate, torch.Tensor)
        and kwargs.get("found_inf") is None  # such a step may be skipped by the kernel
    ):
        number = decay.derived(_decay_in_float32, rate, decay) if on_cuda else 1 - rate * decay
        if first.dtype not in SINGLES or (tensor := _on_device(number, first)) is None:
            return NotImplemented
        if on_cuda:
            torch_cuda.foreach_addcmul_(args[0], args[0], _filled_like(args[0], tensor))
        else:
            torch_cuda.foreach_mul_(args[0], tensor)
        return called(func, args, {**kwargs, "weight_decay": 0.0})
    if not is_traced(rate):
        return NotImplemented
    tensor = rate.numbers.on_device(rate, torch.float32 if on_cuda else torch.float64)  # a CPU's kernel reads a double
    others = {name: x.guarded() if is_traced(x) and name != "lr" else x for name, x in kwargs.items()}
    return NotImplemented if tensor is None else func(*args, **{**others, "lr": tensor})


def _decay_in_float32(rate: float, decay: float) -> float:
    """What one step of AdamW adds to a parameter of 1: the kernel has both numbers in float32."""
    return -ctypes.c_float(rate).value * ctypes.c_float(decay).value  # the product is rounded on its way to the device


def _forms(*names: str) -> list[str]:
    """The names of functions, methods and operators, in place or not: mul, mul_, __mul__, __rmul__, __imul__."""
    return [form.format(name) for name in names for form in ("{}", "{}_", "__{}__", "__r{}__", "__i{}__")]


REWRITES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_forms("mul", "div", "truediv", "true_divide", "multiply", "divide"), _binary),
    **dict.fromkeys(_forms("add", "sub", "rsub"), _sum),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__"), _binary),
    **dict.fromkeys(("addcmul", "addcmul_", "addcdiv", "addcdiv_"), _weighted),
    **dict.fromkeys(("lerp", "lerp_"), _lerp),
    **dict.fromkeys(("pow", "__rpow__"), _power),
    **dict.fromkeys(("where", "fill_", "masked_fill", "masked_fill_"), _copied_number),
    **{f"_foreach_{name}{end}": _arithmetic_of_lists for name in ("mul", "div", "add", "sub") for end in ("", "_")},
    **{f"_foreach_{name}{end}": _weighted_lists for name in ("addcmul", "addcdiv") for end in ("", "_")},
    **dict.fromkeys(("_foreach_lerp", "_foreach_lerp_", "_foreach_pow"), _one_by_one),
    **dict.fromkeys(("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"), _fused),
}


def _has_traced(x: Any) -> bool:
    """Whether `x` is a traced number, or a slice with one, as in `y[:n]`."""
    return any(map(is_traced, (x.start, x.stop, x.step))) if isinstance(x, slice) else is_traced(x)


def _guarded(x: Any) -> Any:
    if isinstance(x, slice):
        return slice(*map(_guarded, (x.start, x.stop, x.step)))
    return x.guarded() if is_traced(x) else x


def called(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch's that may have traced numbers among its arguments."""
    flat, spec = torch_cuda.flatten((args, kwargs))
    if not any(map(_has_traced, flat)):
        return func(*args, **kwargs)
    rewritten = REWRITES.get(getattr(func, "__name__", ""))
    result = NotImplemented if rewritten is None else rewritten(func, args, kwargs)
    if result is not NotImplemented:
        return result
    args, kwargs = torch_cuda.unflatten([*map(_guarded, flat)], spec)
    return func(*args, **kwargs)
