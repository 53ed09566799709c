"""What entering a context costs, in microseconds of a CPU: torch's own beside ours.

torch, float8, function, ...     each entered and left a few times, taking turns; the fastest turn of each counts
    |
    v
microseconds and their ratio to torch's own, as JSON

python benchmarks/bench_context.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import conditions

import aot_hooks

LIMITS = {"float8, kept": 10, "float8, made anew": 10, "function, kept": 40, "function, made anew": 40}
_Enter = Callable[[], contextlib.AbstractContextManager[Any]]


def scale(k: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    return (lambda x: x * k), (lambda p: p / k)


def quantizer() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """A hook that calls a module of 20 layers."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
    return (lambda x: layers(x)), (lambda p: p.clone())


def ways() -> dict[str, _Enter]:
    """Contexts by what they are entered with; a graph was compiled under each."""
    float8, function, module = aot_hooks.float8(), scale(2.0), quantizer()
    found: dict[str, _Enter] = {
        "torch, functions": lambda: torch.autograd.graph.saved_tensors_hooks(*function),
        "float8, kept": lambda: aot_hooks.saved_tensors_hooks(float8),
        "float8, made anew": lambda: aot_hooks.saved_tensors_hooks(aot_hooks.float8()),
        "function, kept": lambda: aot_hooks.saved_tensors_hooks(*function),
        "function, made anew": lambda: aot_hooks.saved_tensors_hooks(*scale(2.0)),
        "function over a module of 20 layers": lambda: aot_hooks.saved_tensors_hooks(*module),
        "policy of a function": lambda: aot_hooks.saved_tensors_policy(lambda saved: float8),
    }
    w, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8)
    for enter in found.values():
        compiled = torch.compile(lambda x: (x @ w).sin() @ w, backend="aot_hooks", options={"inner": "aten"})
        with enter():
            compiled(x).sum().backward()
    return found


def measure(rounds: int, calls: int = 20) -> dict[str, float]:
    """Microseconds to make, enter and leave each context; the fastest of `rounds`."""
    best: dict[str, float] = {}
    found = ways()
    for _ in range(rounds):
        for name, enter in found.items():
            start = time.perf_counter()
            for _ in range(calls):
                with enter():
                    pass
            us = (time.perf_counter() - start) / calls * 1e6
            best[name] = min(us, best.get(name, us))
    return best


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Microseconds to enter a context: torch's own, ours.")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=pathlib.Path, help="write the result here as well")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    us = measure(options.rounds)
    own = us["torch, functions"]
    rows = {name: {"us": round(t, 2), "ratio": round(t / own, 1), "limit": LIMITS.get(name)} for name, t in us.items()}
    result = {"conditions": conditions(torch.device("cpu"), rounds=options.rounds), "contexts": rows}
    text = json.dumps(result, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    late = [name for name, limit in LIMITS.items() if us[name] > limit * own]
    if late:
        print(f"over their limit: {', '.join(late)}", file=sys.stderr)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
