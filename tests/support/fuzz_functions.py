"""What the programs of fuzz_cudagraph.py call: plain functions, captured, and layers that train.

tensors in, a list out; those that take a list empty it, as compiled graphs do
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from tree_programs import World, takes_list

from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree import dispatch

SHAPE = (4, 6)


class Trouble(Exception):
    """What a function raises in the middle."""


trouble = [False]  # whether `failing` does; a replay runs nothing that could
kept: list[torch.Tensor] = []  # what `keeping` keeps


def sine(x):
    return [x.sin()]


def two(x, y):
    return [torch.tanh(x + y), torch.tanh(x * y)]


@takes_list
def consuming(inputs):
    x, y = inputs
    inputs.clear()
    a = x * 2
    del x
    b = a + y
    del y
    c = b.cos()
    d = (a - c).sin()
    del a
    return [c, torch.tanh(d + b)]


def passing_through(x):
    h = x.cos()
    return [x, x.view(-1), h, h[1:]]


def first_part(x):
    return [x.cos() * 2]


def second_part(d, y):
    return [torch.tanh(d * y), d.sin()]


def cut(x, y):
    return second_part(first_part(x)[0].exp(), y)


def writing(x, target):
    target.mul_(0.5).add_(x.sin())
    return [torch.tanh(target * 2)]


def weighted(x, w):
    return [torch.tanh(x * w), w]


def counting(x, state):
    state.mul_(0.75).add_(x.cos())
    return [x.sin() + state]


def sized(x, n):
    return [torch.tanh(x * n), n]


def odd_outputs(x):
    h = x.sin()
    return [h, None, h, x.new_zeros(0), h.t(), 3, h.sum()]


def growing(x):
    return [torch.cat([x, x.cos()]).sum(0).expand(4, 6).contiguous().sin(), torch.tanh(x.repeat(8, 1))[:4]]


def layer_forward(x, w):
    h = torch.tanh(x * w)
    return [h + x.sin(), h, x, w]


@takes_list
def layer_backward(inputs):
    h, x, w, g = inputs
    inputs.clear()
    inner = g * (1 - h * h)
    del h
    if trouble[0]:
        raise Trouble
    return [inner * w + g * x.cos(), inner * x]


def asking(x):
    return [x * 2 if x.sum().item() > -1e9 else x, x.cos()]


def failing(x):
    h = x.sin()
    if trouble[0]:
        raise Trouble
    return [h * 2, h]


def keeping(x):
    kept.append(x * 3)
    del kept[:-3]
    return [x.sin(), kept[-1] + 1]


def any_layout(x):
    return [torch.tanh(x), x.clone(), x.sin().sum(0)]


def same_forward(x, w):
    h = torch.tanh(x * w)
    return [h, h, x, w]  # the output is saved, one tensor


@takes_list
def same_backward(inputs):
    h, x, w, g = inputs
    inputs.clear()
    inner = g * (1 - h * h)
    del h
    return [inner * w, inner * x]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(SHAPE),
    "offset": lambda x: x[1:],
}


def name_of(fn: Callable[..., Any], held_outputs: str, label: str = "") -> str:
    return f"{fn.__name__} {label}{held_outputs}"


class Functions:
    """The captured functions of one world and one choice of options."""

    def __init__(self, world: World, held_outputs: str) -> None:
        options = {"held_outputs": held_outputs, "rerecord_limit": 64}

        def make(
            fn: Callable[..., Any], label: str = "", of: Callable[..., Any] | None = None, **kw: Any
        ) -> Callable[..., Any]:
            return world.function(fn, options=options, name=name_of(of or fn, held_outputs, label), **kw)

        self.plain = [
            (make(fn), fn, count)
            for fn, count in ((sine, 1), (two, 2), (consuming, 2), (passing_through, 1), (odd_outputs, 1), (growing, 1))
        ]
        self.plain.append((in_parts(world, make), cut, 2))
        buffers = [world.randn(*SHAPE) for _ in range(2)]
        self.buffers = [(x, x.clone()) for x in buffers]
        self.writing = make(writing, mutated=(1,))
        self.weighted = make(weighted, static=(1,))
        self.counting = make(counting, static=(1,), mutated=(1,))
        self.sized = make(sized)
        self.troublesome = [(make(fn), fn, 1) for fn in (asking, failing, keeping)]
        self.layouts = {kind: make(any_layout, label=kind) for kind in LAYOUTS}
        self.layer = trained(
            make(layer_forward, static=(1,), is_inference=False, saved_outputs=(1, 2, 3)),
            make(layer_backward, static=(0, 1, 2), is_inference=False, is_backward=True),
        )
        self.same_layer = trained(
            make(same_forward, static=(1,), is_inference=False, saved_outputs=(1, 2, 3)),
            make(same_backward, static=(0, 1, 2), is_inference=False, is_backward=True),
        )


def in_parts(world: World, make: Callable[..., Any]) -> Callable[..., Any]:
    """`cut` as a cut graph: two captured parts, and an operator between them, in one call of Dynamo."""
    calls = types.SimpleNamespace(generation=0)
    with mock.patch.object(torch_cuda, "calls_of_dynamo", lambda: calls):
        first, second = make(first_part, of=cut), make(second_part, of=cut)

    def run(inputs: list[Any]) -> Any:
        calls.generation += 1
        x, y = inputs
        inputs.clear()
        c = first.call([x])[0]
        del x
        between = [c.exp(), y]
        del c, y
        return second.call(between)

    call = dispatch.in_parts(run, world.device, world.driver)

    def with_arguments(*arguments: Any) -> Any:
        inputs = list(arguments)
        del arguments
        return call(inputs)

    with_arguments.call = call  # type: ignore[attr-defined]
    return with_arguments


def trained(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            y, *saved = forward(x.detach(), w.detach())
            if saved[0] is y:  # autograd saves an output of its own as such, without a cycle
                saved[0] = y.detach()
            ctx.save_for_backward(*saved)
            return y

        @staticmethod
        def backward(ctx, g):
            inputs = [*ctx.saved_tensors, g]
            if not ctx.retained:
                ctx.maybe_clear_saved_tensors()
            del g
            return tuple(backward.call(inputs))

        retained = False

    torch.autograd.function.FunctionCtx.retained = False
    return Layer.apply


def run_eagerly(fn: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    return fn(list(arguments)) if getattr(fn, "takes_list", False) else fn(*arguments)
