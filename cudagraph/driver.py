"""Between the tree and the device: what records and replays.

tree -> CaptureDriver -+- CUDA's allocator, streams, graphs
                       +- a simulator of them on the CPU, in the tests
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["CaptureDriver"]


class CaptureDriver(Protocol):
    """What a tree needs of a device.

    Attributes:
        device_type: of the devices that it captures for, such as "cuda".
    """

    device_type: str
