"""Whether what a step calls may still change: code is compiled, or plans are tried.

    unsettled_counts --> sum before a call, sum after it --> another call before the step is recorded, if they differ

A replay would repeat the first attempt for ever.
"""

from __future__ import annotations

from collections.abc import Callable

from .torch_private.compilers import compiled_count

# Functions that return a larger number after each call in which something was not as it will stay.
unsettled_counts: list[Callable[[], int]] = [compiled_count]


def unsettled_count() -> int:
    return sum(count() for count in unsettled_counts)
