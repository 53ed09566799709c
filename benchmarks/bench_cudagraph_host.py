"""Host time of a call of a graph, and of a training step of a small MLP: our trees, torch's, and what they stand on.

    python benchmarks/bench_cudagraph_host.py --json out.json        needs CUDA; two minutes

Calls: a module with i inputs, p parameters of 64 x 64 and o outputs, no gradients, a step marked before each call.

    ours           cudagraph trees over what Inductor compiled
    tree           the same tree, called by hand: without Dynamo, AOTAutograd and Inductor's own call
    torch_trees    mode="reduce-overhead"
    cudagraphs     torch's backend="cudagraphs"
    wrapper        Dynamo and AOTAutograd's runtime around a graph that does nothing: what a call costs before any of it
    copy_replay    one foreach copy of the inputs, replay: what a call costs at the least after that
    floor          both: the same wrapper, in which the inputs are copied and the graph replayed
    replay         the launch alone

"own part" is a variant's time less floor ("tree": less copy_replay). Training: forward, sum, backward, gradients zeroed
in place, synchronized; its floor is the same step whose graphs do nothing. All variants are compiled, then measured in
turn, `--rounds` times over; the median counts.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _measure import conditions
from torch import nn

from cudagraph import Options, tree

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
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - begin
    torch.cuda.synchronize()
    return seconds / calls * 1e6


def medians(variants: dict[str, Callable[[], Any]], calls: int, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            times[name].append(per_call_us(call, calls))
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def ours(fn: Any) -> Any:
    return torch.compile(fn, backend="cudagraph_tree", options={"inner": "inductor"}, fullgraph=True)


def by_hand(fn: Any, xs: list[torch.Tensor], weights: list[torch.Tensor], device: torch.device) -> Callable[[], Any]:
    """A call of `fn` captured as a piece, given its weights as Dynamo gives them: as inputs that stay in place."""
    static = tuple(range(len(xs), len(xs) + len(weights)))
    piece = tree.Piece("by hand", lambda inputs: list(fn(*inputs[: len(xs)])), device, static_inputs=static)
    call = tree.capture(piece, Options())

    def marked() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return call([*xs, *weights])

    return marked


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
            "torch_trees": torch.compile(fn(), mode="reduce-overhead", fullgraph=True),
            "cudagraphs": torch.compile(fn(), backend="cudagraphs", fullgraph=True),
            "wrapper": torch.compile(fn(), backend=standing_still(lambda: None), fullgraph=True),
            "floor": torch.compile(fn(), backend=standing_still(lambda: copy_replay()), fullgraph=True),
        }

        def marked(f: Callable[..., Any]) -> Callable[[], Any]:
            def call() -> Any:
                torch.compiler.cudagraph_mark_step_begin()
                return f(*xs)

            return call

        variants: dict[str, Callable[[], Any]] = {name: marked(f) for name, f in compiled.items()}
        variants["tree"] = by_hand(plain, xs, list(model.parameters()), device)
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
        | {"tree": round(us["tree"] - us["copy_replay"], 2)},
    }


def bench_training(depth: int, device: torch.device, calls: int, rounds: int) -> dict[str, Any]:
    torch._dynamo.reset()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(depth)]).to(device)
    x = torch.randn(32, 128, device=device)

    def step(f: Callable[..., Any]) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=False)
        f(x).sum().backward()

    def synchronized(f: Callable[..., Any]) -> Callable[[], None]:
        def call() -> None:
            step(f)
            torch.cuda.synchronize()

        return call

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

    variants = {name: synchronized(f) for name, f in compiled.items()}
    us = medians({**variants, "whole_step_replay": whole_step}, calls, rounds)
    return {
        "depth": depth,
        "us": us,
        "ratio_to_torch_trees": round(us["ours"] / us["torch_trees"], 3),
        "own_part_us": {name: round(us[name] - us["floor"], 1) for name in ("ours", "torch_trees")},
    }


def printed(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300, help="calls a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write the result there")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    result = {
        "conditions": conditions(device, calls=options.calls, rounds=options.rounds),
        "calls": [printed(bench_calls(size, device, options.calls, options.rounds)) for size in SIZES],
        "training": [printed(bench_training(depth, device, options.calls // 3, options.rounds)) for depth in DEPTHS],
    }
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
