"""`need(path)` looks up a private symbol of torch, see `cudagraph/torch_private/symbols.py`."""

from __future__ import annotations

from cudagraph.torch_private import symbols

from ..errors import UnsupportedTorchError

symbols.errors["aot_hooks"] = UnsupportedTorchError
need = symbols.need
