"""Does training end where it would have without hooks: one small GPT, many ways to store its activations, some seeds.

    python benchmarks/convergence.py --device cuda --json FILE
    python benchmarks/convergence.py --first-seed 1 --seeds 1 --json PART    # one on each device, side by side
    python benchmarks/convergence.py --merge PART PART --json FILE           # into one result
    python benchmarks/convergence.py --report FILE             # writes the table and plot of docs/convergence.md anew

    bytes of the standard library --- of a seed the same weights and batches ---> baseline              losses
                                                                              `-> float8, int8, int4    losses

The model and its data are those of examples/train_gpt.py. Each way is compiled once; a run copies the seed's weights
into it and starts a new optimizer. All ways are run for one seed before the next one begins, and the JSON file is
written after every run, so a measurement that is cut short leaves whole comparisons.

How much of a difference is chance? "baseline, nudged" is the baseline again with every weight off by some
hundred-thousandth of itself: what a change that means nothing makes of the same seed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _measure import ROOT, conditions
from torch import Tensor, nn

import aot_hooks
from aot_hooks import Hook, float8, int4, int8

sys.path.append(str(ROOT / "examples"))
from train_gpt import GPT, Setting, draw_batches, learning_rate_at, read_corpus

BASELINE, NUDGED = "baseline", "baseline, nudged"
NUDGE = 1e-5
HOOKS: dict[str, Callable[[], Hook]] = {
    "float8 e4m3 tensorwise": lambda: float8(scaling="tensorwise"),
    "float8 e4m3 rowwise": lambda: float8(),
    "float8 e4m3 blockwise": lambda: float8(scaling="blockwise"),
    "float8 e5m2 rowwise": lambda: float8(torch.float8_e5m2),
    "int8": lambda: int8(),
    "int8 in powers of two": lambda: int8(32, power_of_two=True),
    "int4": lambda: int4(),
    "int4 to the nearest": lambda: int4(stochastic=False),
}
POINT_COUNT = 100  # of a loss curve, at most: means of as many equal stretches of steps
DIVERGED = 1.2  # a run whose last losses are this many times its lowest has diverged
HELD_OUT = 10  # the last tenth of the corpus is for validation


@dataclasses.dataclass
class Way:
    """One way to train: a model of its own, compiled once, and what the forward runs in."""

    name: str
    model: GPT
    compute_loss: Callable[[Tensor, Tensor], Tensor]
    context: Callable[[], contextlib.AbstractContextManager[Any]]

    @property
    def kept(self) -> float | None:
        """Bytes kept for the backward, of those that would be kept without the hook."""
        plans = aot_hooks.last_plans(self.compute_loss)
        saved = sum(plan.saved_bytes for plan in plans)
        return sum(plan.packed_bytes for plan in plans) / saved if saved else None


def make_way(name: str, setting: Setting, device: torch.device, inner: str) -> Way:
    model = GPT(setting).to(device)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        result: Tensor = model(tokens, targets)
        return result

    # Dynamo compiles so many versions of a code object, and runs what comes after that as it is: so one for each way
    code = loss.__code__.replace(co_name=f"loss_{name}".replace(" ", "_"))
    own = types.FunctionType(code, loss.__globals__, code.co_name, None, loss.__closure__)
    if name == BASELINE:
        stock = {"inductor": "inductor", "aten": "aot_eager"}[inner]
        return Way(name, model, torch.compile(own, backend=stock, dynamic=False), contextlib.nullcontext)
    hook = HOOKS[name]()
    call = torch.compile(own, backend="aot_hooks", dynamic=False, options={"inner": inner})
    return Way(name, model, call, lambda: aot_hooks.saved_tensors_hooks(hook))


def seed_weights(model: GPT, setting: Setting, seed: int, nudge: float) -> None:
    """The weights of `seed` into `model`, in place: what is compiled for it stays valid."""
    torch.manual_seed(seed)
    fresh = GPT(setting)
    with torch.no_grad():
        for mine, new in zip(model.parameters(), fresh.parameters(), strict=True):
            mine.copy_(new * (1 + nudge * torch.randn_like(new)) if nudge else new)


def train(
    way: Way, setting: Setting, seed: int, corpus: Tensor, device: torch.device, nudge: float = 0.0
) -> dict[str, Any]:
    """One run: its losses, each the mean of a stretch of steps, the loss on unseen text, whether it diverged."""
    seed_weights(way.model, setting, seed, nudge)
    optimizer = torch.optim.AdamW(way.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seen, unseen = split(corpus, setting)
    batches = draw_batches(seen, setting, seed, device)
    torch.manual_seed(seed + 1)  # rounding at random
    losses = torch.empty(setting.step_count, device=device)  # read at the end: a read waits for the device
    started = time.perf_counter()
    for step in range(setting.step_count):
        tokens, targets = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=setting.autocast), way.context():
            loss = way.compute_loss(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(way.model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, setting)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[step] = loss.detach()
    each = losses.tolist()
    return {
        "seed": seed,
        "losses": [round(loss, 5) for loss in stretches(each)],
        "validation_loss": round(validation_loss(way.model, setting, unseen, device), 5),
        "diverged": has_diverged(each),
        "seconds": round(time.perf_counter() - started, 2),
    }


def split(corpus: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """Text to train on, and text to validate on."""
    unseen = max(len(corpus) // HELD_OUT, setting.sequence + 1)
    return corpus[:-unseen], corpus[-unseen:]


@torch.no_grad()
def validation_loss(model: GPT, setting: Setting, unseen: Tensor, device: torch.device, batch_count: int = 16) -> float:
    """On the same batches for every run; in eager mode, so that no way has a forward of its own."""
    batches = draw_batches(unseen, setting, 0, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=setting.autocast):
        return float(torch.stack([model(*next(batches)) for _ in range(batch_count)]).mean())


def stretches(losses: list[float]) -> list[float]:
    """Means of equal stretches, at most `POINT_COUNT`; steps left over at the end belong to the last."""
    length = max(1, len(losses) // POINT_COUNT)
    starts = range(0, len(losses) - length + 1, length)
    return [statistics.fmean(losses[s : s + length if s != starts[-1] else None]) for s in starts]


def has_diverged(losses: list[float]) -> bool:
    """Whether a loss is not finite, or the last tenth of the steps is far above the lowest tenth."""
    if not all(map(math.isfinite, losses)):
        return True
    tenth = max(1, len(losses) // 10)
    means = [statistics.fmean(losses[s : s + tenth]) for s in range(0, len(losses) - tenth + 1, tenth)]
    return statistics.fmean(losses[-tenth:]) > DIVERGED * min(means)


def compare(
    names: list[str], setting: Setting, seeds: list[int], device: torch.device, inner: str
) -> Iterator[tuple[str, dict[str, Any], float | None]]:
    """Name, run and bytes kept, run by run: all ways for the first seed, then for the next."""
    corpus = read_corpus(setting.corpus_bytes)
    ways: dict[str, Way] = {}
    for seed in seeds:
        for name in names:
            way = BASELINE if name == NUDGED else name
            if way not in ways:
                ways[way] = make_way(way, setting, device, inner)
            run = train(ways[way], setting, seed, corpus, device, NUDGE if name == NUDGED else 0.0)
            yield name, run, None if way == BASELINE else ways[way].kept


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--inner", choices=("inductor", "aten"), help="default: inductor on CUDA, aten elsewhere")
    parser.add_argument("--hooks", nargs="+", choices=HOOKS, default=list(HOOKS), help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--autocast", action=argparse.BooleanOptionalAction, help="matrix products in bfloat16; default: on CUDA"
    )
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("out/convergence.json"))
    parser.add_argument("--merge", type=pathlib.Path, nargs="+", help="only put the runs of these files into one")
    parser.add_argument("--report", type=pathlib.Path, help="only write the docs' page and plot from this file")
    parser.add_argument("--docs", type=pathlib.Path, default=ROOT / "docs", help="where --report writes")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    from convergence_report import format_table, merged, write_report

    options = parse_arguments(arguments)
    if options.report:
        print(*write_report(json.loads(options.report.read_text()), options.docs), sep="\n")
        return
    if options.merge:
        result = merged([json.loads(path.read_text()) for path in options.merge])
        options.json.write_text(json.dumps(result) + "\n")
        print(format_table(result))
        return
    device = torch.device(options.device)
    on_cuda = device.type == "cuda"
    autocast = on_cuda if options.autocast is None else options.autocast
    setting = Setting(
        options.layers, options.width, options.heads, options.sequence, options.batch, options.steps,
        options.learning_rate, autocast, corpus_bytes=32 << 20,
    )  # fmt: skip
    inner = options.inner or ("inductor" if on_cuda else "aten")
    torch.set_float32_matmul_precision("high")
    with torch.device("meta"):
        parameter_count = sum(p.numel() for p in GPT(setting).parameters())
    header = conditions(
        device, inner=inner, parameter_count=parameter_count, seed_count=options.seeds, **dataclasses.asdict(setting)
    )
    print(", ".join(f"{k} {v}" for k, v in header.items()), flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    names = [BASELINE, NUDGED, *options.hooks]
    seeds = list(range(options.first_seed, options.first_seed + options.seeds))
    result = {"conditions": header, "ways": {}}
    for name, run, kept in compare(names, setting, seeds, device, inner):
        way = result["ways"].setdefault(name, {"kept": kept, "runs": []})
        way["runs"].append(run)
        said = f"{run['validation_loss']:.4f}  {run['seconds']:.1f} s{', DIVERGED' if run['diverged'] else ''}"
        print(f"seed {run['seed']}  {name:24} {said}", flush=True)
        options.json.write_text(json.dumps(result) + "\n")
    print(format_table(result))


if __name__ == "__main__":
    main()
