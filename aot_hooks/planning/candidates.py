"""The ways that a user can type, as candidates of a budget: a budget must not be slower than one of them.

      what is computed again    nothing | pointwise results, as with `recompute_pointwise` | all but inputs of blocks
      how the rest is stored    as it is | lossless, float8, int8, int4 | on the host, as it is or in such a form
                 |
                 +--> can it be under the peak, and faster than what was found? --> rewritten, and judged as any plan is

The question is answered by numbers of the step, which are bounds, nearly. So only few ways are put into graphs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..hook import KEEP, Hook
from ..library.float8 import float8
from ..library.integer import int4, int8
from ..library.lossless import lossless
from ..offloading.hook import offload, settings_of
from .options import error_of
from .step import KEPT, Option, Step

POINTWISE, BLOCKS = "recompute_pointwise", "blocks computed again"  # what is computed again; "": nothing

# The share of the time by which a way must be able to beat what was found, to be tried. Predictions of times differ by
# more than that from one partition to another.
GAIN = 0.002
# By this share the graphs of a way may take less than the bound: kernels then reuse memory that they don't without
# hooks (0.011 was seen, of int8 in a small network on a CPU), and a result is saved in place of terms (0.018).
_LESS = 0.05
_MASKS = "lossless()"


class Way(NamedTuple):
    """A way that a user can type.

    Attributes:
        again: what is computed again: "", `POINTWISE` or `BLOCKS`.
        name: of the options of a `Step` that store values like it does; "" if it keeps them.
        rule: the hook or policy.
    """

    again: str
    name: str
    rule: Any

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.name, self.again)))


def ways(allow: Sequence[Any], max_error: float) -> dict[str, list[Way]]:
    """The ways that `allow` has the means for, by what they compute again."""
    rounded = {"float8()": float8(), "int8()": int8(), "int4()": int4()}
    rounded = {name: hook for name, hook in rounded.items() if name[:-2] in allow}
    rounded |= {repr(means): means for means in allow if isinstance(means, Hook)}
    rounded = {name: hook for name, hook in rounded.items() if error_of(hook) <= max_error}
    hooks: dict[str, Any] = {"": KEEP}
    hooks |= {"lossless()": lossless()} if "lossless" in allow else {}
    hooks |= rounded
    sent = {"offload()": offload()} if "offload" in allow else {}
    if sent:
        forms = {name: hook for name, hook in rounded.items() if settings_of(hook) is None}
        hooks |= sent | {f"offload(then={name})": offload(then=hook) for name, hook in forms.items()}
    found = {"": [Way("", name, rule) for name, rule in hooks.items() if name]}
    if "recompute" in allow:
        found[POINTWISE] = [Way(POINTWISE, name, rule) for name, rule in hooks.items()]
        found[BLOCKS] = [Way(BLOCKS, name, rule) for name, rule in ({"": KEEP} | sent).items()]
    return found


def promising(own: Step, found: Sequence[Way], peak: float, most_ms: float) -> Iterator[Way]:
    """Those of `found` that may be under `peak` and take less than `most_ms`, the fastest first.

    `own`: the step of graphs that compute again what these ways compute again, with options for all other means.
    """
    bounds = {way: _bounds(own, way.name) for way in found}
    able = [way for way in found if bounds[way][0] < most_ms and (1 - _LESS) * bounds[way][1] <= peak]
    yield from sorted(able, key=lambda way: bounds[way][0])


def _bounds(own: Step, name: str) -> tuple[float, int]:
    """The least that a step can take whose values are all stored by the options `name`: milliseconds, and bytes.

    Copies to the host may wait, and less may be sent. Both takes bytes, and neither saves time. Hooks that round store
    masks as `lossless()` does. They may pack a part of a storage, which no option does: queries, keys and values of one
    projection. So a value without options counts as gone.
    """
    rounds = name not in ("", _MASKS, "offload()")
    change = [0] * (len(own.live) + 1)
    chosen: list[Option] = []
    for value in own.values:
        options = {o.name: o for o in value.options}
        option = options.get(name) or (options.get(_MASKS, KEPT) if name else KEPT)
        end = value.last + 1 if option.in_registers else value.first
        if option is not KEPT and value.saved and end > value.gone:
            chosen.append(option)
            change[value.gone] += option.packed_bytes - value.nbytes
            change[end] -= option.packed_bytes - value.nbytes
        elif rounds and value.saved and not value.options and value.first > value.gone:
            change[value.gone] -= value.nbytes
            change[value.first] += value.nbytes
    live = [nbytes + more for nbytes, more in zip(own.live, itertools.accumulate(change), strict=False)]
    # a hook may send less than all: then it packs less, too
    ms = own.ms if any(option.link_bytes for option in chosen) else own.ms_with(chosen)
    return ms, own.bytes_of(live).peak(own.moments)
