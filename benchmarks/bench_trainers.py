"""Hooks in the trainers that people use: tokens a second, peak, and losses over text, beside the trainers' own ways.

    a Llama of transformers, random weights, bytes of the standard library's source as tokens
        |  the same weights and batches in each row
        v
    Trainer    stock            TrainingArguments(torch_compile=True)
               checkpointing    the same with gradient_checkpointing
               checkpointing_offloaded    the same with the blocks' inputs in host memory, as transformers 5 does it
               liger, liger_checkpointing    stock and checkpointing with use_liger_kernel: its loss is in chunks;
                                             last, since Liger changes transformers for all rows after it
               float8, offload_float8, budget        stock and AotHooksCallback
               offload_float8_again    offload_float8 with options={"recompute_pointwise": True}
               offload_float8_timed    the same, planned by the times of the first steps (across_graphs=True)
               offload_float8_all      the same with max_stall_ms=inf: all is sent that can be
    SFTTrainer sft, sft_checkpointing (TRL 1.16 has its "chunked_nll" in any loss "nll"),
               sft_offloading (TRL's activation_offloading), sft_offload_float8,
               sft_offload_float8_again, sft_offload_float8_timed
    torchao    float8_training  stock with torchao's rowwise linear layers; float8_training_packed: with ours as well

A row of a package that is missing says so. Steps are timed by callbacks, between synchronizations, without the first
`--warmup` of them. The budget is 0.98 of what checkpointing takes over what is allocated before a step, so it needs
that row. --json is written after each row.

    python benchmarks/bench_trainers.py                                     # 1B parameters, 8 x 2048 tokens; CUDA
    python benchmarks/bench_trainers.py --rows stock,offload_float8 --steps 300
    python benchmarks/bench_trainers.py --small                             # anywhere, without code generation
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from measure import (
    GIB,
    ROOT,
    conditions,
    default_device,
    first_line,
    format_columns,
    parser_of,
    print_rows,
    release,
    synchronize,
    write,
)
from torch import Tensor

sys.path.append(str(ROOT / "examples"))
from train_gpt import Sizes, read_corpus

import aot_hooks
from aot_hooks.integrations.transformers import AotHooksCallback

ROWS = (
    "stock",
    "checkpointing",
    "checkpointing_offloaded",
    "liger",
    "liger_checkpointing",
    "offload_float8_again",
    "offload_float8_timed",
    "offload_float8_all",
    "offload_float8",
    "sft",
    "sft_checkpointing",
    "sft_offloading",
    "sft_offload_float8_again",
    "sft_offload_float8_timed",
    "sft_offload_float8",
    "float8_training",
    "float8_training_packed",
    "budget",
    "float8",
    "float8_again",
)
# under a measured peak; with pinned memory; kernels of Triton
ON_CUDA = ("budget", "sft_offloading", "checkpointing_offloaded", "liger", "liger_checkpointing")
AGAIN = ("_again", "_timed", "_all")  # ends of the names of rows with options["recompute_pointwise"]
# by the beginning of a row's name
NEEDS = {"sft": ("trl", "datasets"), "float8_training": ("torchao",), "liger": ("liger_kernel",)}


@dataclasses.dataclass(frozen=True)
class Setting(Sizes):
    dtype: torch.dtype
    vocabulary: int  # words of the model; the text has 256
    inner: str  # of the hooks; stock runs the same way


LARGE = Setting(16, 2048, 32, 2048, 8, 20, torch.bfloat16, 256, "inductor")
SMALL = Setting(2, 64, 4, 64, 4, 6, torch.float32, 256, "aten")


class Text(torch.utils.data.Dataset[dict[str, Any]]):
    """Windows of the corpus, one a row, in the same order each time."""

    def __init__(self, setting: Setting, step_count: int) -> None:
        corpus, generator = read_corpus(1 << 22), torch.Generator().manual_seed(0)
        starts = torch.randint(len(corpus) - setting.sequence, (setting.batch * step_count, 1), generator=generator)
        self.rows = corpus[starts + torch.arange(setting.sequence)]  # u8[rows, sequence]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index].long()
        return {"input_ids": row, "labels": row}


class Watch(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Times steps, and reads the device's memory at their beginnings and peaks. Records the kernels of the last step,
    which is not timed, if `profiled`."""

    def __init__(self, device: torch.device, warmup: int, profiled: bool) -> None:
        self.device, self.warmup, self.profiled = device, warmup, profiled
        self.kernels: dict[str, tuple[int, float]] = {}  # by name: how often, ms in all
        self._profile: Any = None
        self.step_ms: list[float] = []
        self.before_bytes = self.peak_bytes = 0
        self.started = 0.0

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.device.type == "cuda" and state.global_step == self.warmup:
            torch.cuda.reset_peak_memory_stats()
            self.before_bytes = torch.cuda.memory_allocated()
        if self.profiled and state.global_step == state.max_steps - 1:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()
        self.started = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        ended = self._now()
        if self._profile is not None:
            self._profile.stop()
            found = self._profile.key_averages()
            self.kernels = {k.key: (k.count, k.self_device_time_total / 1e3) for k in found if k.self_device_time_total}
        else:
            self.step_ms.append((ended - self.started) * 1e3)
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated()


def make_model(setting: Setting, *, float8: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.width,
        intermediate_size=4 * setting.width,
        num_hidden_layers=setting.layer_count,
        num_attention_heads=setting.head_count,
        num_key_value_heads=setting.head_count // 4,
        max_position_embeddings=setting.sequence,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.device(default_device()):
        model = transformers.LlamaForCausalLM(config).to(setting.dtype)
    if float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name("rowwise")
        if not torch.cuda.is_available():
            recipe = dataclasses.replace(recipe, emulate=True)
        convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: "lm_head" not in name)
    return model


def make_policy(name: str, budget_bytes: int | None) -> Any:
    if name == "budget":
        return None if budget_bytes is None else aot_hooks.budget(f"{budget_bytes}B")
    if "offload_float8" in name:
        stall, timed = float("inf") if name.endswith("_all") else 0.0, name.endswith(("_timed", "_all"))
        return aot_hooks.offload(then=aot_hooks.float8(), max_stall_ms=stall, across_graphs=timed)
    if name == "float8_training_packed":
        from aot_hooks.integrations.torchao import float8_training

        return float8_training()
    return aot_hooks.float8() if name in ("float8", "float8_again") else None


def make_trainer(name: str, setting: Setting, data: Text, out: str) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": out,
        "per_device_train_batch_size": setting.batch,
        "max_steps": setting.step_count,
        "logging_steps": 1,
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "torch_compile": True,
        "seed": 0,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "dataloader_pin_memory": False,
        "optim": "adamw_torch_fused" if torch.cuda.is_available() else "adamw_torch",
        "gradient_checkpointing": "checkpointing" in name,
        "use_liger_kernel": name.startswith("liger"),
    }
    if setting.inner == "aten" and make_policy(name, 1) is None:
        arguments["torch_compile_backend"] = "aot_eager"
    if "checkpointing" in name:
        offloaded = {"offload": True} if name.endswith("_offloaded") else {}
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False, **offloaded}
    model = make_model(setting, float8=name.startswith("float8_training"))
    if not name.startswith("sft"):
        return transformers.Trainer(model, transformers.TrainingArguments(**arguments), train_dataset=data)
    import datasets
    import tokenizers
    import trl

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<end>": 2}))
    return trl.SFTTrainer(
        model,
        args=trl.SFTConfig(
            **arguments,
            activation_offloading=name == "sft_offloading",
            max_length=setting.sequence,
            shuffle_dataset=False,
            dataset_kwargs={"skip_prepare_dataset": True},  # its rows are tokens of the longest length
        ),
        train_dataset=datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in data.rows]),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<end>"
        ),
    )


def measure(
    name: str, setting: Setting, data: Text, warmup: int, budget_bytes: int | None, profiled: bool
) -> dict[str, Any]:
    device = torch.device(default_device())
    torch.compiler.reset()
    release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    watch, policy = Watch(device, warmup, profiled), make_policy(name, budget_bytes)
    with tempfile.TemporaryDirectory() as out:
        trainer = make_trainer(name, setting, data, out)
        callback = None
        if policy is not None:
            options = {"inner": setting.inner, "recompute_pointwise": name.endswith(AGAIN)}
            callback = AotHooksCallback(policy, options=options).add_to(trainer)
        trainer.add_callback(watch)
        trainer.remove_callback(transformers.PrinterCallback)  # the losses are in the log's history
        trainer.train()
    metrics = {} if callback is None else callback.training.metrics()
    timed = watch.step_ms[warmup:]
    step_ms = statistics.median(timed)
    return {
        "name": name,
        "policy": repr(policy) if policy is not None else None,
        "median_ms": step_ms,
        "min_ms": min(timed),
        "first_step_ms": watch.step_ms[0],
        "tokens_per_second": setting.batch * setting.sequence / step_ms * 1e3,
        "before_bytes": watch.before_bytes,
        "peak_bytes": watch.peak_bytes,
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "metrics": metrics,
        "kernels": watch.kernels,
    }


def missing(name: str) -> str:
    """The package that a row needs and that is not installed; "" if nothing is missing."""
    needed = next((packages for start, packages in NEEDS.items() if name.startswith(start)), ())
    return next((package for package in needed if importlib.util.find_spec(package) is None), "")


def table(rows: Sequence[dict[str, Any]]) -> str:
    stock = next((row for row in rows if row["name"] == "stock"), rows[0])
    lines = [
        ["row", "ms", "/ stock", "tokens/s", "peak GiB", "over the step's start", "saved", "packed MiB", "last loss"]
    ]
    for row in rows:
        metrics = row["metrics"]
        tail = row["losses"][-max(1, len(row["losses"]) // 10) :]
        lines.append(
            [
                row["name"],
                f"{row['median_ms']:.1f}",
                f"{row['median_ms'] / stock['median_ms']:.3f}",
                f"{row['tokens_per_second']:.0f}",
                f"{row['peak_bytes'] / GIB:.2f}",
                f"{(row['peak_bytes'] - row['before_bytes']) / GIB:.2f}",
                f"{metrics.get('aot_hooks/saved_mib', 0):.1f}",
                f"{metrics.get('aot_hooks/packed_mib', 0):.1f}",
                f"{statistics.mean(tail):.4f}",
            ]
        )
    return format_columns(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__, small="a small model, which runs anywhere")
    parser.add_argument("--rows", help=f"comma-separated, of {', '.join(ROWS)}; default: all that run here")
    parser.add_argument("--steps", type=int, help="default: 20, 6 with --small")
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not timed")
    parser.add_argument("--layers", type=int, help="default: 16 layers, 1B parameters")
    parser.add_argument("--vocabulary", type=int, help="words of the model, of which the text has 256; default: 256")
    parser.add_argument("--budget-gib", type=float, help="the budget in GiB")
    parser.add_argument(
        "--profile", action="store_true", help="record the kernels of the last step, which is not timed then (CUDA)"
    )
    options = parser.parse_args(arguments)
    device = torch.device(default_device())
    names = options.rows.split(",") if options.rows else [n for n in ROWS if device.type == "cuda" or n not in ON_CUDA]
    if wrong := [name for name in names if name not in ROWS]:
        parser.error(f"no row {wrong[0]!r}; there are {', '.join(ROWS)}")
    names.sort(key=lambda name: name.startswith("liger"))
    setting = SMALL if options.small else LARGE
    changes = {"step_count": options.steps, "layer_count": options.layers, "vocabulary": options.vocabulary}
    setting = dataclasses.replace(setting, **{name: value for name, value in changes.items() if value is not None})
    if setting.step_count <= options.warmup:
        parser.error(f"--steps {setting.step_count} leaves nothing to time after --warmup {options.warmup}")
    torch.set_float32_matmul_precision("high")
    transformers.logging.set_verbosity_error()
    data = Text(setting, setting.step_count)
    work = {**dataclasses.asdict(setting), "dtype": str(setting.dtype), "transformers": transformers.__version__}
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for name in names:
        if package := missing(name):
            failures.append(f"{name}: {package} is not installed")
            continue
        checkpointing = next((row for row in rows if row["name"] == "checkpointing"), None)
        budget_bytes = None if options.budget_gib is None else int(options.budget_gib * GIB)
        if name == "budget" and budget_bytes is None:
            if checkpointing is None or checkpointing["peak_bytes"] == 0:
                failures.append("budget: needs --budget-gib, or checkpointing in the same run on CUDA")
                continue
            budget_bytes = int(0.98 * (checkpointing["peak_bytes"] - checkpointing["before_bytes"]))
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            rows.append(measure(name, setting, data, options.warmup, budget_bytes, options.profile))
        except Exception as e:  # the other rows are worth having; exit status 1 says that one is missing
            failures.append(f"{name}: {first_line(e)}")
        else:
            print(f"  {rows[-1]['median_ms']:.1f} ms, {rows[-1]['peak_bytes'] / GIB:.2f} GiB", file=sys.stderr)
        if options.json is not None:  # after each row: a run that is cut short has what it measured
            header = conditions(device, **work)
            write(options.json, {"header": header, "rows": rows, "failures": failures})
    return print_rows(rows, failures, table)


if __name__ == "__main__":
    sys.exit(main())
