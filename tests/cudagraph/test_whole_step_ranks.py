"""`whole_step` on two processes, which Gloo connects: each has a simulator, whose replays send what the step sends.

All cases run in one pair of processes, one after another; each test here looks at what has become of one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import tempfile
import time
import types

import pytest
import torch
import torch.distributed as dist
from ranks import device_type, leave_group, run_ranks
from steps_on_ranks import (
    STEPS,
    assert_ended,
    batch,
    compare,
    local,
    models,
    one_model,
    sharded,
    trained,
    trained_by,
    work,
)
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from whole_steps import OPTIMIZERS, adamw, eager_step, sgd

import cudagraph
from cudagraph.errors import RanksError
from cudagraph.torch_private import distributed as torch_distributed

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")

LIMIT_S = 240  # for all cases


def two_models():
    """Equal ones that no other process knows."""
    ours = one_model()
    return ours, copy.deepcopy(ours)


def ddp(rank):
    """With a buffer that is sent before each forward."""
    step = trained(models(), rank, adamw, clip_grad_norm=0.5)
    assert (step.refused, step.update_refused) == ("", "")
    assert (cudagraph.stats()["recordings"], cudagraph.stats()["replays"]) == (1, STEPS - 12)


def own_step_of(model, optimizer, *, syncs=True):
    def step(x, y):
        optimizer.zero_grad()
        if syncs:
            loss = F.mse_loss(model(x), y)
        else:  # accumulates without an exchange first
            with model.no_sync():
                F.mse_loss(model(x), y).backward()
            loss = F.mse_loss(model(x * 2), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def ddp_views(rank):
    """Gradients are views of buckets, and stay there after the step."""
    ours, eager = pair = models(gradient_as_bucket_view=True)
    step = trained_by(own_step_of, pair, rank)
    assert step.refused == "" and cudagraph.stats()["replays"] == STEPS - 12
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def ddp_no_sync(rank):
    step = trained_by(functools.partial(own_step_of, syncs=False), models(), rank)
    assert step.refused == "" and cudagraph.stats()["replays"] >= 5


def ddp_static_graph(rank):
    """Its reducer reads notes on the host, which the simulator can't tell from a read of the device."""
    step = trained(models(static_graph=True), rank, steps=30)
    is_graph = step.refused == "" and cudagraph.stats()["replays"] >= 5
    assert is_graph or (device_type() == "cpu" and "_local_scalar_dense" in step.refused), step.refused


def ddp_no_sync_outside(rank):
    """Each second call is without an exchange. DDP notes in a flag which one the last call was."""
    ours, eager = pair = models()

    def make(model, optimizer):
        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if model.require_backward_grad_sync:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        return step

    step, expected = cudagraph.whole_step(make(ours, sgd(ours))), make(eager, sgd(eager))
    for i in range(54):
        with contextlib.ExitStack() as stack:
            for each in pair if i % 2 == 0 else ():
                stack.enter_context(each.no_sync())
            assert torch.equal(step(*batch(i, rank)), expected(*batch(i, rank)).detach()), f"loss of step {i}"
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            assert torch.equal(a, b), f"parameters after step {i}"
    assert step.refused == "" and cudagraph.stats()["replays"] >= 8, cudagraph.stats()


def ddp_accumulate(rank):
    step = trained(models(), rank, accumulate=2)
    assert step.refused == "" and cudagraph.stats()["replays"] >= 5


def ddp_hook(rank):
    """A hook that halves what is sent."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    pair = models()
    for each in pair:
        each.register_comm_hook(None, fp16_compress_hook)
    step = trained(pair, rank)
    assert step.refused == "" and cudagraph.stats()["replays"] >= 5


def other_shapes(rank):
    """From some step on, one rank has batches of another size, then both, then one again."""

    def sizes(i, rank):
        return 4 if (i in (14, 17, 18, 21) and rank == 1) or i in (19, 20) else 6

    step = trained(models(), rank, sizes=sizes, steps=24)
    keys = [sorted({one.number for one in known}) for known in step.recordings.values()]
    # 12: both have 6. 17: rank 1 has 4, after a warm-up in 14. 20: both have 4; rank 0 warms up in 19.
    assert keys == ([[0, 1], [2]] if rank == 0 else [[0], [1, 2]]), keys
    assert step.refused == "" and cudagraph.stats()["recordings"] == 3


def own_collective(rank):
    """Of a model that is no DDP: the first call finds out."""
    from torch.distributed import _functional_collectives as functional

    def make(model, optimizer):
        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            for n, p in enumerate(model.parameters()):
                if n % 2:
                    dist.all_reduce(p.grad)
                else:
                    p.grad.copy_(functional.all_reduce(p.grad, "sum", dist.group.WORLD))
            gathered = loss.new_empty(2)
            dist.all_gather_into_tensor(gathered, loss.detach()[None])
            optimizer.step()
            optimizer.zero_grad()
            return gathered.sum()

        return step

    step = trained_by(make, two_models(), rank, steps=6)
    assert step.refused == "" and cudagraph.stats()["replays"] >= 3


def assert_refused_by_rank_1(pair, rank, steps=STEPS):
    """Train with a step whose capture fails on that rank, in the middle of a backward: all ranks leave graphs."""

    def make(model, optimizer):
        def read(grad):
            return grad * (1 + 0 * grad.sum().item()) if rank == 1 else grad

        def step(x, y):
            out = model(x)
            out.register_hook(read)
            loss = F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    step = trained_by(make, pair, rank, steps=steps)
    assert "reads its result on the host" in step.refused
    assert ("on rank 1" in step.refused) == (rank == 0)
    assert cudagraph.stats()["recordings"] == 0 and step.ranks is None


def fails_on_one_rank(rank):
    assert_refused_by_rank_1(models(), rank)


def refused_on_one_rank(rank):
    """A rank that refuses the step before its first recording tells the other."""
    ours, eager = models()
    optimizers = sgd(ours), sgd(eager)
    settings = [1.0]

    def loss_fn(out, y):
        settings[0] = object() if rank == 1 and not settings[1:] else 1.0
        return F.mse_loss(out, y)

    step = cudagraph.whole_step(ours, loss_fn, optimizers[0])
    compare(step, eager_step(eager, F.mse_loss, optimizers[1]), ours, eager, rank)
    assert "settings[0]" in step.refused and ("on rank 1" in step.refused) == (rank == 0)


def refused_in_the_first_call(rank):
    """One rank refuses before the models get new reducers, which would send more than old ones: none gets any."""
    pair = models()

    class Raises:
        @property
        def __dict__(self):
            raise ValueError("planted")

    if rank == 1:
        pair[0].module.raises = Raises()
    step = trained(pair, rank, steps=5)
    assert "planted" in step.refused and ("on rank 1" in step.refused) == (rank == 0)


def own_step_in(group, model, optimizer):
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group[0])
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def group_ends(rank):
    """After the first call, and after the first recording, the group is replaced by another one."""
    ours = one_model()
    eager, groups = copy.deepcopy(ours), [dist.new_group([0, 1])]
    step = cudagraph.whole_step(own_step_in(groups, ours, sgd(ours)))
    expected = own_step_in(groups, eager, sgd(eager))
    for count, replays in ((1, 0), (4, 2), (5, 5)):
        compare(step, expected, ours, eager, rank, steps=count)
        assert step.refused == "" and cudagraph.stats()["replays"] >= replays
        dist.destroy_process_group(groups.pop())
        groups.append(dist.new_group([0, 1]))


def all_groups_end(rank):
    """As where a program that has lost a rank begins anew, after the first call and after the first exchange."""
    ours, world = one_model(), [None]
    eager = copy.deepcopy(ours)
    step, expected = cudagraph.whole_step(own_step_in(world, ours, sgd(ours))), own_step_in(world, eager, sgd(eager))
    for count in (1, 2, 5):
        compare(step, expected, ours, eager, rank, steps=count)
        meet = [tempfile.mktemp() if rank == 0 else ""]
        dist.broadcast_object_list(meet)
        backend = dist.get_backend()
        dist.barrier()
        leave_group()
        dist.init_process_group(backend, init_method=f"file://{meet[0]}", rank=rank, world_size=2)
    assert step.refused == "" and cudagraph.stats()["replays"] >= 3


def local_step(rank):
    """A step that sends nothing needs no other rank: here only one calls it."""
    if rank == 0:
        step = trained(two_models(), rank, steps=4)
        assert step.ranks is None and cudagraph.stats()["replays"] == 3


def averaging(rank, averages, sizes):
    """A step that averages gradients where `averages(i)`, a number that the host changes, and sends nothing else."""
    ours = one_model()
    eager = copy.deepcopy(ours)
    state = types.SimpleNamespace(call=0)

    def make(model, optimizer):
        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if averages(state.call):
                for p in model.parameters():
                    dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    step, expected = cudagraph.whole_step(make(ours, sgd(ours)), state=state), make(eager, sgd(eager))
    for i in range(12):
        state.call = i
        x, y = batch(i, rank, sizes(i))
        assert torch.equal(step(x, y), expected(x, y).detach()), f"loss of step {i}"
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, b)


def talks_each_fourth_call(rank):
    """The first three calls send nothing. Another batch follows the first exchange, on one rank alone."""
    averaging(rank, lambda i: i % 4 == 3, lambda i: 4 if (i, rank) == (5, 1) else 6)


def talks_later(rank):
    """A branch that no call has run before is not recorded at once, or the ranks would not know that it talks."""
    averaging(rank, lambda i: i >= 6, lambda i: 4 if rank == 1 and i in (8, 10) else 6)


def uncounted(rank):
    """Whether the step talks would not be seen, so it is refused before anything runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_distributed, "_collective_count", lambda group: None)
        step = trained(two_models(), rank, steps=3)
    assert "does not count collectives" in step.refused and cudagraph.stats()["recordings"] == 0


def talks_on_the_host(rank):
    """What is sent to one rank alone, and waits for all ranks on the host, is named."""

    def make(model, optimizer, *, send):
        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            send()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    def to_the_other():
        numbers = torch.ones(2, device=device_type())
        dist.send(numbers, 1) if rank == 0 else dist.recv(numbers, 0)

    for send, reason in ((to_the_other, "talks to one of them alone"), (dist.barrier, "waits for other processes")):
        step = trained_by(functools.partial(make, send=send), two_models(), rank, steps=4)
        assert reason in step.refused and cudagraph.stats()["recordings"] == 0, step.refused


def find_unused(rank):
    step = trained(models(find_unused_parameters=True), rank, steps=3)
    assert "find_unused_parameters=True" in step.refused and "static_graph" in step.refused


def fsdp(rank):
    """With clipping over DTensors, and AdamW that treats all of them at once."""
    step = trained(sharded(), rank, adamw, steps=6, clip_grad_norm=0.5)
    assert (step.refused, step.update_refused) == ("", "")
    assert (cudagraph.stats()["recordings"], cudagraph.stats()["replays"]) == (1, 5)


def fsdp_mixed(rank):
    """Linear layers in bfloat16, which stay gathered between forward and backward; accumulation; a fused optimizer."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    pair = sharded(mp_policy=policy, reshard_after_forward=False)
    step = trained(pair, rank, OPTIMIZERS["adamw, fused"], steps=6, accumulate=2)
    assert (step.refused, step.update_refused) == ("", "") and cudagraph.stats()["replays"] >= 4


def fsdp_own_step(rank):
    """Gradients stay after the step; the first of two backwards is not reduced; the step keeps a loss."""
    ours, eager = pair = sharded()

    def make(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            model.set_requires_gradient_sync(False)
            F.mse_loss(model(x), y).backward()
            model.set_requires_gradient_sync(True)
            loss = F.mse_loss(model(2 * x), y)
            loss.backward()
            optimizer.step()
            model.last_loss = loss
            return loss

        return step

    step = trained_by(make, pair, rank, steps=7)
    assert step.refused == "" and cudagraph.stats()["replays"] >= 4
    assert torch.equal(ours.last_loss, eager.last_loss)
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        assert torch.equal(local(a.grad), local(b.grad)) and a.grad.placements == b.grad.placements


def fsdp_schedule(rank):
    """Numbers that change in each call, for a foreach optimizer on DTensors."""
    ours, eager = sharded()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, foreach=True) for each in (ours, eager)]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.3, total_steps=8) for each in optimizers]
    step, expected = cudagraph.whole_step(ours, F.mse_loss, optimizers[0]), eager_step(eager, F.mse_loss, optimizers[1])
    for i in range(6):
        x, y = batch(i, rank)
        assert torch.equal(step(x, y), expected(x, y)), f"loss of step {i}"
        for each in schedulers:
            each.step()
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        assert torch.equal(local(a), local(b))
    assert (step.refused, step.update_refused) == ("", "") and cudagraph.stats()["recordings"] == 1


def fsdp_accumulates(rank):
    """Gradients of three calls add up, unreduced, to those of an update. Flags of FSDP2, which the host sets, say so;
    then the step sets them itself."""

    def make(model, optimizer, within):
        def step(x, y, last):
            if within:
                model.set_requires_gradient_sync(last)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        return step

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)  # sums are kept elsewhere than gradients
    for within, options in ((False, {}), (True, {}), (False, {"mp_policy": policy})):
        cudagraph.reset()
        ours, eager = pair = sharded(**options)
        step, expected = cudagraph.whole_step(make(ours, sgd(ours), within)), make(eager, sgd(eager), within)
        for i in range(18):
            x, y = batch(i, rank)
            last = i % 3 == 2
            for model in pair if not within else ():
                model.set_requires_gradient_sync(last)
            assert torch.equal(step(x, y, last), expected(x, y, last)), f"loss of step {i}"
            for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
                assert torch.equal(local(a), local(b)), f"parameters after step {i}"
        assert step.refused == "" and cudagraph.stats()["replays"] >= 14, (step.refused, cudagraph.stats())


def fsdp_frozen(rank):
    """In each fourth call one layer gets no gradient."""
    ours, eager = pair = sharded()
    step, expected = cudagraph.whole_step(ours, F.mse_loss, sgd(ours)), eager_step(eager, F.mse_loss, sgd(eager))
    for i in range(16):
        for model in pair:
            model.norm.requires_grad_(i % 4 != 3)
        assert torch.equal(step(*batch(i, rank)), expected(*batch(i, rank))), f"loss of step {i}"
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            assert torch.equal(local(a), local(b)), f"parameters after step {i}"
    assert step.refused == "" and cudagraph.stats()["replays"] >= 12, (step.refused, cudagraph.stats())


def evaluated(pair, rank):
    """Train a step of the first model, and run it without a graph after each third step, beside eager mode."""
    ours, eager = pair
    step, expected = cudagraph.whole_step(ours, F.mse_loss, sgd(ours)), eager_step(eager, F.mse_loss, sgd(eager))
    for i in range(24):
        x, y = batch(i, rank)
        assert torch.equal(step(x, y), expected(x, y)), f"loss of step {i}"
        if i % 3 == 2:
            with torch.no_grad():
                assert torch.equal(ours.eval()(x), eager.eval()(x)), f"evaluation after step {i}"
            ours.train(), eager.train()
    return step.refused, cudagraph.stats()


def ddp_evaluated(rank):
    """An evaluation changes a flag of DDP."""
    refused, stats = evaluated(models(), rank)
    assert refused == "" and (stats["recordings"], stats["replays"]) == (2, 12), stats


def fsdp_evaluated(rank):
    """An evaluation leaves the outermost parameters gathered, and a replay makes them stale."""
    mesh, ours = init_device_mesh(device_type(), (2,)), one_model()
    pair = ours, copy.deepcopy(ours)
    for each in pair:
        fully_shard(each.first, mesh=mesh)
        fully_shard(each, mesh=mesh)
    refused, stats = evaluated(pair, rank)
    assert refused == "" and (stats["recordings"], stats["replays"]) == (1, 23), stats


def fsdp_results(rank):
    """The norm of all gradients is a DTensor, which the step returns and stores."""

    def make(model, optimizer):
        def step(x, y):
            F.mse_loss(model(x), y).backward()
            model.total = norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        return step

    ours, eager = sharded()
    step, expected = cudagraph.whole_step(make(ours, sgd(ours))), make(eager, sgd(eager))
    norms = []
    for i in range(6):
        norm, other = step(*batch(i, rank)), expected(*batch(i, rank))
        norms.append((norm, other))
        assert norm.placements == other.placements and torch.equal(local(ours.total), local(eager.total))
    for norm, other in norms:  # later replays leave them as they are
        assert torch.equal(norm.full_tensor(), other.full_tensor())
    assert step.refused == "" and cudagraph.stats()["replays"] == 5


def fsdp_fails(rank):
    """A capture that fails in the middle of a backward, on one rank, leaves modules that are sharded."""
    assert_refused_by_rank_1(sharded(), rank, steps=5)


def tensor_parallel(rank):
    mesh = init_device_mesh(device_type(), (2,))
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).to(device_type())
    eager = copy.deepcopy(ours)
    for each in (ours, eager):
        parallelize_module(each, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    step = trained((ours, eager), 0, adamw, steps=6, clip_grad_norm=0.5)
    assert (step.refused, step.update_refused) == ("", "") and cudagraph.stats()["replays"] >= 4


def fsdp_saved_and_loaded(rank):
    """Between steps: a checkpoint is written, training goes on, and the checkpoint is loaded."""
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    ours, eager = sharded()
    optimizers = adamw(ours), adamw(eager)
    steps = cudagraph.whole_step(ours, F.mse_loss, optimizers[0]), eager_step(eager, F.mse_loss, optimizers[1])
    pairs = [*zip((ours, eager), optimizers, ("ours", "eager"), strict=True)]
    for i in range(5):
        compare(*steps, ours, eager, rank, steps=3)
        for model, optimizer, name in pairs if i in (1, 3) else []:
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            (checkpoint.save if i == 1 else checkpoint.load)(states, checkpoint_id=f"{folder[0]}/{name}")
            set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert steps[0].refused == "" and cudagraph.stats()["replays"] >= 11


def fsdp_events(rank):
    """The next step's gathering waits for an event of this one, which only an uncaptured call leaves behind."""

    def make(model, optimizer):
        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            event = torch.get_device_module(device_type()).Event()
            event.record()
            model.set_post_optim_event(event)
            return loss

        return step

    def sizes(i, rank):
        return 6 - 2 * (i % 3 == 2)

    step = trained_by(make, sharded(), rank, sizes=sizes, steps=9)
    assert step.refused == "" and cudagraph.stats()["replays"] >= 6


def timed_again(rank):
    """Torch takes the times of a model of DDP again when its step is reset."""
    rates = []
    ours, _ = models()
    ours._set_ddp_runtime_logging_sample_rate = rates.append
    step = cudagraph.whole_step(ours, F.mse_loss, sgd(ours))
    for i in range(3):
        step(*batch(i, rank))
    assert rates[-1] > 1000
    step.reset()
    assert rates[-1] == 100


def gone(rank):
    """The last case: one rank takes fewer steps. The other one's error names it."""
    ours, _ = models()
    step = cudagraph.whole_step(ours, F.mse_loss, sgd(ours))
    for i in range(STEPS - 2 * rank):
        if rank == 0 and i == STEPS - 2:
            with pytest.raises(RanksError, match="rank 1 did not come to it"):
                step(*batch(i, rank))
            return
        step(*batch(i, rank))


CASES = (
    ddp, ddp_views, ddp_no_sync, ddp_no_sync_outside, ddp_static_graph, ddp_accumulate, ddp_hook, other_shapes,
    own_collective, fails_on_one_rank, refused_on_one_rank, refused_in_the_first_call, group_ends, local_step,
    talks_each_fourth_call, talks_later, uncounted, talks_on_the_host, find_unused, fsdp, fsdp_mixed, fsdp_own_step,
    fsdp_schedule, fsdp_accumulates, fsdp_results, fsdp_frozen, fsdp_evaluated, ddp_evaluated, fsdp_fails,
    fsdp_saved_and_loaded, fsdp_events, tensor_parallel, timed_again, all_groups_end, gone,
)  # fmt: skip


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def folder(request, tmp_path_factory):
    """Where the cases, all run in one pair of processes, have left their results. Workers of pytest share it."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"ranks_{request.param}"
    try:
        folder.mkdir()
    except FileExistsError:
        until = time.monotonic() + LIMIT_S
        while not (folder / "how").exists() and time.monotonic() < until:
            time.sleep(0.2)
    else:
        ended = run_ranks(work, folder, str(folder), CASES, device=request.param, limit_s=LIMIT_S)
        (folder / "how").write_text("; ".join(f"rank {rank}: {each}" for rank, each in enumerate(ended)))
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(folder, case):
    assert_ended(folder, case)
