"""Random models of captured blocks under `torch.utils.checkpoint`, trained and compared with eager mode.

python tests/support/fuzz_checkpoint.py --first 0 --count 300        seeds 0 to 299, on the simulator of captures
python tests/support/fuzz_checkpoint.py --count 300 --device cuda

A program draws which blocks are frozen, which segments are checkpointed (re-entrant or not, nested or not), how many
forwards come before a backward, whether steps are marked, where evaluations without gradients come, and what is held.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from capture_simulator import Simulator
from fuzz_command import parser_of, printed
from places import backend_with
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cudagraph

WIDTH = 8


class Different(AssertionError):
    """What a program computes is not what eager mode has."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Scale(nn.Module):
    """Its forward saves inputs only, and nothing that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.down


class Machine:
    """The device, and a backend for each option; compilations are shared by all programs."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.driver: Any = Simulator(1 << 18) if device == "cpu" else None
        self.backends = {held: backend_with(self.driver, {"held_outputs": held}) for held in ("error", "copy")}

    def read(self, x: Tensor) -> Tensor:
        return x.detach().clone() if self.driver is None else self.driver.read(x)

    @contextlib.contextmanager
    def many_graphs(self) -> Iterator[None]:
        """A context in which one code object may be compiled for each pattern of frozen parameters."""
        with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=2048):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield


class Program:
    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.seed = seed
        count = draw.randint(2, 5)
        self.kinds = [draw.choice(["all", "all", "part", "none", "scale"]) for _ in range(count)]  # what is trained
        self.held = draw.choice(["error", "copy"])
        self.marks = draw.choice(["", "", "steps", "forwards"])
        re_entrant = draw.random() < 0.5
        self.total = draw.choice([lambda y: y.square().mean(), Tensor.sum])
        self.forward_counts = [draw.choice([1, 1, 2, 3]) for _ in range(5)]
        self.between = [draw.choice([None, None, "multiply", "norm"]) for _ in range(count)]
        self.keeps_outputs, self.evaluates = draw.random() < 0.4, draw.random() < 0.4
        self.input_needs_grad = re_entrant or draw.random() < 0.5
        self.segments: list[tuple[str, list[int], bool]] = []
        first = 0
        while first < count:
            length = draw.randint(1, min(3, count - first))
            how = draw.choice(["plain", "checkpoint", "checkpoint", "nested"])
            own = re_entrant if draw.random() < 0.8 else not re_entrant
            self.segments.append((how, list(range(first, first + length)), own))
            first += length

    def forward(self, blocks: Sequence[Callable[..., Any]], h: Tensor) -> Tensor:
        def span(indices: list[int]) -> Callable[[Tensor], Tensor]:
            def run(h: Tensor) -> Tensor:
                for i in indices:
                    if self.between[i] == "multiply":
                        h = h * 1.5
                    elif self.between[i] == "norm":
                        h = nn.functional.layer_norm(h, (WIDTH,))
                    h = blocks[i](h)
                return h

            return run

        for how, indices, re_entrant in self.segments:
            if how == "plain":
                h = span(indices)(h)
            elif how == "checkpoint" or len(indices) < 2:
                h = checkpoint(span(indices), h, use_reentrant=re_entrant)
            else:

                def nested(h: Tensor, indices: list[int] = indices, re_entrant: bool = re_entrant) -> Tensor:
                    h = checkpoint(span(indices[:1]), h, use_reentrant=re_entrant)
                    return checkpoint(span(indices[1:]), h, use_reentrant=re_entrant)

                h = checkpoint(nested, h, use_reentrant=re_entrant)
        return h

    def run(self, machine: Machine) -> None:
        """Raises `Different`, or the error of a stale output."""
        cudagraph.reset()
        torch.manual_seed(self.seed)
        eager = nn.ModuleList(Scale() if kind == "scale" else Block() for kind in self.kinds).to(machine.device)
        for block, kind in zip(eager, self.kinds, strict=True):
            for name, parameter in block.named_parameters():
                parameter.requires_grad_(kind in ("all", "scale") or (kind == "part" and name.startswith("down")))
        ours = copy.deepcopy(eager)
        compiled = [torch.compile(block, backend=machine.backends[self.held], dynamic=False) for block in ours]
        models: list[Any] = [compiled, eager]
        kept: Any = None

        def batch() -> Tensor:
            return torch.randn(4, WIDTH, device=machine.device)

        def evaluate(share: float) -> None:
            if self.evaluates and self.draw.random() < share:
                x = batch()
                with torch.no_grad():
                    out, expected = (self.forward(model, x) for model in models)
                compare(machine.read(out), expected, "an evaluation")

        for step, forward_count in enumerate(self.forward_counts):
            if self.marks:
                cudagraph.mark_step_begin()
            evaluate(0.4)
            leaves, totals = [], []
            for i in range(forward_count):
                if self.marks == "forwards" and i:
                    cudagraph.mark_step_begin()
                x = batch()
                leaves.append([x.clone().requires_grad_(self.input_needs_grad) for _ in models])
                out, expected = (self.forward(model, leaf) for model, leaf in zip(models, leaves[-1], strict=True))
                if not expected.requires_grad:
                    return
                evaluate(0.2)
                totals.append([self.total(y) for y in (out, expected)])
                kept = out if self.keeps_outputs else None
                del out, expected
            losses = [sum(each) for each in zip(*totals, strict=True)]
            del totals
            compare(*(loss.detach() for loss in losses), f"the loss of step {step}")
            for loss in losses:
                loss.backward()
            pairs = [*zip(ours.parameters(), eager.parameters(), strict=True), *leaves]
            for a, b in pairs:
                if b.grad is not None:
                    compare(a.grad, b.grad, f"a gradient of step {step}")
                a.grad = b.grad = None
        del kept


def compare(got: Tensor, expected: Tensor, what: str) -> None:
    if not torch.allclose(got, expected, rtol=1e-4, atol=1e-5):
        raise Different(f"{what} is {(got - expected).norm() / expected.norm():.2g} off")


def run_seeds(seeds: Sequence[int], machine: Machine) -> list[tuple[int, str]]:
    """What went wrong, by seed."""
    wrong = []
    with machine.many_graphs():
        for seed in seeds:
            try:
                Program(seed).run(machine)
            except (Different, RuntimeError) as error:
                wrong.append((seed, f"{type(error).__name__}: {error}"))
    cudagraph.reset()
    return wrong


def main() -> int:
    options = parser_of(__doc__).parse_args()
    logging.getLogger("cudagraph").setLevel(logging.ERROR)
    seeds = range(options.first, options.first + options.count)
    wrong = run_seeds(seeds, Machine("cuda" if options.device == "cuda" else "cpu"))
    return printed(options, "programs", wrong)


if __name__ == "__main__":
    sys.exit(main())
