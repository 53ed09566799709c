"""Train a GPT twice, as usual and with its saved activations in float8, and see what that gives and what it costs.

    *.py of the standard library, as bytes
        |  the same batches, from the same seed
        v
    GPT  ---------------- torch.compile(gpt) -------------------------------->  losses, ms, bytes      baseline
     same weights  ------ torch.compile(gpt, backend="aot_hooks") ----------->  losses, ms, bytes      hooks
                          with aot_hooks.saved_tensors_hooks(pack, unpack)
        |
        v
    a table, baseline beside hooks;  OUT/train_gpt.png, both loss curves;  OUT/train_gpt.json, every number

The forward computes with the same numbers in both runs. Only what autograd keeps until the backward is stored smaller,
so the gradient is a little off: the table says by how much, and the loss curves say whether it matters.

    python examples/train_gpt.py                        # small on the CPU, 129M parameters on a CUDA machine
    python examples/train_gpt.py --hook int8 --check    # another hook; fail if the loss ends over 2% away
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
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aot_hooks

HOOKS = ("float8", "int8", "int4", "bitmask", "offload")  # of aot_hooks, made without arguments
LOSS_TOLERANCE = 0.02  # what --check allows between the two final losses, relative


@dataclasses.dataclass(frozen=True)
class Sizes:
    layer_count: int
    width: int
    head_count: int
    sequence: int
    batch: int
    step_count: int


@dataclasses.dataclass(frozen=True)
class Setting(Sizes):
    learning_rate: float
    autocast: bool  # matrix products in bfloat16, parameters in float32
    corpus_bytes: int


# on a CPU, by inner compiler
WHY_SLOWER = {
    "aten": "A step with hooks is slower here: without Inductor nothing is fused, so each operator of packing reads\n"
    "and writes memory by itself. --inner inductor fuses it, and compiles for minutes. On a GPU see README.md.",
    "inductor": "A step with hooks is slower here: a CPU has no arithmetic to spare, and these tensors fit into its\n"
    "caches, so that fewer bytes save no time. On a GPU see README.md.",
}

SETTINGS = {
    "small": Setting(3, 128, 4, 128, 8, 80, 1e-3, autocast=False, corpus_bytes=1 << 20),
    "full": Setting(18, 768, 12, 1024, 32, 300, 6e-4, autocast=True, corpus_bytes=32 << 20),
}


class Block(nn.Module):
    def __init__(self, width: int, head_count: int) -> None:
        super().__init__()
        self.head_count = head_count
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.head_count, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, sequence, width of a head]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """A byte-level language model: bytes in, mean cross-entropy of the bytes that follow out."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width = setting.width
        self.byte_embedding = nn.Embedding(256, width)
        self.position_embedding = nn.Embedding(setting.sequence, width)
        self.blocks = nn.ModuleList(Block(width, setting.head_count) for _ in range(setting.layer_count))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(self._initialize)
        for block in self.blocks:  # what adds to the residual stream starts small, as in GPT-2
            for linear in (block.projection, block.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * setting.layer_count))

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


@dataclasses.dataclass
class Run:
    """One of the two trainings: its model and how the model is called, and what was seen of it."""

    name: str
    model: GPT
    compute_loss: Callable[[Tensor, Tensor], Tensor]  # the compiled model
    context: Callable[[], contextlib.AbstractContextManager[None]]  # around the forward
    optimizer: torch.optim.Optimizer
    losses: list[float] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)
    after_forward_bytes: int = 0  # alive between forward and backward, over what was there before the step
    peak_bytes: int = 0  # highest in forward and backward, over the same
    gradient: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))


# ---------------------------------------------------------------------------------------------------- data and training


def read_corpus(byte_count: int) -> Tensor:
    """The first `byte_count` bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= byte_count:
            break
    return torch.frombuffer(text[:byte_count], dtype=torch.uint8)


def draw_batches(corpus: Tensor, setting: Setting, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(corpus) - setting.sequence, (setting.batch, 1), generator=generator)
        window = corpus[starts + torch.arange(setting.sequence + 1)].long().to(device)  # [batch, sequence + 1]
        yield window[:, :-1], window[:, 1:]


def learning_rate_at(step: int, setting: Setting) -> float:
    """Linear over the first tenth of the steps, then down along a cosine to a tenth."""
    warmup = setting.step_count / 10
    done = (step - warmup) / (setting.step_count - warmup)
    return setting.learning_rate * min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * max(0.0, done)))


def progress(step_count: int) -> Iterator[tuple[int, Callable[[str], None]]]:
    """Counts steps on the terminal: tqdm's bar where it is installed, otherwise a plain line ten times a run."""
    try:
        from tqdm import tqdm
    except ImportError:
        for step in range(step_count):
            notes: list[str] = []
            yield step, notes.append
            if (step + 1) % max(1, step_count // 10) == 0:
                print(f"step {step + 1} of {step_count}: {notes[-1]}", flush=True)
        return
    with tqdm(range(step_count), mininterval=0.5) as bar:
        for step in bar:
            yield step, lambda note: bar.set_postfix_str(note, refresh=False)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train_step(run: Run, tokens: Tensor, targets: Tensor, learning_rate: float) -> None:
    synchronize(tokens.device)
    started = time.perf_counter()
    with run.context():
        loss = run.compute_loss(tokens, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    synchronize(tokens.device)
    run.step_ms.append((time.perf_counter() - started) * 1e3)
    run.losses.append(loss.item())


def train(runs: list[Run], setting: Setting, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Trains all runs step by step in turn, so that whatever else the machine does slows all of them."""
    for step, note in progress(setting.step_count):
        tokens, targets = next(batches)
        for run in runs:
            train_step(run, tokens, targets, learning_rate_at(step, setting))
        note(", ".join(f"{run.name} {run.losses[-1]:.3f}" for run in runs))


# ------------------------------------------------------------------------------------------------------------ measuring


def measure_step(run: Run, tokens: Tensor, targets: Tensor) -> None:
    """One forward and backward at the model's weights, without a change to them: the run's bytes and gradient."""
    device = tokens.device
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with run.context():
            loss = run.compute_loss(tokens, targets)
        run.after_forward_bytes = torch.cuda.memory_allocated(device) - before
        loss.backward()
        synchronize(device)
        run.peak_bytes = torch.cuda.max_memory_allocated(device) - before
    else:
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
            with run.context():
                loss = run.compute_loss(tokens, targets)
            with torch.profiler.record_function("backward begins"):
                loss.backward()
        run.after_forward_bytes, run.peak_bytes = read_cpu_allocator(profile)
    run.gradient = torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None])
    run.model.zero_grad(set_to_none=True)


def read_cpu_allocator(profile: torch.profiler.profile) -> tuple[int, int]:
    """Adds up what the profile saw allocated and released: bytes alive where the backward begins, and their highest."""
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    backward_begins = next(event["ts"] for event in events if event.get("name") == "backward begins")
    alive = peak = after_forward = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        alive += event["args"]["Bytes"]
        peak = max(peak, alive)
        if event["ts"] < backward_begins:
            after_forward = alive
    return after_forward, peak


def compare(baseline: Run, hooks: Run, saved_bytes: int, packed_bytes: int) -> dict[str, dict[str, float]]:
    """Every row of the table as data: {row: {"baseline": value, "hooks": value}}."""
    warm = max(1, min(20, len(baseline.losses) // 5))  # steps that compile and settle
    last = max(1, len(baseline.losses) // 10)
    error = (hooks.gradient - baseline.gradient).norm() / baseline.gradient.norm()

    def row(of: Callable[[Run], float]) -> dict[str, float]:
        return {"baseline": of(baseline), "hooks": of(hooks)}

    return {
        "saved_for_backward_bytes": {"baseline": saved_bytes, "hooks": packed_bytes},
        "after_forward_bytes": row(lambda run: run.after_forward_bytes),
        "peak_bytes": row(lambda run: run.peak_bytes),
        "step_median_ms": row(lambda run: statistics.median(run.step_ms[warm:] or run.step_ms)),
        "step_min_ms": row(lambda run: min(run.step_ms)),
        "first_step_ms": row(lambda run: run.step_ms[0]),
        "final_loss": row(lambda run: statistics.fmean(run.losses[-last:])),
        "gradient_relative_error": {"baseline": 0.0, "hooks": float(error)},
    }


def format_table(rows: dict[str, dict[str, float]], device: torch.device, inner: str) -> str:
    mib = 1 << 20
    fused = "" if inner == "inductor" else "; nothing is fused with inner aten"
    how = "torch.cuda.max_memory_allocated" if device.type == "cuda" else "torch.profiler, every allocation"
    shown = {  # row: label, unit, digits, note
        "saved_for_backward_bytes": ("saved for backward, MiB", mib, 1, "the plan: each storage once"),
        "after_forward_bytes": ("alive after forward, MiB", mib, 1, "measured, over the start of the step"),
        "peak_bytes": ("peak of a step, MiB", mib, 1, f"measured likewise: {how}"),
        "step_median_ms": ("a step, median, ms", 1, 1, "forward, backward, optimizer" + fused),
        "step_min_ms": ("a step, fastest, ms", 1, 1, ""),
        "first_step_ms": ("first step, s", 1e3, 1, "compiles"),
        "final_loss": ("final loss", 1, 4, "mean of the last tenth of the steps"),
        "gradient_relative_error": ("gradient error", 1, 4, "|g - baseline's g| / |baseline's g|, same weights, batch"),
    }
    lines = [f"{'':26}{'baseline':>10}{'hooks':>10}{'ratio':>8}"]
    for key, (label, unit, digits, note) in shown.items():
        a, b = rows[key]["baseline"] / unit, rows[key]["hooks"] / unit
        ratio = f"{b / a:.3f}" if a else ""
        lines.append(f"{label:26}{a:>10.{digits}f}{b:>10.{digits}f}{ratio:>8}  {note}".rstrip())
    return "\n".join(lines)


def plot(runs: list[Run], path: pathlib.Path) -> str:
    """Draws the loss curves; returns the line to print about it."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for run, (width, alpha) in zip(runs, ((3, 0.4), (1, 1)), strict=True):
        axes.plot(run.losses, label=run.name, linewidth=width, alpha=alpha)
    axes.set(xlabel="step", ylabel="cross-entropy, nats a byte", title="The same training, activations stored smaller")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return f"wrote {path}"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT with and without hooks on its saved tensors.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--setting", choices=SETTINGS, help="default: full on CUDA, small elsewhere")
    parser.add_argument("--steps", type=int, help="default: the setting's")
    parser.add_argument("--hook", default="float8", choices=HOOKS)
    parser.add_argument("--inner", choices=("inductor", "aten"), help="default: inductor on CUDA, aten elsewhere")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    parser.add_argument("--check", action="store_true", help=f"fail if the losses end over {LOSS_TOLERANCE:.0%}% apart")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"argument --steps: expected at least 1, got {options.steps}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    device = torch.device(options.device)
    on_cuda = device.type == "cuda"
    setting_name = options.setting or ("full" if on_cuda else "small")
    setting = SETTINGS[setting_name]
    if options.steps is not None:
        setting = dataclasses.replace(setting, step_count=options.steps)
    inner = options.inner or ("inductor" if on_cuda else "aten")
    stock_backend = {"inductor": "inductor", "aten": "aot_eager"}[inner]  # the baseline is compiled in the same way
    hook = getattr(aot_hooks, options.hook)()

    def autocast() -> contextlib.AbstractContextManager[None]:
        return torch.autocast(device.type, torch.bfloat16, enabled=setting.autocast)

    @contextlib.contextmanager
    def autocast_and_hooks() -> Iterator[None]:
        with autocast(), aot_hooks.saved_tensors_hooks(hook.pack, hook.unpack):
            yield

    def make_run(name: str, context: Callable[[], contextlib.AbstractContextManager[None]], **how: Any) -> Run:
        torch.manual_seed(options.seed)
        model = GPT(setting).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
        return Run(name, model, torch.compile(model, **how), context, optimizer)

    torch.set_float32_matmul_precision("high")
    if not on_cuda and setting_name == "small":
        torch.set_num_threads(
            1
        )  # enough for steps this small, and two threads wait long for each other on a busy machine
    baseline = make_run("baseline", autocast, backend=stock_backend)
    hooks = make_run(hook.name, autocast_and_hooks, backend="aot_hooks", options={"inner": inner})
    header = {
        "device": torch.cuda.get_device_name(device) if on_cuda else f"CPU, {torch.get_num_threads()} thread(s)",
        "torch": torch.__version__,
        "baseline": f'torch.compile(backend="{stock_backend}")',
        "hooks": f'torch.compile(backend="aot_hooks", inner="{inner}"), saved tensors in {hook.name}',
        "setting": setting_name,
        "parameter_count": sum(p.numel() for p in baseline.model.parameters()),
        **dataclasses.asdict(setting),
    }
    size = f"{header['parameter_count'] / 1e6:.1f}M parameters, {setting.layer_count} layers of width {setting.width}"
    dtype = "bfloat16 autocast" if setting.autocast else "float32"
    print(f"{header['device']}, torch {header['torch']}")
    print(f"GPT: {size}; {setting.batch} x {setting.sequence} bytes a step, {dtype}")
    print(f"baseline: {header['baseline']}\nhooks:    {header['hooks']}\n", flush=True)

    runs = [baseline, hooks]
    batches = draw_batches(read_corpus(setting.corpus_bytes), setting, options.seed, device)
    train(runs, setting, batches)
    baseline.model.load_state_dict(hooks.model.state_dict())
    tokens, targets = next(batches)
    for run in runs:
        measure_step(run, tokens, targets)
    plans = aot_hooks.last_plans(hooks.compute_loss)
    rows = compare(baseline, hooks, sum(p.saved_bytes for p in plans), sum(p.packed_bytes for p in plans))

    options.out.mkdir(parents=True, exist_ok=True)
    numbers = {"header": header, "rows": rows, "losses": {"baseline": baseline.losses, "hooks": hooks.losses}}
    (options.out / "train_gpt.json").write_text(json.dumps(numbers, indent=1))
    print("\n" + format_table(rows, device, inner) + "\n")
    if not on_cuda:
        print(WHY_SLOWER[inner] + "\n")
    print(plot(runs, options.out / "train_gpt.png"), f"wrote {options.out / 'train_gpt.json'}", sep="\n")

    final = rows["final_loss"]
    apart = abs(final["hooks"] / final["baseline"] - 1)
    if options.check and not apart <= LOSS_TOLERANCE:  # "not <=": a NaN fails as well
        print(f"FAILED: the final losses are {apart:.1%} apart, more than {LOSS_TOLERANCE:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
