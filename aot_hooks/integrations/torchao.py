"""Saved tensors of torchao's float8 training: `convert_to_float8_training(model)`.

      forward                              backward
        y = (x in float8) @ W                x in float8 once more, scaled along the other dimension
        saved: x bf16                        dW = (dy in float8) @ (x in float8)

torchao's linear layers multiply in float8 but save bfloat16: the product for the weight's gradient needs other scales
("rowwise"), or torch's partitioner computes the codes again ("tensorwise"). So float8 training saves no memory by
itself. The backward takes the reciprocal of x's largest value, for which lossy hooks leave x as it is: in general a
small error of x could become any error. Here it can't. The scale is for x itself, which torchao then rounds as coarsely
as the hook did:

      x' = x (1 + e), |e| <= 2**-4;  x' / s rounded to float8, times s, is x' (1 + f), |f| <= 2**-4, whatever s is

Source: torchao/float8/float8_linear.py, `matmul_with_hp_or_float8_args`.
"""

from __future__ import annotations

import pathlib
from dataclasses import dataclass, replace
from typing import ClassVar

from torchao.float8 import float8_linear

from ..errors import OptionError
from ..graphs.saved import SavedTensor
from ..hook import Hook
from ..library.float8 import float8

# the lines of torchao's linear layer, and of how it finds scales, as `Read.line` has them; a file of the same name may
# be a user's
_LINES = {
    f"{path.name}:{number}: {line.strip()}"
    for path in pathlib.Path(float8_linear.__file__).parent.glob("float8_*.py")
    for number, line in enumerate(path.read_text().splitlines(), 1)
}


@dataclass(frozen=True)
class _Declines:
    """Why `hook` leaves a tensor, without regard to how the backward reads it."""

    hook: Hook

    def __call__(self, saved: SavedTensor) -> str | None:
        return self.hook.why_not(replace(saved, backward_reads=()))


@dataclass(frozen=True, repr=False)
class Float8Training:
    hook: Hook

    is_means: ClassVar[bool] = True  # for `allow` of a budget
    looks_at_modules: ClassVar[bool] = False

    def __call__(self, saved: SavedTensor) -> Hook:
        # the checks of a lossy hook are left out only where nothing but torchao's scales would fail them
        return replace(self.hook, lossy=False, declines=_Declines(self.hook)) if self._only_scaled(saved) else self.hook

    def _only_scaled(self, saved: SavedTensor) -> bool:
        """Whether a linear layer of torchao alone reads numbers of `saved` that must be exact: to find their scale."""
        return (
            saved.dtype.is_floating_point
            and bool(saved.backward_reads)
            and all(read.line in _LINES for read in saved.backward_reads)
            and not saved.backward_asks
        )

    def why_kept(self, saved: SavedTensor) -> str:
        return self.hook.why_not(saved) or ""

    def why_packed(self, saved: SavedTensor) -> str:
        return "float8 linear layers round it too" if self._only_scaled(saved) else "float8 training"

    @property
    def error(self) -> float | None:
        return self.hook.error

    def __repr__(self) -> str:
        return f"float8_training({self.hook!r})"


def float8_training(hook: Hook | None = None) -> Float8Training:
    """A policy: `hook` for every saved tensor, also for those that torchao's float8 linear layers cast once more.

    Args:
        hook: a lossy hook whose error is at most float8's; `float8()` by default, or `offload(then=float8())`.

    Raises:
        OptionError: `hook` is no lossy hook of this package.
    """
    hook = float8() if hook is None else hook
    if not (isinstance(hook, Hook) and hook.lossy) or hook.is_own:  # type: ignore[redundant-expr]
        raise OptionError(
            "float8_training: expected a hook of aot_hooks that rounds, such as float8() or offload(then=float8()), "
            f"got {hook!r}"
        )
    return Float8Training(hook)
