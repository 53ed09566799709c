"""A random program over captured functions, beside the same in eager mode.

A program holds pairs (ours, eager) of tensors and, at random: calls a function on some of them or on new ones, keeps or
gives away what it called with, holds views, lets go, writes to what it holds, moves weights, trains, begins steps. What
must be so of what it holds is in fuzz_pairs.py.

Programs of generation 2 also call what can't be captured, raises or keeps memory in the middle of a step, save outputs
that they return, give graphs tensors of any layout, and mark steps at any time. Those of generation 3 also call with
buffers that stay where they are. Those of generation 4 run backwards that raise or come twice, reset trees in between,
and go on with functions made anew. In those of generation 5 captures fail, at any point and for any reason. Those of
earlier generations are kept for their seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from failing_captures import POINTS, Fault, Interrupt
from fuzz_functions import (
    LAYOUTS,
    Functions,
    Trouble,
    any_layout,
    counting,
    failing,
    layer_forward,
    passing_through,
    run_eagerly,
    same_forward,
    sized,
    trouble,
    weighted,
    writing,
)
from fuzz_pairs import Holder, Mismatch

from cudagraph.tree import dispatch

moved: list[torch.Tensor] = []  # where weights are moved to


class Program(Holder):
    def run(self) -> None:
        """A few bodies of a loop, each run several times, mostly with the same choices: recordings are replayed."""
        if self.marks:
            dispatch.mark_step_begin()
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
        if self.generation > 3:
            actions += [(self.backward_that_raises, 2), (self.backward_twice, 1), (self.start_over, 1)]
        choices = random.Random(self.random.random())
        if self.generation > 4:
            self.world.driver.armed(None)
        bodies = [[choices.random() for _ in range(choices.randint(2, 6))] for _ in range(choices.randint(1, 3))]
        for _ in range(choices.randint(4, 10)):
            body = choices.choice(bodies)
            self.say("body", bodies.index(body))
            for choice in body:
                self.random = random.Random(choice if choices.random() < 0.9 else choices.random())
                action = self.random.choices([a for a, _ in actions], [w for _, w in actions])[0]
                self.say(" ", action.__name__)
                if self.generation > 4 and self.random.random() < 0.3:
                    self.let_fail()
                action()
                self.check()
            if choices.random() < 0.5:
                self.drop_all()
            if choices.random() < 0.8:
                self.step()

    def let_fail(self) -> None:
        """The next capture that comes so far fails."""
        driver = self.world.driver
        errors = [ValueError("of the test"), torch.OutOfMemoryError("of the test"), Interrupt(), driver.not_permitted()]
        error = self.random.choices(errors, [4, 4, 4, 1])[0]
        fault = Fault(self.random.choice(POINTS), self.random.choice((0, 0, 0, 1, 2, 4)), error)
        self.say("  a capture is to fail:", fault)
        driver.armed(fault)

    def call(self) -> None:
        f, fn, count = self.random.choice(self.functions.plain)
        pairs = [self.pick() for _ in range(count)]
        givers, passed = set(self.picked_from), pairs[0][1]
        if self.generation > 2 and fn is not passing_through and self.random.random() < 0.6:
            pairs[0] = self.filled_buffer()
        self.say("   ", fn.__name__)
        expected = run_eagerly(fn, [b for _, b in pairs])
        aliases = fn is passing_through
        name = self.calls(fn, read=[b for _, b in pairs])
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
        name = self.calls(fn, read=x[1:])
        del x
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
        name = self.calls(any_layout, kind, read=[eager])
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
        name = self.calls(writing, read=[x[1], target[1]])
        del x, target
        self.hold(name, self.functions.writing.call(inputs), expected)

    def call_weighted(self) -> None:
        x, (w, eager_w) = self.pick(), self.random.choice(self.weights)
        expected = weighted(x[1], eager_w)[:1]
        inputs = [x[0], w]
        name = self.calls(weighted, read=x[1:])
        del x
        out = self.functions.weighted.call(inputs)
        if out[1] is not w:
            raise Mismatch("an input that is returned is another object")
        self.hold(name, out[:1], expected)

    def call_counting(self) -> None:
        x = self.pick()
        expected = counting(x[1], self.state[1])
        inputs = [x[0], self.state[0]]
        name = self.calls(counting, read=x[1:])
        del x
        self.hold(name, self.functions.counting.call(inputs), expected)

    def call_sized(self) -> None:
        x, n = self.pick(), self.random.randrange(3)
        expected = sized(x[1], n)
        inputs = [x[0], n]
        name = self.calls(sized, read=x[1:])
        del x
        self.hold(name, self.functions.sized.call(inputs), expected)

    def move_weight(self) -> None:
        i = self.random.randrange(len(self.weights))
        if len(moved) < 8 or self.random.random() < 0.1:
            moved.append(self.fresh())  # a few places that weights move between
        target = self.random.choice(moved)
        if any(target is w for w, _ in self.weights):
            return
        target.copy_(self.weights[i][0])
        self.weights[i] = (target, self.weights[i][1])

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
        self.keep_gradients()

    def keep_gradients(self) -> None:
        if not self.copies_are_possible:  # nor can gradients be copied out when they are still held
            for p, _ in self.parameters:
                p.grad = None if p.grad is None else p.grad.clone()

    def backward_that_raises(self) -> None:
        """If it runs Python. Some gradients may have come by then; without them all is as if it had not been."""
        if not self.trained:
            return
        ours, eager = self.trained.pop(self.random.randrange(len(self.trained)))
        trouble[0] = True
        try:
            (ours * ours).sum().backward()
        except Trouble:
            for p in (p for pair in self.parameters for p in pair):
                p.grad = None
            return
        finally:
            trouble[0] = False
        (eager * eager).sum().backward()
        self.keep_gradients()

    def backward_twice(self) -> None:
        if not self.trained:
            return
        pair = self.trained.pop(self.random.randrange(len(self.trained)))
        for y in pair:
            loss = (y * y).sum()
            torch.autograd.function.FunctionCtx.retained = True
            loss.backward(retain_graph=True)
            torch.autograd.function.FunctionCtx.retained = False
            loss.backward()
            del loss
        self.keep_gradients()

    def start_over(self) -> None:
        """As after a reset, or with functions that were compiled anew; what waits for a backward is given up."""
        self.trained.clear()
        if self.random.random() < 0.5:
            dispatch.reset()
            if self.marks:
                dispatch.mark_step_begin()
        else:
            self.functions = Functions(self.world, self.held_outputs)
        self.steps += 1

    def zero_grad(self) -> None:
        to_none = self.random.random() < 0.7
        for pair in self.parameters:
            for p in pair:
                if p.grad is not None:
                    if to_none:
                        p.grad = None
                    else:
                        p.grad.zero_()
