"""The part of a report about `offload`: which tensors are copied, when, and which stay because compute is too short.

Times are estimates, in milliseconds from the start of the tensor's own forward and backward graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..offloading.schedule import Transfer


def transfer_lines(transfers: Sequence[Transfer], size: int, unit: str) -> list[str]:
    """The lines; none if no tensor has an `offload` hook. `size` bytes are one `unit`."""
    if not transfers:
        return []
    sent = [t for t in transfers if t.placement.offloaded]
    all_bytes, sent_bytes = (sum(t.nbytes for t in some) for some in (transfers, sent))
    # the devices of a graph share its steps, each with its own rates
    compute = sum({t.graph: t.forward_ms + t.backward_ms for t in reversed(transfers)}.values())
    all_stall = sum({(t.graph, t.device): t.full_stall_ms for t in transfers}.values())
    stall = sum(t.placement.stall_ms for t in sent)
    lines = [
        f"offload: {sent_bytes / size:.2f} of {all_bytes / size:.2f} {unit} go to the host; predicted stall "
        f"{stall:.1f} ms of a step of {compute:.1f} ms"
    ]
    if all_stall > stall:
        lines.append(
            f"  the compute is too short for the rest: all that is worth sending would stall it {all_stall:.1f} ms"
        )
    lines += _stalls_together(sent)
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


def _stalls_together(sent: Sequence[Transfer]) -> list[str]:
    """A line for each `max_stall_ms` that several graphs exceed together: it limits each graph and device alone."""
    lines = []
    for limit in dict.fromkeys(t.max_stall_ms for t in sent):
        own = [t for t in sent if t.max_stall_ms == limit]
        count, stall = len({(t.graph, t.device) for t in own}), sum(t.placement.stall_ms for t in own)
        if stall > limit and count > 1:
            text = f"  max_stall_ms={limit:g} holds for each graph and device alone: together {count} of them stall "
            lines.append(f"{text}{stall:.1f} ms")
    return lines


def transfers_as_data(transfers: Sequence[Transfer]) -> list[dict[str, Any]]:
    """A dict for each transfer; the fields of its placement stand in the same dict."""
    rows = []
    for t in transfers:
        row = asdict(t)
        placement = row.pop("placement")
        # `row` again: its names of nodes replace the numbers of gaps, which say less
        rows.append(row | placement | {"slack_ms": t.placement.slack_ms} | row)
    return rows
