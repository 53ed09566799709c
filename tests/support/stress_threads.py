"""Calls on two threads at once, compared with eager mode, in several processes.

python tests/support/stress_threads.py --repetitions 2000 --processes 14 --seconds 100

A repetition draws a backend, forwards alone or with a backward, one compiled function for both threads or one for each,
marked steps or not. Functions are compiled before the threads start: torch's own compilation is not safe in threads
("FX to symbolically trace a dynamo-optimized function" on 2.11). `--cold` compiles in the threads.

Inputs are drawn on the CPU. While a graph is recorded, CUDA's generator refuses to draw in any other thread: "Offset
increment outside graph capture". torch registers that generator with every capture, random operators or not; so in a
run that drew on the device, 495 of 1,994 repetitions ended so. `--draw-on-device` shows it.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import json
import logging
import multiprocessing
import queue as queue_module
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import aot_hooks
import cudagraph

STEPS = 5  # of each thread
STUCK_S = 120.0
BACKENDS = ("cudagraph_tree", "aot_hooks", "aot_hooks with cudagraphs")


@dataclasses.dataclass(frozen=True)
class Kind:
    backend: str
    backward: bool
    shared: bool  # both threads call one compiled function
    marked: bool  # steps are marked
    cold: bool  # compiled in the threads
    draws_on_device: bool

    @classmethod
    def drawn(cls, rng: random.Random, cold: bool, draws_on_device: bool) -> Kind:
        chances = (rng.random() < share for share in (0.5, 0.5, 0.3))
        return cls(rng.choice(BACKENDS), *chances, cold, draws_on_device)


def compiled(model: nn.Module, kind: Kind, hook: aot_hooks.Hook) -> Callable[[Tensor], Tensor]:
    if kind.backend == "cudagraph_tree":
        return torch.compile(model, backend="cudagraph_tree", options={"inner": "aten"})
    options = {"inner": "aten", "cudagraphs": kind.backend.endswith("cudagraphs")}
    call = torch.compile(model, backend="aot_hooks", options=options)

    def in_context(x: Tensor) -> Tensor:
        with aot_hooks.saved_tensors_hooks(hook):
            return call(x)

    return in_context


def step(call: Callable[[Tensor], Tensor], model: nn.Module, kind: Kind, rows: int, device: torch.device) -> None:
    """Run one step and raise `AssertionError` if a value is off: lossy hooks bound gradients, outputs are exact."""

    def values(fn: Callable[[Tensor], Tensor]) -> list[Tensor]:
        if not kind.backward:
            with torch.no_grad():
                return [fn(x).clone()]
        out = fn(x)
        gradients = torch.autograd.grad(out.square().mean(), list(model.parameters()))
        return [out.detach().clone(), *(g.clone() for g in gradients)]

    x = torch.randn(rows, 32, device=device if kind.draws_on_device else None).to(device)
    for i, (found, expected) in enumerate(zip(values(call), values(model), strict=True)):
        off = ((found - expected).norm() / (expected.norm() + 1e-12)).item()
        limit = 0.2 if i and kind.backend != "cudagraph_tree" else 1e-4
        assert off < limit, f"value {i} of a batch of {rows} is {off} off"


def repeat(kind: Kind, rng: random.Random, device: torch.device) -> list[str]:
    """The tracebacks of one repetition."""
    torch.manual_seed(rng.randrange(1 << 30))
    hook = rng.choice([aot_hooks.cast(torch.bfloat16), aot_hooks.float8()])
    layers = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh()
    models = [nn.Sequential(*layers).to(device)] * 2
    if not kind.shared:
        models[1] = copy.deepcopy(models[0])
    calls = [compiled(models[0], kind, hook)] * 2
    if not kind.shared:
        calls[1] = compiled(models[1], kind, hook)
    rows = [4, 4 if kind.shared else 6]
    errors: list[str] = []
    barrier = threading.Barrier(2)

    def run(which: int) -> None:
        try:
            barrier.wait(STUCK_S)
            for _ in range(STEPS):
                if kind.marked:
                    cudagraph.mark_step_begin()
                step(calls[which], models[which], kind, rows[which], device)
        except threading.BrokenBarrierError:
            pass  # the other thread has raised
        except BaseException:
            errors.append(traceback.format_exc())
            barrier.abort()

    if not kind.cold:
        for call, model, n in zip(calls, models, rows, strict=True):
            for _ in range(3):  # compiled, warmed up, recorded
                step(call, model, kind, n, device)
    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(STUCK_S)
        if thread.is_alive():
            frames = sys._current_frames()
            stacks = ["".join(traceback.format_stack(frames[t.ident])) for t in threads if t.ident in frames]
            return [*errors, "stuck\n" + "\n".join(stacks)]
    return errors


def work(options: argparse.Namespace, number: int, queue: Any) -> None:
    """Repeat in this process, and put what was found on `queue`."""
    warnings.filterwarnings("ignore")
    logging.getLogger("cudagraph").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rng = random.Random(number)
    sys.setswitchinterval(rng.choice([5e-3, 1e-4, 1e-5]))
    begin, done, wrong = time.monotonic(), 0, []
    replays = 0
    while done < -(-options.repetitions // options.processes) and time.monotonic() - begin < options.seconds:
        torch._dynamo.reset()
        if rng.random() < 0.3:
            cudagraph.reset()
        kind = Kind.drawn(rng, options.cold, options.draw_on_device)
        errors = repeat(kind, rng, device)
        done += 1
        replays = max(replays, cudagraph.stats()["replays"])
        wrong += [(str(kind), error[-1500:]) for error in errors]
        if any(error.startswith("stuck") for error in errors):
            break
    queue.put((done, replays, wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--cold", action="store_true", help="compile in the threads")
    parser.add_argument("--draw-on-device", action="store_true", help="draw inputs on the device")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=work, args=(options, i, queue)) for i in range(options.processes)]
    for process in processes:
        process.start()
    found = []
    for _ in processes:
        try:
            found.append(queue.get(timeout=options.seconds + 2 * STUCK_S))
        except queue_module.Empty as error:  # a process that died puts nothing
            print(f"lost: {error!r}, exit codes {[p.exitcode for p in processes]}", file=sys.stderr)
            break
    for process in processes:
        process.terminate()
    wrong = [row for _, _, rows in found for row in rows]
    by_line = collections.Counter(error.strip().splitlines()[-1][:160] for _, error in wrong)
    result = {
        "repetitions": sum(done for done, _, _ in found),
        "replays": sum(replays for _, replays, _ in found),
        "processes_lost": len(processes) - len(found),
        "failures": len(wrong),
        "by_line": dict(by_line),
        "first": wrong[:3],
    }
    print(json.dumps(result))
    return 1 if wrong or len(found) < len(processes) else 0


if __name__ == "__main__":
    sys.exit(main())
