"""Random functions, each explained and then run: what `explain` says is what happens.

python tests/support/fuzz_explain.py --count 300                  seeds 0 to 299, captures simulated on the CPU
python tests/support/fuzz_explain.py --count 300 --device cuda

Functions are chains of operators, some of which can't be captured, are moved off the CPU, or launch nothing. As many
functions are recorded as `explain` has captured parts, and the same reasons are in the log, word for word. No run is
without a graph where it says "captured whole", and all is what eager mode gives.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from capture_simulator import Simulator
from fuzz_command import parser_of, printed
from pieces import scaled
from places import backend_with
from torch import nn

import cudagraph
from cudagraph.explain import explain_with
from cudagraph.tree import dispatch
from cudagraph.tree.driver import cuda_driver

Operator = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def rebind(module, h, meta):
    with torch.no_grad():
        module.weight.data *= 0.9
    return h


def write_to_buffer(module, h, meta):
    module.buffer.mul_(0.9).add_(h.detach().sum(0))
    return h + module.buffer


OPERATORS: dict[str, tuple[Operator, int]] = {  # and how often
    "sin": (lambda m, h, meta: h.sin(), 4),
    "matmul": (lambda m, h, meta: torch.tanh(h @ m.weight), 4),
    "view": (lambda m, h, meta: h.reshape(6, 4).t().reshape(4, 6), 2),
    "buffer": (write_to_buffer, 1),
    "unsafe": (lambda m, h, meta: scaled(h, 0.5), 1),
    "dynamic size": (lambda m, h, meta: h + h.nonzero().sum() * 0, 1),
    "item": (lambda m, h, meta: h * 2 + h.detach().sum().long().item() * 0, 1),
    "rebind": (rebind, 1),
    "meta": (lambda m, h, meta: h + (meta * 2).shape[0], 1),
    "sparse": (lambda m, h, meta: h + h.detach().to_sparse().to_dense() * 0, 1),
    "eigenvalues": (lambda m, h, meta: h + torch.linalg.eigvalsh(m.weight @ m.weight.t()) * 0, 1),
    "arange": (lambda m, h, meta: h + torch.arange(6, device=h.device), 1),
}


class Drawn(nn.Module):
    """The function of one seed."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(6, 6, device=device) / 3)
        self.register_buffer("buffer", torch.randn(6, device=device))
        names, weights = list(OPERATORS), [often for _, often in OPERATORS.values()]
        drawn = draw.choices(names, weights, k=draw.randint(1, 6))
        # AOTAutograd refuses to write to what was given other memory
        self.names = [name for i, name in enumerate(drawn) if name != "rebind" or name not in drawn[:i]]
        self.writes_to_input = draw.random() < 0.1
        self.returns_meta = draw.random() < 0.2
        # nor does its backward read what was given other memory since
        rebinds_late = "rebind" in self.names[1:]
        self.grad = draw.random() < 0.4 and not self.writes_to_input and not rebinds_late

    def forward(self, x: torch.Tensor, meta: torch.Tensor) -> Any:
        if self.writes_to_input:
            x.mul_(0.5)
        h = x
        for name in self.names:
            h = OPERATORS[name][0](self, h, meta)
        return (h, meta + 1) if self.returns_meta else h


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def compare(seed: int, driver: Any, device: torch.device) -> None:
    """Raises `AssertionError` where the explanation of a seed's function is not what its run does."""
    cudagraph.reset()
    torch._dynamo.reset()
    explained, module, reference = (Drawn(seed, device) for _ in range(3))

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, 6, device=device), torch.empty(3, 2, device="meta")

    told = Told()
    logger = logging.getLogger("cudagraph")
    logger.addHandler(told)
    propagates, logger.propagate = logger.propagate, False
    try:
        with torch.set_grad_enabled(module.grad):
            found = explain_with(driver or cuda_driver(), explained, inputs(), {})
            cudagraph.reset()
            compiled = torch.compile(module, backend=backend_with(driver))
            for _ in range(5):
                cudagraph.mark_step_begin()
                x, meta = inputs()
                again = x.clone()
                out, expected = (
                    y[0] if module.returns_meta else y for y in (compiled(x, meta), reference(again, meta))
                )
                torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
                assert torch.equal(module.weight, reference.weight)
                if module.grad and expected.requires_grad:
                    for y, each in ((out, module), (expected, reference)):
                        each.weight.grad = None
                        y.sum().backward()
                    if reference.weight.grad is not None:
                        torch.testing.assert_close(module.weight.grad, reference.weight.grad, rtol=1e-3, atol=1e-4)
                del out
    finally:
        logger.removeHandler(told)
        logger.propagate = propagates
    counts = cudagraph.stats()
    captured = [part for part in found.parts if part.captured]
    trees = [each for kept in dispatch.every_thread for each in kept.values()]
    # after a graph break one function may be called at several places, a recording each
    recorded = {node.function for each in trees for node in each.root.recordings()}
    assert len(recorded) == len(captured), (counts, str(found), told.text)
    assert not (found.captured_whole and counts["skips"]), (counts, str(found), told.text)
    for blocker in found.blockers:
        assert str(blocker) in told.text, (str(found), told.text)
    reasons = {line.strip() for line in told.text.splitlines() if line.startswith("  ")}
    assert reasons == {str(blocker) for blocker in found.blockers}, (str(found), told.text)


def run_seeds(seeds: range, driver: Any, device: torch.device) -> list[tuple[int, str]]:
    """What differed, by seed."""
    wrong = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        for seed in seeds:
            try:
                compare(seed, driver, device)
            except Exception as error:
                wrong.append((seed, f"{type(error).__name__}: {error}"))
    cudagraph.reset()
    return wrong


def main() -> int:
    options = parser_of(__doc__).parse_args()
    on_cuda = options.device == "cuda"
    seeds = range(options.first, options.first + options.count)
    wrong = run_seeds(seeds, None if on_cuda else Simulator(), torch.device("cuda" if on_cuda else "cpu"))
    return printed(options, "functions", wrong)


if __name__ == "__main__":
    sys.exit(main())
