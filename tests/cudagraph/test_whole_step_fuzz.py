"""Random training programs, a few each time; fuzz_whole_step.py runs more. Seeds that failed stay here."""

from __future__ import annotations

import contextlib

import fuzz_whole_step
import pytest
import torch.distributed as dist
from fuzz_whole_step import World

from cudagraph.step import recording
from cudagraph.step.gradients import Gradients
from cudagraph.step.host import HostRandom, HostState
from cudagraph.step.inputs import Inputs
from cudagraph.step.numbers import Numbers
from cudagraph.step.outputs import Outputs
from cudagraph.torch_private import cuda as torch_cuda

KEPT = (
    # the learning rate of groups that load_state_dict had made was not looked at
    *(1498,),
    # another recording wrote where a gradient lies that somebody held
    *(11076, 11292, 13611),
    # two recordings had one snapshot: what one accepted was no change to the other
    *(211620, 216621),
)

NOTICING = (71, 23, 32, 2, 1243)  # programs that notice what few others do


@pytest.fixture(params=["simulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request):
    made = World(request.param)
    yield made
    made.patch.undo()


def test_programs_are_as_in_eager(world):
    assert fuzz_whole_step.run_seeds(range(40), world)["wrong"] == []


def test_programs_that_once_differed(world):
    assert fuzz_whole_step.run_seeds(KEPT, world)["wrong"] == []


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_programs_of_two_ranks():
    found = fuzz_whole_step.run_two_ranks(0, 12, 200)
    assert found["wrong"] == [] and found["programs"] == 12 and found["counts"]["replays"] > 0


DELETIONS = {
    "host values are compared": (HostState, "unchanged", lambda self: True),
    "snapshots are of one recording each": (HostState, "copied", lambda self: self),
    "host values are put back": (HostState, "restore", lambda self: None),
    "tensors that moved are noticed": (torch_cuda, "pointers_equal", lambda *_: True),
    "gradients are looked at": (Gradients, "may_replay", lambda self: True),
    "gradients are given": (Gradients, "assign", lambda self: None),
    "gradients that somebody holds move out": (Gradients, "move_out", lambda self, driver: None),
    "schedulers are looked at": (recording, "refusing_schedules", lambda schedulers: contextlib.nullcontext()),
    "random numbers of the host are looked at": (HostRandom, "changed", lambda self: False),
    "inputs are copied": (Inputs, "copy", lambda self, flat: None),
    "numbers are written to the device": (Numbers, "fill", lambda self: None),
    "numbers may decide": (Numbers, "broken_condition", lambda self: None),
    "numbers are counted on": (Numbers, "assign", lambda self: []),
    "what the step stores is refreshed": (Outputs, "assign", lambda self: []),
}


@pytest.mark.parametrize("name", DELETIONS)
def test_its_deletion_is_noticed(monkeypatch, name):
    owner, attribute, value = DELETIONS[name]
    monkeypatch.setattr(owner, attribute, value)
    world = World("simulator")
    try:
        for seed in (*KEPT, *NOTICING, *range(150)):
            if fuzz_whole_step.run_seed(seed, world) is not None:
                return
        pytest.fail("no program noticed it")
    finally:
        world.patch.undo()
