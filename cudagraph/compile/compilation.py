"""Captures the graphs that one graph of Dynamo becomes: its forward and backward, or its inference graph.

Dynamo's graph --> AOTAutograd --> forward, backward, or inference graph
                                      |
   inner "aten"                       +--> pieces.callable_of: parts of the graph itself, captured
   inner "inductor"                   +--> inductor.captured: Inductor's code, captured
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from ..graph.analyse import Kind, phase_of
from ..options import Options
from ..torch_private import autograd_cache, compilers
from ..torch_private.cache_contents import keyed_by_name
from ..torch_private.damaged_entries import checked_entries
from ..tree.driver import CaptureDriver, cuda_driver
from . import entry, inductor
from .pieces import Boxed, callable_of

_numbers = itertools.count()


@dataclass(eq=False)
class Compilation:
    """The compilers of the graphs that one graph of Dynamo becomes.

    Backends that call AOTAutograd or Inductor themselves pass them `aten_compilers()` or `inner_compile()`.
    """

    options: Options
    driver: CaptureDriver = field(default_factory=cuda_driver)
    # In the names of its graphs. By default the next free number, taken when the first graph is named: torch may
    # restart a compilation, and a warm start must get the same numbers.
    number: int | None = None
    # Names of the forward's inputs that are parameters or buffers; the backward uses the same names.
    static_names: set[str] = field(default_factory=set)
    store: entry.Store | None = None  # this compilation's entry in torch's cache; set by `through_cache`
    inference: Any = None  # the callable of the inference graph. It has a `replay` if the graph is captured whole

    def kind(self, gm: GraphModule, phase: str, static: Sequence[int] | None = None) -> Kind:
        """The `Kind` of `gm`, which AOTAutograd compiles now. `static`: a forward's static inputs in Inductor."""
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        if phase == "backward":
            # A saved activation may move. The tree finds those in its own memory, and copies the others.
            static = tuple(i for i, name in enumerate(names) if name in self.static_names)
            return Kind(phase, self._take_number(), static)
        static = tuple(compilers.static_inputs_of_forward() if static is None else static)
        self.static_names = {names[i] for i in static}
        returned = compilers.returned_by_forward() if phase == "forward" else None
        return Kind(phase, self._take_number(), static, returned, compilers.rebound_inputs())

    def _take_number(self) -> int:
        if self.number is None:
            self.number = next(_numbers)
        return self.number

    def aten_compilers(self) -> dict[str, Callable[..., Boxed]]:
        """Compilers for AOTAutograd, by `forward`, `backward` and `inference`, that capture its graphs as they are."""
        return {phase: functools.partial(self._compile_aten, phase) for phase in ("forward", "backward", "inference")}

    def _compile_aten(self, phase: str, gm: GraphModule, _: Any) -> Boxed:
        run = callable_of(gm, self.kind(gm, phase), self.options, self.driver)
        self.inference = run if phase == "inference" else None
        return run

    def inner_compile(self, inner: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """An inner compiler for Inductor. It compiles with `inner` (by default Inductor's own), then captures."""
        inner = inner or compilers.inductor_inner_compile()

        def compile_graph(gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
            phase = phase_of(bool(kwargs.get("is_backward")), bool(kwargs.get("is_inference")))
            kind = self.kind(gm, phase, kwargs.get("static_input_idxs"))
            found = inductor.analysed(gm, kind, self.options, self.driver.device_type)
            with checked_entries(), compilers.inductor_capture_settings(cut=bool(found.verdict.blockers)):
                code = inner(gm, inputs, **{**kwargs, "cudagraphs": compilers.no_cudagraphs()})
            if not compilers.is_compiled_graph(code):
                return code
            if self.store is not None:
                self.store.add(found)
            return self._captured(code, found)

        return compile_graph

    def _captured(self, code: Any, found: entry.AnalysedGraph) -> Any:
        run = inductor.captured(code, found, self.options, self.driver)
        self.inference = run if found.phase == "inference" else None
        return run

    @property
    def why_not_stored(self) -> str:
        """Why this compilation does not use torch's AOTAutograd cache; "" if it does."""
        if self.options.inner != "inductor":
            return f"inner {self.options.inner!r} compiles nothing that could be stored"
        return autograd_cache.why_captures_are_not_cached()

    def key(self, gm: GraphModule) -> str:
        """What capturing adds to the cache key of Dynamo's graph `gm`."""
        return entry.key_of(gm, self.options, self.driver.device_type)

    @property
    def refused(self) -> str:
        """Why the cache's entry was refused; "" if it was used or there was none."""
        return self.store.refused if self.store is not None else ""

    def through_cache(self, gm: GraphModule) -> Any:
        """A context in which Inductor's compilation of Dynamo's graph `gm` goes through torch's AOTAutograd cache.

        Loaded code is captured like compiled code. With `why_not_stored` the cache is off inside, and so it is for a
        graph whose key would not hold all that it computes.
        """
        if self.why_not_stored or keyed_by_name(gm):
            return autograd_cache.without_autograd_cache()

        def finish(code: Any, found: entry.AnalysedGraph) -> Any:
            return self._captured(code, found.numbered(self._take_number()))

        self.store = entry.Store(gm, self.options, self.driver.device_type, finish)
        return autograd_cache.extended(self.store)
