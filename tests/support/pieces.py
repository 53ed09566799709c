"""Helpers for the graph side of `cudagraph`: graphs on a CUDA device that nobody has, and captures that are only noted.

traced(fn, *fakes)      a graph of fake CUDA and CPU tensors, as AOTAutograd would hand it over
Noted                   a driver for the CPU; `notes.pieces` are what `tree.capture` was given, run as they are
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cudagraph.graph.blockers import Blocker, blocker_of, reason_against
from cudagraph.tree import dispatch

CUDA = torch.device("cuda", 0)


@torch.library.custom_op("cudagraph_tests::scaled", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    """An operator that can't be captured, with a gradient."""
    return x * by


scaled.register_fake(lambda x, by: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, grad: (scaled(grad, ctx.by), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
)


@torch.library.custom_op("cudagraph_tests::gate", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def gate(x: torch.Tensor) -> torch.Tensor:
    """An operator that can't be captured. It has no gradient formula: a graph of one that has is in no cache."""
    return x.sigmoid()


gate.register_fake(torch.empty_like)


@contextmanager
def fake_devices() -> Iterator[FakeTensorMode]:
    """Tensors made inside are fake, on any device."""
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()) as mode:
        yield mode


def traced(fn: Callable[..., Any], make_inputs: Callable[[], tuple[Any, ...]]) -> GraphModule:
    """The graph of `fn(*make_inputs())` on fake tensors, functional but for operators that write by themselves."""
    with fake_devices():
        return make_fx(fn)(*make_inputs())


def blockers(gm: GraphModule, device: torch.device) -> tuple[Blocker, ...]:
    """The operators of `gm` that can't be captured on `device`, in order."""
    return tuple(blocker_of(node, reason) for node in gm.graph.nodes if (reason := reason_against(node, device)))


@dataclass(eq=False)
class Noted:
    """A driver that captures nothing, for graphs on the CPU."""

    device_type: str = "cpu"
    pieces: list[dispatch.Piece] = field(default_factory=list)
    call_counts: dict[str, int] = field(default_factory=dict)

    def why_not(self) -> str | None:
        return None

    def capture(self, piece: dispatch.Piece, options: Any, driver: Any = None) -> Callable[[list[Any]], Any]:
        assert driver is self
        self.pieces.append(piece)

        def call(inputs: list[Any]) -> Any:
            self.call_counts[piece.name] = self.call_counts.get(piece.name, 0) + 1
            # Inductor appends sizes that it does not tell of
            assert all(isinstance(x, int) for x in inputs[len(piece.placeholders) :])
            outputs = piece.run(inputs)
            assert inputs == []  # pieces own what they are given
            assert not piece.output_traces or len(outputs) == len(piece.output_traces)
            return outputs

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def piece_as_data(piece: dispatch.Piece) -> dict[str, Any]:
    """All of a piece but its code, to be compared."""
    named = {f.name: getattr(piece, f.name) for f in dataclasses.fields(piece)}
    return {**named, "run": None, "constants": [c.tolist() for c in piece.constants]}
