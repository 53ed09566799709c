"""Random programs with offload against the same without: compiled, eager, captured, with little room and late copies.

    seed -> program   operators on four values: products, views, slices, attention, breaks, checkpoints
         -> settings  which hooks and policies, room on the host and under way, scope, dynamic sizes, order of backwards
         -> check     gradients bit for bit those of the hook that only passes on (or of `then` alone), many steps;
                      afterwards no host memory is leased, and the report of each plan adds up

    python tests/support/fuzz_offload.py --first 0 --count 1000               # about one a second
    python tests/support/fuzz_offload.py --inner inductor --count 20
    python tests/support/fuzz_offload.py --captured --count 100               # CUDA graphs, on the simulator
    python tests/support/fuzz_offload.py --across --count 100                 # steps of many graphs, one plan for all

Copies on the CPU are made at their waits, and seen to be done as late as may be: a value that is let go too soon shows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import logging
import math
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import late_copies
import pytest
import torch
from offloading import SLOW, simulate
from torch.utils.checkpoint import checkpoint

import aot_hooks
import cudagraph
from aot_hooks import policies
from aot_hooks.offloading import at_run_time, transfers

replays: list[int] = []  # of each captured program
SAME = aot_hooks.Hook("same", lambda x: (x,), lambda p: p[0])
Values = list[torch.Tensor]


def operators() -> list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Of two values [n, 16] and a weight [16, 16]; they give [n, 16]."""
    return [
        lambda a, c, w: a @ w,
        lambda a, c, w: torch.tanh(a),
        lambda a, c, w: (a.t() @ c).tanh()[:1] * a,
        lambda a, c, w: torch.sin(a) * c,
        lambda a, c, w: torch.nn.functional.layer_norm(a, (16,)) + c,
        lambda a, c, w: a.softmax(-1) * 4,
        lambda a, c, w: torch.cat([a[:3], c[3:]], 0),
        lambda a, c, w: torch.cat([a[:, :8] * a[:, 8:].sigmoid(), c[:, 8:]], 1),
        lambda a, c, w: torch.where(a > 0, c, a * 2),
        lambda a, c, w: a.view(-1, 4, 4).transpose(1, 2).reshape(-1, 16) * c,
        lambda a, c, w: a.relu() + c.sigmoid(),
        lambda a, c, w: a.max(1, keepdim=True)[0].tanh() * c,
        lambda a, c, w: a.cumsum(0) * 0.1 + c,
        lambda a, c, w: attention(a, c),
        lambda a, c, w: a.unsqueeze(1).expand(-1, 3, -1).sin().mean(1) * c,
        lambda a, c, w: (a.to(torch.float64) * c).tanh().float(),
        lambda a, c, w: a.add(1).mul_(0.5).cos(),
        lambda a, c, w: torch.complex(a, c).abs().tanh(),
    ]


def attention(a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    q, k = (x.view(1, -1, 2, 8).transpose(1, 2) for x in (a, c))
    return torch.nn.functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).reshape(-1, 16)


@dataclass
class Program:
    """`ops`: (operator, target and first value, second value, what surrounds it)."""

    ops: list[tuple[int, int, int, str]]
    region: Any
    returns: int | None = None  # the value that the caller gets, too

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        known = operators()
        v = [x, x @ w, torch.tanh(x), x * b]
        for k, p, q, around in self.ops:
            op = known[k]
            if around == "break":
                torch._dynamo.graph_break()
            if around == "checkpoint":
                v[p] = checkpoint(op, v[p], v[q], w, use_reentrant=False)
            elif around == "region" and self.region is not None:
                with aot_hooks.saved_tensors_hooks(self.region):
                    v[p] = op(v[p], v[q], w)
            else:
                v[p] = op(v[p], v[q], w)
        y = (v[0] + v[1].sin()) * 0.5 + v[2] * v[3].tanh()
        return y if self.returns is None else (y, v[self.returns])


@dataclass
class Case:
    """What is drawn for one seed."""

    program: Program
    reference: Program
    hook: Any
    plain: Any
    scope: str
    dynamic: bool
    sizes: list[int]
    order: list[int]
    thread: bool
    tick_s: float  # from one event of a step to the next, by the clock of its plans
    said: str


def case(seed: int, across: bool = False) -> Case:
    """What is drawn for `seed`. If `across`, steps of several graphs, whose hooks plan them as one."""
    rng = random.Random(seed)
    around = ["", "", "", "", "", "", rng.choice(["", "break"]), rng.choice(["", "checkpoint"]), "region"]
    count = len(operators())
    if across:
        around.append("break")
    ops = [
        (rng.randrange(count), rng.randrange(4), rng.randrange(4), rng.choice(around))
        for _ in range(rng.randint(3, 12))
    ]

    def settings() -> dict[str, Any]:
        return {
            "min_bytes": rng.choice([0, 0, 0, 600]),
            "max_stall_ms": rng.choice([0.0, 1e-4, 1e-3, math.inf, math.inf]),
            "in_flight_bytes": rng.choice([0, 300, 3000, 1 << 30, 1 << 30]),
            "max_host_bytes": rng.choice([None, None, None, 0, 4096, 16384]),
            "rates": rng.choice([None, SLOW, SLOW]),
            **({"across_graphs": True} if across else {}),
        }

    first, second = settings(), settings()
    kind = rng.choice(["one", "one", "then", "two"])
    hook: Any = aot_hooks.offload(**first)
    plain: Any = SAME
    if kind == "then":
        first["min_bytes"] = 0  # what is smaller would not be packed
        plain = rng.choice([aot_hooks.int8(16), aot_hooks.bitmask(), aot_hooks.cast(torch.bfloat16)])
        hook = aot_hooks.offload(then=plain, **first)
    elif kind == "two":
        hook = policies.first_match(
            policies.larger_than(rng.choice([1000, 1500]), hook), policies.everything(aot_hooks.offload(**second))
        )
    region = rng.choice([None, aot_hooks.offload(**second)]) if kind == "one" else None
    dynamic = rng.random() < 0.2
    sizes = [rng.choice([8, 16, 24]) for _ in range(3)] if dynamic else [rng.choice([8, 16])] * 3
    forwards = rng.choice([1, 1, 1, 2])
    order = rng.sample(range(forwards), forwards)
    scope = rng.choice(["donated", "donated", "no_static", "all"])
    thread, returns = rng.random() < 0.2, rng.choice([None, 0, 1, 2, 3]) if across else None
    said = f"{kind} {first} scope={scope} dynamic={dynamic} order={order} region={region is not None} {ops} {returns}"
    return Case(
        Program(ops, region, returns),
        Program(ops, None, returns),
        hook,
        plain,
        scope,
        dynamic,
        sizes,
        order,
        thread,
        rng.choice([1e-6, 1e-4, 1e-3]),
        said,
    )


@contextlib.contextmanager
def late(at_wait: bool = True) -> Any:
    """Copies as late as they may be."""
    before = transfers.is_finished
    late_copies.at_wait = at_wait
    transfers.is_finished = lambda ticket: False  # type: ignore[assignment]
    try:
        yield
    finally:
        late_copies.at_wait, transfers.is_finished = False, before  # type: ignore[assignment]


def gradients(fn: Any, inputs: list[Values], hook: Any, order: list[int], scope: str, thread: bool) -> list[Values]:
    """Of one forward an input, all in flight, and their backwards in `order`."""
    leaves = [[a.clone().requires_grad_(i < 2) for i, a in enumerate(values)] for values in inputs]
    losses = []
    for values in leaves:
        with aot_hooks.saved_tensors_policy(hook, scope=scope):
            y = fn(*values)
        if isinstance(y, tuple):
            y = y[0] * y[1].cos()
        losses.append((y.double() * torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape)).sum())
    del y
    for i in order:
        if thread:
            worker = threading.Thread(target=losses[i].backward)
            worker.start()
            worker.join()
        else:
            losses[i].backward()
    return [[loss.detach(), *(a.grad for a in values[:2])] for loss, values in zip(losses, leaves, strict=True)]


def check(seed: int, inner: str = "aten", captured: bool = False, across: bool = False) -> int:
    """Run the program of `seed`; how many tensors it sent. Raises `AssertionError` if anything is not as without."""
    drawn = case(seed, across)
    if across:  # a step is planned after its third run
        drawn.sizes = [rows for rows in dict.fromkeys(drawn.sizes) for _ in range(5)]
    if captured:  # each size warms up, is recorded and replayed
        drawn.sizes = [rows for rows in drawn.sizes[:2] for _ in range(4)]
    torch._dynamo.reset()
    aot_hooks.reset()
    generator = torch.Generator().manual_seed(seed)
    options = {"inner": inner, "cudagraphs": {"held_outputs": "copy"} if captured else False}
    ours = torch.compile(drawn.program, backend="aot_hooks", options=options, dynamic=drawn.dynamic)
    plain = torch.compile(drawn.reference, backend="aot_hooks", options={"inner": inner}, dynamic=drawn.dynamic)
    exactly = drawn.program.region is None and inner == "aten"
    sent = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(late())
        stack.enter_context(warnings.catch_warnings())
        if across:
            clock = itertools.count(step=drawn.tick_s)
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(at_run_time, "_mark", lambda _: next(clock))
        if captured:
            simulate(stack.enter_context(pytest.MonkeyPatch.context()), 1 << 22)
        warnings.filterwarnings("ignore", message="aot_hooks.offload: the host has no room")
        for rows in drawn.sizes:
            w = torch.randn(16, 16, generator=generator) / 4
            inputs = [
                [torch.randn(rows, 16, generator=generator), w, torch.randn(rows, 16, generator=generator)]
                for _ in drawn.order
            ]
            expected = gradients(plain, inputs, drawn.plain, drawn.order, drawn.scope, False)
            got = gradients(ours, inputs, drawn.hook, drawn.order, drawn.scope, drawn.thread)
            compare(got, expected, exactly, "compiled")
            for plan in aot_hooks.last_plans(ours):
                assert 0 <= plan.packed_bytes and plan.host_bytes >= 0
                assert drawn.plain is not SAME or plan.packed_bytes <= plan.saved_bytes, "more than there was"
                assert plan.host_bytes == sum(t.nbytes for t in plan.transfers if t.placement.offloaded)
            if not captured and not across:
                expected = gradients(drawn.reference, inputs, drawn.plain, drawn.order, drawn.scope, False)
                got = gradients(drawn.program, inputs, drawn.hook, drawn.order, drawn.scope, drawn.thread)
                compare(got, expected, drawn.program.region is None, "eager")
        sent = aot_hooks.offload_stats()["sent_count"]
        del got, expected
        if captured:
            replays.append(cudagraph.stats()["replays"])
            aot_hooks.reset()
    gc.collect()
    assert aot_hooks.offload_stats()["host_leased_bytes"] == 0, "host memory is held"
    assert not transfers._in_flight and not transfers._kept
    return sent


def compare(got: Any, expected: Any, exactly: bool, where: str) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 2e-3, "atol": 2e-4}
    torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda m: f"{where}: {m}", **tolerance)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random programs with offload against the same without.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--inner", choices=("aten", "inductor"), default="aten")
    parser.add_argument("--across", action="store_true", help="one plan for all graphs of a step")
    parser.add_argument("--captured", action="store_true", help="as CUDA graphs, on the simulator")
    given = parser.parse_args(arguments)
    logging.getLogger("cudagraph").setLevel(logging.ERROR)  # what has no room runs without a graph
    started, sent, wrong, ran = time.monotonic(), 0, 0, 0
    for seed in range(given.first, given.first + given.count):
        if time.monotonic() - started > given.seconds:
            break
        ran += 1
        try:
            sent += check(seed, given.inner, given.captured, given.across)
        except Exception as error:
            wrong += 1
            print(
                f"seed {seed}: {type(error).__name__}: {str(error)[:600]}\n    {case(seed, given.across).said}",
                flush=True,
            )
    seconds = time.monotonic() - started
    print(f"{ran} programs, {wrong} wrong, {sent} tensors sent, {sum(replays)} replays, {seconds:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
