"""A random program over captured functions, beside the same in eager mode.

A program holds pairs (ours, eager) of tensors and, at random: calls a function on some of them or on new ones, keeps or
gives away what it called with, holds views, lets go, writes to what it holds, moves weights, trains, begins steps. What
must hold: whoever reads a tensor reads what eager has, or gets the error that its memory was reused; and that only for
what an earlier step gave out, never with held_outputs="copy", and never in a backward. Where steps begin by themselves,
the documented rules and the path that the tree is on say when one may have begun.

Programs of generation 2 also call what can't be captured, raises or keeps memory in the middle of a step, save outputs
that they return, give graphs tensors of any layout, and mark steps at any time. Those of generation 3 also call with
buffers that stay where they are. Those of generations 1 and 2 are kept for their seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from fuzz_functions import (
    LAYOUTS,
    SHAPE,
    Functions,
    Trouble,
    any_layout,
    counting,
    failing,
    layer_forward,
    name_of,
    passing_through,
    run_eagerly,
    same_forward,
    sized,
    trouble,
    weighted,
    writing,
)
from tree_programs import World

from cudagraph import tree
from cudagraph.liveness import STALE

moved: list[torch.Tensor] = []  # where weights are moved to


class Mismatch(AssertionError):
    """What ours has is not what eager has."""


class Held:
    """A pair that the program holds.

    Attributes:
        born: in which step.
        givers: names of functions that gave it out.
        may_write: whether writing to it means the same in both.
        may_be_stale: a step may have begun by itself since.
    """

    def __init__(
        self, ours: torch.Tensor, eager: torch.Tensor, born: int, givers: set[str], *, may_write: bool = True
    ) -> None:
        self.ours, self.eager, self.born, self.givers, self.may_write = ours, eager, born, givers, may_write
        self.may_be_stale = False

    def view(self, ours: torch.Tensor, eager: torch.Tensor, *, may_write: bool) -> Held:
        """A pair of views of it."""
        view = Held(ours, eager, self.born, self.givers, may_write=may_write)
        view.may_be_stale = self.may_be_stale
        return view


class Program:
    def __init__(
        self, seed: int, world: World, functions: dict[str, Functions], *, generation: int = 3, trace: bool = False
    ) -> None:
        self.generation = generation
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
        self.picked_from: set[str] = set()  # names of functions that gave out what was picked last
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
        if self.generation > 1:
            actions += [(self.call_layout, 2), (self.call_troublesome, 2), (self.step, 1)]
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
                if pair.born >= self.steps and not pair.may_be_stale:
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
        usable = [
            pair
            for pair in self.held
            if pair.ours.shape == SHAPE and pair.ours.is_contiguous() and not pair.ours.requires_grad
        ]
        self.picked_from = set()
        if not usable or self.random.random() < 0.3:
            x = self.fresh()
            return x, x.clone()
        pair = self.random.choice(usable)
        self.picked_from = pair.givers
        if self.random.random() < 0.4:
            self.held.remove(pair)
        return pair.ours, pair.eager

    def filled_buffer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A pair that is in the same place as in earlier calls and programs, with other values."""
        pair = self.random.choice(self.functions.buffers)
        values = self.fresh()
        for side in pair:
            side.copy_(values)
        return pair

    def calls(self, fn: Callable[..., Any], label: str = "") -> str:
        """`fn` is about to be called; its name. Where steps begin by themselves, the call may begin one."""
        name = name_of(fn, self.held_outputs, label)
        here = [t for t in (getattr(tree.local, "trees", None) or {}).values() if t.driver is self.world.driver]
        path = [node.function.name for node in here[0].place.path()] if here else []
        if not self.marks and name in path:
            for pair in self.held:
                pair.may_be_stale |= path[0] == name or name in pair.givers
        return name

    def hold(
        self,
        name: str,
        ours: Sequence[Any],
        eager: Sequence[Any],
        *,
        may_write: bool = True,
        passed: torch.Tensor | None = None,
        givers: AbstractSet[str] = frozenset(),
    ) -> None:
        """`givers`: who gave out the input `passed`, which outputs may be aliases of: they are its memory."""
        if len(ours) != len(eager):
            raise Mismatch("another number of outputs")
        for a, b in zip(ours, eager, strict=True):
            if not isinstance(b, torch.Tensor):
                if a != b:
                    raise Mismatch(f"{a} is not {b}")
            elif self.random.random() < (0.9 if self.holds_much else 0.6):
                is_passed = passed is not None and passed.untyped_storage()._cdata == b.untyped_storage()._cdata
                givers_of_it = {name, *givers} if is_passed else {name}
                self.held.append(Held(a, b, self.steps, givers_of_it, may_write=may_write))
            else:
                self.compare(self.world.read(a), b, "an output")

    def call(self) -> None:
        f, fn, count = self.random.choice(self.functions.plain)
        pairs = [self.pick() for _ in range(count)]
        givers, passed = set(self.picked_from), pairs[0][1]
        if self.generation > 2 and fn is not passing_through and self.random.random() < 0.6:
            pairs[0] = self.filled_buffer()
        self.say("   ", fn.__name__)
        expected = run_eagerly(fn, [b for _, b in pairs])
        aliases = fn is passing_through
        name = self.calls(fn)
        if aliases:
            # What is no output of a graph is copied, so its alias is one of the copy: none of them may be written to.
            for pair in self.held:
                if any(pair.eager.untyped_storage()._cdata == b.untyped_storage()._cdata for _, b in pairs):
                    pair.may_write = False
                    pair.givers.add(name)
        inputs = [a for a, _ in pairs]
        del pairs
        self.hold(name, f.call(inputs), expected, may_write=not aliases, passed=passed, givers=givers)

    def call_troublesome(self) -> None:
        f, fn, _ = self.random.choice(self.functions.troublesome)
        x = self.pick()
        self.say("   ", fn.__name__)
        expected = run_eagerly(fn, [x[1]])
        inputs = [x[0]]
        del x
        name = self.calls(fn)
        trouble[0] = fn is failing and self.random.random() < 0.3
        try:
            ours = f.call(inputs)
        except Trouble:
            return
        finally:
            trouble[0] = False
        self.hold(name, ours, expected)

    def call_layout(self) -> None:
        """A graph whose input lies in another way than outputs do, held or not."""
        kind = self.random.choice(list(LAYOUTS))
        x = self.pick()
        ours, eager = (LAYOUTS[kind](side) for side in x)
        self.say("   ", kind)
        givers = [pair for pair in self.held if pair.ours is x[0]]
        del x
        if self.random.random() < 0.5 and givers:
            self.held.append(givers[0].view(ours, eager, may_write=False))
        del givers
        expected = any_layout(eager)
        inputs = [ours]
        del ours
        name = self.calls(any_layout, kind)
        found = self.functions.layouts[kind].call(inputs)
        if [y.stride() for y in found] != [y.stride() for y in expected]:
            raise Mismatch("outputs lie in another way")
        self.hold(name, found, expected)

    def call_writing(self) -> None:
        x, target = self.pick(), self.pick()
        frozen = {pair.eager.untyped_storage()._cdata for pair in self.held if not pair.may_write}
        shared = x[1].untyped_storage()._cdata == target[1].untyped_storage()._cdata
        if shared or target[1].untyped_storage()._cdata in frozen:
            return
        expected = writing(x[1], target[1])
        inputs = [x[0], target[0]]
        del x, target
        self.hold(self.calls(writing), self.functions.writing.call(inputs), expected)

    def call_weighted(self) -> None:
        x, (w, eager_w) = self.pick(), self.random.choice(self.weights)
        expected = weighted(x[1], eager_w)[:1]
        inputs = [x[0], w]
        del x
        name = self.calls(weighted)
        out = self.functions.weighted.call(inputs)
        if out[1] is not w:
            raise Mismatch("an input that is returned is another object")
        self.hold(name, out[:1], expected)

    def call_counting(self) -> None:
        x = self.pick()
        expected = counting(x[1], self.state[1])
        inputs = [x[0], self.state[0]]
        del x
        self.hold(self.calls(counting), self.functions.counting.call(inputs), expected)

    def call_sized(self) -> None:
        x, n = self.pick(), self.random.randrange(3)
        expected = sized(x[1], n)
        inputs = [x[0], n]
        del x
        self.hold(self.calls(sized), self.functions.sized.call(inputs), expected)

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
                self.held.append(pair.view(how(pair.ours), how(pair.eager), may_write=pair.may_write))

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
        same = self.generation > 1 and self.random.random() < 0.5
        self.calls(same_forward if same else layer_forward)
        ours = (self.functions.same_layer if same else self.functions.layer)(x[0], p[0])
        self.trained.append((ours, torch.tanh(x[1] * p[1]) + (0 if same else x[1].sin())))
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
        if not self.copies_are_possible:  # nor can gradients be copied out when they are still held
            for p, _ in self.parameters:
                p.grad = None if p.grad is None else p.grad.clone()

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
