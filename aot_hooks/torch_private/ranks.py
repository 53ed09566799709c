"""What the ranks of a job have in common: the store through which they met. No rank waits for another, or not for long.

    rank 0 measures 50.1 GB/s --agreed--> 50.1      the first to come says it
    rank 1 measures 51.4 GB/s --agreed--> 50.1      the others take it over

The store of the default group has no public name (2.11 to 2.15).
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from .symbols import need

_PREFIX = "aot_hooks: "


def agreed(name: str, value: str) -> str:
    """The value that the first rank of the job gave for `name`; `value` if this rank is the first, or the only one.

    Ranks that plan one program must plan from the same numbers: one that sends other tensors than the rest stalls
    where they do not, and each exchange makes all of them wait for it. No rank waits here, so it may be called by some
    ranks only, and in any order.
    """
    if (store := _store()) is None:
        return value
    try:
        # an empty value would count as none
        return bytes(store.compare_set(_PREFIX + name, "", f"={value}")).decode().removeprefix("=")
    except RuntimeError:  # a store that can't, such as torch's fake one, or whose host is gone
        return value


def meet(name: str, most_s: float) -> bool:
    """Whether all ranks of this host come here with `name`. Waits for them for `most_s` seconds at most.

    torchrun says how many there are. Where it does not, all ranks count as those of one host.
    """
    if (store := _store()) is None:
        return False
    host, count = os.environ.get("GROUP_RANK", "0"), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    key, end = f"{_PREFIX}{name} on host {host}", time.monotonic() + most_s
    try:
        here = store.add(key, 1)
        while here < count and time.monotonic() < end:
            time.sleep(1e-3)
            here = store.add(key, 0)
    except RuntimeError:  # as in `agreed`
        return False
    return bool(here >= count > 1)


def _store() -> Any:
    """The store of the default group; None for a process alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return need("torch.distributed.distributed_c10d._get_default_store")()
