"""The longest sequence that trains within a memory limit: with nothing, float8, offload, and both.

    for each way:   double the length until a step does not fit, then halve what is between     -> longest length
                    one step at each length: forward, backward, AdamW, all within the limit     -> peak of the step
    for all ways:   a step at a length that fits with each                                      -> peaks to compare

Read `ways`, which makes the hooks, and `Trainer.step`, which is what a training script needs: a hook around the forward
of a compiled model. The rest is the search. The model is a stack of Llama-shaped blocks; its weights and the state of
the optimizer are on the device throughout. The limit is `torch.cuda.set_per_process_memory_fraction`: what does not
fit there raises, as on a smaller device.

How far offload reaches is up to one block of the model: once all that was saved is gone, the peak is what the backward
of one block works with, and what is on its way back for the next (`in_flight_bytes`). float8 makes neither smaller; it
halves what crosses the link, so that the same time hides twice as many values, and half as many bytes on their way.

    python examples/offload_long_context.py                    # a CUDA device with more than 24 GiB, some ten minutes
    python examples/offload_long_context.py --inner aten --limit-gib 4 --layers 4 --width 2048          # a minute
    python examples/offload_long_context.py --small                # no device: predicted peaks, half a minute

Without a CUDA device it does what `--small` does. A CPU has no second memory to offload to: there copies are plain
copies, and what the table says of memory are the predictions of `aot_hooks.plan`. With a CUDA device nothing more is
needed than host memory to pin, as much as the column "host GiB" says.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aot_hooks

GIB = 1 << 30


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Blocks without embedding and head, whose logits would take most of the memory at any length."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def ways(min_bytes: int) -> dict[str, aot_hooks.Hook | None]:
    """Offloading is asked for as much as there is, whatever it costs: what counts here is what fits."""
    everything = {"min_bytes": min_bytes, "max_stall_ms": math.inf}
    return {
        "nothing": None,
        "float8": aot_hooks.float8(),
        "offload": aot_hooks.offload(in_flight_bytes=256 << 20, **everything),
        # as many values on their way as without float8, in half the bytes
        "float8 + offload": aot_hooks.offload(then=aot_hooks.float8(), in_flight_bytes=128 << 20, **everything),
    }


class Trainer:
    """One model and optimizer for all lengths and ways."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = torch.device(options.device)
        with self.device:
            model = Model(options.layers, options.width, options.width // 128 or 1, options.width * 3)
            self.model = model.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.device.type == "cuda")
        self.inner = options.inner
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()  # makes its state, so that each length finds the same memory taken

    def compiled(self) -> Callable[[Tensor], Tensor]:
        """Anew, for one length: one graph for all would be planned for the bytes of the first."""
        torch._dynamo.reset()
        return torch.compile(self.model, backend="aot_hooks", dynamic=False, options={"inner": self.inner})

    def step(self, fn: Callable[[Tensor], Tensor], hook: aot_hooks.Hook | None, length: int) -> float:
        """One step at `length`; the loss. Raises `torch.OutOfMemoryError`."""
        generator = torch.Generator().manual_seed(0)
        width = self.model.blocks[0].qkv.in_features
        x = torch.randn(1, length, width, generator=generator).to(self.device, torch.bfloat16)
        if hook is None:
            y = fn(x)
        else:
            with aot_hooks.saved_tensors_hooks(hook):
                y = fn(x)
        loss = y.float().square().mean()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def fits(self, hook: aot_hooks.Hook | None, length: int) -> dict[str, Any] | None:
        """What the second of two steps at `length` took, or None if they do not fit."""
        self.clear()
        fn = self.compiled()
        try:
            self.step(fn, hook, length)  # compiles, and pins host memory
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            loss = self.step(fn, hook, length)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return None
        seconds, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated()
        host = aot_hooks.offload_stats()["host_peak_bytes"]
        return {"length": length, "s": seconds, "peak_gib": peak / GIB, "host_gib": host / GIB, "loss": loss}

    def clear(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        gc.collect()
        aot_hooks.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def longest(trainer: Trainer, hook: aot_hooks.Hook | None, start: int, finest: int) -> dict[str, Any]:
    """The longest length that fits: a multiple of `finest`, to within a sixteenth."""
    best: dict[str, Any] = {"length": 0}
    fails = math.inf  # the shortest that does not fit
    length = start
    while best["length"] < length < fails and fails - best["length"] > best["length"] / 16:
        found = trainer.fits(hook, length)
        print(f"    {length:7}: {'fits' if found else 'out of memory'}", file=sys.stderr, flush=True)
        if found is None:
            fails = length
        else:
            best = found
        middle = best["length"] + (min(fails, 4 * length) - best["length"]) / 2
        length = int(middle // finest * finest) if fails < math.inf else 2 * length
    return best


def limited(options: argparse.Namespace) -> None:
    """Leave this process no more than the limit, and no less.

    Tensors of many sizes come and go near it. In segments of fixed size, the default, hundreds of MiB of it end up in
    pieces that are free and too small; segments that grow give the pages of such pieces to others.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before the first use of the device
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, options.limit_gib * GIB / total))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The longest sequence that trains within a memory limit.")
    parser.add_argument("--limit-gib", type=float, default=24.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--start", type=int, default=4096, help="the first length that is tried")
    parser.add_argument("--finest", type=int, default=2048, help="lengths are multiples of it")
    parser.add_argument("--ways", default="", help="comma-separated, all if not given")
    parser.add_argument("--inner", choices=("inductor", "aten"), default="inductor")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="predict the peaks of a small model, run one step of each")
    options = parser.parse_args(arguments)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device; leave it out, or give --small")
    if options.small or options.device == "cpu":
        if not options.small:
            print("No CUDA device, so nothing can be limited: peaks of a small model as predicted (--small).\n")
        return small()
    limited(options)
    trainer = Trainer(options)
    held = torch.cuda.memory_allocated() / GIB
    chosen = {k: v for k, v in ways(1 << 20).items() if not options.ways or k in options.ways.split(",")}
    device = torch.cuda.get_device_name(0)
    held_text = f"weights and state {held:.1f} GiB"
    print(f"{device}, torch {torch.__version__}, limit {options.limit_gib} GiB, {held_text}", flush=True)
    rows = {}
    for name, hook in chosen.items():
        print(f"  {name}", file=sys.stderr, flush=True)
        rows[name] = longest(trainer, hook, options.start, options.finest)
        print(json.dumps({"way": name, **rows[name]}), flush=True)
    common = min(row["length"] for row in rows.values())
    for name, hook in chosen.items():
        at_common = trainer.fits(hook, common) if common and rows[name]["length"] > common else rows[name]
        rows[name]["at_common"] = {key: at_common.get(key, math.nan) for key in ("s", "peak_gib")} if at_common else {}
        print(json.dumps({"way": name, "length": common, **rows[name]["at_common"]}), flush=True)
    print("\n" + table(rows, common))
    return 0


def table(rows: dict[str, dict[str, Any]], common: int) -> str:
    """The longest length of each way, and all of them side by side at the length `common`."""
    title = f"{'way':18} {'longest':>8} {'s a step':>9} {'peak GiB':>9} {'host GiB':>9}"
    lines = [f"{title}   at {common}: {'s a step':>9} {'peak GiB':>9}"]
    for name, row in rows.items():
        longest_row = " ".join(f"{row.get(key, math.nan):9.3f}" for key in ("s", "peak_gib", "host_gib"))
        beside = " ".join(f"{row['at_common'].get(key, math.nan):9.3f}" for key in ("s", "peak_gib"))
        lines.append(f"{name:18} {row['length']:8} {longest_row}   {'':{len(f'at {common}:')}} {beside}")
    return "\n".join(lines)


def small() -> int:
    """What would be alive at the peak, and that a step gives the same loss and gradients."""
    torch.manual_seed(0)
    model, x = Model(4, 64, 1, 192), torch.randn(1, 128, 64)
    expected: list[Tensor] = []
    print(
        "4 blocks of width 64, 128 tokens, float32. saved: what the backward needs; it waits on the device or the host."
    )
    print("peak: most bytes alive in the two graphs, as predicted. error: of all gradients, against the first row.\n")
    print(f"{'way':18} {'saved KiB':>10} {'on device':>10} {'on host':>10} {'peak KiB':>10} {'error':>9}")
    for name, hook in ways(1).items():
        torch._dynamo.reset()
        plan = aot_hooks.plan(model, x, policy=hook, inner="aten")
        peak = max(p.live_bytes for p in plan.live_after)
        fn = torch.compile(model, backend="aot_hooks", options={"inner": "aten", "policy": hook})
        fn(x).square().mean().backward()
        grads = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        expected = expected or grads
        wrong = sum(float((a - b).square().sum()) for a, b in zip(grads, expected, strict=True))
        error = math.sqrt(wrong / sum(float(b.square().sum()) for b in expected))
        kib = [n / 1024 for n in (plan.saved_bytes, plan.packed_bytes, plan.host_bytes, peak)]
        print(f"{name:18} " + " ".join(f"{n:10.1f}" for n in kib) + f" {error:9.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
