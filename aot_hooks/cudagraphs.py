"""options["cudagraphs"]: compiled graphs go to the `cudagraph` package.

    AOTAutograd's graphs, hooks inlined --Compilation--> captured whole, or in parts around what can't be

What hooks pack is classified value by value: parameters that are saved stay where they are, activations lie where the
tree put them, and what `offload` sent lies in pinned memory, which its operators alone touch: they are declared, so
that a graph whose only tensors on the CPU are theirs is captured whole.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import OptionError
from .offloading import transfers

if TYPE_CHECKING:
    from cudagraph import Options
    from cudagraph.backend import Compilation

__all__ = ["capture_options", "compilation", "forget"]

_OPERATORS = (transfers.offload_start, transfers.offload_wait, transfers.reload_start, transfers.reload_wait)


def capture_options(inner: str, said: bool | Mapping[str, Any]) -> Options | None:
    """The options of `cudagraph` that `options["cudagraphs"]` asks for; None if it asks for no graphs.

    Raises `OptionError` for what `cudagraph` does not know.
    """
    if isinstance(said, Mapping) and "inner" in said:
        raise OptionError("options['cudagraphs'] takes no 'inner': options['inner'] says it")
    if said is False:
        return None
    import cudagraph

    try:
        return cudagraph.Options.parse({**(said if isinstance(said, Mapping) else {}), "inner": inner})
    except cudagraph.OptionError as e:
        raise OptionError(f"options['cudagraphs']: {e}") from e


def compilation(options: Options) -> Compilation:
    """The compilers of `cudagraph` for the graphs that one graph of Dynamo becomes."""
    import cudagraph
    from cudagraph.backend import Compilation

    for operator in _OPERATORS:
        cudagraph.register_host_operator(operator)
    transfers.capture_under_way = cudagraph.capturing
    return Compilation(options)


def forget() -> None:
    """Forget recordings: they write to host memory that is about to be given back."""
    if "cudagraph" in sys.modules:
        sys.modules["cudagraph"].reset()
