"""Budgets half way between the lowest peak and none, for models of transformers with random weights.

    each model, in a process of its own:
      no hooks        planned and measured peak, gradients, twice: what differs then is noise
      any means, exact means
                      budget = (lowest planned peak + that without hooks) / 2
                      compiled, warmed up: measured peak against the budget, gradients against those without hooks
    then one process after the other takes the times of its steps

It fails if a step takes more than its budget, or a gradient is off by more than `max_error` and the noise. Without
generated code (--small) exact means give the same bits. Generated code does not round between operators that are fused,
and what is computed again is fused in other ways. So its exact gradients differ from those without hooks by as much as
either differs from float32, which is measured for the models without dropout. --casts has all code round.

python benchmarks/bench_budget_models.py --json budget_models.json     # a CUDA machine
python benchmarks/bench_budget_models.py --models vit,llama --casts    # are the bits the same then?
python benchmarks/bench_budget_models.py --small                       # anywhere
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import measure
import torch
import transformers
from torch import Tensor, nn

import aot_hooks

MAX_ERROR = 0.05
EXACT = ("recompute", "lossless", "offload")
WORDS = 256
QUEUED = 10  # steps
Sizes = dict[str, int]
SMALL: Sizes = {"width": 64, "layers": 2, "heads": 4, "length": 64, "image": 32, "patch": 4, "batch": 8}
LARGE: Sizes = {"width": 1024, "layers": 12, "heads": 16, "length": 1024, "image": 256, "patch": 8, "batch": 8}


def llama(s: Sizes) -> Any:
    sizes = {"hidden_size": s["width"], "intermediate_size": 3 * s["width"], "num_hidden_layers": s["layers"]}
    heads = {"num_attention_heads": s["heads"], "num_key_value_heads": s["heads"] // 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes, **heads)
    return transformers.LlamaForCausalLM(config)


def gpt2(s: Sizes) -> Any:
    sizes = {"n_embd": s["width"], "n_layer": s["layers"], "n_head": s["heads"], "n_positions": s["length"]}
    tokens = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **tokens, **sizes))
    model.loss_type = "ForCausalLM"  # else it logs a warning, which breaks the graph
    return model


def t5(s: Sizes) -> Any:
    sizes = {"d_model": s["width"], "d_kv": s["width"] // s["heads"], "d_ff": 4 * s["width"]}
    # of the encoder, and as many of the decoder, which has attention twice; with 6, compiling all rows took 6 minutes
    counts = {"num_layers": s["layers"] // 4, "num_heads": s["heads"]}
    config = transformers.T5Config(vocab_size=WORDS, decoder_start_token_id=0, use_cache=False, **sizes, **counts)
    return transformers.T5ForConditionalGeneration(config)


def vit(s: Sizes) -> Any:
    sizes = {"hidden_size": s["width"], "intermediate_size": 4 * s["width"], "num_hidden_layers": s["layers"]}
    images = {"image_size": s["image"], "patch_size": s["patch"], "num_labels": 10}
    config = transformers.ViTConfig(num_attention_heads=s["heads"], **images, **sizes)
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[Sizes], Any]] = {"llama": llama, "gpt2": gpt2, "t5": t5, "vit": vit}


class Loss(nn.Module):
    """The loss of a batch: tokens, which are their own labels, or images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return self.model(pixel_values=x, labels=torch.arange(len(x), device=x.device) % 10).loss
        return self.model(input_ids=x, labels=x).loss


def model_and_batch(name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[Loss, Tensor]:
    torch.manual_seed(0)
    with device:
        model = Loss(MODELS[name](sizes)).to(dtype).train()
        if name == "vit":
            return model, torch.randn(sizes["batch"], 3, sizes["image"], sizes["image"], dtype=dtype)
        return model, torch.randint(1, WORDS, (sizes["batch"], sizes["length"]))


def float32_gradient(name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """The gradient of the same weights, computed in float32 without compilation. None if the model has dropout."""
    model, x = model_and_batch(name, sizes, device, dtype)
    if any(isinstance(m, nn.Dropout) and m.p for m in model.modules()):
        return None
    return gradient(model.float(), model, x.float() if x.is_floating_point() else x)


def gradient(model: nn.Module, function: Any, x: Tensor) -> Tensor:
    """All gradients of one step, behind each other."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)  # dropout
    function(x).backward()
    found = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def rows_of(name: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Callable[[], float]]]:
    """The rows of a model without times, and for each what takes the ms of a step."""
    device, inner = torch.device(options.device), "aten" if options.small else "inductor"
    dtype = torch.float32 if options.small else torch.bfloat16
    sizes = SMALL if options.small else LARGE
    torch._inductor.config.emulate_precision_casts = options.casts
    exact = float32_gradient(name, sizes, device, dtype)
    model, x = model_and_batch(name, sizes, device, dtype)

    def planned(policy: Any) -> int:
        began = time.perf_counter()
        found = aot_hooks.plan(model, x, policy=policy, inner=inner).peak_bytes
        print(f"{name}, {policy!r}: planned in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        return found

    stock = planned(aot_hooks.KEEP)
    rows: list[dict[str, Any]] = [{"model": name, "means": "no hooks", "policy": aot_hooks.KEEP}]
    for means, allow, max_error in (("any", None, MAX_ERROR), ("exact", EXACT, 0.0)):
        named = {"max_error": max_error} | ({} if allow is None else {"allow": allow})
        limit = (stock + planned(aot_hooks.budget(max_slowdown=math.inf, **named))) // 2
        rows.append(
            {"model": name, "means": means, "policy": aot_hooks.budget(f"{limit}B", **named), "budget_bytes": limit}
        )
    steps = []
    reference = None
    for row in rows:
        policy = row.pop("policy")
        function = torch.compile(model, backend="aot_hooks", options={"inner": inner, "policy": policy})
        began = time.perf_counter()
        for _ in range(2):
            gradient(model, function, x)
        row["first_steps_s"] = time.perf_counter() - began
        print(f"{name}, {row['means']}: first steps took {row['first_steps_s']:.0f} s", file=sys.stderr, flush=True)
        found = gradient(model, function, x)
        reference = found if reference is None else reference
        again = gradient(model, function, x)
        row["noise"] = measure.relative_error(again, found)
        row["error"] = measure.relative_error(found, reference)
        row["bitwise"] = torch.equal(found, reference)
        row["float32_error"] = None if exact is None else measure.relative_error(found, exact)
        del found, again
        gc.collect()
        measured, _ = measure.measure_bytes(lambda f=function: f(x), lambda loss: loss.backward(), device)
        model.zero_grad(set_to_none=True)
        row["peak_bytes"] = measured.peak
        if policy is not aot_hooks.KEEP:
            plan = aot_hooks.last_plans(function)[-1]
            row |= {"predicted_peak_bytes": plan.peak_bytes, "predicted_ratio": plan.step_ratio}
            row["hooks"] = _means(plan)
        else:
            row |= {"predicted_peak_bytes": stock, "predicted_ratio": 1.0}
        steps.append(lambda f=function: _step_ms(model, f, x))
    return rows, steps


def _means(plan: aot_hooks.Plan) -> dict[str, int]:
    """The bytes that each hook of `plan` takes."""
    found: dict[str, int] = {}
    for decision in plan.decisions:
        found[decision.hook.name] = found.get(decision.hook.name, 0) + decision.saved_bytes
    return found


def _step_ms(model: nn.Module, function: Any, x: Tensor) -> float:
    """The median of some runs of steps that are queued without a pause, so that the host can be ahead of the device."""

    def steps() -> None:
        for _ in range(QUEUED):
            model.zero_grad(set_to_none=True)
            function(x).backward()

    return statistics.median([measure.step_ms(steps, x.device) / QUEUED for _ in range(6)][1:])


def serve(connection: Any, name: str, options: argparse.Namespace) -> None:
    try:
        rows, steps = rows_of(name, options)
    except Exception as error:
        connection.send(measure.first_line(error))
        return
    connection.send(rows)
    connection.recv()
    connection.send([step() for step in steps])


def rows_of_all(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of all models, and what went wrong."""
    rows, failures = [], []
    served = [(name, measure.Served(serve, name, options)) for name in options.models.split(",")]
    for name, process, answer in [(name, process, process.answer()) for name, process in served]:
        if isinstance(answer, str):
            failures.append(f"{name}: {answer}")
            continue
        times = process.answer("time")
        for row, ms in zip(answer, times, strict=True):
            rows.append(row | {"median_ms": ms, "ratio": ms / times[0]})
    return rows, failures + wrong(rows, same_bits=options.small)


def wrong(rows: list[dict[str, Any]], *, same_bits: bool) -> list[str]:
    """What a budget promises and these rows don't have."""
    failures = []
    noise = {row["model"]: row["noise"] for row in rows if row["means"] == "no hooks"}
    for row in (row for row in rows if "budget_bytes" in row):
        name = f"{row['model']}, {row['means']} means"
        if row["peak_bytes"] > row["budget_bytes"]:
            failures.append(f"{name}: {row['peak_bytes']} bytes, over the budget of {row['budget_bytes']}")
        if row["means"] == "exact" and same_bits and not row["bitwise"]:
            failures.append(f"{name}: other bits, off by {row['error']:.2g}")
        if not row["error"] <= MAX_ERROR + noise[row["model"]]:  # also if it is no number
            failures.append(f"{name}: gradients are off by {row['error']:.2g}")
    return failures


def format_rows(rows: list[dict[str, Any]]) -> str:
    unit, title = (measure.GIB, "GiB") if any(row["peak_bytes"] > measure.GIB for row in rows) else (measure.MIB, "MiB")
    lines = [["model", "means", f"budget {title}", "predicted", "peak", "/ stock", "predicted", "error", "noise"]]
    lines[0].append("to float32")
    for row in rows:
        peaks = [measure.number(row.get(f"{key}_bytes"), ".3f", unit) for key in ("budget", "predicted_peak", "peak")]
        ratios = [f"{row[key]:.3f}" for key in ("ratio", "predicted_ratio")]
        errors = [measure.number(row[key], ".2g") for key in ("error", "noise", "float32_error")]
        lines.append([row["model"], row["means"], *peaks, *ratios, *errors])
    return measure.format_columns(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = measure.parser_of(__doc__, small=measure.ANYWHERE)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--casts", action="store_true", help="generated code rounds as eager mode does")
    parser.add_argument("--device", default=measure.default_device())
    options = parser.parse_args(arguments)
    rows, failures = rows_of_all(options)
    if options.json is not None:
        header = measure.conditions(torch.device(options.device), transformers=transformers.__version__)
        header |= (SMALL if options.small else LARGE) | {"emulate_precision_casts": options.casts}
        measure.write(options.json, {"header": header, "rows": rows, "failures": failures})
    return measure.print_rows(rows, failures, format_rows)


if __name__ == "__main__":
    sys.exit(main())
