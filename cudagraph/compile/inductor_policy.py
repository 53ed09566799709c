"""`cudagraph.Policy()` lets Inductor's own users switch to this package's trees.

    torch._inductor.config.cudagraph_policy = cudagraph.Policy()      torch 2.13 and later
    torch.compile(model, mode="reduce-overhead")

Inductor decides what to capture, as for its own trees, and asks the policy to wrap each compiled graph. Code that its
scheduler cut is captured piece by piece. Graphs that torch's caches loaded are captured, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import counters
from ..graph.analyse import phase_of
from ..options import Options
from ..placeholder import PlaceholderInfo
from ..torch_private import compilers
from ..tree import dispatch
from ..tree.driver import CaptureDriver, cuda_driver
from ..tree.function import Piece
from .inductor import capture_partitions
from .pieces import uncaptured

_numbers = itertools.count()


class Pending:
    """Stands for a compiled graph from Inductor's call of `cudagraphify` to that of `wrap_output`. A call of it runs
    `run`: the graph uncaptured, or what `wrap_output` puts there."""

    def __init__(self, piece: Piece) -> None:
        self.piece, self.run = piece, piece.run

    def __call__(self, inputs: list[Any]) -> Any:
        return self.run(inputs)


class Policy(compilers.inductor_policy_class()):  # type: ignore[misc]
    """For `torch._inductor.config.cudagraph_policy`.

    Args:
        options: those of `torch.compile(backend="cudagraph_tree", options=...)`; "inner" has no meaning here.
        driver: the driver that captures; CUDA's if None.

    Raises:
        UnsupportedTorchError: torch before 2.13 has no such policies.
        OptionError: an unknown or ill-typed option.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, *, driver: CaptureDriver | None = None) -> None:
        compilers.need_inductor_policy()
        self.options = Options.parse(options)
        self.driver = driver or cuda_driver()
        self._local = threading.local()  # .pending: the callable of the graph that this thread is compiling
        self._static: dict[Any, set[str]] = {}  # names of a forward's static inputs, by Inductor's number of the graph

    def __deepcopy__(self, _: Any) -> Policy:
        return self  # torch.compile copies Inductor's settings

    def cudagraphify(
        self, model: Callable[..., Any], example_inputs: Any, static_input_idxs: Sequence[int], **kwargs: Any
    ) -> Callable[..., Any]:
        """Called by Inductor to wrap `model`. `wrap_output` does it, because it sees the pieces."""
        is_backward, is_inference = kwargs["is_backward"], kwargs["is_inference"]
        index, kind = kwargs["device_index"], self.driver.device_type
        piece = Piece(
            name=f"{phase_of(is_backward, is_inference)} {next(_numbers)} of Inductor",
            run=model,
            device=torch.device("cpu") if kind == "cpu" else torch.device(kind, index),
            static_inputs=tuple(static_input_idxs),
            mutated_inputs=tuple(kwargs.get("mutated_input_idxs") or ()),
            placeholders=tuple(map(_info, kwargs.get("placeholders") or ())),
            output_traces=tuple(kwargs.get("stack_traces") or ()),
            constants=tuple(kwargs.get("constants") or ()),
            is_backward=is_backward,
            is_inference=is_inference,
        )
        pending = self._local.pending = Pending(piece)
        return pending

    def wrap_output(self, output_code: Any) -> Any:
        """Capture the graph of the last `cudagraphify`: whole, or piece by piece as the code was cut."""
        pending, self._local.pending = getattr(self._local, "pending", None), None
        if pending is None or not compilers.is_compiled_graph(output_code):
            return output_code  # Inductor decided against a capture, and logged why
        number = compilers.graph_number(output_code)
        piece = dataclasses.replace(
            pending.piece,
            static_inputs=self._static_inputs(pending.piece, number),
            compiled=None if number is None else f"Inductor's {number}",
            has_collectives=compilers.calls_collectives(output_code),
        )
        maps = compilers.partitions_of(output_code)
        if maps is None:
            run = dispatch.capture(piece, self.options, self.driver)
        elif maps:
            counters.add("partitions", len(maps) > 1)
            run = capture_partitions(output_code, piece, maps, self.options, self.driver)
        else:
            run = uncaptured(piece.run)
        if compilers.callable_of(output_code) is pending:
            compilers.set_callable(output_code, run)
        else:  # somebody has wrapped it since
            pending.run = run
        return output_code

    def _static_inputs(self, piece: Piece, graph_number: Any) -> tuple[int, ...]:
        """The inputs that are parameters or buffers. In a backward, Inductor calls saved tensors static, too: the tree
        finds those in its own memory by itself, and others move in each step."""
        names = [info.name for info in piece.placeholders]
        if not piece.is_backward:
            self._static[graph_number] = {names[i] for i in piece.static_inputs if i < len(names)}
            return piece.static_inputs
        known = self._static.get(graph_number)
        if known is None:  # the forward was not captured
            known = {name for name in names if name.startswith("primals")}
        return tuple(i for i in piece.static_inputs if names[i] in known)


def _info(theirs: Any) -> PlaceholderInfo:
    """torch's record of a placeholder as this package's."""
    users = tuple(map(_info, theirs.users))
    return PlaceholderInfo(theirs.name, theirs.stack_trace, users, theirs.mutating_use_stack_trace)
