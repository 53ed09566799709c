"""Random training programs: `whole_step` beside the same steps in eager mode, with changes and faults between calls.

python tests/support/fuzz_whole_step.py --count 10000                        on the simulator; prints what differed
python tests/support/fuzz_whole_step.py --device cuda --workers 16 --seconds 120 --count 1000000
python tests/support/fuzz_whole_step.py --first 4711 --count 1 --trace       one program, with what it does
python tests/support/fuzz_whole_step.py --ranks --count 1000                 two processes; stops at the first error

A program is a model, an optimizer, a form of the step, and some calls. Before each call something may change on the
host; in the call the step may raise, or a capture may fail at any point. After each call everything is compared:
results, parameters, buffers, gradients, random states, options of the model and the optimizer's state.

With `--ranks` two processes run each program together, connected by Gloo, and average gradients. What changes on the
host is the same on both; batches, and captures that fail, are of each rank alone.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import capture_simulator
import pytest
import torch
import torch.distributed as dist
from failing_captures import POINTS, FailingDriver, Fault, Interrupt
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from whole_steps import Planted, copied, eager_step, on_simulator

import cudagraph
from cudagraph.step import whole

VALUES = [0.5, 0.3, 0.07, 0.03125]
POWERS = [0.5, 0.25, 0.0625, 0.03125]  # on CUDA a fused SGD has its learning rate in float32


PROGRAMS_OF_A_PAIR = 100  # that two processes run, because each of them makes a group, and groups stay
LIMIT_OF_A_PAIR_S = 1200.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(4, 8), nn.Linear(8, 2), nn.Dropout(0.25)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.zeros(8))
        self.options = {
            "scale": 1.0,
            "tanh": False,
            "norm": False,
            "order": [0, 1],
            "raise": 0,
            "count": False,
            "calls": 0,
            "temperature": 0.0,
            "decides": False,
            "stores": "",
            "rounds": 1,
            "updates": True,
            "toggles": False,
            "is_odd": False,
        }
        self.layers = [F.relu, torch.tanh]
        self.kept: Any = None
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.options["count"]:
            self.options["calls"] += 1
        x = self.first(x) + self.shift
        if self.options["norm"]:
            x = self.norm(x)
        for i in self.options["order"]:
            x = self.layers[i](x)
        x = self.last(self.dropout(x)) * self.options["scale"] / (1 + self.options["temperature"])
        if self.options["toggles"]:
            self.options["is_odd"] = not self.options["is_odd"]
            x = x * 0.5 if self.options["is_odd"] else x
        if self.options["decides"] and self.options["calls"] % 4 > 1:
            x = x * 0.5
        self.store(x)
        if self.options["raise"]:
            raise Planted
        return torch.tanh(x) if self.options["tanh"] else x

    def store(self, x: torch.Tensor) -> None:
        """Keep what a router's loss or a probe is, in one of the ways in which programs do."""
        how, loss = self.options["stores"], x.square().mean()
        if how == "an attribute":
            self.kept = loss
        elif how == "a new list":
            self.kept = [loss.detach(), {"x": x.detach()}, 1.0]
        elif how == "the same list":
            self.losses.clear()
            self.losses += [loss.detach(), x.detach()]
        elif how == "a weight":
            self.kept = self.last.bias.detach()
        elif how == "what was there":
            self.kept = loss.detach() if self.kept is None else self.kept * 0.5 + loss.detach()


STORES = ("", "", "", "an attribute", "a new list", "the same list", "a weight", "what was there")
SCHEDULES = ("", "", "lr", "weight_decay", "momentum", "betas", "temperature")


def muon_and_adamw(model: Net) -> list[torch.optim.Optimizer]:
    matrices, others = ([p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False))
    return [
        torch.optim.Muon(matrices, lr=0.0625),
        torch.optim.AdamW(others, lr=0.0625, foreach=True, capturable=True),
    ]


OPTIMIZERS: list[Callable[[Any], Any]] = [
    lambda m: torch.optim.SGD(m.parameters(), lr=0.25, momentum=0.5),
    lambda m: torch.optim.SGD(m.parameters(), lr=0.25, fused=True),
    lambda m: torch.optim.AdamW(m.parameters(), lr=0.0625, fused=True, weight_decay=0.25),
    lambda m: torch.optim.Adam(m.parameters(), lr=0.0625, capturable=True, foreach=True),
    lambda m: torch.optim.Adafactor(m.parameters(), lr=0.0625),
    muon_and_adamw,
]


def listed(optimizer: Any) -> list[torch.optim.Optimizer]:
    return optimizer if isinstance(optimizer, list) else [optimizer]


class Side:
    """One of the two that are compared: a model, its optimizers, and its step."""

    def __init__(self, model: Net, make: Callable[[Any], Any], scaler: Any) -> None:
        self.model, self.optimizers, self.scaler = model, listed(make(model)), scaler
        self.held: list[torch.Tensor] = []  # views of gradients
        self.schedulers: list[torch.optim.lr_scheduler.LRScheduler] = []  # which the step itself steps
        self.numbers: Any = None  # a generator on the host that the step draws from


def function_of(side: Side, form: str, on_host: str, *, talks: bool = False) -> Callable[..., Any]:
    """A step of the user's own. `on_host`: what it does there besides, which a replay would not. `talks`: whether it
    averages gradients over the ranks."""
    model, optimizers = side.model, side.optimizers
    first, to_none = "first" in form, "none" in form
    if on_host == "schedules":
        side.schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) for optimizer in optimizers]
    if on_host == "draws":
        side.numbers = random.Random(1)

    def zero() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        if first:
            zero()
        out = model(x)
        loss = F.mse_loss(out, y)
        if side.numbers is not None:
            loss = loss * side.numbers.choice(VALUES)
        loss.backward()
        if talks:
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad.mul_(0.5)
        if "adds" not in form and model.options["updates"]:
            for each in (*optimizers, *side.schedulers):
                each.step()
            if not first:
                zero()
        return loss.detach(), {"out": out.detach()}

    return step


# --- what changes between calls: (side, value) or, for torch's own settings, once for both


def replace_parameter(side: Side, value: float) -> None:
    old = side.model.last.bias
    side.model.last.bias = nn.Parameter(old.detach().clone())
    for optimizer in side.optimizers:
        optimizer.state.pop(old, None)
        for group in optimizer.param_groups:
            group["params"] = [side.model.last.bias if p is old else p for p in group["params"]]


def load(side: Side, value: float) -> None:
    side.model.load_state_dict(
        {k: v * 0.5 if v.is_floating_point() else v for k, v in copy.deepcopy(side.model.state_dict()).items()}
    )
    for optimizer in side.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def set_gradient(side: Side, value: float) -> None:
    side.model.last.bias.grad = torch.full_like(side.model.last.bias, value)


def hold_gradients(side: Side, value: float) -> None:
    side.held += [p.grad.view(-1) for p in side.model.parameters() if p.grad is not None]


def optimizer_step(side: Side, value: float) -> None:
    for optimizer in side.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=value > 0.1)


def add_parameter(side: Side, value: float) -> None:
    if not hasattr(side.model, "extra"):
        side.model.register_parameter("extra", nn.Parameter(torch.full_like(side.model.last.bias, value)))
        side.model.last.register_forward_hook(lambda module, args, out, m=side.model: out + m.extra)
        side.optimizers[-1].add_param_group({"params": [side.model.extra], "lr": value})


def evaluate(side: Side, value: float) -> None:
    training = side.model.training
    side.model.eval()
    with torch.no_grad(), torch.autocast(side.model.shift.device.type, torch.bfloat16, enabled=value > 0.1):
        side.model(torch.ones(3, 4, device=side.model.shift.device))
    side.model.train(training)


def of_all_groups(name: str) -> Callable[[Side, float], None]:
    def change(side: Side, value: float) -> None:
        for group in [group for optimizer in side.optimizers for group in optimizer.param_groups]:
            if group.get(name):  # momentum that was 0 would need buffers that are not there
                group[name] = value

    return change


def scheduled(side: Side, name: str, value: float) -> None:
    """What a schedule sets before each call."""
    if name == "temperature":
        side.model.options["temperature"] = value
    for group in [group for optimizer in side.optimizers for group in optimizer.param_groups]:
        if name == "betas" and "betas" in group:
            group["betas"] = (value, group["betas"][1])
        elif group.get(name):
            group[name] = value


CHANGES: list[Callable[[Side, float], Any]] = [
    of_all_groups("lr"),
    of_all_groups("lr"),  # as often as schedules do
    of_all_groups("weight_decay"),
    of_all_groups("momentum"),
    lambda s, value: s.model.train(value > 0.1),
    lambda s, value: s.model.first.requires_grad_(value > 0.1),
    lambda s, value: s.model.options.update(scale=value),
    lambda s, value: s.model.options.update(tanh=value > 0.1),
    lambda s, value: s.model.options.update(norm=value > 0.1),
    lambda s, value: s.model.options["order"].reverse(),
    lambda s, value: s.model.layers.__setitem__(0, F.gelu if value > 0.1 else F.silu),
    lambda s, value: setattr(s.model.dropout, "p", value),
    lambda s, value: setattr(s.model, "shift", s.model.shift + value),
    lambda s, value: s.model.shift.add_(value),
    lambda s, value: setattr(s.model.first.weight, "data", s.model.first.weight.data.clone()),
    lambda s, value: s.model.last.weight.register_hook(lambda g: g * value),
    lambda s, value: s.model.first.register_forward_hook(lambda module, args, out: out * value),
    lambda s, value: s.model.zero_grad(set_to_none=value > 0.1),
    lambda s, value: s.scaler.update(value * 64) if s.scaler is not None and s.scaler._scale is not None else None,
    lambda s, value: s.model.options.update(count=value > 0.25),
    replace_parameter,
    set_gradient,
    hold_gradients,
    optimizer_step,
    add_parameter,
    evaluate,
    load,
]


class World:
    """Where programs run."""

    def __init__(self, kind: str, rank: int | None = None) -> None:
        """`rank`: of this process, if two run each program together."""
        self.patch = pytest.MonkeyPatch()
        self.kind, self.rank = kind, rank
        self.values = POWERS if kind == "cuda" else VALUES
        if kind == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.driver = FailingDriver(whole.cuda_driver())
            self.patch.setattr(whole, "cuda_driver", lambda: self.driver)
        else:
            self.device = torch.device("cpu")
            self.driver = FailingDriver(on_simulator(self.patch, 1 << 18))
            self.patch.setattr(whole, "cuda_driver", lambda: self.driver)

    def random_states(self) -> list[Any]:
        on_device = [torch.cuda.get_rng_state()] if self.kind == "cuda" else []
        return [torch.get_rng_state(), *on_device]


FORMS = ("parts", "parts", "function, zero first, none", "function, none", "function, zero first", "function", "adds")


class Program:
    def __init__(self, seed: int, world: World, *, calls: int = 16, trace: bool = False) -> None:
        self.choose, self.world, self.calls, self.trace = random.Random(seed), world, calls, trace
        choose = self.choose
        make = choose.choice(OPTIMIZERS)
        form = choose.choice(FORMS)
        # What each rank chooses by itself, and whether the step talks.
        self.own = choose if world.rank is None else random.Random(seed * 2 + world.rank)
        talks = world.rank is not None and (form == "parts" or seed % 4 > 0)
        form = "function, none" if form == "parts" and talks else form
        clip, accumulate = choose.choice([None, 0.5]), choose.choice([1, 1, 3])
        can_scale = make in OPTIMIZERS[1:3] and form == "parts"
        scaled = can_scale and choose.random() < 0.4
        torch.manual_seed(seed)
        model = Net().to(world.device)
        sides = []
        for each in (copy.deepcopy(model), model):
            scaler = torch.amp.GradScaler(world.device.type, init_scale=64.0, growth_interval=3) if scaled else None
            sides.append(Side(each, make, scaler))
        self.ours, self.eager = sides
        self.options = {"size_limit": choose.choice([1, 2, 16]), "rerecord_limit": choose.choice([1, 16])}
        if form == "parts":
            optimizers = self.ours.optimizers
            self.step = cudagraph.whole_step(
                self.ours.model, F.mse_loss, optimizers if len(optimizers) > 1 else optimizers[0],
                scaler=self.ours.scaler, clip_grad_norm=clip, accumulate=accumulate, options=self.options,
            )  # fmt: skip
            side = self.eager
            self.expected = eager_step(side.model, F.mse_loss, side.optimizers, side.scaler, clip, accumulate)
        else:
            on_host = random.Random(~seed).choice(["", "", "", "", "schedules", "draws"])
            ours, self.expected = (function_of(side, form, on_host, talks=talks) for side in sides)
            self.step = cudagraph.whole_step(ours, options=self.options)
        self.often, self.faulty = choose.choice([0.1, 0.3, 0.9]), choose.choice([0.0, 0.0, 0.3])
        self.sizes = [6, choose.choice([6, 7])]
        self.done: list[Any] = [form, self.sizes, self.options]
        # Of its own, so that the programs of earlier seeds stay what they were in all else.
        more = random.Random(seed * 31 + 7)
        self.schedule, stores = more.choice(SCHEDULES), more.choice(STORES)
        more_options = {"stores": stores, "count": more.random() < 0.2, "decides": more.random() < 0.3}
        more_options |= {"rounds": more.choice([1, 1, 2, 3]), "toggles": more.random() < 0.15}
        for side in sides:
            side.model.options.update(more_options)
        self.done.append((self.schedule, more_options))
        self.results: list[tuple[Any, Any]] = []

    def run(self) -> None:
        for i in range(self.calls):
            if self.choose.random() < self.often:
                self.change()
            for side in (self.ours, self.eager) if self.schedule else ():
                scheduled(side, self.schedule, self.world.values[i % len(VALUES)])
            for side in (self.ours, self.eager):  # gradients of some calls add up to one update
                rounds = side.model.options["rounds"]
                side.model.options["updates"] = i % rounds == rounds - 1
            self.call(i)
        for ours, expected in self.results:
            same(ours, expected, "a result, later")
        same(self.ours.held, self.eager.held, "a gradient that is held")

    def note(self, *what: Any) -> None:
        self.done.append(what)
        if self.trace:
            print(*what)

    def change(self) -> None:
        number, value = self.choose.randrange(len(CHANGES) + 1), self.choose.choice(self.world.values)
        self.note("change", number, value)
        if number == len(CHANGES):
            cudagraph.reset()
            return
        for side in (self.ours, self.eager):
            CHANGES[number](side, value)

    def call(self, i: int) -> None:
        choose, own, device = self.choose, self.own, self.world.device
        size, raises = own.choice(self.sizes), choose.random() < 0.05
        generator = torch.Generator().manual_seed(own.randrange(100))
        x, y = (torch.randn(size, n, generator=generator) for n in (4, 2))
        x, y = x.to(device), y.to(device)
        if choose.random() < 0.05:
            x = x.t().contiguous().t()
        autocast = choose.random() < 0.05
        fault = None
        if own.random() < self.faulty:
            errors = [RuntimeError("planted"), torch.OutOfMemoryError("planted")]
            errors += [Interrupt()] if self.world.rank is None else []  # a rank that is interrupted misses a call
            if own.random() < 0.1:
                errors = [self.world.driver.not_permitted()]
            point = choice_of_points(own)
            fault = Fault(point, own.randrange(40) if point == "operator" else 0, own.choice(errors))
        self.world.driver.armed(fault)
        self.note("call", i, size, "raises" if raises else "", "autocast" if autocast else "", fault)
        found = []
        for side, step in ((self.ours, self.step), (self.eager, self.expected)):
            if raises:
                side.model.options["raise"] = 1
            torch.manual_seed(i)
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                try:
                    result = step(x, y)
                except Planted:
                    result = None
                except Interrupt:
                    result = again(step, x, y)
            if raises:
                side.model.options["raise"] = 0
            found.append((result, self.world.random_states()))
        self.world.driver.armed(None)
        (ours, ours_random), (expected, expected_random) = found
        same(ours, expected, "the result")
        same(ours_random, expected_random, "the random state")
        if ours is not None:
            self.results.append((ours, copy.deepcopy(expected)))
        kept = [[each.model.kept, [*each.model.losses]] for each in (self.ours, self.eager)]
        same(*kept, "what the model keeps")
        if self.ours.model.options["stores"] != "a weight":
            self.results.append((kept[0], copied(kept[1])))
        self.compare()

    def compare(self) -> None:
        ours, eager = self.ours.model, self.eager.model
        assert (ours.options, ours.training) == (eager.options, eager.training), "the options of the model"
        same(ours.state_dict(), eager.state_dict(), "the model")
        same([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()], "the gradients")
        for a, b in zip(self.ours.optimizers, self.eager.optimizers, strict=True):
            state, state_2 = a.state_dict(), b.state_dict()
            same(state["state"], state_2["state"], "the optimizer's state")
            for group in (*state["param_groups"], *state_2["param_groups"]):
                group.pop("capturable", None)
            assert state["param_groups"] == state_2["param_groups"], "the optimizer's options"
        counted, counted_2 = ([each.last_epoch for each in side.schedulers] for side in (self.ours, self.eager))
        assert counted == counted_2, "the schedulers"
        if self.ours.numbers is not None:
            assert self.ours.numbers.getstate() == self.eager.numbers.getstate(), "the generator on the host"
        if self.ours.scaler is not None:
            assert self.ours.scaler.state_dict() == self.eager.scaler.state_dict(), "the scaler"

    def close(self) -> None:
        """Nothing is left: no block of the pool is allocated that no recording accounts for."""
        step = self.step
        pool = step._pool
        self.results.clear()
        self.done.clear()  # the tracebacks of planted errors hold frames
        for side in (self.ours, self.eager):
            side.held.clear()
            side.model.kept = None
            side.model.losses.clear()
            side.model.zero_grad(set_to_none=True)
        if pool is not None and not pool.broken:
            live, known = pool.live_blocks(), self.known_blocks(pool)
            if live != known:
                gc.collect()  # gradients that nobody holds any more, but in a cycle
                live, known = pool.live_blocks(), self.known_blocks(pool)
            assert live == known, f"blocks that nobody accounts for: {live - known}, or that are gone: {known - live}"

    def known_blocks(self, pool: Any) -> set[int]:
        """The addresses of recordings, gradients among them."""
        return {a for each in self.step.recordings.values() for one in each if one.pool is pool for a in one.blocks}


def choice_of_points(choose: random.Random) -> str:
    """Half of all faults are in operators. The check of live blocks also runs after failures, and can't raise there."""
    return "operator" if choose.random() < 0.5 else choose.choice([point for point in POINTS if point != "live"])


def again(step: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> Any:
    try:
        return step(x, y)
    except Planted:
        return None


def same(a: Any, b: Any, what: str) -> None:
    """Raises if two nested values differ, bit for bit in tensors."""
    if isinstance(b, torch.Tensor):
        assert isinstance(a, torch.Tensor) and torch.equal(a.cpu(), b.cpu()), what
    elif isinstance(b, dict):
        assert list(a) == list(b), what
        for key in b:
            same(a[key], b[key], f"{what}: {key}")
    elif isinstance(b, (list, tuple)):
        assert len(a) == len(b), what
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{what}: {i}")
    else:
        assert a == b, what


def run_seed(seed: int, world: World, *, trace: bool = False) -> str | None:
    """What went wrong; None if nothing did."""
    try:
        program = Program(seed, world, trace=trace)
        program.run()
        program.close()
    except (AssertionError, RuntimeError, ValueError, KeyError, TypeError) as error:
        if trace:
            raise
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        cudagraph.step.whole.reset()
        capture_simulator.graveyard.clear()
    return None


def run_seeds(seeds: Sequence[int], world: World, *, seconds: float = float("inf"), trace: bool = False) -> Any:
    """The result of as many programs as there is time for. Errors are printed at once, to stderr."""
    begin, wrong, done = time.monotonic(), [], 0
    cudagraph.reset()
    totals: dict[str, int] = {}
    for seed in seeds:
        if (error := run_seed(seed, world, trace=trace)) is not None:
            wrong.append((seed, error))
            print(seed, error, file=sys.stderr, flush=True)
        done += 1
        for name, number in cudagraph.stats().items():
            totals[name] = totals.get(name, 0) + number
        cudagraph.reset()
        if done % 50 == 0:
            gc.collect()
        if done % 1000 == 0:
            print(done, "programs", file=sys.stderr, flush=True)
        if time.monotonic() - begin > seconds:
            break
    passed = round(time.monotonic() - begin, 1)
    return {"programs": done, "different": len(wrong), "seconds": passed, "counts": totals, "wrong": wrong[:20]}


def run_as_rank(rank: int, folder: str, first: int, count: int) -> None:
    """Run programs together with the other rank, until one is different from eager mode."""
    logging.getLogger("cudagraph").setLevel(logging.CRITICAL)
    world = World("simulator", rank)
    totals: dict[str, Any] = {"programs": 0, "different": 0, "counts": {}, "wrong": []}
    for seed in range(first, first + count):
        result = run_seeds([seed], world)
        for name in ("programs", "different", "wrong"):
            totals[name] += result[name]
        for name, number in result["counts"].items():
            totals["counts"][name] = totals["counts"].get(name, 0) + number
        (pathlib.Path(folder) / f"result{rank}").write_text(json.dumps(totals))
        if result["different"]:
            raise AssertionError(result["wrong"])


def run_two_ranks(first: int, count: int, seconds: float) -> Any:
    begin, done, wrong, counts = time.monotonic(), 0, [], {}
    while done < count and not wrong and time.monotonic() - begin < seconds:
        with tempfile.TemporaryDirectory() as name:
            folder, some = pathlib.Path(name), min(PROGRAMS_OF_A_PAIR, count - done)
            ended = run_ranks(run_as_rank, folder, name, first + done, some, limit_s=LIMIT_OF_A_PAIR_S)
            results = [json.loads((folder / f"result{rank}").read_text()) for rank in range(2)]
        wrong = [error for each in results for error in each["wrong"]]
        if any(each.exit_code != 0 for each in ended):
            wrong.append(str(ended)[:300])
        done += results[0]["programs"]
        counts = {name: counts.get(name, 0) + number for name, number in results[0]["counts"].items()}
    passed = round(time.monotonic() - begin, 1)
    return {"programs": done, "different": len(wrong), "seconds": passed, "counts": counts, "wrong": wrong, "ranks": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--device", choices=["simulator", "cuda"], default="simulator")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--ranks", action="store_true", help="two processes run each program together")
    parser.add_argument("--trace", action="store_true", help="print what programs do; stop at the first error")
    options = parser.parse_args()
    gc.freeze()  # a collection would look at all objects of torch's modules: 0.16 s
    top = {"device": options.device, "torch": torch.__version__, "command": " ".join(sys.argv), "first": options.first}
    if options.ranks:
        result = run_two_ranks(options.first, options.count, options.seconds)
    elif options.workers == 1:
        if not options.trace:
            logging.getLogger("cudagraph").setLevel(logging.CRITICAL)
        torch.set_num_threads(1)
        seeds = range(options.first, options.first + options.count)
        result = run_seeds(seeds, World(options.device), seconds=options.seconds, trace=options.trace)
    else:
        each = options.count // options.workers
        rest = ["--count", str(each), "--device", options.device, "--seconds", str(options.seconds)]
        begins = [str(options.first + i * each) for i in range(options.workers)]
        commands = [[sys.executable, __file__, "--first", first, *rest] for first in begins]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        results = [json.loads(one.communicate()[0].splitlines()[-1]) for one in running]
        names = results[0]["counts"]
        result = {
            **{name: sum(one[name] for one in results) for name in ("programs", "different")},
            "seconds": max(one["seconds"] for one in results),
            "counts": {name: sum(one["counts"].get(name, 0) for one in results) for name in names},
            "wrong": [wrong for one in results for wrong in one["wrong"]][:20],
        }
    print(json.dumps({**top, **result}))
    return 1 if result["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
