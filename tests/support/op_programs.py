"""Programs around the operators of torch's own `op_db`: each operator reads an intermediate, a projection reads it.

      direct        x --mm--> h --operator--> out --* fixed weights, sum--> scalar
      activated     x --mm--> h --- 2 * h * sigmoid(h / 16) --> t --operator--> out --* fixed weights, sum--> scalar

`mm` is a product with the identity matrix: exact, and never computed again by the partitioner, so `h` or what is made
of it has to be saved. `t` is cheap, so the backward computes it again, from an `h` that was rounded. All floating-point
inputs of a sample are lifted so. Sample inputs are `op_db`'s own, made with sizes of `SIZES` where the operator's
samples allow that, or one [8, 64] tensor for elementwise and reduction operators, so that no hook declines them as too
short.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from oracle import HOOKS, Verdict, compare
from torch.utils import _pytree as pytree

__all__ = [
    "DTYPES",
    "EXCEPTIONS",
    "NO_GRADIENT",
    "SIZES",
    "NoProgram",
    "Program",
    "Result",
    "check",
    "operators",
    "programs",
    "sample_sizes",
]

NO_GRADIENT = "has no gradient in this dtype"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = {"S": 16, "M": 24, "L": 40}  # torch's own: 5, 10, 20
LARGEST_COUNT = 1 << 15  # elements of a sample
LARGEST = 3.0  # number in a sample of ours, if its domain allows: beyond it, activations are constant
FEWEST_IN_A_ROW, FEWEST_COUNT = 16, 256  # of a sample that is preferred
FORMS = ("direct", "activated")
# name -> why it is no program of ours
EXCEPTIONS = {
    "sparse_mm_reduce": "takes sparse tensors",
    "sparse_sampled_addmm": "takes sparse tensors",
}


class NoProgram(Exception):
    """The operator, in this dtype, makes no program; says why."""


@dataclasses.dataclass(frozen=True)
class Program:
    """`run(*inputs)` is a scalar; `inputs` is the sample's tensors, then the weights of the projection."""

    name: str
    run: Callable[..., torch.Tensor]
    inputs: list[torch.Tensor]
    wrt: list[torch.Tensor]
    shapes: str


@functools.lru_cache(None)
def operators() -> dict[str, Any]:
    """Every operator of `op_db` that has a gradient for float32, by name."""
    from torch.testing._internal import common_methods_invocations as invocations

    # Around random operators, it breaks the graph. Each of our runs is seeded before it.
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {
        op.formatted_name: op
        for op in invocations.op_db
        if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu")
    }


@contextlib.contextmanager
def sample_sizes(sizes: dict[str, int]) -> Iterator[None]:
    """Sample inputs are made with `sizes` in place of torch's own."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch.testing._internal.opinfo") or name.endswith("common_methods_invocations")
    ]
    before = [(module, name, getattr(module, name)) for module in modules for name in sizes if hasattr(module, name)]
    try:
        for module, name, _ in before:
            setattr(module, name, sizes[name])
        yield
    finally:
        for module, name, size in before:
            setattr(module, name, size)


@dataclasses.dataclass(frozen=True)
class Random:
    """A tensor that takes a gradient."""

    shape: tuple[int, ...]
    low: float = -LARGEST
    high: float = LARGEST


def R(*shape: int, **limits: float) -> Random:
    return Random(shape, **limits)


# name -> (arguments, keyword arguments), where `op_db`'s samples are tiny
OWN: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "addmm": ([R(16, 32), R(16, 24), R(24, 32)], {}),
    "addmm_decomposed": ([R(16, 32), R(16, 24), R(24, 32)], {}),
    "cov": ([R(8, 64)], {}),
    "corrcoef": ([R(8, 64)], {}),
    "constant_pad_nd": ([R(4, 8, 32)], {"pad": (2, 2)}),
    "median": ([R(8, 64)], {"dim": 1}),
    "nanmedian": ([R(8, 64)], {"dim": 1}),
    "quantile": ([R(8, 64)], {"q": 0.3, "dim": 1}),
    "nanquantile": ([R(8, 64)], {"q": 0.3, "dim": 1}),
    "native_layer_norm": ([R(16, 32), (32,), R(32), R(32), 1e-5], {}),
    "nn_functional_adaptive_avg_pool1d": ([R(4, 8, 32)], {"output_size": 4}),
    "nn_functional_adaptive_avg_pool2d": ([R(2, 4, 16, 16)], {"output_size": 4}),
    "nn_functional_adaptive_max_pool1d": ([R(4, 8, 32)], {"output_size": 4}),
    "nn_functional_adaptive_max_pool2d": ([R(2, 4, 16, 16)], {"output_size": 4}),
    "nn_functional_adaptive_max_pool3d": ([R(2, 2, 8, 8, 16)], {"output_size": 4}),
    "nn_functional_avg_pool3d": ([R(2, 2, 8, 8, 16)], {"kernel_size": 2}),
    "nn_functional_bilinear": ([R(8, 16), R(8, 24), R(16, 16, 24), R(16)], {}),
    "nn_functional_conv1d": ([R(4, 8, 32), R(8, 8, 3), R(8)], {}),
    "nn_functional_conv2d": ([R(2, 4, 16, 16), R(8, 4, 3, 3), R(8)], {}),
    "nn_functional_conv3d": ([R(2, 2, 8, 8, 16), R(4, 2, 3, 3, 3), R(4)], {}),
    "nn_functional_conv_transpose1d": ([R(4, 8, 32), R(8, 8, 3), R(8)], {}),
    "nn_functional_conv_transpose2d": ([R(2, 4, 16, 16), R(4, 8, 3, 3), R(8)], {}),
    "nn_functional_conv_transpose3d": ([R(2, 2, 8, 8, 16), R(2, 4, 3, 3, 3), R(4)], {}),
    "nn_functional_cross_entropy": ([R(16, 32)], {"target": torch.arange(16)}),
    "nn_functional_glu": ([R(8, 64)], {}),
    "nn_functional_interpolate_bicubic": ([R(2, 4, 8, 16)], {"scale_factor": 2, "mode": "bicubic"}),
    "nn_functional_interpolate_bilinear": ([R(2, 4, 8, 16)], {"scale_factor": 2, "mode": "bilinear"}),
    "nn_functional_interpolate_linear": ([R(4, 8, 32)], {"scale_factor": 2, "mode": "linear"}),
    "nn_functional_interpolate_nearest": ([R(4, 8, 32)], {"scale_factor": 2, "mode": "nearest"}),
    "nn_functional_kl_div": ([R(8, 64), R(8, 64, low=0.01, high=1.0)], {}),
    "nn_functional_layer_norm": ([R(16, 32), (32,), R(32), R(32)], {}),
    "nn_functional_linear": ([R(16, 32), R(48, 32), R(48)], {}),
    "nn_functional_local_response_norm": ([R(4, 8, 32)], {"size": 3}),
    "nn_functional_max_pool1d": ([R(4, 8, 32)], {"kernel_size": 3, "stride": 2}),
    "nn_functional_max_pool2d": ([R(2, 4, 16, 16)], {"kernel_size": 3, "stride": 2}),
    "nn_functional_max_pool3d": ([R(2, 2, 8, 8, 16)], {"kernel_size": 2}),
    "nn_functional_nll_loss": ([R(16, 32)], {"target": torch.arange(16)}),
    "nn_functional_normalize": ([R(8, 64)], {}),
    "nn_functional_pairwise_distance": ([R(8, 64), R(8, 64)], {}),
    "nn_functional_rms_norm": ([R(16, 32)], {"normalized_shape": (32,)}),
    "nn_functional_scaled_dot_product_attention": ([R(2, 4, 16, 32), R(2, 4, 16, 32), R(2, 4, 16, 32)], {}),
    "nn_functional_unfold": ([R(2, 4, 16, 16)], {"kernel_size": 3}),
    "tensordot": ([R(16, 32), R(32, 16)], {"dims": 1}),
    "torch_ops_aten__safe_softmax_default": ([R(8, 64)], {"dim": -1}),
    "trapezoid": ([R(8, 64), R(8, 64)], {}),
    "linalg_vecdot": ([R(8, 64), R(8, 64)], {}),
    "linalg_matrix_norm": ([R(16, 32)], {}),
    "linalg_vander": ([R(4, 16)], {"N": 4}),
}


def _tensors(sample: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [a for a in leaves if isinstance(a, torch.Tensor)]


def _suitable(sample: Any) -> bool:
    tensors = _tensors(sample)
    leaves = [a for a in tensors if a.requires_grad]
    return bool(
        leaves
        and all(a.layout is torch.strided and a.numel() for a in tensors)
        and all(a.is_floating_point() for a in leaves)
        and sum(a.numel() for a in tensors) <= LARGEST_COUNT
        and all(a.is_leaf for a in leaves)
    )


def _samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Suitable sample inputs, those with long rows first."""
    from torch.testing._internal.common_methods_invocations import (
        BinaryUfuncInfo,
        ReductionOpInfo,
        SampleInput,
        UnaryUfuncInfo,
        make_tensor,
    )

    domain = {"low": -LARGEST, "high": LARGEST}

    def make(x: Any) -> Any:
        if not isinstance(x, Random):
            return x
        return make_tensor(x.shape, device="cpu", dtype=dtype, requires_grad=True, low=x.low, high=x.high)

    if op.formatted_name in OWN:
        (first, *args), kwargs = pytree.tree_map(make, OWN[op.formatted_name])
        yield SampleInput(first, args=tuple(args), kwargs=kwargs)
    if isinstance(op, UnaryUfuncInfo):
        low, high = op.domain
        low = -LARGEST if low is None else max(low, -LARGEST)
        high = LARGEST if high is None else min(high, LARGEST)
        yield SampleInput(make(R(8, 64, low=low, high=high)), kwargs=op.sample_kwargs("cpu", dtype, None)[0])
    if isinstance(op, BinaryUfuncInfo):
        lhs, rhs = (
            make_tensor((8, 64), device="cpu", dtype=dtype, requires_grad=True, **(domain | kwargs))
            for kwargs in (op.lhs_make_tensor_kwargs, op.rhs_make_tensor_kwargs)
        )
        yield SampleInput(lhs, args=(rhs,))
    if isinstance(op, ReductionOpInfo):
        yield SampleInput(make(R(8, 64)), kwargs={"dim": 1})
    found = []
    for sizes in (SIZES, {}):
        with sample_sizes(sizes), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
                    if _suitable(sample):
                        found.append(sample)
                    if len(found) >= 40:
                        break
            except Exception:
                if not sizes:
                    raise

    def short(sample: Any) -> tuple[int, int]:
        rows, counts = zip(*((a.shape[-1] if a.dim() else 1, a.numel()) for a in _tensors(sample)), strict=True)
        return -min(max(rows), FEWEST_IN_A_ROW), -min(max(counts), FEWEST_COUNT)

    yield from sorted(found, key=short)  # stable


def _lift(x: torch.Tensor, identity: torch.Tensor, form: str) -> torch.Tensor:
    """An intermediate like `x`."""
    h = (x.reshape(-1, identity.shape[0]) @ identity).view(x.shape)
    return h if form == "direct" else 2 * h * torch.sigmoid(h / 16)


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def _program(op: Any, sample: Any, form: str, magnitude: float) -> Program:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    lifted = [i for i, a in enumerate(leaves) if isinstance(a, torch.Tensor) and a.requires_grad]
    given = [i for i, a in enumerate(leaves) if isinstance(a, torch.Tensor) and not a.requires_grad]
    wrt = [_leaf(leaves[i] * magnitude) for i in lifted]
    rest = [leaves[i].detach() for i in given]
    identities = [torch.eye(a.shape[-1] if a.dim() else 1, dtype=a.dtype) for a in wrt]
    constants = [None if isinstance(a, torch.Tensor) else a for a in leaves]
    call, post = op.get_op(), sample.output_process_fn_grad
    many = len(wrt)

    def apply(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        full = list(constants)
        for i, x, identity in zip(lifted, tensors[:many], tensors[many : 2 * many], strict=True):
            full[i] = _lift(x, identity, form)
        for i, x in zip(given, tensors[2 * many :], strict=True):
            full[i] = x
        first, args, kwargs = pytree.tree_unflatten(full, spec)
        out = post(call(first, *args, **kwargs))
        outs = out if isinstance(out, list | tuple) else [out]
        flat = [b for a in outs for b in (a if isinstance(a, list | tuple) else [a])]
        differentiable = [a for a in flat if isinstance(a, torch.Tensor) and a.requires_grad]
        return [torch.view_as_real(a.resolve_conj()) if a.is_complex() else a for a in differentiable]

    torch.manual_seed(0)
    tensors = [*wrt, *identities, *rest]
    outs = apply(tensors)
    if not outs:
        raise NoProgram("no output has a gradient")
    if any(a.layout is not torch.strided for a in outs):
        raise NoProgram("gives a sparse tensor")
    weights = [torch.randn(a.shape).to(a.dtype) for a in outs]
    count = len(tensors)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        found = apply(list(inputs[:count]))
        return sum((a * w).sum() for a, w in zip(found, inputs[count:], strict=True))  # type: ignore[return-value]

    shapes = ", ".join(str(list(a.shape)) for a in wrt) + (f" times {magnitude:g}" if magnitude != 1 else "")
    return Program(op.formatted_name, run, [*tensors, *weights], wrt, shapes)


def programs(
    name: str, dtype: torch.dtype, form: str, count: int = 1, magnitudes: Sequence[float] = (1.0,)
) -> list[Program]:
    """Programs of an operator with its first `count` samples, each times the next of `magnitudes`.

    Raises:
        NoProgram: there is none.
    """
    op = operators()[name]
    if dtype not in op.supported_backward_dtypes("cpu"):
        raise NoProgram(NO_GRADIENT)
    torch.manual_seed(zlib.crc32(name.encode()))
    found: list[Program] = []
    reason = "no sample with a floating-point tensor that takes a gradient"
    for sample, magnitude in ((s, m) for s in _samples(op, dtype) for m in magnitudes):
        try:
            program = _program(op, sample, form, magnitude)
            grads = torch.autograd.grad(program.run(*program.inputs), program.wrt, allow_unused=True)
        except NoProgram as e:
            reason = str(e)
            continue
        except Exception as e:
            reason = f"eager mode: {type(e).__name__}: {str(e).strip()[:200]}"
            continue
        if all(g is None for g in grads):
            reason = "no input gets a gradient"
            continue
        if not any(g is not None and g.isfinite().any() for g in grads):
            reason = "no gradient is finite"
            continue
        found.append(program)
        if len(found) == count * len(magnitudes):
            break
    if not found:
        raise NoProgram(reason)
    return found


@dataclasses.dataclass(frozen=True)
class Result:
    """What one operator did in one dtype.

    Attributes:
        reason: why it was not compared; "" if it was.
        fullgraph: whether Dynamo traced it whole.
        without_hooks: how far the compiled gradients are from eager mode's without hooks.
        verdicts: one a hook.
    """

    name: str
    dtype: str
    form: str
    shapes: str = ""
    reason: str = ""
    fullgraph: bool = True
    without_hooks: float = 0.0
    verdicts: tuple[Verdict, ...] = ()

    @property
    def ok(self) -> bool:
        return all(v.ok for v in self.verdicts)


def check(
    name: str,
    dtype_name: str,
    form: str,
    count: int = 1,
    magnitudes: Sequence[float] = (1.0,),
    among: Sequence[str] = tuple(HOOKS),
) -> list[Result]:
    """Compares the programs of one operator, under every hook `among` these that stores `dtype_name` in fewer bytes."""
    dtype = DTYPES[dtype_name]
    result = functools.partial(Result, name, dtype_name, form)
    if name in EXCEPTIONS:
        return [result(reason=EXCEPTIONS[name])]
    try:
        found = programs(name, dtype, form, count, magnitudes)
    except NoProgram as e:
        return [result(reason=str(e))]
    hooks = [hook for hook in among if hook != "cast" or dtype is torch.float32]
    results = []
    for program in found:
        reason = ""
        for fullgraph in (True, False):
            try:
                verdicts, without = compare(program.run, program.inputs, program.wrt, hooks, fullgraph=fullgraph)
                results.append(result(program.shapes, "", fullgraph, without, tuple(verdicts)))
                break
            except Exception as e:
                reason = f"torch.compile without hooks: {type(e).__name__}: {str(e).strip()[:200]}"
        else:
            results.append(result(program.shapes, reason))
    return results
