"""Operators of torch's `op_db` whose fake kernels predict other strides than the real kernels return, found by running.

      sample of op_db --relaid--> inputs --real--> strides ---+
                          permuted, expanded, size 1          |-- differ: a `Case`
                              |         --fake--> strides ----+

Each ATen operator that an entry of `op_db` calls is run twice, on real tensors and on fake ones of the same layout. A
case is kept for one ATen operator and one layout of the inputs: the first that shows a difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from op_programs import SIZES, sample_sizes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLE_COUNT = 4  # of an operator: a search takes two minutes with so many
LARGEST_COUNT = 1 << 16  # elements of a sample; larger ones take seconds
SLOW = ("grid_sampler_3d",)  # takes a minute, and its results are new and contiguous


def permuted(x: torch.Tensor) -> torch.Tensor:
    """The first dimension is the innermost in memory."""
    order = list(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x.narrow(0, 0, 1).expand_as(x)


def of_size_1(x: torch.Tensor) -> torch.Tensor:
    """The strides of the first two dimensions are those of a larger tensor, as slicing leaves them."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)[:1, :, ...]


LAYOUTS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {  # with the fewest dimensions
    "permuted": (2, permuted),
    "channels_last": (3, channels_last),
    "expanded": (1, expanded),
    "of_size_1": (2, of_size_1),
}


class Case(NamedTuple):
    """How to show the difference: the `index`-th sample of `op_db`'s `name`, with its first tensor in `layout`."""

    name: str
    index: int
    layout: str


class _Comparing(TorchDispatchMode):
    """Runs each ATen operator on fake tensors, too; lists those whose results have other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.differ: dict[str, list[torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = [_fake_layout(a) for a in pytree.tree_leaves((args, kwargs))]
        real = func(*args, **kwargs)
        mode = FakeTensorMode()
        leaves = [a if layout is None else _fake(mode, layout) for a, layout in before]
        fake_args, fake_kwargs = pytree.tree_unflatten(leaves, pytree.tree_structure((args, kwargs)))
        try:
            with mode, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fake = func(*fake_args, **fake_kwargs)
        except Exception:  # no fake kernel, or one that reads values: no graph has this operator
            return real
        for one, other in zip(pytree.tree_leaves(real), pytree.tree_leaves(fake), strict=True):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided and one.shape == other.shape:
                if one.numel() and one.stride() != other.stride():
                    self.differ.setdefault(str(func), []).append(one)
        return real


def _fake_layout(a: Any) -> tuple[Any, Any]:
    if not isinstance(a, torch.Tensor) or a.layout is not torch.strided:
        return a, None
    return a, (a.shape, a.stride(), a.dtype, a.device)


def _fake(mode: FakeTensorMode, layout: Any) -> torch.Tensor:
    shape, stride, dtype, device = layout
    with mode:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def operators(device: str) -> Iterator[Any]:
    """Every entry of `op_db` that takes float32 on `device`."""
    from torch.testing._internal import common_methods_invocations as invocations

    for op in invocations.op_db:
        if torch.float32 in op.supported_dtypes(device) and op.formatted_name not in SLOW:
            yield op


def samples(op: Any, device: str) -> list[tuple[list[Any], Any]]:
    """The leaves and the structure of the first samples of `op`, whose first leaf is a tensor."""
    torch.manual_seed(0)
    found = []
    with sample_sizes(SIZES), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in op.sample_inputs(device, torch.float32, requires_grad=False):
            leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            tensors = [a for a in leaves if isinstance(a, torch.Tensor)]
            if not tensors or leaves[0] is not tensors[0] or any(a.layout is not torch.strided for a in tensors):
                continue
            if tensors[0].numel() and sum(a.numel() for a in tensors) <= LARGEST_COUNT:
                found.append((leaves, spec))
            if len(found) == SAMPLE_COUNT:
                break
    return found


def relaid(leaves: list[Any], layout: str) -> list[Any] | None:
    """`leaves` with the first tensor in `layout`; None if it has too few dimensions."""
    fewest, lay_out = LAYOUTS[layout]
    return None if leaves[0].dim() < fewest else [lay_out(leaves[0]), *leaves[1:]]


def differing(ops: Iterator[Any], device: str) -> dict[str, Case]:
    """The cases that are found, by ATen operator and layout, as "aten.roll.default permuted"."""
    found: dict[str, Case] = {}
    inside: dict[str, Case] = {}  # the tensor that differs is no result of the entry of `op_db`
    for op in ops:
        for index, (leaves, spec) in enumerate(_samples_or_none(op, device)):
            for layout in LAYOUTS:
                again = relaid(leaves, layout)
                if again is None or (device != "cpu" and _raises_on_cpu(op, again, spec)):
                    continue
                if again[0].is_floating_point():  # operators differ from those without a gradient: max_pool1d
                    again[0] = again[0].detach().requires_grad_()
                input, args, kwargs = pytree.tree_unflatten(again, spec)
                with _Comparing() as comparing, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        torch.manual_seed(0)
                        results = pytree.tree_leaves(op.op(input, *args, **kwargs))
                    except Exception:  # the operator takes no such layout, or the other inputs no such size
                        continue
                tensors = [x for x in results if isinstance(x, torch.Tensor) and x.layout is torch.strided]
                shown = {x.data_ptr() for x in tensors if x.dim() and x.numel()}
                for name, differ in comparing.differ.items() if shown else ():
                    here = found if any(x.data_ptr() in shown for x in differ) else inside
                    here.setdefault(f"{name} {layout}", Case(op.formatted_name, index, layout))
    return inside | found


def _raises_on_cpu(op: Any, leaves: list[Any], spec: Any) -> bool:
    """Whether `op` refuses such inputs, an index out of bounds say. A GPU would not run anything afterwards."""
    copies = [a.cpu() if isinstance(a, torch.Tensor) else a for a in leaves]
    input, args, kwargs = pytree.tree_unflatten(copies, spec)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            op.op(input, *args, **kwargs)
    except Exception:
        return True
    return False


def _samples_or_none(op: Any, device: str) -> list[tuple[list[Any], Any]]:
    try:
        return samples(op, device)
    except Exception:  # samples that need a package, or other sizes
        return []
