"""What happened since the last reset, as plain numbers: data that `stats()` copies out.

warm up, record, replay, copy, skip, partition --add--> one dict
"""

from __future__ import annotations

__all__ = ["COUNTERS", "add", "clear", "stats"]

COUNTERS = ("warmups", "recordings", "rerecordings", "replays", "copies", "skips", "partitions", "held_outputs")

counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)


def add(name: str, count: int = 1) -> None:
    """Count `count` more of `name`, one of `COUNTERS`."""
    counts[name] += count


def clear() -> None:
    for name in COUNTERS:
        counts[name] = 0


def stats() -> dict[str, int]:
    """How often each thing happened since `reset()`.

    warmups: runs as they are, before a recording; recordings: captures, of which rerecordings for addresses that
    moved; replays: launches of a captured graph; copies: inputs copied to where a graph reads them; skips: runs
    without a graph for a reason; partitions: graphs cut into pieces; held_outputs: outputs held when their memory was
    reused.
    """
    return dict(counts)
