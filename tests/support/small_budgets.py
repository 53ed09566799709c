"""`aot_hooks.budget` for models of tests, whose steps take less than 1 MiB, the least that a bare number may be."""

from __future__ import annotations

from typing import Any

import aot_hooks


def budget(peak: Any = None, **arguments: Any) -> Any:
    """`aot_hooks.budget(peak, **arguments)`; a whole number of bytes may be as small as the test likes."""
    return aot_hooks.budget(f"{peak}B" if type(peak) is int else peak, **arguments)
