"""The pieces that Inductor cuts a graph into: what each of its inputs is, and outputs in memory of an input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capture_simulator import Simulator
from torch import Tensor

import cudagraph
from cudagraph.compile.inductor import pieces_of
from cudagraph.options import Options
from cudagraph.placeholder import PlaceholderInfo
from cudagraph.torch_private.compilers import PartitionMap
from cudagraph.tree.dispatch import capture
from cudagraph.tree.function import Piece

pytestmark = pytest.mark.core


def doubled_in_place(inputs: list[Any]) -> list[Tensor]:
    """As Inductor's code for `found * 2`, where `found` was made by another piece and has its last use here."""
    found = inputs[0]
    inputs.clear()
    return [found.mul_(2)]


def graph(input_count: int, **settings: Any) -> Piece:
    placeholders = tuple(PlaceholderInfo(f"x{i}") for i in range(input_count))
    return Piece(
        "graph",
        doubled_in_place,
        torch.device("cpu"),
        placeholders=placeholders,
        output_traces=(None,),
        saved_outputs=(),
        is_inference=True,
        **settings,
    )


def test_positions_are_those_of_the_piece() -> None:
    whole = graph(3, static_inputs=(0, 1), mutated_inputs=(1,), unread_inputs=(0,))
    (piece,) = pieces_of(whole, [PartitionMap((None, 1, 2), ((0,),))])
    assert (piece.static_inputs, piece.mutated_inputs) == ((1,), (1,))
    assert (piece.unread_inputs, piece.reusable_inputs) == ((), (0,))
    (piece,) = pieces_of(whole, [PartitionMap((2, 0), ((0,),))])
    assert (piece.unread_inputs, piece.reusable_inputs) == ((1,), ())


@pytest.mark.parametrize("address_stays", [False, True])
def test_an_output_in_memory_of_a_reused_input_has_its_new_numbers(address_stays: bool) -> None:
    """The graph doubles a copy of its input in place: the caller's own tensor is not the output."""
    simulator = Simulator()
    (piece,) = pieces_of(graph(1), [PartitionMap((None,), ((0,),))])
    call = capture(piece, Options(), simulator)
    stays = torch.empty(4)
    for i in range(30):
        size = 4 if i % 3 or address_stays else 3
        x = torch.arange(float(size)) + i
        expected = x * 2
        if address_stays:
            x = stays.copy_(x)
        (out,) = call([x, size])
        torch.testing.assert_close(simulator.read(out), expected, rtol=0, atol=0)
        del out
    assert cudagraph.stats()["replays"] >= 10
