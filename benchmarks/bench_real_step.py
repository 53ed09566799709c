"""A whole fine-tuning step with a real vocabulary: a Llama of transformers, its loss, AdamW. Peak, ms, tokens a second.

    ids -- LlamaForCausalLM, labels shifted inside --> loss --> backward --> AdamW
      stock                    torch.compile
      checkpointing            transformers' own, compiled; chunk_checkpointing with the loss in chunks
      float8, offload          float8(), and offload(then=float8()), with pointwise results computed again
      chunk                    options={"chunk": True}; chunk_float8, chunk_offload with these hooks
      chunk_tile_offload       with {"tile": True} as well: MLPs again in the backward, some tokens at a time
      chunk_tile_inputs        with --blocks: layers' inputs in host memory, exact, and all else computed again
      budget 12.3GiB           a budget: of this size, or
      budget as checkpointing  of the measured peak of another row
      budget total 80GiB       of all that is allocated

The compiled function returns the loss alone, in each way. A model that returns its logits keeps them alive, with chunks
or without. Each way runs in a process of its own, on the same weights and tokens. `--jobs` of them compile at a time,
budgets one by one, since they measure their first steps. Then each round runs a step of each way, in an order drawn
anew. Peaks are over what is allocated before the step: weights, gradients of zero bytes, the optimizer's state. Losses
of all steps show that ways agree. A row has the predicted peak beside the measured one wherever there is a plan.

`--blocks` compiles each layer on its own, so that one compilation serves all, and the loss with the last layer. Hooks
pack the layers' inputs, too. `--few` runs a step of two layers first, which compiles. With `--rounds 0` the step whose
peak is measured is timed, so a way takes `--warmup` steps and one more. `--prefix` has labels of the first tokens
alone. Their gradients are those of a run of so many tokens: `--gradients` writes them, `--against` compares.
`--float32` shows how far off bfloat16 is by itself.

Adapters of a model of 8B: few blocks, few steps. The difference of two numbers of blocks, or of tokens, is what a block
or a token takes. `--limit` holds the allocator to so many GiB.

Before torch 2.14 a compiled model of transformers makes a mask of tokens x tokens, which fused attention adds to its
scores: 4 GiB of booleans at 65,536 tokens. `--causal` has it make none, in each way.

    python benchmarks/bench_real_step.py --json out/real_step.json       # 8 blocks, 8192 tokens; CUDA, 130 GiB
    python benchmarks/bench_real_step.py --layers 32 --tokens 16384 --jobs 1 --ways chunk_offload,checkpointing
    python benchmarks/bench_real_step.py --layers 8 --tokens 32768 --lora 16 --causal --warmup 2 --rounds 2 --jobs 2 \\
        --ways chunk_checkpointing,chunk_offload,chunk_tile_offload     # 8 of 32 blocks; again with --layers 4
    python benchmarks/bench_real_step.py --layers 32 --tokens 131072 --lora 16 --blocks --jobs 1 --warmup 1 \\
        --rounds 0 --ways chunk_tile_offload
    python benchmarks/bench_real_step.py --small        # anywhere, without code generation
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import random
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from llama import LlamaByBlocks, make_llama
from measure import (
    ANYWHERE,
    GIB,
    Served,
    conditions,
    error_of,
    first_line,
    format_columns,
    measure_bytes,
    parser_of,
    relative_error,
    release,
    step_ms,
    write,
)

import aot_hooks

BUDGET = "budget "  # begins the names of rows with a budget
TOTAL = "total "  # begins what follows when the budget is of all that is allocated
AS = "as "  # begins what follows when the budget is another row's peak
HANDS_ON = ("stock", "checkpointing", "float8", "offload")
WAYS = (*HANDS_ON, "chunk", *(f"chunk_{way}" for way in HANDS_ON[1:]), "chunk_tile_offload", "chunk_tile_inputs")
BUDGETS = ("budget as checkpointing", "budget as chunk_offload", "budget as chunk_checkpointing")
POLICIES = {"float8": aot_hooks.float8, "offload": lambda: aot_hooks.offload(then=aot_hooks.float8())}


@dataclasses.dataclass(frozen=True)
class Setting:
    layers: int
    width: int
    tokens: int
    vocabulary: int
    lora: int  # rank of the adapters of all linear layers but the head, the only ones trained; 0: all is trained
    warmup: int  # steps; a budget may compile again in the second and in the third
    limit: float  # GiB that the allocator may take; 0: all
    causal: bool  # attention without a mask
    blocks: bool  # compiled one by one
    few: bool  # the first step is of two layers
    host: int  # GiB that hooks of blocks may pin
    prefix: int  # tokens that have labels; 0: all
    gradients: str  # a file for those of the measured step
    against: str  # such a file to compare with
    float32: bool  # the same weights in float32
    device: str
    inner: str


def compiled(model: Any, way: str, budget_bytes: int, setting: Setting) -> Any:
    """The compiled function from token ids to the loss. `budget_bytes` is 0 where the way has no budget."""

    def loss(ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return result

    options: dict[str, Any] = {"inner": setting.inner}
    if budget_bytes:
        of = "total" if TOTAL in way else "peak"
        policy = aot_hooks.budget(**{of: f"{budget_bytes}B"})
        return torch.compile(loss, backend="aot_hooks", options=options | {"policy": policy})
    *forms, hook = way.split("_") if way != "chunk" else ("chunk", "")
    if hook == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # Beside adapters transformers then has the embedding's output ask for gradients. Only reentrant checkpointing
        # needs that, and Dynamo cuts the graph there: the logits would be a graph's result.
        model.disable_input_require_grads()
    if way in ("stock", "checkpointing"):
        return torch.compile(loss, backend="inductor" if setting.inner == "inductor" else "aot_eager")
    options |= dict.fromkeys(forms, True)
    if hook in POLICIES:
        options |= {"policy": POLICIES[hook](), "recompute_pointwise": True}
    return torch.compile(loss, backend="aot_hooks", options=options)


@dataclasses.dataclass(frozen=True)
class Packed:
    """A policy of `hook` for what one layer saves, its input too. Angles are in memory for all layers."""

    hook: aot_hooks.Hook
    width: int

    def __call__(self, saved: aot_hooks.SavedTensor) -> aot_hooks.Hook:
        return aot_hooks.KEEP if saved.is_input and saved.shape[-1] != self.width else self.hook


def compiled_by_blocks(model: LlamaByBlocks, way: str, budget_bytes: int, setting: Setting) -> Any:
    """The function from token ids to the loss, whose layers are compiled."""
    options: dict[str, Any] = {"inner": setting.inner}
    stock: dict[str, Any] = {"backend": "inductor" if setting.inner == "inductor" else "aot_eager"}
    ours: dict[str, Any] = {"backend": "aot_hooks", "options": options}
    # a budget's name may end with another way's
    *forms, hook = [""] if budget_bytes else way.split("_") if way != "chunk" else ("chunk", "")
    checkpointed = hook in ("checkpointing", "inputs")
    layer = last = stock
    if budget_bytes:
        options["policy"] = aot_hooks.budget(**{"total" if TOTAL in way else "peak": f"{budget_bytes}B"})
        layer = last = ours
    elif forms:
        last = {"backend": "aot_hooks", "options": {**options, "chunk": True}}
    if "tile" in forms:
        options |= {"tile": True, "recompute_pointwise": True}
        layer = ours
    if hook in POLICIES:
        sent = aot_hooks.offload(then=aot_hooks.float8(), across_graphs=True, max_host_bytes=setting.host * GIB)
        policy = Packed(sent if hook == "offload" else aot_hooks.float8(), setting.width)
        options |= {"policy": policy, "scope": "no_static", "recompute_pointwise": True}
        layer = ours
    for block in model.blocks:
        block.compile(dynamic=False, **layer)
    model.last.compile(dynamic=False, **last)
    inputs = aot_hooks.offload(max_host_bytes=setting.host * GIB) if hook == "inputs" else None
    return functools.partial(model, checkpointed=checkpointed, inputs=inputs)


class Step:
    """The model of one way, and its steps."""

    def __init__(self, way: str, budget_bytes: int, setting: Setting) -> None:
        self.device = torch.device(setting.device)
        self.model = make_llama(
            setting.layers,
            setting.width,
            tokens=setting.tokens,
            vocabulary=setting.vocabulary,
            device=self.device,
            lora=setting.lora,
            causal=setting.causal,
        )
        if setting.prefix:  # the second of two factors is zero at first, and so is the first one's gradient
            torch.manual_seed(2)
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.02)
        if setting.float32:
            self.model.float()
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=1e-4, fused=self.device.type == "cuda"
        )
        make = torch.Generator().manual_seed(1)
        self.ids = torch.randint(setting.vocabulary, (1, setting.tokens), generator=make).to(self.device)
        self.planned: Any  # what has the plans
        if setting.blocks:
            self.planned = LlamaByBlocks(self.model)
            self.loss = compiled_by_blocks(self.planned, way, budget_bytes, setting)
            if setting.prefix:
                labels = self.ids.clone()
                labels[:, setting.prefix :] = -100
                self.loss = functools.partial(self.loss, labels=labels)
        else:
            self.planned = self.loss = compiled(self.model, way, budget_bytes, setting)
        self.losses: list[float] = []

    def __call__(self) -> float:
        """One step; returns its ms."""
        return step_ms(self._step, self.device)

    def _step(self) -> None:
        loss = self.loss(self.ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(float(loss.detach()))


def serve(connection: Connection, way: str, budget_bytes: int, setting: Setting) -> None:
    """A process: warms up and sends its row, then runs a step for every command and sends its ms."""
    try:
        began = time.perf_counter()
        if setting.limit:
            whole = torch.cuda.get_device_properties(setting.device).total_memory
            torch.cuda.set_per_process_memory_fraction(setting.limit * GIB / whole, torch.cuda.current_device())
        step = Step(way, budget_bytes, setting)
        if setting.few:
            step.loss(step.ids, count=2).backward()
            step.optimizer.zero_grad(set_to_none=True)
        for _ in range(min(2, setting.warmup)):
            step()
        first_s = time.perf_counter() - began
        for _ in range(setting.warmup - 2):
            step()
        release(step.device)
        before = torch.cuda.memory_allocated(step.device) if step.device.type == "cuda" else 0
        began = time.perf_counter()
        measured, loss = measure_bytes(lambda: step.loss(step.ids), lambda loss: loss.backward(), step.device)
        ms = 1e3 * (time.perf_counter() - began)
        step.losses.append(float(loss.detach()))
        row = {
            "way": way,
            "peak_bytes": measured.peak,
            "after_forward_bytes": measured.after_forward,
            "before_bytes": before,
            "logits_bytes": 4 * setting.tokens * setting.vocabulary,
            "first_two_steps_s": first_s,
            "measured_step_ms": ms,
            "losses": step.losses,
            "host_bytes": aot_hooks.offload_stats()["host_bytes"],
            "kept_on_device_bytes": aot_hooks.offload_stats()["kept_on_device_bytes"],
            **gradients_row(step.model, setting),
        }
        step.optimizer.zero_grad(set_to_none=True)
        if budget_bytes:
            row["budget_bytes"] = budget_bytes
        if plans := plans_of(step.planned, budget_bytes, setting):
            row["predicted_peak_bytes"] = max(plan.peak_bytes for plan in plans)
            row["chunked"] = repr(plans[-1].chunked)[:500]
            row |= {"predicted_ratio": plans[-1].step_ratio} if budget_bytes else {}
        release(step.device)
        connection.send(row)
        while connection.recv() == "step":
            step()  # what was freed for the others is allocated again
            ms = step()
            release(step.device)
            connection.send((ms, step.losses))
    except Exception as error:
        connection.send(first_line(error))


def plans_of(planned: Any, budget_bytes: int, setting: Setting) -> tuple[aot_hooks.Plan, ...]:
    """Plans that have the whole step's peak."""
    return aot_hooks.last_plans(planned) if budget_bytes or not setting.blocks else ()


def gradients_row(model: torch.nn.Module, setting: Setting) -> dict[str, Any]:
    """Whether gradients are finite, and how far off they are from those in a file."""
    if not (setting.prefix or setting.gradients or setting.against):
        return {}
    own = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    if setting.gradients:
        torch.save(own, setting.gradients)
    row: dict[str, Any] = {"gradients": len(own), "finite": all(bool(g.isfinite().all()) for g in own.values())}
    if setting.against:
        other = torch.load(setting.against)
        assert other.keys() == own.keys(), "gradients of the same parameters"
        row["gradient_error"] = error_of(own, other)
        row["largest_gradient_error"] = max(relative_error(g, other[name]) for name, g in own.items())
    return row


def budget_of(way: str, rows: dict[str, dict[str, Any]]) -> int:
    """In bytes; 0 for a way without one.

    Raises:
        ValueError: it is the peak of a row that has none.
    """
    if not way.startswith(BUDGET):
        return 0
    said = way.removeprefix(BUDGET).removeprefix(TOTAL)
    if not said.startswith(AS):
        return int(float(said.removesuffix("GiB")) * GIB)
    other = rows.get(said.removeprefix(AS), {})
    if "peak_bytes" not in other:
        raise ValueError(f"{way!r} needs the row {said.removeprefix(AS)!r} before it")
    return int(other["peak_bytes"])


def measure(ways: list[str], setting: Setting, jobs: int, rounds: int, path: pathlib.Path | None) -> dict[str, Any]:
    """All rows; written to `path` whenever some are ready."""
    rows: dict[str, dict[str, Any]] = {}
    work = {name: value for name, value in dataclasses.asdict(setting).items() if name != "device"}
    result: dict[str, Any] = {"conditions": conditions(torch.device(setting.device), **work), "rows": []}
    plain = [way for way in ways if not way.startswith(BUDGET)]
    groups = [plain[i : i + jobs] for i in range(0, len(plain), jobs)]
    groups += [[way] for way in ways if way.startswith(BUDGET)]
    first: Served | None = None  # stock's process: it takes part in the rounds of each group
    for group in groups:
        served = {}
        for way in group:
            try:
                served[way] = Served(serve, way, budget_of(way, rows), setting)
            except ValueError as error:
                rows[way] = {"way": way, "error": str(error)}
        for way, process in served.items():
            answer = process.answer()
            rows[way] = answer if isinstance(answer, dict) else {"way": way, "error": answer}
        timed = {way: process for way, process in served.items() if "error" not in rows[way]}
        if first is None and "stock" in timed:
            first = timed["stock"]
        elif first is not None:
            timed["stock"] = first
        take_times(timed, rows, rounds)
        for process in served.values():
            if process is not first:
                process.send("stop")
        result["rows"] = list(rows.values())
        write(path, result)
    if first is not None:
        first.send("stop")
    return result


def take_times(timed: dict[str, Served], rows: dict[str, dict[str, Any]], rounds: int) -> None:
    """Adds ms and losses to the rows; `ratio` is to the fastest step of stock in the same rounds."""
    times: dict[str, list[float]] = {way: [] for way in timed}
    order = random.Random(0)
    for _ in range(rounds):
        for way in order.sample(sorted(timed), len(timed)):
            answer = timed[way].answer("step") if "error" not in rows[way] else ""
            if isinstance(answer, str):
                rows[way]["error"] = rows[way].get("error", answer)
                continue
            times[way].append(answer[0])
            rows[way]["losses"] = answer[1]
    for way, own in times.items():
        if not rounds and "error" not in rows[way]:
            rows[way] |= dict.fromkeys(("ms", "ms_least"), rows[way]["measured_step_ms"])
        if own and not (way == "stock" and "ms" in rows[way]):
            rows[way] |= {"ms": statistics.median(own), "ms_least": min(own)}
        if own and times.get("stock"):
            rows[way]["ratio"] = min(own) / min(times["stock"])
            rows[way]["median_ratio"] = statistics.median(own) / statistics.median(times["stock"])


def show(result: dict[str, Any], tokens: int) -> str:
    shown = [
        ["way", "ms", "/ stock", "median", "peak GiB", "predicted", "total GiB", "tokens/s", "first two s", "last loss"]
    ]
    for row in result["rows"]:
        if "error" in row:
            shown.append([row["way"], row["error"][:90], *[""] * 8])
            continue
        ratios = [f"{row[key]:.3f}" if key in row else "" for key in ("ratio", "median_ratio")]
        sizes = row["peak_bytes"], row.get("predicted_peak_bytes", 0), row["before_bytes"] + row["peak_bytes"]
        peaks = [f"{nbytes / GIB:.3f}" for nbytes in sizes]
        rest = [f"{row['first_two_steps_s']:.0f}", f"{row['losses'][-1]:.4f}"]
        shown.append([row["way"], f"{row['ms']:.1f}", *ratios, *peaks, f"{1e3 * tokens / row['ms']:.0f}", *rest])
    return format_columns(shown)


def main() -> None:
    parser = parser_of(
        __doc__, small=ANYWHERE, where=True, layers=8, width=4096, tokens=8192, vocabulary=128256, rounds=8
    )
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters: only these are trained")
    parser.add_argument("--ways", default=",".join((*WAYS, *BUDGETS)))
    parser.add_argument("--jobs", type=int, default=3, help="processes that compile, and hold a model, at a time")
    parser.add_argument("--warmup", type=int, default=6, help="steps before the peak is measured")
    parser.add_argument("--causal", action="store_true", help="attention without a mask of tokens x tokens")
    parser.add_argument("--blocks", action="store_true", help="compile each layer on its own")
    parser.add_argument("--few", action="store_true", help="with --blocks: the first step has two layers")
    parser.add_argument("--host", type=int, default=96, help="with --blocks: GiB that hooks may pin")
    parser.add_argument("--prefix", type=int, default=0, help="with --blocks: labels of the first tokens alone")
    parser.add_argument("--gradients", default="", help="a file for gradients of the measured step")
    parser.add_argument("--against", default="", help="such a file to compare with")
    parser.add_argument("--float32", action="store_true", help="compute in float32, with weights rounded to bfloat16")
    parser.add_argument("--limit", type=float, default=0.0, help="GiB that a process may allocate; 0: all")
    options = parser.parse_args()
    ways = options.ways.split(",")
    if wrong := {way for way in ways if not way.startswith(BUDGET)} - set(WAYS):
        parser.error(f"no way is called {', '.join(sorted(wrong))}; there are {', '.join(WAYS)}, and budgets")
    setting = Setting(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Setting)})
    if options.small:
        sizes: dict[str, Any] = {"layers": 2, "width": 64, "tokens": 1024, "vocabulary": 16384}
        setting = dataclasses.replace(setting, **sizes, limit=0.0, device="cpu", inner="aten")
    result = measure(ways, setting, options.jobs, options.rounds, options.json)
    print(show(result, setting.tokens))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
