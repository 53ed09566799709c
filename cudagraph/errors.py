"""The errors of this package. A message says what was expected, what came, where, and the way out."""

from __future__ import annotations

# The end of a reason against a capture, found in the graph (graph/analyse.py) or during the capture (tree/record.py).
REBINDS = "other memory or another shape, which a replay would not"


class CudaGraphError(Exception):
    """Base of all errors of this package."""


class OptionError(CudaGraphError, ValueError):
    """An unknown or ill-typed option."""


class NotCapturableError(CudaGraphError, RuntimeError):
    """`or_error` is set and something would have run without a CUDA graph."""


class StaleOutputError(CudaGraphError, RuntimeError):
    """A graph was called with an earlier output whose memory has been reused since.

    A read by an ordinary operator raises a `RuntimeError` with the same text: torch makes that one.
    """


class RanksError(CudaGraphError, RuntimeError):
    """Processes that run a step together could not agree how: one of them is gone, or takes fewer steps."""


class UnsupportedTorchError(CudaGraphError, RuntimeError):
    """This torch lacks a symbol that the package needs."""
