"""`lossless()`: the policy that packs only what gets smaller without changing a bit.

      dropout mask    bool[n]                                     8 an element a byte         bitmask
      ReLU's result   f32[n], backward evaluates `x <= 0` only    1 bit: the answer           compare(le 0)
      pooled tensor   f32[n], backward reads its shape only       nothing                     shape_only
      pool's indices  int64[n], the plane has 56 * 56 cells       int16                       narrow(int16)
      anything else                                               stays, with a reason

Where the backward only compares a tensor, numbers fall into classes that no reader can tell apart (`x <= 0`, and the
rest with NaN). The index of each element's class crosses, and one representative of the class comes back.

Source: Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training" (ISCA 2018), there for ReLU and
max-pooling by name. Here for all comparisons that graphs/backward_reads.py finds, and ranges of graphs/value_ranges.py.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..errors import names_arguments
from ..graphs.layout import from_memory_order, in_memory_order
from ..graphs.read_tables import Test
from ..graphs.saved import SavedTensor
from ..hook import KEEP, Hook
from ..torch_private import values as torch_values
from .bitmask import bitmask, pack_bits, unpack_bits
from .blocks import convert_back, rounded

_MOST_BITS = 4  # of a number in a range stored bit by bit; beyond that a byte is as good


@dataclass(frozen=True)
class Lossless:
    looks_at_modules: ClassVar[bool] = False
    error: ClassVar[float] = 0.0  # of each hook that it chooses

    def __call__(self, saved: SavedTensor) -> Hook:
        hook = _choose(saved)
        return KEEP if isinstance(hook, str) else hook

    def why_kept(self, saved: SavedTensor) -> str:
        hook = _choose(saved)
        return hook if isinstance(hook, str) else ""

    def why_packed(self, saved: SavedTensor) -> str:
        if saved.dtype is torch.bool:
            return "lossless: a bool is one bit"
        if saved.backward_asks is not None:
            return "lossless: " + ("the backward only compares it" if saved.backward_asks else "only its shape is read")
        return f"lossless: from {saved.value_range[0]} to {saved.value_range[1]}" if saved.value_range else ""

    def __repr__(self) -> str:
        return "lossless()"


@names_arguments
def lossless() -> Lossless:
    """The policy that stores in fewer bytes what it can store exactly, and leaves everything else.

    - bool tensors: 1 bit an element;
    - tensors that the backward only compares with constants (ReLU, ReLU6, leaky ReLU, hard shrinking, sign, ...): the
      answers, 1 to 4 bits an element; nothing if it reads only their shape (the input of average pooling);
    - integers whose range the graph proves (indices of pooling, argmax, sort, top-k; signs): 1 to 32 bits.

    Gradients are bitwise the same as without it, for NaN, infinities, -0.0 and subnormal numbers too. Ranges that
    depend on a symbolic size use the largest size that the graph admits, without a guard. Parts that run eagerly have
    no graph to read, so there only bool tensors in scope are packed.
    """
    return Lossless()


def _choose(saved: SavedTensor) -> Hook | str:
    """The hook for `saved`, or why it stays."""
    numel = min(math.prod(saved.shape), saved.nbytes // saved.dtype.itemsize)  # a dimension of stride 0 is one row
    if not saved.shape or numel < 2:
        return "lossless: too few elements to get smaller"
    if saved.dtype is torch.bool:
        return bitmask()
    if saved.backward_asks is not None:
        hook = compare_hook(saved.backward_asks, saved.dtype)
    elif saved.value_range is not None:
        hook = narrow_hook(*saved.value_range)
    elif saved.dtype.is_floating_point or saved.dtype.is_complex:
        return "lossless: the backward may need its numbers"
    else:
        return "lossless: the graph does not prove a smaller range"
    packed_bytes = math.ceil(numel / 8) * getattr(hook.pack, "bits", 64)  # 64: `KEEP`
    return hook if packed_bytes < numel * saved.dtype.itemsize else "lossless: as small as it gets"


_Class = tuple[tuple[bool, ...], float]  # the answers of all tests, and a number that gives them


def classes(tests: Sequence[Test], dtype: torch.dtype) -> tuple[_Class, ...] | None:
    """The classes of numbers of `dtype` that `tests` cannot tell apart: the answers, and one number of each class.

    Answers are the same between two neighbouring constants, and beyond the outermost. So it is enough to try a number
    from each of these intervals, the constants, both zeros and the NaNs. None if a class has no number but a NaN with
    its sign set, which no graph can hold.
    """
    constants = sorted({0.0, *(c for test in tests for c in test.constants)})
    finite = [c for c in constants if math.isfinite(c)]
    middles = [a / 2 + b / 2 for a, b in itertools.pairwise(finite)]
    largest = torch.finfo(dtype).max
    beyond = [2 * finite[0] - 1, 2 * finite[-1] + 1, -largest, largest]
    candidates = [*beyond, *constants, *middles, -0.0, math.inf, -math.inf]
    with torch_values.without_modes():
        numbers = torch.tensor(candidates, dtype=torch.float64).to(dtype).tolist()
    numbers += [math.nan, -math.nan]  # not above: a conversion may flip a NaN's sign
    found: dict[tuple[bool, ...], float] = {}
    for number in numbers:
        answers = tuple(bool(test(number)) for test in tests)
        if answers not in found and math.isnan(number) and math.copysign(1.0, number) < 0:
            return None
        found.setdefault(answers, math.nan if math.isnan(number) else number)
    return tuple(sorted(found.items(), key=lambda item: item[0]))


@functools.cache
def compare_hook(tests: tuple[Test, ...], dtype: torch.dtype) -> Hook:
    """The hook that stores the answers of `tests`; `KEEP` if no number of `dtype` can stand for some class."""
    found = classes(tests, dtype)
    if found is None:
        return KEEP
    name = f"compare({', '.join(map(repr, tests))})" if tests else "shape_only"
    return Hook(name, _PackAnswers(tests, found), _UnpackNumbers(tuple(number for _, number in found)))


@dataclass(frozen=True)
class _PackAnswers:
    tests: tuple[Test, ...]
    classes: tuple[_Class, ...]

    @property
    def bits(self) -> int:
        """Bits that one element takes."""
        return (len(self.classes) - 1).bit_length()

    def __call__(self, x: torch.Tensor) -> Any:
        y, permutation = in_memory_order(x, keep_rows=False)
        y = rounded(y) if x.dtype.itemsize == 2 else y
        answers = [test(y) for test in self.tests]
        bits = []
        for k in range(self.bits):
            members = [_match(answers, wanted) for i, (wanted, _) in enumerate(self.classes) if i >> k & 1]
            bits.append(pack_bits(functools.reduce(torch.logical_or, members)))
        return bits, y.shape, x.dtype, x.device, permutation


def _match(answers: list[torch.Tensor], wanted: tuple[bool, ...]) -> torch.Tensor:
    """For each element, whether its answers are those of `wanted`."""
    terms = (a if w else ~a for a, w in zip(answers, wanted, strict=True))
    return functools.reduce(torch.logical_and, terms)


@dataclass(frozen=True)
class _UnpackNumbers:
    """Restores each element from the bits of its number's position in `numbers`."""

    numbers: tuple[float, ...]

    def __call__(self, packed: Any) -> torch.Tensor:
        bits, shape, dtype, device, permutation = packed

        def full(number: float, sizes: Any = ()) -> torch.Tensor:
            return torch.full(sizes, number, dtype=dtype, device=device)

        if not bits:
            return from_memory_order(full(self.numbers[0], shape), permutation)
        level = [full(number) for number in self.numbers]
        for plane in bits:  # from the lowest bit on, each halves the candidates
            bit = unpack_bits(plane, shape)
            level += level[-1:] * (len(level) % 2)
            level = [torch.where(bit, odd, even) for even, odd in zip(level[::2], level[1::2], strict=True)]
        return from_memory_order(level[0], permutation)


@functools.cache
def narrow_hook(low: int, high: int) -> Hook:
    """The hook for whole numbers from `low` to `high`; `KEEP` if they need 64 bits."""
    bits = (high - low).bit_length()
    if bits <= _MOST_BITS:
        return Hook(f"narrow({bits} bits)", _PackOffsets(low, bits), _UnpackNumbers(tuple(range(low, high + 1))))
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return Hook(f"narrow({str(dtype).removeprefix('torch.')})", _Convert(dtype), convert_back)
    return KEEP


@dataclass(frozen=True)
class _PackOffsets:
    low: int
    bits: int

    def __call__(self, x: torch.Tensor) -> Any:
        y, permutation = in_memory_order(x, keep_rows=False)
        offsets = (y - self.low).to(torch.uint8)
        bits = [pack_bits((offsets >> k & 1).to(torch.bool)) for k in range(self.bits)]
        return bits, y.shape, x.dtype, x.device, permutation


@dataclass(frozen=True)
class _Convert:
    dtype: torch.dtype

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    def __call__(self, x: torch.Tensor) -> Any:
        return x.to(self.dtype), x.dtype
