"""What the package raises: `CudaGraphError` and its children.

A message says what was expected, what came, where in the user's code, and the way out. The package stands alone:
nothing here comes from `aot_hooks`.
"""

from __future__ import annotations

__all__ = [
    "CudaGraphError",
    "NotCapturableError",
    "OptionError",
    "StaleOutputError",
    "UnsupportedTorchError",
]


class CudaGraphError(Exception):
    """Base of all errors of this package."""


class OptionError(CudaGraphError, ValueError):
    """An unknown or ill-typed option."""


class NotCapturableError(CudaGraphError, RuntimeError):
    """`or_error` is set and something would have run without a CUDA graph."""


class StaleOutputError(CudaGraphError, RuntimeError):
    """A tensor was handed to a graph whose memory had been reused since it was an output.

    A read by an ordinary operator raises a `RuntimeError` with the same text: torch makes that one.
    """


class UnsupportedTorchError(CudaGraphError, RuntimeError):
    """This torch lacks a symbol the package stands on."""
