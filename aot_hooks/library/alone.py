"""Hooks' tensor code that runs as an operator of its own: `torch.ops.aot_hooks.pack_int8` and others.

      hook --alone(code, x)--> torch.ops.aot_hooks.<name>    one node of a graph: `code`, compiled by itself
                         `---> `code`                        Inductor fuses it with the model; CPUs run it

The operators run on CUDA where nothing would fuse the code: in eager mode and in graphs with inner="aten". Under
Inductor they run where the code alone is faster than fused with a model: for int4, whose two codes a byte Inductor
materializes apart, and for stochastic rounding, which takes it a minute to compile in a model.

Inductor compiles an operator at its first call for a dtype and a length of rows; how many rows there are is symbolic.
By the times of single tensors on an H200 that takes 1 to 3% of a step of Llama blocks more than Triton kernels by hand.
Only int4 has such kernels.
CUDA graphs can capture what has run once: nothing here reads a value on the host.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..hook import compiled_by
from ..torch_private.inductor import compile_alone

_operators: dict[Any, Any] = {}  # by their tensor code
# What is compiled, by the tensor code and all that is fixed in it; each with whether it is for the sizes of tensors.
_compiled: dict[Any, list[tuple[Callable[..., Any], Callable[[Sequence[Tensor]], bool]]]] = defaultdict(list)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device; (0, 0) for a GPU of AMD's, or without Triton."""
    has_triton = importlib.util.find_spec("triton") is not None and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if has_triton else (0, 0)


def runs_alone(x: Tensor, dtype: torch.dtype | None = None, *, beats_inductor: bool = False) -> bool:
    """Whether code for `x` should run as an operator; `dtype` is the float8 format that it is converted to."""
    if x.device.type != "cuda" or (compiled_by() == "inductor" and not beats_inductor):
        return False
    return _capability(x.device) >= ((8, 9) if dtype is torch.float8_e4m3fn else (8, 0))


def alone(
    code: Callable[..., Any], x: Tensor, dtype: torch.dtype | None = None, *, beats_inductor: bool = False
) -> Any:
    """The operator of `code` if that should run for `x`, see `runs_alone`; else `code`."""
    return _operators[code] if runs_alone(x, dtype, beats_inductor=beats_inductor) else code


_Code = TypeVar("_Code", bound=Callable[..., Any])


def operator(code: _Code) -> _Code:
    """Makes an operator of `code`, for `alone`; returns `code`.

    The tensors that it takes are contiguous. They come as rows, [n, m], or with one dimension.
    """
    schema = torch.library.infer_schema(code, mutates_args=())
    op = torch.library.custom_op(
        f"aot_hooks::{code.__name__}", functools.partial(_run, code), mutates_args=(), schema=schema
    )
    op.register_fake(code)
    _operators[code] = op
    return code


def operator_with_kernel(file: str) -> Callable[[_Code], _Code]:
    """`operator`, for which CUDA devices run the function of the same name in `file`, beside this one."""

    def define(code: _Code) -> _Code:
        def run(*args: Any) -> Any:  # imports Triton, which not every torch comes with
            return getattr(importlib.import_module(f"{__package__}.{file}"), code.__name__)(*args)

        _operators[operator(code)].register_kernel("cuda")(run)
        return code

    return define


def _run(code: Callable[..., Any], *args: Any) -> Any:
    """Runs an operator: its code as compiled for such tensors, or compiled now."""
    leading = args[0].shape[:-1]
    args = tuple(a.reshape(-1, a.shape[-1]) if isinstance(a, Tensor) and a.dim() > 1 else a for a in args)
    tensors = [a.contiguous() for a in args if isinstance(a, Tensor)]
    # A size of 1 is not symbolic, and says that numbers are broadcast.
    fixed = tuple((a.dtype, a.device, a.shape[1:], len(a) == 1) if isinstance(a, Tensor) else a for a in args)
    forms = _compiled[code, fixed]
    run = next((run for run, is_for in forms if is_for(tensors)), None)
    if run is None:

        def of_tensors(*values: Tensor) -> Any:
            given = iter(values)
            return code(*(next(given) if isinstance(a, Tensor) else a for a in args))

        forms.append(compile_alone(of_tensors, tensors))
        run = forms[-1][0]
    with torch.no_grad():
        out = run(*tensors)
    made = tuple(y.view(*leading, y.shape[-1]) if leading else y for y in ([out] if isinstance(out, Tensor) else out))
    return made[0] if isinstance(out, Tensor) else made
