"""What the tests of `cudagraph`'s tree run on: a device with its driver, pieces by hand, a backend for programs.

world = World("simulator") | World("cuda")        the same tests, the same code
world.function(lambda x, w: [x @ w], static=(1,))   a piece captured from a plain function
torch.compile(f, backend=world.backend())           forwards and backwards as pieces, as AOTAutograd made them
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from capture_simulator import Simulator
from failing_captures import trying_again
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.utils import count_tangents

from cudagraph.options import Options
from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.torch_private import symbols
from cudagraph.torch_private.compilers import static_inputs_of_forward
from cudagraph.tree import dispatch
from cudagraph.tree.dispatch import Piece
from cudagraph.tree.driver import cuda_driver


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A function that saves three tensors for its backward."""
    h = torch.tanh(x * w)
    return torch.sin(h * h + x)


class World:
    def __init__(self, kind: str, **simulator: Any) -> None:
        self.kind = kind
        self.driver: Any = Simulator(**simulator) if kind == "simulator" else cuda_driver()
        self.device = torch.device("cpu") if kind == "simulator" else torch.device("cuda", torch.cuda.current_device())
        self.names = itertools.count()
        self.tries_again = False  # what an interrupt left undone is done once more

    @property
    def raises_on_access(self) -> bool:
        return symbols.has("torch._C._set_storage_data_ptr_access_error_msg")

    def randn(self, *size: int, **kw: Any) -> torch.Tensor:
        return torch.randn(*size, device=self.device, **kw)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """The values of `x`; raises if it is stale."""
        return self.driver.read(x) if self.kind == "simulator" else x.detach().clone()

    def capture(
        self, run: Callable[[list[Any]], Sequence[Any]], options: dict[str, Any] | None = None, **piece: Any
    ) -> Callable[[list[Any]], Sequence[Any]]:
        """`run` takes a list, as a compiled graph does."""
        name = piece.pop("name", f"graph {next(self.names)}")
        call = dispatch.capture(Piece(name, run, self.device, **piece), Options.parse(options), self.driver)
        return trying_again(call) if self.tries_again else call

    def function(
        self,
        fn: Callable[..., Sequence[Any]],
        *,
        static: Sequence[int] = (),
        mutated: Sequence[int] = (),
        options: dict[str, Any] | None = None,
        **piece: Any,
    ) -> Callable[..., Sequence[Any]]:
        """A function of tensors, called with tensors; the references that the call holds are gone when it runs."""

        def run(inputs: list[Any]) -> Sequence[Any]:
            arguments = list(inputs)
            inputs.clear()
            return _call_dropping(fn, arguments)

        call = self.capture(run, options, static_inputs=tuple(static), mutated_inputs=tuple(mutated), **piece)

        def with_arguments(*arguments: Any) -> Sequence[Any]:
            inputs = list(arguments)
            del arguments
            return call(inputs)

        with_arguments.call = call  # type: ignore[attr-defined]
        return with_arguments

    def backend(self, options: dict[str, Any] | None = None) -> Callable[..., Any]:
        def compile_graph(gm: Any, example_inputs: Any) -> Any:
            saved: list[tuple[int, ...]] = []

            def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **kw: Any) -> Any:
                fw, bw = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kw)
                count = len(next(n for n in fw.graph.nodes if n.op == "output").args[0])
                saved.append(tuple(range(num_fwd_outputs, count)))
                return fw, bw

            def piece(kind: str) -> Callable[..., Any]:
                def compiler(graph: Any, inputs: Any) -> Any:
                    torch_cuda.set_boxed(graph)
                    static = static_inputs_of_forward()
                    if kind == "backward":  # all that is saved, as torch's trees take it
                        static = tuple(range(count_tangents(graph)))
                    mutated = [
                        i
                        for i, n in enumerate(graph.graph.find_nodes(op="placeholder"))
                        if any(u.target is torch.ops.aten.copy_.default and u.args[0] is n for u in n.users)
                    ]
                    return self.capture(
                        graph.forward,
                        options,
                        name=f"{kind} {next(self.names)}",
                        static_inputs=tuple(static),
                        mutated_inputs=tuple(mutated),
                        is_backward=kind == "backward",
                        is_inference=kind == "inference",
                        saved_outputs=saved[-1] if kind == "forward" else None,
                    )

                return compiler

            return aot_autograd(
                fw_compiler=piece("forward"),
                bw_compiler=piece("backward"),
                inference_compiler=piece("inference"),
                partition_fn=partition,
                keep_inference_input_mutations=True,
            )(gm, example_inputs)

        return compile_graph


def _call_dropping(fn: Callable[..., Sequence[Any]], arguments: list[Any]) -> Sequence[Any]:
    """`fn(*arguments)` for code that wants its arguments in a list which it may empty, or as they are."""
    if getattr(fn, "takes_list", False):
        return fn(arguments)
    return fn(*arguments)


def takes_list(fn: Any) -> Any:
    fn.takes_list = True
    return fn


def same(world: World, got: Sequence[Any], expected: Sequence[Any]) -> None:
    """`got` is as `expected`: numbers, shapes, strides, types."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
            torch.testing.assert_close(world.read(a), b, rtol=1e-5, atol=1e-5)
        else:
            assert a == b


def steps(
    world: World,
    f: Callable[..., Sequence[Any]],
    eager: Callable[..., Sequence[Any]],
    arguments: Callable[[], Sequence[Any]],
    count: int = 4,
) -> None:
    """Call `f` in `count` steps, nothing held from one to the next."""
    for _ in range(count):
        dispatch.mark_step_begin()
        xs = arguments()
        same(world, f(*xs), eager(*xs))
