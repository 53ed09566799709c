"""The bytes of one compiled call, from the plan of its graph, which may have those of the whole step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ..passes.plan import Plan
from .recorded import Version
from .step import Bytes
from .within import bytes_of


def own_bytes(plan: Plan) -> Bytes:
    """The bytes of a call, without those of others beside it."""
    found = bytes_of(plan.live_after)
    if (share := plan.in_step) is None:
        return found
    return Bytes(found.forward - share.beside_forward, share.held_bytes, found.backward - share.beside_backward)


def averaged(loose: Plan, tight: Plan, version: Version, tight_peak: int) -> tuple[Plan, Bytes]:
    """The plan of the loose version with the average time of a call; and the bytes of a call, the held ones averaged.

    `tight_peak`: the most that is alive in the step while one of the tighter calls runs.
    """
    assert version.tight is not None
    own, other, counts = version.nbytes, version.tight.nbytes, (version.loose_calls, version.tight_calls)
    calls = sum(counts)

    def average(*numbers: float) -> float:
        return sum(count * number for count, number in zip(counts, numbers, strict=True)) / calls

    held = math.ceil(average(own.held, other.held))
    share = Bytes(max(own.forward, other.forward), held, max(own.backward, other.backward))
    step = loose.in_step
    if step is not None:
        beside = max(0, step.other_bytes - version.tight_calls * other.held)
        elsewhere = max(step.elsewhere_bytes, tight_peak)
        step = replace(step, calls=calls, other_bytes=beside, elsewhere_bytes=elsewhere, tight_bytes=other.held)
    return replace(loose, after_ms=average(loose.after_ms, tight.after_ms), in_step=step), share


def total(parts: Iterable[Bytes]) -> Bytes:
    return Bytes(*map(sum, zip(*parts, strict=True)))
