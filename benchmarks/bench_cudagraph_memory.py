"""Memory of captured training beside that of the same graphs uncaptured, without a GPU: on the simulator of the tests.

    python benchmarks/bench_cudagraph_memory.py --json out.json        a CPU, three minutes

The Llama-shaped stack of model.py at 1/32 of its widths and tokens, in bfloat16, so that activations and weights stand
to each other as at full size. Per step: forward, `y.float().pow(2).mean()`, backward, gradients let go of.

    alive       bytes at the peak of a step of the uncaptured graphs, all of it
    pool        most bytes that are allocated at a time in the graphs' pool, while they are recorded
    segments    what CUDA's allocator would reserve for them: best fit, in segments; see packing.py
    expandable  the same where segments can be expanded
    placed      what they would take if each block were placed with all lifetimes known
    outside     bytes at the peak of a step whose graphs do nothing: the loss, which can't use the pool
    ratio       (segments + outside) / alive
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from _measure import conditions, measure_bytes
from model import Stack
from packing import CachingAllocator, live_peak, placed
from torch import Tensor

import aot_hooks
import cudagraph
from aot_hooks import cudagraphs
from aot_hooks.backend import aot_hooks as hooks_backend
from cudagraph.compile.compilation import Compilation

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"))
from capture_simulator import Arena, Simulator

CPU = torch.device("cpu")
SMALLER = 32  # widths and numbers of tokens; bytes by its square


class TracedArena(Arena):
    """An arena that notes what was allocated and freed. What a recording leaves is freed when the next one is known not
    to own it."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.trace: list[tuple[int | None, int]] = []
        self.numbers: dict[int, int] = {}  # by address
        self.left: set[int] = set()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        storage = super().allocate(nbytes)
        if nbytes:
            self.trace.append((nbytes, len(self.trace)))
            self.numbers[storage.data_ptr()] = self.trace[-1][1]
        return storage

    def free(self, addresses: Iterable[int]) -> None:
        self.trace += [(None, self.numbers.pop(address)) for address in addresses]

    def poll(self) -> None:
        before = set(self.blocks)
        super().poll()
        dead = before - set(self.blocks)
        if self.tape is None:  # between recordings nothing owns a block, be it needed or not
            self.left |= dead
        else:
            self.free(sorted(dead))

    def disown(self, storage: torch.UntypedStorage) -> None:
        super().disown(storage)
        self.left.add(storage.data_ptr())

    def staging(self) -> contextlib.AbstractContextManager[None]:
        self.free(sorted(self.left))  # where nothing was restored, nothing is left
        self.left.clear()
        return super().staging()

    def restore(self, state: dict[int, int], owners: Sequence[torch.UntypedStorage], free: Sequence[int]) -> None:
        super().restore(state, owners, free)
        self.free(sorted(self.left - {owner.data_ptr() for owner in owners}))
        self.left.clear()


class NoLaunch(Simulator):
    """Records, and replays nothing."""

    def open_pool(self, device: torch.device) -> TracedArena:
        self.pools.append(TracedArena(self.arena_bytes))
        return self.pools[-1]  # type: ignore[return-value]

    def launcher(self, graph: Any) -> Callable[[], Any]:
        return int


def loss_of(y: Tensor) -> Tensor:
    return y.float().pow(2).mean()


def compiled(stack: Stack, how: str, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """From the input to the loss; `how`: one graph, with or without the loss, or a graph a block."""

    def compile_it(f: Any) -> Any:
        return torch.compile(f, backend=hooks_backend, options={"inner": "aten", **options})

    if how == "with the loss":
        return compile_it(lambda x: loss_of(stack(x)))  # type: ignore[no-any-return]
    if how == "one graph":
        whole = compile_it(lambda x: stack(x))
        return lambda x: loss_of(whole(x))
    blocks = [compile_it(block) for block in stack.blocks]

    def in_blocks(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, stack.cos, stack.sin)
        return loss_of(x)

    return in_blocks


def row(how: str, hooks: bool) -> dict[str, Any]:
    torch.compiler.reset()
    torch.manual_seed(0)
    tokens, width = 8192 // SMALLER, 4096 // SMALLER
    stack = Stack(4, width, head_count=4, kv_head_count=1, hidden=14336 // SMALLER, token_count=tokens).to(
        torch.bfloat16
    )
    x = torch.randn(2, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    policy = aot_hooks.policies.everything(aot_hooks.float8() if hooks else aot_hooks.KEEP)

    def peak(f: Callable[[Tensor], Tensor]) -> int:
        def forward() -> Tensor:
            with aot_hooks.saved_tensors_policy(policy):
                return f(x)

        def let_go() -> None:
            x.grad = None
            stack.zero_grad(set_to_none=True)

        for _ in range(3):
            forward().backward()
            let_go()
        gc.collect()
        measured, _ = measure_bytes(forward, lambda loss: loss.backward(), CPU)
        let_go()
        return measured.peak

    alive = peak(compiled(stack, how, {}))
    driver = NoLaunch(1 << 28)
    cudagraphs.compilation = lambda options: Compilation(options, driver)
    try:
        outside = peak(compiled(stack, how, {"cudagraphs": True}))
    finally:
        cudagraphs.compilation = Compilation
    (pool,) = driver.pools
    assert isinstance(pool, TracedArena)
    needs = {
        "segments": CachingAllocator(scale=SMALLER**2).run(pool.trace).reserved,
        "expandable": CachingAllocator(scale=SMALLER**2, expandable=True).run(pool.trace).reserved,
        "placed": placed(pool.trace),
    }
    found = {"how": how, "hooks": "float8" if hooks else "none", "alive": alive, "pool": live_peak(pool.trace), **needs}
    found |= {"outside": outside, "ratio": round((needs["segments"] + outside) / alive, 3)}
    cudagraph.reset()
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the result there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(how, hooks) for hooks in (False, True) for how in ("one graph", "with the loss", "a graph a block")]
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"conditions": conditions(CPU), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
