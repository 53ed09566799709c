"""The bytes of one call with a plan, and that plan with the bytes of the other calls of its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..passes.live_bytes import LivePoint
from ..passes.plan import InStep, Plan
from .step import ALONE, Bytes, Moment


def bytes_of(points: Sequence[LivePoint]) -> Bytes:
    """The bytes of a call with the live bytes of `points`."""
    return Bytes.of(*([p.live_bytes for p in points if p.phase == phase] for phase in ("forward", "backward")))


def own_bytes(plan: Plan) -> Bytes:
    """The bytes of a call with `plan`, without those of others beside it, see `in_step`."""
    found = bytes_of(plan.live_after)
    if (share := plan.in_step) is None:
        return found
    return Bytes(found.forward - share.beside_forward, share.held_bytes, found.backward - share.beside_backward)


def in_step(plan: Plan, moments: Sequence[Moment], held: int | None = None) -> Plan:
    """`plan` with the bytes of the other calls of its step, if there are any.

    `held`: what each call holds, if its live bytes don't say it.
    """
    if moments == ALONE:
        return plan

    def bytes_of_call(points: Sequence[LivePoint]) -> Bytes:
        own = bytes_of(points)
        return own if held is None else own._replace(held=min(held, own.held))

    def shifted(points: Sequence[LivePoint]) -> tuple[LivePoint, ...]:
        own = bytes_of_call(points)
        beside = {phase: own.beside(moments, phase) for phase in ("forward", "backward")}
        return tuple(replace(p, live_bytes=p.live_bytes + beside[p.phase]) for p in points)

    own, running = bytes_of_call(plan.live_after), [m for m in moments if m.phase]
    share = InStep(
        1 + max(m.calls for m in running),
        own.held,
        max(m.nbytes for m in moments),
        own.beside(moments, "forward"),
        own.beside(moments, "backward"),
        own.beside(moments, ""),
    )
    before, after = shifted(plan.live_before), shifted(plan.live_after)
    return replace(plan, live_before=before, live_after=after, in_step=share)
