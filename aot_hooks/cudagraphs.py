"""options["cudagraphs"]: compiled graphs go to the `cudagraph` package.

    AOTAutograd's graphs, hooks inlined --Compilation--> captured whole, or in parts around what can't be

Each saved value has its place: a parameter stays at its address, an activation is in the memory of the CUDA graph tree,
a tensor that `offload` sent is in pinned host memory. Only the operators of `offload` touch that memory. `cudagraph`
knows them as host operators, so it captures a graph whole whose only CPU tensors are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cudagraph
from cudagraph.compile.compilation import Compilation

from .errors import OptionError
from .offloading import transfers


def capture_options(inner: str, option: bool | Mapping[str, Any]) -> cudagraph.Options | None:
    """The options of `cudagraph` for the value of `options["cudagraphs"]`; None if that is False.

    Raises `OptionError` for an option that `cudagraph` does not know.
    """
    if isinstance(option, Mapping) and "inner" in option:
        raise OptionError("options['cudagraphs'] takes no 'inner': options['inner'] says it")
    if option is False:
        return None
    try:
        return cudagraph.Options.parse({**(option if isinstance(option, Mapping) else {}), "inner": inner})
    except cudagraph.OptionError as e:
        raise OptionError(f"options['cudagraphs']: {e}") from e


def compilation(options: cudagraph.Options) -> Compilation:
    """The compilers of `cudagraph` for the graphs that one graph of Dynamo becomes."""
    for operator in transfers.COPIES:
        cudagraph.register_host_operator(operator)
    transfers.capture_under_way = cudagraph.capturing
    return Compilation(options)


def forget() -> None:
    """Forget recordings: they write to host memory that is about to be freed."""
    cudagraph.reset()
