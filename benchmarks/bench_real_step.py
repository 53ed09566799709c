"""A whole fine-tuning step with a real vocabulary: a Llama of transformers, its loss, AdamW. Peak, ms, tokens a second.

    ids -- LlamaForCausalLM, labels shifted inside --> loss --> backward --> AdamW
      stock             torch.compile
      checkpointing     transformers' own, compiled
      chunk             options={"chunk": True}
      chunk_float8      the same with float8(), chunk_offload with offload(then=float8())
      float8, offload   without chunks

The compiled function returns the loss alone, in each way. A model that returns its logits keeps them alive, with chunks
or without. Each way runs in a process of its own, on the same weights and tokens. Peaks are over what is allocated
before the step: weights, gradients of zero bytes, the optimizer's state. Losses of all steps show that ways agree.

    python benchmarks/bench_real_step.py --json out/real_step.json       # 8 blocks, 8192 tokens; CUDA, 80 GiB
    python benchmarks/bench_real_step.py --layers 32 --tokens 16384 --ways chunk_offload,checkpointing
    python benchmarks/bench_real_step.py --small        # anywhere, without code generation
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from measure import GIB, conditions, format_columns, measure_bytes

import aot_hooks

WAYS = ("stock", "checkpointing", "float8", "offload", "chunk", "chunk_float8", "chunk_offload")
POLICIES = {"float8": aot_hooks.float8, "offload": lambda: aot_hooks.offload(then=aot_hooks.float8())}


@dataclasses.dataclass(frozen=True)
class Setting:
    layers: int
    width: int
    tokens: int
    vocabulary: int
    steps: int
    device: str
    inner: str


def make_model(setting: Setting) -> Any:
    import transformers

    torch.manual_seed(0)
    heads = max(setting.width // 128, 4)
    config = transformers.LlamaConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.width,
        intermediate_size=7 * setting.width // 2,
        num_hidden_layers=setting.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        max_position_embeddings=setting.tokens,
        use_cache=False,
        tie_word_embeddings=False,
    )
    with torch.device(setting.device):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()


def compiled(model: Any, way: str, setting: Setting) -> Any:
    def loss(ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return result

    if way == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if way in ("stock", "checkpointing"):
        backend = "inductor" if setting.inner == "inductor" else "aot_eager"
        return torch.compile(loss, backend=backend)
    chunk, hook = way.startswith("chunk"), way.removeprefix("chunk").removeprefix("_")
    options: dict[str, Any] = {"inner": setting.inner, "chunk": chunk}
    if hook:
        options |= {"policy": POLICIES[hook](), "recompute_pointwise": True}
    return torch.compile(loss, backend="aot_hooks", options=options)


def run(way: str, setting: Setting) -> dict[str, Any]:
    """One way, in this process."""
    device = torch.device(setting.device)
    began = time.perf_counter()
    model = make_model(setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    step_loss = compiled(model, way, setting)
    make = torch.Generator().manual_seed(1)
    ids = torch.randint(setting.vocabulary, (1, setting.tokens), generator=make).to(device)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    losses, times = [], []
    for _ in range(setting.steps):
        start = now()
        loss = step_loss(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(1e3 * (now() - start))
        losses.append(float(loss.detach()))
        if len(times) == 2:
            first = now() - began
        del loss
    gc.collect()
    measured, _ = measure_bytes(lambda: step_loss(ids), lambda loss: loss.backward(), device)
    timed = times[min(3, len(times) - 1) :]
    return {
        "way": way,
        "ms": statistics.median(timed),
        "ms_least": min(timed),
        "tokens_a_second": 1e3 * setting.tokens / statistics.median(timed),
        "peak_bytes": measured.peak,
        "after_forward_bytes": measured.after_forward,
        "logits_bytes": 4 * setting.tokens * setting.vocabulary,
        "first_two_steps_s": first,
        "losses": losses,
    }


def in_own_process(way: str, arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, *arguments, "--way", way], capture_output=True, text=True)
    if done.returncode:
        return {"way": way, "error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--inner", default="inductor", choices=("inductor", "aten"))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)  # one of them, in this process
    options = parser.parse_args()
    if wrong := set(options.ways.split(",")) - set(WAYS):
        parser.error(f"no way is called {', '.join(sorted(wrong))}; there are {', '.join(WAYS)}")
    if options.small:
        small = Setting(2, 64, 1024, 16384, 3, "cpu", "aten")
    setting = small if options.small else Setting(*(getattr(options, f.name) for f in dataclasses.fields(Setting)))
    if options.way:
        print(json.dumps(run(options.way, setting)))
        return
    arguments = [a for a in sys.argv[1:] if not a.startswith("--json") and a != str(options.json)]
    rows = [in_own_process(way, arguments) for way in options.ways.split(",")]
    work = {name: value for name, value in dataclasses.asdict(setting).items() if name != "device"}
    result = {"conditions": conditions(torch.device(setting.device), **work), "rows": rows}
    shown = [["way", "ms", "peak GiB", "tokens/s", "last loss"]]
    for row in rows:
        if "error" in row:
            shown.append([row["way"], row["error"][:60], "", "", ""])
            continue
        peak, last = f"{row['peak_bytes'] / GIB:.3f}", f"{row['losses'][-1]:.4f}"
        shown.append([row["way"], f"{row['ms']:.1f}", peak, f"{row['tokens_a_second']:.0f}", last])
    print(format_columns(shown))
    print(json.dumps(result))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
