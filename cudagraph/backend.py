"""The backend that `torch.compile(f, backend="cudagraph_tree")` finds by entry point.

    gm, inputs --> AOTAutograd --> forward, backward, or inference graph
                                       |
       inner "aten"                    +--> graphs.callable_of: parts of the graph as it is, captured
       inner "inductor"                +--> inductor.inner_compile: Inductor's code, captured

Without a CUDA device the graphs run as they are, and one line in the log says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from .compile import entry, inductor
from .errors import OptionError
from .graph import analyse
from .graph.analyse import Boxed, Kind
from .options import Options
from .torch_private import autograd_cache, compilers
from .tree import dispatch
from .tree.driver import CaptureDriver

__all__ = ["Compilation", "backend_with", "cudagraph_tree", "reset"]

_numbers = itertools.count()


def cudagraph_tree(
    gm: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile `gm` so that it is replayed as CUDA graphs.

    Args:
        gm, inputs: what Dynamo hands a backend.
        mode: passed on to Inductor, as in `torch.compile(mode=...)`.
        options: see `Options`.

    Raises:
        OptionError: an unknown option or mode.
        NotCapturableError: with `options["or_error"]`, where something would run without a graph; Dynamo wraps it.
    """
    return compile_graph(gm, inputs, mode, Options.parse(options), None)


def backend_with(driver: CaptureDriver | None, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The backend with these options, whose graphs are captured by `driver`."""
    parsed = Options.parse(options)

    def cudagraph_tree_with_driver(gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        return compile_graph(gm, inputs, None, parsed, driver)

    return cudagraph_tree_with_driver


def reset() -> None:
    """Give all memory back and forget all recordings and what was logged; compiled functions record again."""
    dispatch.reset()
    analyse.forget_reports()


cudagraph_tree.reset = reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def compile_graph(
    gm: GraphModule, inputs: Sequence[Any], mode: str | None, options: Options, driver: CaptureDriver | None
) -> Callable[..., Any]:
    compilation = Compilation(options, driver)
    if options.inner == "aten":
        compiled = compilers.compile_aten(
            gm, inputs, partition=compilers.min_cut_partition, **compilation.aten_compilers()
        )
        return shortcut(compiled, compilation.inference, inputs)
    try:
        patches = compilers.mode_options(mode)
    except RuntimeError as e:
        raise OptionError(f"mode={mode!r}: {e}") from e
    with compilation.through_cache(gm):
        compiled = compilers.compile_inductor(gm, inputs, compilation.inner_compile(), patches)
        return shortcut(compiled, compilation.inference, inputs)


def shortcut(compiled: Callable[..., Any], captured: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """`compiled`, AOTAutograd's runtime around the inference graph that `captured` replays, where that runtime is all
    that keeps a replay from being called at once; `compiled` itself if it does more, or the graph is not captured
    whole."""
    if not hasattr(captured, "replay") or len(captured.piece.placeholders) != len(inputs):
        return compiled
    if not compilers.runtime_only_passes_on(inputs):
        return compiled
    replay = captured.replay

    @functools.wraps(compiled)
    def call(*arguments: Any) -> Any:
        given = list(arguments)
        outputs = replay(given)
        return compiled(*given) if outputs is None else outputs

    return call


@dataclass(eq=False)
class Compilation:
    """The compilers of the graphs that one graph of Dynamo becomes.

    Also for backends that call AOTAutograd or Inductor themselves: give them `aten_compilers()` or `inner_compile()`.

    Attributes:
        options, driver: how and with what to capture.
        number: in the names of its graphs; the next one when the first of them is named, if it is not given. (torch may
            begin a compilation anew, which warm starts don't see.)
        static_names: the forward's inputs that are parameters or buffers; in the backward they have the same names.
        store: what goes into torch's cache and comes out of it, once `through_cache` was entered.
        inference: what replays the graph, if that is an inference graph that is captured whole.
    """

    options: Options
    driver: CaptureDriver | None = None
    number: int | None = None
    static_names: set[str] = field(default_factory=set)
    store: entry.Store | None = None
    inference: Any = None

    @property
    def device_type(self) -> str:
        return "cuda" if self.driver is None else self.driver.device_type

    def kind(
        self,
        gm: GraphModule,
        *,
        is_backward: bool = False,
        is_inference: bool = False,
        static: Sequence[int] | None = None,
    ) -> Kind:
        """To be called while AOTAutograd compiles `gm`: says what its static inputs are. `static` are those of a
        forward where its inputs are not AOTAutograd's any more."""
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        if is_backward:
            # Saved tensors that are parameters stay where they are. Activations don't by themselves: the tree finds
            # those that lie in its own memory, and copies the others.
            static = tuple(i for i, name in enumerate(names) if name in self.static_names)
        else:
            static = tuple(compilers.static_inputs_of_forward() if static is None else static)
            self.static_names = {names[i] for i in static}
        returned = None if is_backward or is_inference else compilers.returned_by_forward()
        rebound = () if is_backward else compilers.rebound_inputs()
        kind = Kind("", is_backward, is_inference, static, returned, rebound)
        return dataclasses.replace(kind, name=self._name(kind))

    def _name(self, kind: Kind) -> str:
        if self.number is None:
            self.number = next(_numbers)
        return f"{kind.word} {self.number}"

    def aten_compilers(self) -> dict[str, Callable[..., Boxed]]:
        """`forward`, `backward`, `inference`: compilers for AOTAutograd that run its graphs as they are, captured."""

        def forward(gm: GraphModule, _: Any) -> Boxed:
            return self._callable_of(gm, self.kind(gm))

        def backward(gm: GraphModule, _: Any) -> Boxed:
            return self._callable_of(gm, self.kind(gm, is_backward=True))

        def inference(gm: GraphModule, _: Any) -> Boxed:
            return self._callable_of(gm, self.kind(gm, is_inference=True))

        return {"forward": forward, "backward": backward, "inference": inference}

    def _callable_of(self, gm: GraphModule, kind: Kind) -> Boxed:
        run = analyse.callable_of(gm, kind, self.options, self.driver, self.device_type)
        if kind.is_inference:
            self.inference = run
        return run

    def inner_compile(self, inner: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """What Inductor is to compile graphs with: `inner` (its own if None), and then captured."""
        return inductor.inner_compile(self, inner or compilers.inductor_inner_compile())

    @property
    def why_not_stored(self) -> str:
        """Why what is compiled now goes through no cache of AOTAutograd's results; "" if it does."""
        return entry.why_not(self.options)

    def key(self, gm: GraphModule) -> str:
        """What stands in the keys of entries for Dynamo's graph `gm` because it is captured."""
        return entry.key_of(gm, self.options, self.device_type)

    @property
    def refused(self) -> str:
        """Why an entry that was there was not taken; "" if it was or there was none."""
        return self.store.refused if self.store is not None else ""

    @contextlib.contextmanager
    def through_cache(self, gm: GraphModule) -> Iterator[None]:
        """Inductor's compilation of Dynamo's graph `gm` inside goes through torch's cache of AOTAutograd's results, and
        what comes out of that is captured as what is compiled; see stored.py. Not if `why_not_stored`."""
        if self.why_not_stored:
            with autograd_cache.without_autograd_cache():
                yield
            return
        self.store = entry.Store(gm, self.options, self.device_type)
        with self.store.through_cache(self._finish):
            yield

    def _finish(self, code: Any, found: entry.Found) -> Any:
        return inductor.finish(code, found.named(self._name(found.verdict.kind)), self)
