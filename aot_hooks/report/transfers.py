"""The part of a report that tells of `offload`: what is copied, when, and what does not fit beside the compute.

      Transfers --transfer_lines--> text, one line a tensor that is sent, one line a reason why others stay
                --transfers_as_data--> numbers and strings

Times are estimates, in milliseconds from the begin of the tensor's own forward and backward graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..offloading.schedule import Transfer

__all__ = ["transfer_lines", "transfers_as_data"]


def transfer_lines(transfers: Sequence[Transfer], size: int, unit: str) -> list[str]:
    """Nothing if `offload` was not asked for any tensor; `size` bytes are one `unit`."""
    if not transfers:
        return []
    sent = [t for t in transfers if t.placement.offloaded]
    asked_bytes, sent_bytes = (sum(t.nbytes for t in some) for some in (transfers, sent))
    # the devices of a graph see the same steps, each with its own rates
    compute = sum({t.graph: t.forward_ms + t.backward_ms for t in reversed(transfers)}.values())
    all_stall = sum({(t.graph, t.device): t.full_stall_ms for t in transfers}.values())
    stall = sum(t.placement.stall_ms for t in sent)
    lines = [
        f"offload: {sent_bytes / size:.2f} of {asked_bytes / size:.2f} {unit} go to the host; predicted stall "
        f"{stall:.1f} ms of a step of {compute:.1f} ms"
    ]
    if all_stall > stall:
        lines.append(
            f"  the compute is too short for the rest: all that is worth sending would stall it {all_stall:.1f} ms"
        )
    lines += _several_graphs(sent)
    if sent:
        lines.append(f"{unit:>10}  forward: start    wait  backward: reload     use   slack   stall ms  tensor")
    for t in sent:
        p = t.placement
        lines.append(
            f"{t.nbytes / size:10.3f}  {p.start_ms:14.1f} {p.wait_ms:7.1f} {p.reload_ms:17.1f} {p.use_ms:7.1f} "
            f"{p.slack_ms:7.1f} {p.stall_ms:10.1f}  {t.name}"
        )
    stays: dict[str, list[int]] = defaultdict(list)
    for t in transfers:
        if not t.placement.offloaded:
            stays[t.placement.reason].append(t.nbytes)
    lines += [f"{sum(sizes) / size:10.3f}  in {len(sizes)} stays: {reason}" for reason, sizes in stays.items()]
    return lines


def _several_graphs(sent: Sequence[Transfer]) -> list[str]:
    """Where a limit holds for each graph and device, the sum may be over it."""
    stalls: dict[float, dict[tuple[int, str], float]] = defaultdict(lambda: defaultdict(float))
    for t in sent:
        stalls[t.max_stall_ms][t.graph, t.device] += t.placement.stall_ms
    return [
        f"  max_stall_ms={limit:g} holds for each graph and device alone: together {len(of)} of them stall "
        f"{sum(of.values()):.1f} ms"
        for limit, of in stalls.items()
        if sum(of.values()) > limit and len(of) > 1
    ]


def transfers_as_data(transfers: Sequence[Transfer]) -> list[dict[str, Any]]:
    """One dict a transfer, its placement taken apart."""
    rows = []
    for t in transfers:
        row = asdict(t)
        row |= row.pop("placement") | {"slack_ms": t.placement.slack_ms}
        # where it stands, by node: the gaps' numbers say less
        row |= {name: getattr(t, name) for name in ("start", "wait", "reload", "use")}
        rows.append(row)
    return rows
