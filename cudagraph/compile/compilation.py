"""Captures the graphs that one graph of Dynamo becomes: its forward and backward, or its inference graph.

Dynamo's graph --> AOTAutograd --> forward, backward, or inference graph
                                      |
   inner "aten"                       +--> pieces.callable_of: parts of the graph itself, captured
   inner "inductor"                   +--> inductor.captured: Inductor's code, captured
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from ..graph.analyse import Kind
from ..options import Options
from ..torch_private import autograd_cache, compilers
from ..tree.driver import CaptureDriver
from . import entry, inductor
from .pieces import Boxed, callable_of

__all__ = ["Compilation"]

_numbers = itertools.count()


@dataclass(eq=False)
class Compilation:
    """The compilers of the graphs that one graph of Dynamo becomes.

    Backends that call AOTAutograd or Inductor themselves pass them `aten_compilers()` or `inner_compile()`.

    Attributes:
        number: the number in the names of its graphs. By default the next free one, taken when the first graph is
            named: torch may restart a compilation, and a warm start must get the same numbers.
        static_names: names of the forward's inputs that are parameters or buffers; the backward uses the same names.
        store: this compilation's entry of torch's cache; set by `through_cache`.
        inference: the callable of the inference graph. It has a `replay` if the graph is captured whole.
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
        """The `Kind` of `gm`, with its static inputs. Call it while AOTAutograd compiles `gm`.

        `static`: the forward's static inputs, where a compiler in between has changed AOTAutograd's inputs.
        """
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        if is_backward:
            # A saved parameter does not move. A saved activation may: the tree finds those in its own memory, and
            # copies the others.
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
        """Compilers for AOTAutograd, by `forward`, `backward` and `inference`, that capture its graphs themselves."""

        def forward(gm: GraphModule, _: Any) -> Boxed:
            return self._callable_of(gm, self.kind(gm))

        def backward(gm: GraphModule, _: Any) -> Boxed:
            return self._callable_of(gm, self.kind(gm, is_backward=True))

        def inference(gm: GraphModule, _: Any) -> Boxed:
            return self._callable_of(gm, self.kind(gm, is_inference=True))

        return {"forward": forward, "backward": backward, "inference": inference}

    def _callable_of(self, gm: GraphModule, kind: Kind) -> Boxed:
        run = callable_of(gm, kind, self.options, self.driver, self.device_type)
        if kind.is_inference:
            self.inference = run
        return run

    def inner_compile(self, inner: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """An inner compiler for Inductor: compiles with `inner` (Inductor's own by default), then captures."""
        inner = inner or compilers.inductor_inner_compile()

        def compile_graph(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            kind = self.kind(
                gm,
                is_backward=bool(kwargs.get("is_backward")),
                is_inference=bool(kwargs.get("is_inference")),
                static=kwargs.get("static_input_idxs"),
            )
            found = inductor.analysed(gm, kind, self.options, self.device_type)
            with compilers.inductor_capture_settings(cut=bool(found.verdict.blockers)):
                code = inner(gm, inputs, **{**kwargs, "cudagraphs": compilers.no_cudagraphs()})
            if not compilers.is_compiled_graph(code):
                return code
            if self.store is not None:
                self.store.keep(found)
            return self._captured(code, found)

        return compile_graph

    def _captured(self, code: Any, found: entry.Found) -> Any:
        run = inductor.captured(code, found, self.options, self.driver)
        if found.verdict.kind.is_inference:
            self.inference = run
        return run

    @property
    def why_not_stored(self) -> str:
        """Why this compilation does not use torch's AOTAutograd cache; "" if it does."""
        return entry.why_not(self.options)

    def key(self, gm: GraphModule) -> str:
        """What capturing adds to the cache key of Dynamo's graph `gm`."""
        return entry.key_of(gm, self.options, self.device_type)

    @property
    def refused(self) -> str:
        """Why the cache's entry was refused; "" if it was used or there was none."""
        return self.store.refused if self.store is not None else ""

    @contextlib.contextmanager
    def through_cache(self, gm: GraphModule) -> Iterator[None]:
        """Send Inductor's compilation of Dynamo's graph `gm` through torch's AOTAutograd cache; see entry.py.

        Loaded code is captured like compiled code. With `why_not_stored` the cache is off inside.
        """
        if self.why_not_stored:
            with autograd_cache.without_autograd_cache():
                yield
            return
        self.store = entry.Store(gm, self.options, self.device_type)
        with self.store.through_cache(self._captured_from_cache):
            yield

    def _captured_from_cache(self, code: Any, found: entry.Found) -> Any:
        return self._captured(code, found.named(self._name(found.verdict.kind)))
