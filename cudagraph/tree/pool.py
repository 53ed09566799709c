"""The memory pool of one tree, which all its recordings share."""

from __future__ import annotations

import torch

from .capture import Owner
from .driver import CaptureDriver, Pool

__all__ = ["SharedPool"]


class SharedPool:
    """A pool that the first recording opens.

    Attributes:
        owner: lives as long as the recordings in the pool; see capture.py.
        broken: somebody keeps memory of the pool that should be free, so nothing more is recorded in it.
    """

    def __init__(self, driver: CaptureDriver, device: torch.device) -> None:
        self.driver = driver
        self.device = device
        self.owner = Owner()
        self.broken = False
        self._opened: Pool | None = None

    @property
    def opened(self) -> Pool:
        if self._opened is None:
            self._opened = self.driver.open_pool(self.device)
        return self._opened

    def release(self) -> None:
        """Give the memory back: no recording is left. The next one opens a new pool."""
        if self._opened is not None:
            self._opened.release()
            self._opened = None
        self.owner = Owner()
