"""Copies of offload on the CPU as late as a device may make them, at the wait; and a log of their steps.

A value that was let go too soon shows if the copy is made as late as it may be.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from aot_hooks.offloading import copies

at_wait = False  # on the CPU, copy at the wait, not at the start
log: list[str] | None = None  # if a list, gets every step: "start", "wait", "reload", "use"

_begin, _join = copies.begin, copies.join
_out: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # of started copies, whether to the host


def begin(pairs: Any, device: torch.device, **named: Any) -> Any:
    late = at_wait and device.type != "cuda"
    begun = [copies.Copy(*pair) for pair in pairs] if late else _begin(pairs, device, **named)
    _out.update(dict.fromkeys(begun, named["out"]))
    if log is not None:
        log.extend(["start" if named["out"] else "reload"] * len(begun))
    return begun


def join(copy: Any) -> None:
    _join(copy)
    if copy not in _out:
        return  # it stays on the device
    if at_wait and copy.event is None:
        copy.target.data.copy_(copy.source)  # a device writes without a new version, too
    if log is not None:
        log.append("wait" if _out[copy] else "use")


copies.begin, copies.join = begin, join
