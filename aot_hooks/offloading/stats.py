"""What `offload` has sent and fetched, and its host memory."""

from __future__ import annotations

from . import at_run_time, transfers
from .copies import pool


def offload_stats() -> dict[str, int]:
    """Counts since the last `aot_hooks.reset()`, and the host memory in use.

    Tensors and bytes sent to the host, fetched back, and kept on the device because the host had no room. Of the pool:
    bytes now, at most, and leased now; blocks now, and blocks allocated. Of the last step of several graphs that had a
    plan: the calls of graphs, and the bytes that they could send and did send.
    """
    last = [each.last for each in at_run_time.all_followers() if each.last is not None]
    step = ("graph_count", "nbytes", "sent_bytes")
    tensors = [f"{what}_{unit}" for what in ("sent", "fetched", "kept_on_device") for unit in ("count", "bytes")]
    return {name: transfers.counts[name] for name in tensors} | {
        "host_bytes": pool.total_bytes,
        "host_peak_bytes": pool.peak_bytes,
        "host_leased_bytes": pool.leased_bytes,
        "host_blocks": pool.block_count,
        "host_blocks_made": pool.made_count,
        **{f"step_{name.replace('nbytes', 'bytes')}": sum(getattr(plan, name) for plan in last) for name in step},
    }


def reset() -> None:
    """Free unused host memory and reset the counts. Memory that tensors wait in is freed when they are."""
    pool.reset()
    transfers.counts.clear()
    for each in at_run_time.all_followers():
        each.forget()
