"""The oracle for lossy hooks: may a compiled gradient be as wrong as it is?

      program, inputs --compile, no hooks--> g0        --compile, hook--> g
                      --eager, no hooks----> e0        --eager, hook----> e

      finite      g is finite wherever g0 is
      error       |g - g0| / |g0| <= 1.5 * |e - e0| / |e0| + ROUNDOFF[hook]
                  Above that, medians of nine measurements on inputs nearby are compared. Where eager mode's own
                  gradient is not finite, or off by all of itself, there is nothing to compare with: a larger error is
                  counted, but is no failure.

Eager mode is the measure because there each operator's backward reads exactly the tensors that it saved. A compiled
backward may read other tensors than these, and compute again from them, so it may be wrong where eager mode is right.
There the hook is applied as asked, to whatever the operators save: with protection eager code keeps the tensors of a
program's last operators, and is exact where a program is one operator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import aot_hooks

__all__ = ["HOOKS", "ONE_KIND", "ROUNDOFF", "TWO_KINDS", "Verdict", "compare", "format_failures", "total_error"]

FACTOR = 1.5
EAGER_LOST = "worse, eager lost"
REPEATS = 8  # on inputs nearby, where the first measurement is above the bound
# name -> (hook, relative error that it may make of a value)
HOOKS: dict[str, aot_hooks.Hook] = {
    "float8": aot_hooks.float8(),
    "int8": aot_hooks.int8(),
    "int4": aot_hooks.int4(stochastic=False),
    "cast": aot_hooks.cast(torch.bfloat16),
}
# Two of them for tests: one rounds relative to each value, one relative to a block, coarsely. Which reads may be
# rounded does not depend on the hook. Committed runs of op_db.py and fuzz_decisions.py have all four.
TWO_KINDS = ("float8", "int4")
# For programs of which others of their kind are compared with both: a wrong read is worst with the coarser one.
ONE_KIND = ("int4",)
# The largest error of a value, from the docstrings of the hooks in aot_hooks/library: relative to the value for
# float8 and cast, to the largest value of its block for int8 (1/250) and int4 (1/14 and 2**-4 of it), rounded up.
ROUNDOFF = {"float8": 2.0**-4, "int8": 2.0**-7, "int4": 2.0**-3, "cast": 2.0**-8}
# A gradient much smaller than the largest of the program is compared with this share of the largest one's norm.
SMALLEST_SHARE = 2.0**-7
# Gradients of zeros are compared with this norm, the smallest normal number of float32, so that errors stay finite:
# "not finite" is a gradient that is not. Example: a softmax of numbers that are 10,000 apart.
SMALLEST_NORM = 2.0**-126

# A finite number above this share of the largest one is the sum of terms of which some may be beyond it when rounded.
NEAR_OVERFLOW = 2.0**-3


@dataclass(frozen=True)
class Verdict:
    """How a gradient came out under one hook.

    Attributes:
        hook: its name in `HOOKS`.
        error: of the compiled gradients, the largest over the inputs; infinite if one is not finite where it should be.
        eager_error: the same in eager mode. Elements that are not finite there count as zeros.
        eager_is_finite: whether eager mode's gradients are finite wherever they are without hooks.
        bound: what `error` may be.
        packed_count: saved tensors that the hook packed in the compiled graphs.
        reason: why there is no error to compare; "" if there is.
    """

    hook: str
    error: float
    eager_error: float
    eager_is_finite: bool
    bound: float
    packed_count: int
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.kind in ("ok", EAGER_LOST)

    @property
    def kind(self) -> str:
        """The failure in a few words; "ok" if it is none. `EAGER_LOST` is no failure."""
        if self.reason:
            return "raises"
        if not math.isfinite(self.error):
            return "not finite"
        if self.error <= self.bound:
            return "ok"
        if not self.eager_is_finite or self.eager_error >= 1:
            return EAGER_LOST
        return "worse, eager exact" if self.eager_error == 0 else "worse"

    def __str__(self) -> str:
        if self.reason:
            return f"{self.hook}: {self.reason}"
        return (
            f"{self.hook}: {self.kind}: error {self.error:.4g}, eager mode {self.eager_error:.4g}, at most "
            f"{self.bound:.4g}; {self.packed_count} packed"
        )


Grads = list["torch.Tensor | None"]


def compare(
    fn: Callable[..., torch.Tensor],
    inputs: Sequence[object],
    wrt: Sequence[torch.Tensor],
    hooks: Sequence[str] = tuple(HOOKS),
    *,
    inner: str = "aten",
    fullgraph: bool = False,
    reset: bool = True,
) -> tuple[list[Verdict], float]:
    """Verdicts on the scalar `fn(*inputs)` and its gradients with regard to `wrt`, one a hook, and the relative
    difference between compiled and eager gradients without hooks."""
    if reset:
        torch._dynamo.reset()
    compiled = torch.compile(fn, backend="aot_hooks", options={"inner": inner}, fullgraph=fullgraph)
    found, without_hooks = _compare_once(fn, compiled, inputs, wrt, hooks)
    unsure = [v.hook for v in found if not v.ok and not v.reason and math.isfinite(v.error)]
    if unsure:
        rows = [_compare_once(fn, compiled, *_nearby(inputs, wrt, seed), unsure)[0] for seed in range(REPEATS)]
        again = {name: [v for row in rows for v in row if v.hook == name] for name in unsure}
        found = [_median([v, *again.get(v.hook, ())]) for v in found]
    return found, without_hooks


def _nearby(
    inputs: Sequence[object], wrt: Sequence[torch.Tensor], seed: int
) -> tuple[list[object], list[torch.Tensor]]:
    """`inputs` and `wrt` with each number off by about one in 64, so that other numbers are rounded up and down."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, torch.Tensor] = {}

    def near(x: object) -> object:
        if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point or x.layout is not torch.strided:
            return x
        if id(x) not in made:
            noise = torch.randn(x.shape, generator=generator).to(x.dtype)
            made[id(x)] = (x.detach() * (1 + noise / 64)).requires_grad_(x.requires_grad)
        return made[id(x)]

    others = [near(x) for x in inputs]
    return others, [made.get(id(x), x) for x in wrt]


def _median(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict of several for a hook: the medians of its errors.

    Both errors are those of one rounding among many. Where gradients cancel, their ratio is a matter of luck.
    """
    if len(verdicts) == 1:
        return verdicts[0]
    error, eager_error = (statistics.median(getattr(v, e) for v in verdicts) for e in ("error", "eager_error"))
    error = max(error, *(math.inf if math.isinf(v.error) else 0.0 for v in verdicts))
    return dataclasses.replace(
        verdicts[0],
        error=error,
        eager_error=eager_error,
        eager_is_finite=all(v.eager_is_finite for v in verdicts),
        bound=FACTOR * eager_error + ROUNDOFF[verdicts[0].hook],
    )


def _compare_once(
    fn: Callable[..., torch.Tensor],
    compiled: Callable[..., torch.Tensor],
    inputs: Sequence[object],
    wrt: Sequence[torch.Tensor],
    hooks: Sequence[str],
) -> tuple[list[Verdict], float]:
    eager = gradients(fn, inputs, wrt)
    exact = gradients(compiled, inputs, wrt)
    found = []
    for name in hooks:
        hook = HOOKS[name]
        try:
            eagerly = gradients(fn, inputs, wrt, dataclasses.replace(hook, lossy=False))
            error = relative_error(gradients(compiled, inputs, wrt, hook), exact)
        except Exception as e:
            reason = f"{type(e).__name__}: {str(e).strip()[:300]}"
            found.append(Verdict(name, math.inf, math.inf, True, 0.0, 0, reason))
            continue
        packed = sum(d.hook == hook for plan in aot_hooks.last_plans(compiled) for d in plan.decisions)
        finite = math.isfinite(relative_error(eagerly, eager))
        eager_error = relative_error([None if g is None else g.nan_to_num(0.0, 0.0, 0.0) for g in eagerly], eager)
        found.append(Verdict(name, error, eager_error, finite, FACTOR * eager_error + ROUNDOFF[name], packed))
    return found, relative_error(exact, eager)


def gradients(
    fn: Callable[..., torch.Tensor],
    inputs: Sequence[object],
    wrt: Sequence[torch.Tensor],
    hook: aot_hooks.Hook | None = None,
) -> Grads:
    """Of `fn(*inputs)`, under `hook`; random numbers are the same at each call."""
    torch.manual_seed(0)
    with aot_hooks.saved_tensors_hooks(hook, scope="donated") if hook is not None else contextlib.nullcontext():
        loss = fn(*inputs)
    return list(torch.autograd.grad(loss, wrt, allow_unused=True))


def relative_error(found: Grads, expected: Grads) -> float:
    """The largest of the gradients' |found - expected| / |expected|, where `expected` is finite; infinite if `found` is
    not finite there, or if only one of them has a gradient. A number near the largest of its dtype isn't compared."""
    pairs = []
    for f, e in zip(found, expected, strict=True):
        if (f is None) != (e is None):
            return math.inf
        if f is None or e is None:
            continue
        finite = e.abs() < torch.finfo(e.dtype).max * NEAR_OVERFLOW
        f, e = f[finite].double(), e[finite].double()
        if not f.isfinite().all():
            return math.inf
        pairs.append(((f - e).norm().item(), e.norm().item()))
    smallest = max(SMALLEST_NORM, SMALLEST_SHARE * max((norm for _, norm in pairs), default=0.0))
    return max((d / max(norm, smallest) for d, norm in pairs), default=0.0)


def total_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """|found - expected| / |expected| of all gradients together, as if they were one vector."""
    off = sum(float((f.double() - e.double()).square().sum()) for f, e in zip(found, expected, strict=True))
    return (off / sum(float(e.double().square().sum()) for e in expected)) ** 0.5


def format_failures(verdicts: Sequence[Verdict]) -> str:
    """One line for each verdict that isn't ok."""
    return "\n".join(f"  {v}" for v in verdicts if not v.ok)
