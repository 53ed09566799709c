"""`need(path)` looks up a private symbol of torch, see `cudagraph/torch_private/symbols.py`.

Functions of `cudagraph.torch_private` that both packages call take `need`, so that each package raises its own error.
"""

from __future__ import annotations

from cudagraph.torch_private import symbols

from ..errors import UnsupportedTorchError

need = symbols.needing("aot_hooks", UnsupportedTorchError)
