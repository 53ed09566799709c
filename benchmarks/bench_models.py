"""Every kind of model with its saved tensors stored smaller: bytes, error of the gradients, time, in one table.

    zoo.MODELS  x  none, lossless(), first_match(lossless(), larger_than(.., int8()))
        |  the same weights, batch and dropout in each
        v
    a row each: bytes saved as planned and as held, |g - g_none| / |g_none|, ms a step

It checks as it measures, and exits with 1 if a check fails or a row is missing:

    none       the gradient of eager, up to the order of additions
    lossless   the gradient of none, to the last bit
    int8       within the model's bound (`Model.int8_error`) of none's, and not equal to it

    python benchmarks/bench_models.py                                   # seconds a model on a CPU, inner "aten"
    python benchmarks/bench_models.py --device cuda --size large        # inner "inductor"
    python benchmarks/bench_models.py --models resnet,gpt --json PATH
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from measure import (
    MIB,
    conditions,
    error_of,
    format_columns,
    gradients,
    measure_bytes,
    number,
    parser_of,
    step_ms,
    write,
)
from torch import Tensor
from zoo import MODELS, Model, Work

import aot_hooks
from aot_hooks import policies

NO_BACKEND_ERROR = 1e-4  # of float32 sums in another order, none's gradient against eager's
MIN_PACKED_BYTES = 1 << 10

POLICIES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "lossless": aot_hooks.lossless,
    "int8": lambda: policies.first_match(
        aot_hooks.lossless(), policies.larger_than(MIN_PACKED_BYTES, aot_hooks.int8())
    ),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One model under one policy.

    Attributes:
        saved_bytes, packed_bytes: of the plans, each storage once; None where no graph was compiled.
        after_forward_bytes: what is alive between forward and backward, over what was before the step.
        peak_bytes: the most that is alive in the step, over the same.
        gradient_error: |g - g_none| / |g_none| over all parameters together.
        bitwise: whether every gradient equals none's to the last bit.
        step_ms: median of forward and backward.
        first_step_s: the step that compiles.
        wrong: what a check found, "" if nothing.
    """

    model: str
    policy: str
    saved_bytes: int | None
    packed_bytes: int | None
    after_forward_bytes: int
    peak_bytes: int
    gradient_error: float
    bitwise: bool
    step_ms: float
    first_step_s: float
    wrong: str


def entered(policy: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if policy is None else aot_hooks.saved_tensors_policy(policy)


class Steps:
    """One model under one policy, compiled; `gradients` are those of seed 0."""

    def __init__(self, work: Work, policy: Any, inner: str) -> None:
        options: dict[str, Any] = {"inner": inner}
        if inner == "inductor":
            options["inductor"] = {"fallback_random": True}  # dropout draws what eager would
        self.work, self.policy = work, policy
        self.compiled = torch.compile(work.module, backend="aot_hooks", options=options)
        self.device = work.inputs[0].device
        self.step_ms: list[float] = []
        started = time.perf_counter()
        self.gradients = gradients(work.module, self.forward)
        self.first_step_s = time.perf_counter() - started

    def forward(self) -> Tensor:
        torch.manual_seed(0)
        with entered(self.policy):
            loss: Tensor = self.compiled(*self.work.inputs)
        return loss

    def timed(self) -> None:
        self.step_ms.append(step_ms(lambda: self.forward().backward(), self.device))
        self.work.module.zero_grad(set_to_none=True)


def check(policy: str, model: Model, error: float, bitwise: bool, backend_error: float) -> str:
    """What is wrong with a row's gradient, "" if nothing; "not <=" so that a NaN is wrong too."""
    if policy == "none":
        return "" if backend_error <= NO_BACKEND_ERROR else f"gradient {backend_error:.1e} off eager's"
    if policy == "lossless":
        return "" if bitwise else f"gradient not bitwise equal, {error:.1e} off"
    if bitwise:
        return "nothing was rounded"
    return "" if error <= model.int8_error else f"gradient {error:.3f} off, more than {model.int8_error}"


def measure(name: str, size: str, device: torch.device, inner: str, step_count: int) -> list[Row]:
    """The rows of one model, one for each policy."""
    torch._dynamo.reset()
    model = MODELS[name]
    work = model.make(size, device)

    def eager() -> Tensor:
        torch.manual_seed(0)
        loss: Tensor = work.module(*work.inputs)
        return loss

    exact = gradients(work.module, eager)
    runs = {policy: Steps(work, make(), inner) for policy, make in POLICIES.items()}
    for _ in range(step_count):  # in turn, so that whatever else the machine does slows all of them
        for run in runs.values():
            run.timed()
    none = runs["none"].gradients
    backend_error = error_of(none, exact)
    rows = []
    for policy, run in runs.items():
        plans = aot_hooks.last_plans(run.compiled)
        held, _ = measure_bytes(run.forward, Tensor.backward, device)
        work.module.zero_grad(set_to_none=True)
        error = error_of(run.gradients, none)
        bitwise = all(torch.equal(g, none[parameter]) for parameter, g in run.gradients.items())
        wrong = check(policy, model, error, bitwise, backend_error)
        if policy != "none" and bool(plans) != model.compiles:
            wrong = wrong or f"{len(plans)} graphs were compiled"
        rows.append(
            Row(
                name,
                policy,
                sum(plan.saved_bytes for plan in plans) if plans else None,
                sum(plan.packed_bytes for plan in plans) if plans else None,
                held.after_forward,
                held.peak,
                error,
                bitwise,
                statistics.median(run.step_ms),
                run.first_step_s,
                wrong,
            )
        )
    return rows


def format_table(rows: list[Row]) -> str:
    title = [
        "model",
        "policy",
        "saved MiB",
        "packed",
        "held",
        "peak",
        "gradient error",
        "ms a step",
        "first s",
        "check",
    ]
    table = [title]
    for row in rows:
        planned = [number(count, ".2f", MIB) or "-" for count in (row.saved_bytes, row.packed_bytes)]
        held = [f"{count / MIB:.2f}" for count in (row.after_forward_bytes, row.peak_bytes)]
        error = "0, bitwise" if row.bitwise else f"{row.gradient_error:.4f}"
        times = [f"{row.step_ms:.1f}", f"{row.first_step_s:.1f}"]
        table.append([row.model, row.policy, *planned, *held, error, *times, row.wrong or "ok"])
    return format_columns(table)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in MODELS]
        if unknown:
            raise argparse.ArgumentTypeError(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
        return chosen

    parser = parser_of(__doc__)
    parser.add_argument("--models", type=names, default=list(MODELS), help=f"of {','.join(MODELS)}; default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=("small", "large"), default="small", help="large wants a CUDA device")
    parser.add_argument("--inner", choices=("aten", "inductor"), help="default: inductor on CUDA, aten elsewhere")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each row")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device = torch.device(options.device)
    inner = options.inner or ("inductor" if device.type == "cuda" else "aten")
    rows: list[Row] = []
    failures: list[str] = []
    for name in options.models:
        try:
            rows += measure(name, options.size, device, inner, options.steps)
        except Exception:  # the other models still get their rows; the command fails in any case
            traceback.print_exc()
            failures.append(f"{name}: no rows, see above")
    failures += [f"{row.model}, {row.policy}: {row.wrong}" for row in rows if row.wrong]
    got = {(row.model, row.policy) for row in rows}
    wanted = {(name, policy) for name in options.models for policy in POLICIES}
    failures += [f"{name}, {policy}: no row" for name, policy in sorted(wanted - got)]

    sizes = {name: getattr(MODELS[name], options.size) for name in options.models}
    header = conditions(
        device, inner=inner, size=options.size, models=sizes, step_count=options.steps, threads=torch.get_num_threads()
    )
    result = {"header": header, "rows": [dataclasses.asdict(row) for row in rows], "failures": failures}
    write(options.json, result)
    print(
        ", ".join(f"{key} {header[key]}" for key in ("device", "torch", "commit", "date", "inner", "size", "threads"))
    )
    print("saved, packed: by the plan, each storage once; held, peak: measured, over the start of the step\n")
    print(format_table(rows))
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
