"""Counts what happened since the last reset: warm up, record, replay, ... --add--> one dict; `stats()` copies it."""

from __future__ import annotations

COUNTERS = "warmups recordings rerecordings replays copies skips given_up partitions held_outputs".split()
counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)


def add(name: str, count: int = 1) -> None:
    """Count `count` more of `name`, one of `COUNTERS`."""
    counts[name] += count


def clear() -> None:
    counts.update(dict.fromkeys(COUNTERS, 0))


def stats() -> dict[str, int]:
    """How often each thing happened since `reset()`.

    warmups: uncaptured runs before a recording; recordings: captures; rerecordings: those of them for addresses that
    moved; replays: launches of a captured graph; copies: inputs copied to a graph's memory, and outputs copied out of
    it; skips: runs without a graph for a reason; given_up: compiled functions that run without graphs from then on,
    because their parameters move in each step; partitions: graphs cut into pieces; held_outputs: outputs that were
    held when their memory was reused.
    """
    return dict(counts)
