"""For tests of `whole_step` on two processes: equal models, a step beside eager mode, cases one by one."""

from __future__ import annotations

import copy
import pathlib
import sys
import time
import traceback

import pytest
import torch
from ranks import device_type
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from whole_steps import Net, eager_step, on_simulator, sgd, tensors_of

import cudagraph
from cudagraph.torch_private import cuda as torch_cuda

STEPS = 18  # torch times the first 10 iterations of a model of DDP, so the 13th is recorded
SMALL_BUCKETS = 1e-4  # MiB: several in a model of 100 numbers


def batch(step, rank, size=6):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)
    return x.to(device_type()), y.to(device_type())


def one_model():
    torch.manual_seed(1)
    return Net().to(device_type())


def replicated(model, **options):
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS, **options)


def models(**options):
    """Two equal replicated models: for the step, and for eager mode."""
    ours = one_model()
    return replicated(ours, **options), replicated(copy.deepcopy(ours), **options)


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def sharded(**options):
    """Two equal models, each sharded over the ranks, with `options` for its linear layers."""
    mesh = init_device_mesh(device_type(), (2,))
    ours = one_model()
    pair = ours, copy.deepcopy(ours)
    for each in pair:
        fully_shard(each.first, mesh=mesh, **options)
        fully_shard(each.last, mesh=mesh, **options)
        fully_shard(each, mesh=mesh)
    return pair


def compare(step, expected, ours, eager, rank, *, sizes=lambda i, rank: 6, steps=STEPS):
    """Run both, and compare losses and parameters in each step, bit for bit."""
    for i in range(steps):
        x, y = batch(i, rank, sizes(i, rank))
        assert torch.equal(step(x, y), expected(x, y).detach()), f"loss of step {i}"
        for a, b in zip(tensors_of(ours.state_dict()), tensors_of(eager.state_dict()), strict=True):
            assert torch.equal(local(a), local(b)), f"state after step {i}"


def trained(pair, rank, make=sgd, *, sizes=lambda i, rank: 6, steps=STEPS, **how):
    """Train a step of the first model beside eager mode for the second one; returns the step."""
    ours, eager = pair
    step = cudagraph.whole_step(ours, F.mse_loss, make(ours), **how)
    compare(step, eager_step(eager, F.mse_loss, make(eager), **how), ours, eager, rank, sizes=sizes, steps=steps)
    return step


def trained_by(make_step, pair, rank, **how):
    """The same for a step of the user's own, `make_step(model, optimizer)`."""
    ours, eager = pair
    step = cudagraph.whole_step(make_step(ours, sgd(ours)))
    compare(step, make_step(eager, sgd(eager)), ours, eager, rank, **how)
    return step


def runs_here(case):
    """The simulator can gather parameters only where storages can exchange their memory."""
    return device_type() == "cuda" or torch_cuda.can_swap() or not case.__name__.startswith("fsdp")


def work(rank, folder, cases):
    """Run `cases` one after another; each leaves a file for each rank in `folder`, which says how it ended."""
    for case in filter(runs_here, cases):
        file, begin = pathlib.Path(folder) / f"{case.__name__}{rank}", time.monotonic()
        file.write_text("under way")
        cudagraph.reset()
        with pytest.MonkeyPatch.context() as patch:
            if device_type() == "cpu":
                on_simulator(patch)
            try:
                case(rank)
                text = "ended"
            except BaseException:
                text = traceback.format_exc()
        file.write_text(text)
        print(f"rank {rank}: {case.__name__}, {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
        if text != "ended":
            raise AssertionError(f"{case.__name__}: {text}")


def why_not_run(folder):
    """The cases that failed or did not end, with the last line of their error, and how the processes ended."""
    texts = {file.name: file.read_text() for file in folder.glob("*[01]")}
    failed = [f"{name}: {text.splitlines()[-1]}" for name, text in texts.items() if text != "ended"]
    how = folder / "how"
    return f"a case before it failed: {failed}; {how.read_text() if how.exists() else 'they have not ended'}"


def assert_ended(folder, case):
    if "cpu" in folder.name and not torch_cuda.can_swap() and case.__name__.startswith("fsdp"):
        pytest.skip("the simulator needs storages that can exchange their memory")
    for rank in range(2):
        file = folder / f"{case.__name__}{rank}"
        assert file.exists() and file.read_text() != "under way", why_not_run(folder)
        assert file.read_text() == "ended"
