"""Two processes, on gloo or on NCCL: a small stack that FSDP2 shards over them, and how each of them ended.

    run_ranks(work, folder) -- work(0), work(1), in processes of their own --> (Ended, Ended)
    with group_of_one():    -- this process as the only rank

No process waits longer than `WAIT_S` for another one, on a GPU `WAIT_ON_GPU_S`. With NCCL it is aborted then, without
an error of Python.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing as mp
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ROWS, WIDTH = 32, 16
WAIT_S = 10
WAIT_ON_GPU_S = 20  # loading kernels and starting NCCL may take longer than WAIT_S on one rank
LEAVE_S = 30  # seconds for the end of the groups; one that hangs writes the tracebacks of all threads
_left: list[Any] = []  # groups


def leave_group() -> None:
    """Leave the group of all ranks, and keep it in memory.

    Torch 2.13 may wait for ever where DDP holds the last reference to a group of Gloo: it joins Gloo's thread with the
    interpreter locked, and that thread needs the lock to free its last exchange.
    """
    _left.append(dist.group.WORLD)
    dist.destroy_process_group()


@contextlib.contextmanager
def group_of_one(device: str = "cpu") -> Iterator[Any]:
    """A group of this process alone: NCCL on a GPU, Gloo on a CPU."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        leave_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks(count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count)))


def device_type() -> str:
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def batch(step: int, rank: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(device_type())


def sharded(count: int = 6, **compiled: Any) -> nn.Sequential:
    """A stack whose blocks are compiled, one graph for all, and sharded over the two processes."""
    model, mesh = blocks(count).to(device_type()), init_device_mesh(device_type(), (2,))
    for block in model:
        block.compile(**compiled)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Ended(NamedTuple):
    exit_code: int | None  # None: it had to be killed; minus a signal's number
    error: str  # text of the exception that ended it

    @property
    def failed(self) -> bool:
        """Whether it ended by itself, and not well."""
        return self.exit_code not in (0, None)


def run_ranks(
    work: Callable[..., None],
    folder: pathlib.Path,
    *arguments: Any,
    limit_s: float = 60,
    device: str = "cpu",
    count: int = 2,
) -> list[Ended]:
    """Call `work(rank, *arguments)` in `count` processes, each with a GPU if `device` is "cuda".

    `work` is a function of a module.
    """
    there = os.path.dirname(work.__code__.co_filename)  # where a new process finds the module
    context = mp.get_context("spawn")
    sys.path.insert(0, there)
    try:
        processes = [
            context.Process(target=_run, args=(work, rank, count, str(folder), device, arguments))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
    finally:
        sys.path.remove(there)
    until = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    errors = [folder / f"error{rank}" for rank in range(count)]
    texts = [error.read_text() if error.exists() else "" for error in errors]
    return [Ended(code, text) for code, text in zip(codes, texts, strict=True)]


def _run(
    work: Callable[..., None], rank: int, count: int, folder: str, device: str, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the same kernels in a capture as outside
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # takes a minute
    how: dict[str, Any] = {"init_method": f"file://{folder}/meet", "rank": rank, "world_size": count}
    wait = datetime.timedelta(seconds=WAIT_S if device == "cpu" else WAIT_ON_GPU_S)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=wait, **how)
    try:
        work(rank, *arguments)
    except Exception as error:
        (pathlib.Path(folder) / f"error{rank}").write_text(f"{type(error).__name__}: {error}")
        faulthandler.dump_traceback_later(LEAVE_S, exit=True)
        raise
    faulthandler.dump_traceback_later(LEAVE_S, exit=True)
    leave_group()
    faulthandler.cancel_dump_traceback_later()
