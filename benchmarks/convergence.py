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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import ROOT, conditions
from torch import Tensor, nn
from ways import HOOKS as WAYS
from ways import own_code

import aot_hooks

sys.path.append(str(ROOT / "examples"))
from train_gpt import GPT, Setting, draw_batches, learning_rate_at, read_corpus

BASELINE, NUDGED = "baseline", "baseline, nudged"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"  # in docs/convergence.md
NUDGE = 1e-5
HOOKS = {  # names of the report: those of ways.py
    "float8 e4m3 tensorwise": "float8 tensorwise",
    "float8 e4m3 rowwise": "float8",
    "float8 e4m3 blockwise": "float8 blockwise",
    "float8 e5m2 rowwise": "float8 e5m2",
    "int8": "int8",
    "int8 in powers of two": "int8(32, power of two)",
    "int4": "int4",
    "int4 to the nearest": "int4 to the nearest",
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

    own = own_code(loss, f"loss_{name}")
    if name == BASELINE:
        stock = {"inductor": "inductor", "aten": "aot_eager"}[inner]
        return Way(name, model, torch.compile(own, backend=stock, dynamic=False), contextlib.nullcontext)
    hook = WAYS[HOOKS[name]]()
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


# ---------------------------------------------------------------------------------------------- table, plot and page


@dataclasses.dataclass(frozen=True)
class Summary:
    """One row: final losses over the seeds, in nats a byte, and their differences from the baseline's."""

    name: str
    kept: float | None
    losses: tuple[float, ...]
    differences: tuple[float, ...]
    diverged_count: int


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of different seeds as one, under the first one's date.

    Raises:
        ValueError: they were not measured under the same conditions, or two have a seed in common.
    """
    apart = ("date", "seed_count")
    first, *others = results
    seeds = [{run["seed"] for run in result["ways"][BASELINE]["runs"]} for result in results]
    for other in others:
        for name, value in first["conditions"].items():
            if name not in apart and other["conditions"].get(name) != value:
                raise ValueError(f"{name} is {value!r} in one result and {other['conditions'].get(name)!r} in another")
    if sum(map(len, seeds)) != len(set().union(*seeds)):
        raise ValueError(f"expected other seeds in each result, got {', '.join(str(sorted(s)) for s in seeds)}")
    ways: dict[str, Any] = {}
    for result in results:
        for name, way in result["ways"].items():
            ways.setdefault(name, {"kept": way["kept"], "runs": []})["runs"] += way["runs"]
    return {"conditions": {**first["conditions"], "seed_count": sum(map(len, seeds))}, "ways": ways}


def summarize(result: dict[str, Any]) -> list[Summary]:
    """Rows in the order of the result. A seed whose baseline is missing has no difference."""
    ways = result["ways"]
    baseline = {run["seed"]: run["validation_loss"] for run in ways[BASELINE]["runs"]}
    return [
        Summary(
            name,
            way["kept"],
            tuple(run["validation_loss"] for run in way["runs"]),
            tuple(run["validation_loss"] - baseline[run["seed"]] for run in way["runs"] if run["seed"] in baseline),
            sum(run["diverged"] for run in way["runs"]),
        )
        for name, way in ways.items()
    ]


def format_table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| activations stored as | bytes kept | final loss | less the baseline's, same seed | diverged |",
        "|---|---|---|---|---|",
    ]
    for row in summarize(result):
        kept = f"{row.kept:.2f}" if row.kept else "1"
        loss, difference = f"{statistics.fmean(row.losses):.4f}", ""
        if len(row.losses) > 1:
            loss += f" ± {statistics.stdev(row.losses):.4f}"
        if row.name != BASELINE and row.differences:
            difference = f"{statistics.fmean(row.differences):+.4f}"
        if difference and len(row.differences) > 1:
            difference += f" ({min(row.differences):+.4f} to {max(row.differences):+.4f})"
        lines.append(f"| {row.name} | {kept} | {loss} | {difference} | {row.diverged_count} of {len(row.losses)} |")
    return "\n".join(lines)


def describe(result: dict[str, Any]) -> str:
    """The conditions, as a sentence."""
    c = result["conditions"]
    dtype = "bfloat16 autocast" if c["autocast"] else "float32"
    counts = {len(way["runs"]) for way in result["ways"].values()}
    few, many = min(counts), max(counts)
    seeds = f"{few} to {many} seeds" if few != many else f"{many} seed{'s' if many > 1 else ''}"
    return (
        f"{c['device']}, torch {c['torch']}, inner {c['inner']!r}, {dtype}: "
        f"{c['parameter_count'] / 1e6:.1f}M parameters ({c['layer_count']} layers of width {c['width']}), "
        f"{c['step_count']} steps of {c['batch']} × {c['sequence']} "
        f"bytes, {seeds}; commit {(c['commit'] or 'unknown')[:7]}."
    )


def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Left the loss curves, right what they differ from the baseline's; means over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = result["ways"]
    step_count = result["conditions"]["step_count"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    baseline = {run["seed"]: run["losses"] for run in ways[BASELINE]["runs"]}
    for i, (name, way) in enumerate(ways.items()):
        runs = [run for run in way["runs"] if run["seed"] in baseline]
        curve = [statistics.fmean(points) for points in zip(*(run["losses"] for run in runs), strict=True)]
        # [seed][point]
        off = [[a - b for a, b in zip(run["losses"], baseline[run["seed"]], strict=True)] for run in runs]
        steps = [(point + 1) * step_count / len(curve) for point in range(len(curve))]
        style = {"label": name, "linewidth": 1.2, "color": f"C{i}"}
        if name in (BASELINE, NUDGED):
            style |= {"color": "black" if name == BASELINE else "grey", "linewidth": 2.5, "alpha": 0.5}
        left.plot(steps, curve, **style)
        if name != BASELINE:
            right.plot(steps, [statistics.fmean(points) for points in zip(*off, strict=True)], **style)
    left.set(xlabel="step", ylabel="training loss, nats a byte", title="Loss")
    right.set(xlabel="step", title="Loss less the baseline's, same seed and batches")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write_report(result: dict[str, Any], docs: pathlib.Path) -> list[str]:
    """Puts the table between the markers of `docs`/convergence.md, and draws the plot; returns lines that say so.

    Raises:
        ValueError: the page has no markers.
    """
    page, image = docs / "convergence.md", docs / "images" / "convergence.png"
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page}: expected one {BEGIN!r} and one {END!r}")
    before, rest = text.split(BEGIN)
    measured = "\n\n".join(
        ["", describe(result), format_table(result), "![loss curves](images/convergence.png)", ""]
    ).lstrip("\n")
    plot(result, image)
    page.write_text(f"{before}{BEGIN}\n{measured}{END}{rest.split(END)[1]}")
    return [f"wrote {page}", f"wrote {image}"]


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
        options.layers,
        options.width,
        options.heads,
        options.sequence,
        options.batch,
        options.steps,
        options.learning_rate,
        autocast,
        corpus_bytes=32 << 20,
    )
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
