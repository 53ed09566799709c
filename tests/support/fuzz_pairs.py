"""What a random program holds: pairs (ours, eager) of tensors, and what must be so of them at any time.

Whoever reads a tensor reads what eager has, or gets the error that its memory was reused; and that only for what an
earlier step gave out, never with held_outputs="copy", and never in a backward. Where steps begin by themselves, the
documented rules and the path that the tree is on say when one may have begun.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from fuzz_functions import (
    SHAPE,
    Functions,
    name_of,
)
from tree_programs import World

from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree import dispatch
from cudagraph.tree.liveness import STALE


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


class Holder:
    """The pairs of one program: it picks what to call with, keeps what comes out, and compares."""

    def __init__(
        self, seed: int, world: World, functions: dict[str, Functions], *, generation: int = 5, trace: bool = False
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

    def calls(self, fn: Callable[..., Any], label: str = "", read: Sequence[torch.Tensor] = ()) -> str:
        """`fn` is about to be called, in eager mode with `read`; its name. The call may begin a step by itself."""
        name = name_of(fn, self.held_outputs, label)
        here = [t for t in (getattr(dispatch.local, "trees", None) or {}).values() if t.driver is self.world.driver]
        path = [node.function.name for node in here[0].path_end.path()] if here else []
        # where storages move only once, an unmarked call goes on with the step rather than take away what it reads
        moves = torch_cuda.can_swap() and getattr(self.world.driver, "moves", "all") == "all"
        storages = {x.untyped_storage()._cdata for x in read} if moves or not self.marks else set()
        for pair in self.held:
            if pair.eager.untyped_storage()._cdata in storages and self.copies_are_possible:
                pair.born = self.steps  # what the call that begins a step reads is copied out
            elif not self.marks and name in path:
                pair.may_be_stale |= here[0].path_end.first.name == name or name in pair.givers
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

    def step(self) -> None:
        if self.marks:
            dispatch.mark_step_begin()
            self.steps += 1
