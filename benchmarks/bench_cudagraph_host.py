"""Host time of a call of a graph, and of a training step of a small MLP: our trees, torch's, and what they stand on.

    python benchmarks/bench_cudagraph_host.py --json out.json        needs CUDA; two minutes

Calls: a module with i inputs, p parameters of 64 x 64 and o outputs, no gradients, a step marked before each call.

    ours           cudagraph trees over what Inductor compiled, given the same tensors in each call
    ours_moving    the same, given two sets of tensors in turn: inputs are copied
    tree           the same tree, called by hand: without Dynamo, AOTAutograd and Inductor's own call
    tree_moving    likewise, given two sets of tensors in turn
    torch_trees    mode="reduce-overhead"
    cudagraphs     torch's backend="cudagraphs"
    wrapper        Dynamo and AOTAutograd's runtime around a graph that does nothing: what a call costs before any of it
    copy_replay    one foreach copy of the inputs, replay: what a call costs at the least after that
    floor          both: the same wrapper, in which the inputs are copied and the graph replayed
    replay         the launch alone

"own part" is a variant's time less floor ("tree": less copy_replay). Ours may be less than the floor: inputs that come
from the same place call after call are read there, and replays of graphs without gradients pass AOTAutograd's runtime
by. torch's trees copy inputs in any case.

Training: forward, sum, backward, gradients zeroed in place, synchronized; its floor is the same step whose graphs do
nothing. "_none": gradients set to None instead. What the floor is made of, each measured by itself, less "synchronize":

    zero_grad      gradients zeroed in place
    bare           a function that gives ready-made gradients: sum, autograd's engine, accumulation into each `.grad`
    forward        of the floor: Dynamo, AOTAutograd's runtime and what it saves
    backward       of the floor less zero_grad, bare and forward: AOTAutograd's runtime, on autograd's thread

All variants are compiled, then measured in turn, `--rounds` times over; the median counts.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from measure import conditions, host_seconds, parser_of, write
from torch import nn

from cudagraph import Options
from cudagraph.tree import dispatch
from cudagraph.tree.driver import cuda_driver

SIZES = ((1, 2, 1), (8, 16, 4), (64, 200, 16))
DEPTHS = (4, 24)


class Chain(nn.Module):
    def __init__(self, parameters: int, outputs: int, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64, device=device) for _ in range(parameters))
        self.outputs = outputs

    def forward(self, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = xs[0]
        for x in xs[1:]:
            h = h + x
        for w in self.weights:
            h = torch.tanh(h @ w)
        return tuple(h + i for i in range(self.outputs))


def per_call_us(call: Callable[[], Any], calls: int) -> float:
    for _ in range(10):
        call()
    return host_seconds(call, calls) * 1e6


def medians(variants: dict[str, Callable[[], Any]], calls: int, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            times[name].append(per_call_us(call, calls))
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def ours(fn: Any) -> Any:
    return torch.compile(fn, backend="cudagraph_tree", options={"inner": "inductor"}, fullgraph=True)


Inputs = Callable[[], list[torch.Tensor]]


def marked(f: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
    """A call of `f` that begins a step."""

    def call() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return f(*inputs())

    return call


def by_hand(
    fn: Any, xs: list[torch.Tensor], weights: list[torch.Tensor], device: torch.device
) -> Callable[[Inputs], Callable[[], Any]]:
    """Calls of `fn` captured as a piece, given its weights as Dynamo gives them: as inputs that stay in place."""
    static = tuple(range(len(xs), len(xs) + len(weights)))
    piece = dispatch.Piece("by hand", lambda inputs: list(fn(*inputs[: len(xs)])), device, static_inputs=static)

    def captured_anew(inputs: Inputs) -> Callable[[], Any]:
        call = dispatch.capture(piece, Options(), cuda_driver())

        def run() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return call([*inputs(), *weights])

        return run

    return captured_anew


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def standing_still(launch: Callable[[], None]) -> Any:
    """A backend behind AOTAutograd's runtime whose graphs launch something and give what they gave the first time."""
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: Any, inputs: Any) -> Any:
        first: list[Any] = []

        def run(arguments: list[Any]) -> Any:
            if not first:
                first.extend(graph(*arguments))
            arguments.clear()
            launch()
            return [x.data if isinstance(x, torch.Tensor) else x for x in first]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler)


def check(name: str, got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=lambda m: f"{name} is wrong: {m}")


def bench_calls(size: tuple[int, int, int], device: torch.device, calls: int, rounds: int) -> dict[str, Any]:
    inputs, parameters, outputs = size
    torch._dynamo.reset()
    model = Chain(parameters, outputs, device)
    xs = [torch.randn(64, 64, device=device) for _ in range(inputs)]
    static = [x.clone() for x in xs]

    def fn() -> Callable[..., Any]:
        return lambda *arguments: model.forward(*arguments)  # code of its own for each backend

    with torch.no_grad():
        expected = model(*xs)
        plain = torch.compile(fn(), fullgraph=True, dynamic=False)
        graph = captured(lambda: plain(*static))

        def copy_replay() -> None:
            torch._foreach_copy_(static, xs)
            graph.replay()

        compiled = {
            "ours": ours(fn()),
            "ours_moving": ours(lambda *arguments: model.forward(*arguments)),  # not the code that `ours` has compiled
            "torch_trees": torch.compile(fn(), mode="reduce-overhead", fullgraph=True),
            "cudagraphs": torch.compile(fn(), backend="cudagraphs", fullgraph=True),
            "wrapper": torch.compile(fn(), backend=standing_still(lambda: None), fullgraph=True),
            "floor": torch.compile(fn(), backend=standing_still(lambda: copy_replay()), fullgraph=True),
        }

        def same() -> list[torch.Tensor]:
            return xs

        turns = itertools.cycle([xs, [x.clone() for x in xs]])

        def moving() -> list[torch.Tensor]:
            return next(turns)

        variants: dict[str, Callable[[], Any]] = {
            name: marked(f, moving if name == "ours_moving" else same) for name, f in compiled.items()
        }
        hand = by_hand(plain, xs, list(model.parameters()), device)
        variants |= {"tree": hand(same), "tree_moving": hand(moving)}
        for name, call in variants.items():
            for _ in range(4):
                check(name, call(), expected)
        us = medians({**variants, "copy_replay": copy_replay, "replay": graph.replay}, calls, rounds)
    return {
        "inputs": inputs,
        "parameters": parameters,
        "outputs": outputs,
        "us": us,
        "ratio_to_torch_trees": round(us["ours"] / us["torch_trees"], 3),
        "own_part_us": {name: round(us[name] - us["floor"], 2) for name in ("ours", "torch_trees")}
        | {name: round(us[name] - us["copy_replay"], 2) for name in ("tree", "tree_moving")},
    }


class ReadyMade(torch.autograd.Function):
    """The sum of `x`, whose backward gives `gradients`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradients: list[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return x.detach()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *(g.data for g in ctx.gradients)  # tensors of their own, which autograd need not copy


def synchronized(call: Callable[..., Any], *arguments: Any, **named: Any) -> Callable[[], None]:
    def run() -> None:
        call(*arguments, **named)
        torch.cuda.synchronize()

    return run


def parts_of_the_floor(model: nn.Module, x: torch.Tensor, floor: Callable[..., Any]) -> dict[str, Callable[[], None]]:
    parameters = list(model.parameters())
    ready = [torch.ones_like(p) for p in parameters]
    out = model(x).detach()

    def bare() -> None:
        ReadyMade.apply(out, ready, *parameters).sum().backward()

    return {
        "zero_grad": synchronized(model.zero_grad, set_to_none=False),
        "bare": synchronized(bare),
        "forward": synchronized(floor, x),
        "synchronize": torch.cuda.synchronize,
    }


def bench_training(depth: int, device: torch.device, calls: int, rounds: int) -> dict[str, Any]:
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(depth)]).to(device)
    x = torch.randn(32, 128, device=device)

    def step(f: Callable[..., Any], *, none: bool = False) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=none)
        f(x).sum().backward()

    def fn() -> Callable[..., Any]:
        return lambda x: model(x)

    step(model)
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    compiled: dict[str, Callable[..., Any]] = {
        "eager": model,
        "ours": ours(fn()),
        "torch_trees": torch.compile(fn(), mode="reduce-overhead", fullgraph=True),
        "cudagraphs": torch.compile(fn(), backend="cudagraphs", fullgraph=True),
        "inductor": torch.compile(fn(), fullgraph=True),
        "floor": torch.compile(fn(), backend=standing_still(lambda: None), fullgraph=True),
    }
    for name, f in compiled.items():
        for _ in range(4):
            step(f)
        check(name, [p.grad for p in model.parameters()], expected)
    apart = copy.deepcopy(model)  # without what the variants keep of its autograd graph

    def whole() -> None:
        apart.zero_grad(set_to_none=False)
        apart(x).sum().backward()

    graph = captured(whole)

    def whole_step() -> None:
        graph.replay()
        torch.cuda.synchronize()

    parts = parts_of_the_floor(model, x, compiled["floor"])
    variants = {name: synchronized(step, f) for name, f in compiled.items()}
    us = medians({**variants, "whole_step_replay": whole_step, **parts}, calls, rounds)
    nothing = us["synchronize"]
    made_of = {name: round(us[name] - nothing, 1) for name in ("zero_grad", "bare", "forward")}
    made_of["backward"] = round(us["floor"] - nothing - sum(made_of.values()), 1)
    # measured after the others: these leave no gradients that the others could add to
    none = {name: synchronized(step, compiled[name], none=True) for name in ("eager", "ours", "torch_trees", "floor")}
    us_none = medians(none, calls, rounds)
    return {
        "depth": depth,
        "floor_made_of_us": made_of,
        "us_none": us_none,
        "ratio_to_torch_trees_none": round(us_none["ours"] / us_none["torch_trees"], 3),
        "us": us,
        "ratio_to_torch_trees": round(us["ours"] / us["torch_trees"], 3),
        "own_part_us": {name: round(us[name] - us["floor"], 1) for name in ("ours", "torch_trees")},
    }


def main() -> None:
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--calls", type=int, default=300, help="calls a round")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    header = conditions(device, calls=options.calls, rounds=options.rounds)
    result: dict[str, Any] = {"conditions": header, "calls": [], "training": []}

    def add(part: str, row: dict[str, Any]) -> None:  # a run that is cut leaves what it has
        print(json.dumps(row), flush=True)
        result[part].append(row)
        write(options.json, result)

    for size in SIZES:
        add("calls", bench_calls(size, device, options.calls, options.rounds))
    for depth in DEPTHS:
        add("training", bench_training(depth, device, options.calls // 3, options.rounds))


if __name__ == "__main__":
    main()
