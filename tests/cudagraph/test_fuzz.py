"""A few random programs each time; fuzz_cudagraph.py runs as many as one likes. Seeds that once failed stay here."""

from __future__ import annotations

import dataclasses

import fuzz_cudagraph
import pytest
import torch
from tree_programs import World

from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree import dispatch, node, record, tree
from cudagraph.tree.liveness import Watch, copy_preserving_layout, on_slots
from cudagraph.tree.steps import Next

KEPT = (
    # where storages can be moved only once, outputs that alias one another were given out as separate copies
    *(5081, 5220, 5290, 5686, 5841),
    # the backward of a warm-up was taken for that of a forward that still waited
    *(41151, 41201),
)


@pytest.mark.parametrize("probed_calls", [1, node.PROBED_CALLS])
def test_programs_are_as_in_eager(world, probed_calls, monkeypatch):
    monkeypatch.setattr(node, "PROBED_CALLS", probed_calls)
    assert fuzz_cudagraph.run_seeds(range(1, 41), world) == []


@pytest.mark.parametrize("moves", ["all", "made"])
def test_programs_that_once_differed(moves):
    dispatch.reset()
    assert fuzz_cudagraph.run_seeds(KEPT, World("simulator", moves=moves), generation=1) == []


def test_what_a_function_passes_on_is_its_givers():
    """The last program repeats a function while only its own output is held, which another passed on: a step begins."""
    dispatch.reset()
    assert fuzz_cudagraph.run_seeds(range(739, 742), World("simulator"), generation=3, reset_every=50) == []


def dead_or_not(monkeypatch):
    """Replays don't check the slots that must be dead."""

    def replay(self, inputs, original=node.Recording.replay):
        self.watch_dead = Watch(())
        return original(self, inputs)

    monkeypatch.setattr(node.Recording, "replay", replay)


def steps_at_any_time(monkeypatch):
    """Where steps begin by themselves, each call begins one."""
    monkeypatch.setattr(tree, "next_of", lambda call: Next.GOES_ON if call.is_marked else Next.BEGINS)


def any_backward_answers(monkeypatch):
    """A backward is taken for that of every forward that waits."""

    def connect(recording, plan, original=record._connect):
        original(recording, plan)
        if recording.function.piece.is_backward:
            recording.pending = ()

    monkeypatch.setattr(record, "_connect", connect)


def failures_end_steps(monkeypatch):
    """After a failed capture the tree closes at once, although the step's outputs are needed."""

    def call(self, function, key, inputs, original=tree.Tree.call):
        if self.is_broken and self.uncaptured is None:
            self.close(inputs)
        return original(self, function, key, inputs)

    monkeypatch.setattr(tree.Tree, "call", call)


def moved_buffers(monkeypatch):
    """Addresses of inputs that are read in place are not compared."""

    def replay(self, inputs, original=node.Recording.replay):
        layout = self.inputs
        if layout.reads_in_place:
            fixed = [i for i in layout.fixed if i in self.function.static_inputs]
            self.inputs = dataclasses.replace(layout, fixed=fixed)
        return original(self, inputs)

    monkeypatch.setattr(node.Recording, "replay", replay)
    monkeypatch.setattr(node, "PROBED_CALLS", 1)


def reads_take_away(monkeypatch):
    """The inputs of a call that begins a step are copied, but other holders of them get nothing."""

    def release(self, slots, inputs, original=tree.Tree._release_held_outputs):
        for i in on_slots(inputs, slots):
            inputs[i] = copy_preserving_layout(inputs[i])
        original(self, slots, inputs)

    monkeypatch.setattr(tree.Tree, "_release_held_outputs", release)


def inputs_are_left_out(monkeypatch):
    """After a capture that failed, the call has the copies that were made for it."""

    def failed_record(pool, node, key, inputs, *rest, original=record.record):
        try:
            return original(pool, node, key, inputs, *rest)
        except ValueError:
            inputs[:] = [torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for x in inputs]
            raise

    monkeypatch.setattr(tree, "record", failed_record)


@pytest.mark.parametrize(
    ("delete", "first"),
    [
        (dead_or_not, 30),
        (steps_at_any_time, 5),
        (any_backward_answers, 1020),
        (failures_end_steps, 95),
        (moved_buffers, 0),
        (reads_take_away, 10),
        (inputs_are_left_out, 0),
    ],
)
def test_the_fuzzer_notices(delete, first, monkeypatch):
    """Within ten programs from the seed `first` on."""
    if delete is reads_take_away and not torch_cuda.can_swap():
        pytest.skip("this torch can't point a storage elsewhere, so nothing that is read is moved")
    dispatch.reset()
    delete(monkeypatch)
    generation = {moved_buffers: 3, inputs_are_left_out: 5}.get(delete, 2)
    assert fuzz_cudagraph.run_seeds(range(first, first + 10), World("simulator"), generation=generation, reset_every=5)
    for trees in dispatch.every_thread:
        trees.clear()
