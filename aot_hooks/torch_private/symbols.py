"""`needing(SYMBOLS)` returns `need(path)`, which looks up a private symbol of torch that the file's table lists.

The tables are described in `cudagraph/torch_private/symbols.py`. Functions of `cudagraph.torch_private` that both
packages call take a parameter `need`, so that each package raises its own error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudagraph.torch_private import symbols
from cudagraph.torch_private.symbols import Symbols

from ..errors import UnsupportedTorchError

__all__ = ["needing"]


def needing(table: Symbols) -> Callable[[str], Any]:
    return symbols.needing(table, "aot_hooks", UnsupportedTorchError)
