"""The backend that `torch.compile(f, backend="cudagraph_tree")` finds by entry point.

    gm, inputs --> compile/: AOTAutograd or Inductor, its graphs captured --> callable for Dynamo

Without a CUDA device the graphs run uncaptured, and one line in the log says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from .compile import entry
from .compile.compilation import Compilation
from .errors import OptionError
from .graph import analyse
from .graph.snapshots import partition
from .options import Options
from .step import whole
from .torch_private import compilers
from .tree import dispatch
from .tree.driver import CaptureDriver, cuda_driver


def cudagraph_tree(
    gm: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile `gm` so that it is replayed as CUDA graphs.

    Args:
        gm, inputs: a backend's arguments from Dynamo.
        mode: for Inductor, as in `torch.compile(mode=...)`.
        options: see `Options`.

    Raises:
        OptionError: an unknown option or mode.
        NotCapturableError: with `options["or_error"]`, where something would run without a graph; Dynamo wraps it.
    """
    return compile_graph(gm, inputs, mode, Options.parse(options), cuda_driver())


def reset() -> None:
    """Free all recordings and their memory, and forget which warnings were logged; compiled functions record again."""
    whole.reset()
    dispatch.reset()
    analyse.reported.clear()


cudagraph_tree.reset = reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def compile_graph(
    gm: GraphModule, inputs: Sequence[Any], mode: str | None, options: Options, driver: CaptureDriver
) -> Callable[..., Any]:
    compilation = Compilation(options, driver)
    if options.inner == "aten":
        to_aten = compilation.aten_compilers()
        compiled = compilers.compile_aten(gm, inputs, partition=partition, **to_aten)
    else:
        try:
            patches = compilers.mode_options(mode)
        except RuntimeError as e:
            raise OptionError(f"mode={mode!r}: {e}") from e
        if compilers.custom_partitioner(patches) is None:
            patches |= compilers.partitioned_by(partition, f"cudagraph {entry.sources()}")
        with compilation.through_cache(gm):
            compiled = compilers.compile_inductor(gm, inputs, compilation.inner_compile(), patches)
    return shortcut(compiled, compilation.inference, inputs)


def shortcut(compiled: Callable[..., Any], captured: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A callable that tries `captured.replay` first and calls `compiled` where that gives None.

    `compiled` is AOTAutograd's runtime around the inference graph `captured`. It is returned unchanged if that runtime
    does more than pass values on, or if the graph is not captured whole.
    """
    if not hasattr(captured, "replay") or len(captured.piece.placeholders) != len(inputs):
        return compiled
    if not compilers.runtime_only_passes_on(inputs):
        return compiled
    replay = captured.replay

    @functools.wraps(compiled)
    def call(*arguments: Any) -> Any:
        inputs_list = list(arguments)
        outputs = replay(inputs_list)
        return compiled(*inputs_list) if outputs is None else outputs

    return call
