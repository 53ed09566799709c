"""Random programs over captured functions, each compared with the same program in eager mode.

    python tests/fuzz_cudagraph.py --count 10000 --device cuda        seeds 0 to 9999; prints what differed
    python tests/fuzz_cudagraph.py --first 4711 --count 1 --trace     one program, with what it does

A program holds pairs (ours, eager) of tensors and, at random: calls a function on some of them or on new ones, keeps or
gives away what it called with, holds views, lets go, writes to what it holds, moves weights, trains, begins steps. What
must hold: whoever reads a tensor reads what eager has, or gets the error that its memory was reused; and that only for
what an earlier step gave out, never with held_outputs="copy", and never in a backward.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tree_programs import World, takes_list

from cudagraph import tree
from cudagraph.liveness import STALE

SHAPE = (4, 6)


class Mismatch(AssertionError):
    """What ours has is not what eager has."""


# --- functions: tensors in, a list out; those that take a list empty it, as compiled graphs do


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
    return [inner * w + g * x.cos(), inner * x]


class Functions:
    """The captured functions of one world and one choice of options."""

    def __init__(self, world: World, held_outputs: str) -> None:
        options = {"held_outputs": held_outputs, "rerecord_limit": 64}

        def make(fn: Callable[..., Any], **kw: Any) -> Callable[..., Any]:
            return world.function(fn, options=options, name=fn.__name__, **kw)

        self.plain = [
            (make(fn), fn, count)
            for fn, count in ((sine, 1), (two, 2), (consuming, 2), (passing_through, 1), (odd_outputs, 1), (growing, 1))
        ]
        self.writing = make(writing, mutated=(1,))
        self.weighted = make(weighted, static=(1,))
        self.counting = make(counting, static=(1,), mutated=(1,))
        self.sized = make(sized)
        forward = make(layer_forward, static=(1,), is_inference=False, saved_outputs=(1, 2, 3))
        backward = make(layer_backward, static=(0, 1, 2), is_inference=False, is_backward=True)

        class Layer(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                y, *saved = forward(x.detach(), w.detach())
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
        self.layer = Layer.apply


def run_eagerly(fn: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    return fn(list(arguments)) if getattr(fn, "takes_list", False) else fn(*arguments)


class Held:
    """A pair that the program holds. `written`: whether writing to it means the same in both."""

    def __init__(self, ours: torch.Tensor, eager: torch.Tensor, born: int, *, may_write: bool = True) -> None:
        self.ours, self.eager, self.born, self.may_write = ours, eager, born, may_write


class Program:
    def __init__(self, seed: int, world: World, functions: dict[str, Functions], *, trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.world = world
        self.trace = trace
        torch.manual_seed(seed)
        self.held_outputs = self.random.choice(["error", "error", "copy"])
        self.functions = functions[self.held_outputs]
        self.marks = self.random.random() < 0.6
        self.holds_much = self.random.random() < 0.5
        self.held: list[Held] = []
        self.trained: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.steps = 0  # what can be stale was born before this one
        weights = [self.fresh() for _ in range(2)]
        self.weights = [(w, w.clone()) for w in weights]
        state = self.fresh()
        self.state = (state, state.clone())
        self.parameters = [
            (p.clone().requires_grad_(), p.clone().requires_grad_()) for p in (self.fresh() for _ in range(2))
        ]

    def fresh(self) -> torch.Tensor:
        return self.world.randn(*SHAPE)

    def say(self, *words: Any) -> None:
        if self.trace:
            print(*words, flush=True)

    # --- running

    def run(self) -> None:
        """A few bodies of a loop, each run several times, mostly with the same choices: recordings are replayed."""
        if self.marks:
            tree.mark_step_begin()
        actions: list[tuple[Callable[[], None], int]] = [
            (self.call, 10),
            (self.call_writing, 2),
            (self.call_weighted, 2),
            (self.call_counting, 1),
            (self.call_sized, 1),
            (self.move_weight, 1),
            (self.view, 2),
            (self.write, 2),
            (self.drop, 3 if self.holds_much else 6),
            (self.drop_all, 1),
            (self.train_forward, 3),
            (self.backward, 3),
            (self.zero_grad, 1),
        ]
        choices = random.Random(self.random.random())
        bodies = [[choices.random() for _ in range(choices.randint(2, 6))] for _ in range(choices.randint(1, 3))]
        for _ in range(choices.randint(4, 10)):
            body = choices.choice(bodies)
            self.say("body", bodies.index(body))
            for choice in body:
                self.random = random.Random(choice if choices.random() < 0.9 else choices.random())
                action = self.random.choices([a for a, _ in actions], [w for _, w in actions])[0]
                self.say(" ", action.__name__)
                action()
                self.check()
            if choices.random() < 0.5:
                self.drop_all()
            if choices.random() < 0.8:
                self.step()

    def check(self) -> None:
        """Everything that is held reads as in eager, or says that it is stale where it may be."""
        kept = []
        for pair in self.held:
            values = self.read(pair)
            if values is None:
                if self.held_outputs == "copy" and self.copies_are_possible:
                    raise Mismatch("a tensor became stale in spite of held_outputs='copy'")
                if pair.born >= self.steps:
                    raise Mismatch("a tensor became stale in its own step")
                continue
            self.compare(values, pair.eager, "a held tensor")
            kept.append(pair)
        self.held = kept
        for ours, eager in [*self.weights, self.state]:
            self.compare(ours, eager, "a weight")
        for ours, eager in self.parameters:
            if (ours.grad is None) != (eager.grad is None):
                raise Mismatch("only one has a gradient")
            if ours.grad is not None:
                self.compare(self.world.read(ours.grad), eager.grad, "a gradient")

    @property
    def copies_are_possible(self) -> bool:
        return self.world.kind == "cuda" or self.world.driver.can_move

    def read(self, pair: Held) -> torch.Tensor | None:
        try:
            return self.world.read(pair.ours)
        except RuntimeError as error:
            if STALE not in str(error):
                raise
            return None

    def compare(self, ours: torch.Tensor, eager: torch.Tensor, what: str) -> None:
        if ours.shape != eager.shape or not torch.allclose(ours, eager, rtol=1e-4, atol=1e-4):
            raise Mismatch(f"{what} differs by {(ours - eager).abs().max().item()}")

    # --- actions

    def pick(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A pair to call with, which the program may or may not go on holding."""
        usable = [pair for pair in self.held if pair.ours.shape == SHAPE and not pair.ours.requires_grad]
        if not usable or self.random.random() < 0.3:
            x = self.fresh()
            return x, x.clone()
        pair = self.random.choice(usable)
        if self.random.random() < 0.4:
            self.held.remove(pair)
        return pair.ours, pair.eager

    def began(self) -> None:
        """A call may have begun a step, where steps begin by themselves."""
        if not self.marks:
            self.steps += 1

    def hold(self, ours: Sequence[Any], eager: Sequence[Any], *, may_write: bool = True) -> None:
        if len(ours) != len(eager):
            raise Mismatch("another number of outputs")
        for a, b in zip(ours, eager, strict=True):
            if not isinstance(b, torch.Tensor):
                if a != b:
                    raise Mismatch(f"{a} is not {b}")
            elif self.random.random() < (0.9 if self.holds_much else 0.6):
                self.held.append(Held(a, b, self.steps, may_write=may_write))
            else:
                self.compare(self.world.read(a), b, "an output")

    def call(self) -> None:
        f, fn, count = self.random.choice(self.functions.plain)
        pairs = [self.pick() for _ in range(count)]
        self.say("   ", fn.__name__)
        expected = run_eagerly(fn, [b for _, b in pairs])
        aliases = fn is passing_through
        if aliases:
            # What is no output of a graph is copied, so its alias is one of the copy: none of them may be written to.
            for pair in self.held:
                if any(pair.eager.untyped_storage()._cdata == b.untyped_storage()._cdata for _, b in pairs):
                    pair.may_write = False
        inputs = [a for a, _ in pairs]
        del pairs
        self.began()
        self.hold(f.call(inputs), expected, may_write=not aliases)

    def call_writing(self) -> None:
        x, target = self.pick(), self.pick()
        frozen = {pair.eager.untyped_storage()._cdata for pair in self.held if not pair.may_write}
        shared = x[1].untyped_storage()._cdata == target[1].untyped_storage()._cdata
        if shared or target[1].untyped_storage()._cdata in frozen:
            return
        expected = writing(x[1], target[1])
        inputs = [x[0], target[0]]
        del x, target
        self.began()
        self.hold(self.functions.writing.call(inputs), expected)

    def call_weighted(self) -> None:
        x, (w, eager_w) = self.pick(), self.random.choice(self.weights)
        expected = weighted(x[1], eager_w)[:1]
        inputs = [x[0], w]
        del x
        self.began()
        out = self.functions.weighted.call(inputs)
        if out[1] is not w:
            raise Mismatch("an input that is returned is another object")
        self.hold(out[:1], expected)

    def call_counting(self) -> None:
        x = self.pick()
        expected = counting(x[1], self.state[1])
        inputs = [x[0], self.state[0]]
        del x
        self.began()
        self.hold(self.functions.counting.call(inputs), expected)

    def call_sized(self) -> None:
        x, n = self.pick(), self.random.randrange(3)
        expected = sized(x[1], n)
        inputs = [x[0], n]
        del x
        self.began()
        self.hold(self.functions.sized.call(inputs), expected)

    def move_weight(self) -> None:
        i = self.random.randrange(len(self.weights))
        if len(moved) < 8 or self.random.random() < 0.1:
            moved.append(self.fresh())  # a few places that weights move between
        target = self.random.choice(moved)
        if any(target is w for w, _ in self.weights):
            return
        target.copy_(self.weights[i][0])
        self.weights[i] = (target, self.weights[i][1])

    def view(self) -> None:
        if self.held:
            pair = self.random.choice(self.held)
            how = self.random.choice(
                [torch.Tensor.detach, lambda x: x.reshape(-1)[1:], lambda x: x.t(), lambda x: x.view(x.shape)]
            )
            if pair.ours.dim() == 2 and pair.ours.is_contiguous():
                self.held.append(Held(how(pair.ours), how(pair.eager), pair.born, may_write=pair.may_write))

    def write(self) -> None:
        usable = [pair for pair in self.held if pair.may_write and not pair.ours.requires_grad and pair.ours.numel()]
        usable = [pair for pair in usable if pair.ours.grad_fn is None]
        if usable:
            pair = self.random.choice(usable)
            with torch.no_grad():
                pair.ours.mul_(0.5)
                pair.eager.mul_(0.5)

    def drop(self) -> None:
        if self.held:
            self.held.pop(self.random.randrange(len(self.held)))

    def drop_all(self) -> None:
        self.held.clear()

    def train_forward(self) -> None:
        if len(self.trained) > 3:
            return
        if self.trained and self.random.random() < 0.5:
            x = self.trained.pop(self.random.randrange(len(self.trained)))
        else:
            x = self.pick()
            x = (x[0].clone(), x[1].clone())
        p = self.random.choice(self.parameters)
        self.began()
        ours = self.functions.layer(x[0], p[0])
        self.trained.append((ours, torch.tanh(x[1] * p[1]) + x[1].sin()))
        self.compare(self.world.read(ours), self.trained[-1][1], "a trained output")

    def backward(self) -> None:
        if not self.trained:
            return
        ours, eager = self.trained.pop(self.random.randrange(len(self.trained)))
        weight = self.random.choice([None, self.fresh()])
        for y in (ours, eager):
            # autograd saves y for the square, so a forward's own output is needed by eager code
            loss = (y * y).sum() if weight is None else (y * weight).sum()
            loss.backward()
            del loss
        self.began()

    def zero_grad(self) -> None:
        to_none = self.random.random() < 0.7
        for pair in self.parameters:
            for p in pair:
                if p.grad is not None:
                    if to_none:
                        p.grad = None
                    else:
                        p.grad.zero_()

    def step(self) -> None:
        if self.marks:
            tree.mark_step_begin()
            self.steps += 1


moved: list[torch.Tensor] = []


def run_seeds(
    seeds: Sequence[int], world: World, *, reset_every: int = 25, trace: bool = False
) -> list[tuple[int, str]]:
    """Run a program a seed; what went wrong, by seed."""
    wrong = []
    functions: dict[str, Functions] = {}
    for count, seed in enumerate(seeds):
        if count % reset_every == 0:
            tree.reset()
            functions = {held: Functions(world, held) for held in ("error", "copy")}
        tree.forget_marks()
        try:
            Program(seed, world, functions, trace=trace).run()
        except (Mismatch, RuntimeError, AssertionError) as error:
            if trace:
                raise
            wrong.append((seed, f"{type(error).__name__}: {error}"))
            tree.reset()
            functions = {held: Functions(world, held) for held in ("error", "copy")}
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--device", choices=["simulator", "cuda"], default="simulator")
    parser.add_argument("--reset-every", type=int, default=25, help="programs that share recordings")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--moves", choices=["all", "made"], default="all", help="of the simulator: see there")
    parser.add_argument("--trace", action="store_true", help="print what programs do; stop at the first error")
    options = parser.parse_args()
    world = World(options.device, **({"moves": options.moves} if options.device == "simulator" else {}))
    begin = time.monotonic()
    wrong: list[tuple[int, str]] = []
    done = 0
    last = options.first + options.count
    totals: dict[str, int] = {}
    for chunk in (
        itertools.batched(range(options.first, last), options.reset_every)
        if sys.version_info >= (3, 12)
        else (range(i, min(i + options.reset_every, last)) for i in range(options.first, last, options.reset_every))
    ):
        wrong += run_seeds(list(chunk), world, reset_every=options.reset_every, trace=options.trace)
        done += len(chunk)
        for name, number in tree.stats().items():
            totals[name] = totals.get(name, 0) + number
        if time.monotonic() - begin > options.seconds:
            break
    result = {
        "device": options.device,
        "first": options.first,
        "programs": done,
        "different": len(wrong),
        "seconds": round(time.monotonic() - begin, 1),
        "counts": totals,
        "wrong": wrong[:20],
    }
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
