"""The last layer and its loss alone, as it is and in chunks of tokens: GiB over its inputs and results, ms.

    hidden [tokens, width] -- product with weight [words, width] --> cross entropy --> gradients of both
      compiled      torch.compile
      chunk True    options={"chunk": True}; `chunk 1024` has at most so many tokens in a chunk
      eager

All ways run in one process, one after the other. Distances are those of the weight's gradient to that of the first way.

    python benchmarks/bench_loss.py --json out/loss.json      # 16,384 tokens, 128,256 words; CUDA, 40 GiB
    python benchmarks/bench_loss.py --small                   # anywhere, without code generation
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from measure import (
    ANYWHERE,
    GIB,
    conditions,
    format_columns,
    measure_bytes,
    parser_of,
    relative_error,
    step_ms,
    write,
)
from torch import Tensor
from torch.nn import functional as F

WAYS = ("compiled", "chunk True", "chunk 1024", "chunk 4096", "eager")


def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), labels)


def function_of(way: str, inner: str) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    if way == "eager":
        return loss_of
    if way == "compiled":
        return torch.compile(loss_of, backend="inductor" if inner == "inductor" else "aot_eager")
    tokens = way.removeprefix("chunk ")
    chunk = True if tokens == "True" else int(tokens)
    return torch.compile(loss_of, backend="aot_hooks", options={"chunk": chunk, "inner": inner})


def measured(way: str, inner: str, inputs: tuple[Tensor, Tensor, Tensor], rounds: int) -> dict[str, Any]:
    """A row. Leaves the gradients of one step in the inputs."""
    function, (hidden, weight, _) = function_of(way, inner), inputs

    def step() -> None:
        hidden.grad = weight.grad = None
        function(*inputs).backward()

    times = [step_ms(step, hidden.device) for _ in range(3 + rounds)][3:]
    hidden.grad = weight.grad = None
    found, loss = measure_bytes(lambda: function(*inputs), lambda loss: loss.backward(), hidden.device)
    assert hidden.grad is not None and weight.grad is not None
    results = hidden.grad.nbytes + weight.grad.nbytes
    over = {"peak_over_results_bytes": found.peak - results, "after_forward_bytes": found.after_forward}
    return {"way": way, "ms": statistics.median(times), "ms_least": min(times), **over, "loss": float(loss.detach())}


def main() -> None:
    parser = parser_of(__doc__, small=ANYWHERE, where=True, tokens=16384, width=4096, vocabulary=128256, rounds=7)
    parser.add_argument("--ways", default=",".join(WAYS))
    said = parser.parse_args()
    if said.small:
        said.tokens, said.width, said.vocabulary, said.inner, said.device = 2048, 64, 4096, "aten", "cpu"
    device = torch.device(said.device)
    torch.manual_seed(0)
    hidden = (0.7 * torch.randn(said.tokens, said.width, device=device)).to(torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(said.vocabulary, said.width, device=device)).to(torch.bfloat16).requires_grad_()
    inputs = hidden, weight, torch.randint(said.vocabulary, (said.tokens,), device=device)
    work = {name: getattr(said, name) for name in ("tokens", "width", "vocabulary", "inner")}
    result: dict[str, Any] = {"conditions": conditions(device, **work), "rows": []}
    first: Tensor | None = None
    for way in said.ways.split(","):
        row = measured(way, said.inner, inputs, said.rounds)
        assert weight.grad is not None
        first = weight.grad.clone() if first is None else first
        row["distance"] = relative_error(weight.grad, first)
        result["rows"].append(row)
        write(said.json, result)
    head = ["way", "ms", "fastest", "GiB over results", "distance", "loss"]
    cells = "{way}|{ms:.1f}|{ms_least:.1f}|{gib:.3f}|{distance:.1e}|{loss:.4f}"
    shown = [cells.format(**row, gib=row["peak_over_results_bytes"] / GIB).split("|") for row in result["rows"]]
    print(format_columns([head, *shown]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
