"""`needing(SYMBOLS)` returns `need(path)`, which looks up a private symbol of torch that the file's table lists.

Functions of `cudagraph.torch_private` that both packages call take `need`, so that each package raises its own error.
"""

from __future__ import annotations

import functools

from cudagraph.torch_private import symbols

from ..errors import UnsupportedTorchError

needing = functools.partial(symbols.needing, package="aot_hooks", error=UnsupportedTorchError)
