"""Private symbols of torch by their path: `need(path)` returns one, or raises an error that says what needs it.

Each file of this folder lists its symbols, `SYMBOLS = {path: what needs it}`, and makes its own `need` of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import UnsupportedTorchError

__all__ = ["TESTED", "needing", "probe"]

TESTED = ("2.11.0", "2.13.0", "2.15.0")


def _resolve(path: str) -> Any:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            obj = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            obj = getattr(obj, name)
        return obj
    raise ImportError(path)


def probe(symbols: Mapping[str, str]) -> dict[str, bool]:
    """Which private symbols of a table this torch has: `{symbol: present}`."""
    found = {}
    for path in symbols:
        try:
            _resolve(path)
            found[path] = True
        except (ImportError, AttributeError):
            found[path] = False
    return found


def needing(symbols: Mapping[str, str]) -> Callable[[str], Any]:
    """What gives a symbol of the table by its path, or an `UnsupportedTorchError` that names it and what needs it."""

    def need(path: str) -> Any:
        try:
            return _resolve(path)
        except (ImportError, AttributeError):
            raise UnsupportedTorchError(
                f"torch {torch.__version__} has no {path}, which aot_hooks needs for {symbols[path]}; "
                f"tested with torch {', '.join(TESTED)}: install one of them, or report this version"
            ) from None

    return need
