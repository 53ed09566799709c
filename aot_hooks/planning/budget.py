"""`budget`: how many bytes a step may take, in place of a choice of hooks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import OptionError, did_you_mean, names_arguments
from ..graphs.saved import SavedTensor
from ..hook import KEEP, Hook
from ..settings.byte_sizes import as_argument, parse_size, size_text

ALLOWED = ("recompute", "chunk", "tile", "lossless", "offload", "float8", "int8", "int4")
EXACT = ("recompute", "chunk", "tile", "lossless", "offload")  # of these


@dataclass(frozen=True, repr=False)
class Budget:
    """The policy that `budget` makes. It chooses for a whole graph at once, so it stands alone.

    This is what the user said. A graph gets an `Assignment`, see assignment.py.

    Attributes:
        peak: bytes, "fit", or None.
        max_slowdown: how much longer than without hooks a step may take: 0.05 is 5%; None, math.inf: any.
        total: bytes that the device may have allocated in all, in place of `peak`.
    """

    peak: int | str | None
    max_slowdown: float | None
    allow: tuple[Any, ...]
    max_error: float
    total: int | None = None

    looks_at_modules: ClassVar[bool] = False
    decides_for_graph: ClassVar[bool] = True  # so no other policy may ask it for one tensor

    @property
    def step_ratio(self) -> float:
        """The longest time of a step over that without hooks."""
        return math.inf if self.max_slowdown is None else 1 + self.max_slowdown

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The hooks among the means."""
        return tuple(means for means in self.allow if isinstance(means, Hook))

    @property
    def exact(self) -> tuple[Any, ...]:
        """The means that round nothing."""
        return tuple(m for m in self.allow if m in EXACT or getattr(m, "error", None) == 0)

    @property
    def asks_device(self) -> bool:
        """Whether the peak depends on what a device holds when a graph is compiled."""
        return self.peak == "fit" or self.total is not None

    def __call__(self, saved: SavedTensor) -> Hook:
        return KEEP  # asked by eager parts, which no plan covers

    def why_kept(self, saved: SavedTensor) -> str:
        return "budget: not in a graph that it plans"

    def __repr__(self) -> str:
        peak = as_argument(self.peak) if isinstance(self.peak, int) else self.peak
        arguments = [] if peak is None else [repr(peak)]
        arguments += [] if self.total is None else [f"total={as_argument(self.total)!r}"]
        arguments += [] if self.max_slowdown is None else [f"max_slowdown={_shown(self.max_slowdown)}"]
        arguments += [] if self.allow == ALLOWED else [f"allow={self.allow!r}"]
        arguments += [] if self.max_error == 0.05 else [f"max_error={self.max_error!r}"]  # the default of `budget`
        return f"budget({', '.join(arguments)})"


@names_arguments
def budget(
    peak: int | str | None = None,
    *,
    total: int | str | None = None,
    max_slowdown: float | None = None,
    allow: Sequence[Any] = ALLOWED,
    max_error: float = 0.05,
) -> Budget:
    """A policy: the fastest step found that takes at most `peak` bytes, as predicted.

    For each saved tensor one of these is chosen: keep it, compute it again in the backward, store it exactly in fewer
    bytes, round it, or send it to the host. The last layer and its loss may be computed in chunks of tokens, and
    wide parts of layers in tiles of tokens.

    Args:
        peak: the most bytes of the step, over what is allocated before it: a number, "24GiB", "500MB", or "fit". Less
            than 1 MiB needs a unit: "12345B".
        total: in place of `peak`: the most bytes that the process may have allocated on the device, "80GiB". Weights,
            data and the optimizer's state count, also state that the optimizer makes in its first step. On a CPU the
            arguments of the graph count as allocated. "fit", for `peak` or `total`: what the device has free when
            the graph is compiled, less 5% and less that state.
        max_slowdown: how much longer the step may take than without hooks: 0.05 for 5%, at most 1.0. Without `peak` the
            plan with the lowest peak within that time is taken; math.inf asks for the lowest at any price.
        allow: the means that may be used; also hooks, your own or the package's, that state their `error`, and the
            `float8_training(...)` of integrations.torchao.
        max_error: relative error of the gradient, estimated from values' errors and bytes; 0 for exact means only. A
            single value may be off by four times as much. A hook for all values, as a user types it, is a candidate if
            its own error is at most `max_error`.

    Raises:
        OptionError: a wrong argument.
        BudgetError: when a graph is compiled that cannot stay under `peak`.
    """
    if peak is None and total is None and max_slowdown is None:
        raise OptionError(
            'budget: expected peak or total (bytes, "24GiB" or "fit"), max_slowdown, or both, got neither'
        )
    if peak is not None and total is not None:
        raise OptionError(
            f"budget: expected peak or total, got both: peak={peak!r} is over what is allocated before the step, "
            f"total={total!r} is all that the process has allocated. Leave one out"
        )
    if not isinstance(allow, list | tuple | set | frozenset) or not all(m in ALLOWED or _is_rule(m) for m in allow):
        raise OptionError(
            f"budget: allow must be some of {', '.join(map(repr, ALLOWED))}, or a Hook that states its error, "
            f"got {allow!r}{_meant_by_allow(allow)}"
        )
    if not _is_number(max_error) or not 0 <= max_error:
        raise OptionError(f"budget: max_error must be a number of at least 0, got {max_error!r}")
    if max_slowdown is not None:
        max_slowdown = _checked_slowdown(max_slowdown)
    means = tuple(name for name in ALLOWED if name in allow) + tuple(sorted(filter(_is_rule, allow), key=repr))
    if total == "fit":
        peak, total = "fit", None
    _check_hooks(means)
    peak = peak if peak in (None, "fit") else parse_size(peak)
    total = None if total is None else parse_size(total, "total")
    return Budget(peak, max_slowdown, means, float(max_error), total)


def mib(nbytes: float) -> str:
    """`nbytes` in MiB for people; in KiB or bytes below one."""
    number = nbytes / 2**20
    if 0 <= number < 1:
        return size_text(round(nbytes))
    return f"{number:.4g} MiB" if number < 1000 else f"{number:.1f} MiB"


def _meant_by_allow(allow: Any) -> str:
    """What to write in place of `allow`, names that are no means, or one that is not in a list; else ""."""
    names = [allow] if isinstance(allow, str) else allow if isinstance(allow, list | tuple) else []
    wrong = next((name for name in names if isinstance(name, str) and name not in ALLOWED), None)
    if wrong is not None:
        return did_you_mean(wrong, ALLOWED)
    return f"; write [{allow!r}]" if isinstance(allow, str) else ""


def _checked_slowdown(value: Any) -> float:
    """`value` as a float. Above 1.0 it is refused: 5 may stand for 5% or for five times the time."""
    if _is_number(value) and (0 <= value <= 1 or value == math.inf):
        return float(value)
    raise OptionError(
        f"budget: max_slowdown must be 0.05 for 5%, or another number from 0 to 1, got {value!r}{_meant(value)}"
    )


def _meant(slowdown: Any) -> str:
    """What was probably meant by a wrong slowdown: 0.05 by 5, "5%" and 1.05. "" if nobody can tell."""
    text = str(slowdown).strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        return ""
    if text.endswith("%") or 2 <= number <= 100:
        number /= 100
    elif number > 1:
        number -= 1
    if 0 <= number <= 1:
        return f"; did you mean {number:g}, which is {100 * number:g}%?"
    return "; math.inf asks for the lowest peak at any price" if number > 1 else ""


def _is_rule(value: object) -> bool:
    """Whether `value` is a hook or policy that may be a means."""
    return isinstance(value, Hook) or getattr(value, "is_means", False) is True


def _check_hooks(allow: Sequence[Any]) -> None:
    """Raises `OptionError` for hooks that can't be means: a budget must know what they do to a gradient."""
    taken = {"keep", *ALLOWED, *(f"{name}()" for name in allow if isinstance(name, str))}
    for hook in allow:
        if isinstance(hook, str):
            continue
        if repr(hook) in taken:
            raise OptionError(
                f"budget: allow has a hook {repr(hook)!r}, a name that another means has. Leave one out, or give your "
                "hook another name"
            )
        taken.add(repr(hook))
        if not isinstance(hook, Hook):
            continue
        what = f"budget: allow has hook {repr(hook)!r}"
        if hook.error is None:
            raise OptionError(
                f"{what}, which does not state its error, so max_error can't hold. State it: Hook(..., error=0.01) for "
                "one hundredth of a value, root mean square, or error=0 if every number comes back exactly"
            )
        if hook.error and not hook.lossy:
            raise OptionError(
                f"{what} of error {hook.error!r}, and lossy=False, which also packs what the backward must read "
                "exactly. Make it with Hook(..., lossy=True)"
            )
        if hook.eager:
            raise OptionError(
                f"{what} with eager=True. A budget predicts bytes and times of what it can trace. Write a hook that "
                "can be traced, or use it without a budget"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _shown(number: float) -> str:
    """`number` as an expression that needs no import."""
    return "float('inf')" if number == math.inf else repr(number)
