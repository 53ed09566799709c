"""Bandwidth of each hook's kernels beside a device copy, on one CUDA device.

    python benchmarks/bench_kernels.py [--rows 16384] [--columns 4096 14336] [--json FILE.json]

GB/s counts bytes read and written, once each. Every kernel is timed in turn with the copy, round after round, and the
fastest time of each counts; the copy is of the packed tensor's input. Inputs are larger than the L2 cache. The table
goes to stdout, the numbers with their conditions to --json.

      host    |copies of 1 GiB|begin|call|call|...|end|begin.query(): not reached, or else once more with more copies
      device                  |copy      copy      copy     |begin|call|call|...|end

"us" is time on the device: the host has queued all calls before the first of them runs, so what it takes for a call, as
long as a kernel of 50 us, does not count. It stands beside it as "host us", of calls that wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import conditions, format_columns, host_seconds, parser_of, write

from aot_hooks.library.triton import ops

Call = Callable[[], Any]


def candidates(x: torch.Tensor) -> Iterator[tuple[str, Call, int]]:
    """Name, call, and bytes read and written."""

    def both(name: str, pack: Call, unpack: Callable[..., Any], given: torch.Tensor) -> Iterator[tuple[str, Call, int]]:
        packed = pack()
        packed = packed if isinstance(packed, tuple) else (packed,)
        moved = given.nbytes + sum(p.nbytes for p in packed)
        yield f"{name} pack", pack, moved
        yield f"{name} unpack", lambda: unpack(*packed), moved

    dtype, columns, seed = x.dtype, x.shape[-1], torch.zeros(1, dtype=torch.int64, device=x.device)
    for fmt in (torch.float8_e4m3fn, torch.float8_e5m2):
        for block in (0, 128):
            name = f"float8({str(fmt).removeprefix('torch.float8_')}, {'blockwise' if block else 'rowwise'})"
            yield from both(
                name,
                lambda b=block, f=fmt: ops.pack_float8(x, b, f),
                lambda q, s, b=block: ops.unpack8(q, s, b, dtype),
                x,
            )
    for noise, name in ((None, ""), (seed, ", stochastic")):
        for block, power, scales in ((64, False, ""), (32, True, ", power of two")):
            yield from both(
                f"int8({block}{name}{scales})",
                lambda n=noise, b=block, p=power: ops.pack_int8(x, b, p, n),
                lambda q, s, b=block: ops.unpack8(q, s, b, dtype),
                x,
            )
        yield from both(
            f"int4(32{name})",
            lambda n=noise: ops.pack_int4(x, 32, n),
            lambda q, s: ops.unpack_int4(q, s, columns, 32, dtype),
            x,
        )
    mask = torch.cat([x > i / 10 for i in range(x.itemsize)])  # as many bytes as x
    yield from both("bitmask", lambda: ops.pack_bits(mask), lambda q: ops.unpack_bits(q, list(mask.shape)), mask)


class Queue:
    """Times calls on the device with the host out of the way."""

    def __init__(self, device: torch.device) -> None:
        self.ahead = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.ahead)
        self.copy_count = 4  # of `ahead`, some 0.5 ms each

    def seconds(self, call: Call, repeats: int = 10) -> float:
        """Of one call on the device, of `repeats` one after the other."""
        while True:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(self.copy_count):
                self.target.copy_(self.ahead)
            begin.record()
            for _ in range(repeats):
                call()
            end.record()
            host_was_ahead = not begin.query()
            end.synchronize()
            if host_was_ahead:
                return begin.elapsed_time(end) / 1e3 / repeats
            if self.copy_count > 1000:
                raise RuntimeError(f"the host took over half a second to queue {repeats} calls")
            self.copy_count *= 2


def measure(x: torch.Tensor, rounds: int, queue: Queue) -> list[dict[str, Any]]:
    results = []
    target = torch.empty_like(x)

    def copy() -> None:
        target.copy_(x)

    for name, call, moved in candidates(x):
        for _ in range(3):
            call(), copy()
        times = [(queue.seconds(call), queue.seconds(copy), host_seconds(call)) for _ in range(rounds)]
        took, copy_took, host_took = (min(column) for column in zip(*times, strict=True))
        results.append(
            {
                "kernel": name,
                "shape": list(x.shape),
                "dtype": str(x.dtype).removeprefix("torch."),
                "us": took * 1e6,
                "host_us": host_took * 1e6,
                "gb_per_s": moved / took / 1e9,
                "copy_gb_per_s": 2 * x.nbytes / copy_took / 1e9,
                "of_copy": moved / took / (2 * x.nbytes / copy_took),
            }
        )
    return results


def format_table(results: list[dict[str, Any]]) -> str:
    rows = [["kernel", "shape", "dtype", "us", "host us", "GB/s", "copy GB/s", "of copy"]]
    for r in results:
        shape = "x".join(map(str, r["shape"]))
        times = [f"{r['us']:.1f}", f"{r['host_us']:.0f}"]
        numbers = [f"{r['gb_per_s']:.0f}", f"{r['copy_gb_per_s']:.0f}", f"{r['of_copy']:.0%}"]
        rows.append([r["kernel"], shape, r["dtype"], *times, *numbers])
    return format_columns(rows)


def main() -> None:
    parser = parser_of(__doc__, rows=16384, rounds=10)
    parser.add_argument("--columns", type=int, nargs="+", default=[4096, 14336])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "needs a CUDA device\n")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    results, queue = [], Queue(device)
    for columns in arguments.columns:
        for dtype in (torch.bfloat16, torch.float32):
            results += measure(torch.randn(arguments.rows, columns, device=device).to(dtype), arguments.rounds, queue)
            torch.cuda.empty_cache()
    header = conditions(device, rows=arguments.rows, rounds=arguments.rounds)
    print(", ".join(f"{k} {v}" for k, v in header.items()))
    print(format_table(results))
    write(arguments.json, {"conditions": header, "results": results})


if __name__ == "__main__":
    main()
