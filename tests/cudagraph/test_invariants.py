"""Each invariant of the tree: a scenario that passes with it and fails without it.

scenario(world)                      right as the code is
scenario(world) under `delete`       wrong numbers, a missing error, or a refusal of the simulator
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from capture_simulator import Arena, Simulator
from tree_programs import World
from tree_scenarios import (
    Wrong,
    accumulated_gradients,
    branch_after_replay,
    buffer_that_is_left,
    conjugated,
    given_away_then_kept,
    held_for_the_first_time,
    held_over,
    held_over_and_fed_back,
    held_over_as_copies,
    kept_by_the_function,
    kept_while_recorded,
    moving_weight,
    new_inputs,
    other_numbers,
    overlapping_input,
    pending_backward,
    step_inside_of_a_backward,
    streams,
    write_to_the_caller,
)

from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree import dispatch, liveness, node, record, tree
from cudagraph.tree.function import Function


def always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kw: value


def keep_plan(plan: Callable[..., record.CapturePlan]) -> Callable[..., record.CapturePlan]:
    def changed(*args: Any) -> record.CapturePlan:
        made = plan(*args)
        held_inputs = [slot for slot in dict.fromkeys(made.managed.values()) if slot in made.held]
        held = [slot for slot in made.held if slot not in held_inputs]
        return dataclasses.replace(made, held=held, donated=[*made.donated, *held_inputs])

    return changed


def no_dead_watch(replay: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: node.Recording, inputs: list[Any]) -> Any:
        self.watch_dead = liveness.Watch(())
        return replay(self, inputs)

    return changed


def nothing_released(self: tree.Tree, slots: Any, inputs: Any) -> None:
    return None


def without_clones(part: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, slots, inputs: part(self, slots, list(inputs))


DELETIONS: dict[str, tuple[Callable[[World], None], Callable[[pytest.MonkeyPatch], None]]] = {
    "static addresses are compared": (
        moving_weight,
        lambda m: m.setattr(torch_cuda, "pointers_equal", always(True)),
    ),
    "addresses of inputs that are read in place are compared": (
        buffer_that_is_left,
        lambda m: m.setattr(torch_cuda, "pointers_equal", always(True)),
    ),
    "inputs are copied": (new_inputs, lambda m: m.setattr(torch_cuda, "foreach_copy", always(None))),
    "numbers are part of the key": (other_numbers, lambda m: m.setattr(Function, "find_key_inputs", always(()))),
    "overlapping inputs are copied flat": (
        overlapping_input,
        lambda m: m.setattr(liveness, "overlap_span", always(None)),
    ),
    "what was dead must be dead": (
        held_for_the_first_time,
        lambda m: m.setattr(node.Recording, "replay", no_dead_watch(node.Recording.replay)),
    ),
    "what was given away must be given away": (
        given_away_then_kept,
        lambda m: m.setattr(node.Recording, "replay", no_dead_watch(node.Recording.replay)),
    ),
    "what is kept is not given away": (
        kept_while_recorded,
        lambda m: m.setattr(record, "_plan", keep_plan(record._plan)),
    ),
    "what is held at the end of a step is released": (
        held_over,
        lambda m: m.setattr(tree.Tree, "_release_held_outputs", nothing_released),
    ),
    "it is poisoned": (held_over, lambda m: m.setattr(Simulator, "poison", always(None))),
    "the slot is renewed": (held_over, lambda m: m.setattr(liveness.Slot, "renew", always(None))),
    "inputs on it are saved first": (
        held_over_and_fed_back,
        lambda m: (
            m.setattr(tree.Tree, "can_move", always(False)),
            m.setattr(tree.Tree, "_release_held_outputs", without_clones(tree.Tree._release_held_outputs)),
        ),
    ),
    "copies are made": (held_over_as_copies, lambda m: m.setattr(Simulator, "copy_out", always(None))),
    "the pool is restored": (branch_after_replay, lambda m: m.setattr(Arena, "restore", always(None))),
    "the pool is freed after a recording": (branch_after_replay, lambda m: m.setattr(Arena, "disown", always(None))),
    "forwards wait for their backward": (
        pending_backward,
        lambda m: m.setattr(node.Node, "waits_for_backward", always(False)),
    ),
    "no step begins inside of a backward": (
        step_inside_of_a_backward,
        lambda m: m.setattr(torch_cuda, "graph_task_id", always(-1)),
    ),
    "gradients are copied out": (
        accumulated_gradients,
        lambda m: m.setattr(tree.Tree, "_release_held_outputs", _with_errors_only(tree.Tree._release_held_outputs)),
    ),
    "the caller's own memory is not written to by a graph": (
        write_to_the_caller,
        lambda m: m.setattr(Function, "reason_against", always(None)),
    ),
    "what a capture leaves allocated is found": (
        kept_by_the_function,
        lambda m: m.setattr(Arena, "live_blocks_are", always(True)),
    ),
    "streams wait for each other": (streams, lambda m: m.setattr(tree.Tree, "change_stream", always(None))),
    "conjugate bits are kept": (
        conjugated,
        lambda m: m.setattr(
            record, "layout_of", lambda x: liveness.layout_of(x)._replace(conjugate=False, negative=False)
        ),
    ),
}


def _with_errors_only(part: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: tree.Tree, slots: Any, inputs: Any) -> Any:
        for slot in slots:
            slot.copies = False
        return part(self, slots, inputs)

    return changed


SCENARIOS = sorted({scenario for scenario, _ in DELETIONS.values()}, key=lambda scenario: scenario.__name__)

NEEDS_MOVING = {held_over_as_copies, accumulated_gradients}


@pytest.mark.core
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_it_holds(world, scenario):
    if scenario in NEEDS_MOVING and world.kind == "simulator" and not world.driver.can_move:
        pytest.skip("this torch can't point a storage elsewhere, and the simulator's storages can't be resized")
    scenario(world)


@pytest.mark.parametrize("name", DELETIONS)
def test_its_deletion_is_noticed(name, monkeypatch):
    scenario, delete = DELETIONS[name]
    if scenario in NEEDS_MOVING and not torch_cuda.can_swap():
        pytest.skip("this torch can't point a storage elsewhere")
    dispatch.reset()
    delete(monkeypatch)
    try:
        with pytest.raises((Wrong, AssertionError, RuntimeError, NotImplementedError)):
            scenario(World("simulator"))
    finally:
        monkeypatch.undo()
        for trees in dispatch.every_thread:
            trees.clear()  # what was deleted may have left anything behind
        dispatch.reset()
