"""Gradient checkpointing of transformers around decoder layers that are captured one by one, steps not marked."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

from fuzz_checkpoint import Machine
from trained import LENGTH, VOCABULARY, llama

import cudagraph


@pytest.mark.parametrize("frozen", [(), (0,)], ids=["all trained", "first frozen"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_of_captured_layers_are_those_of_eager_mode(
    device: str, use_reentrant: bool, frozen: tuple[int, ...]
) -> None:
    machine = Machine(device)
    model = llama().to(device).train()
    for number in frozen:
        model.model.layers[number].requires_grad_(False)
    eager = copy.deepcopy(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
        eager.enable_input_require_grads()
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=machine.backends["error"])
    with machine.many_graphs():
        for _ in range(4):
            ids = torch.randint(0, VOCABULARY, (2, LENGTH), device=device)
            for one in (model, eager):
                one.zero_grad()
                one(input_ids=ids, labels=ids).loss.backward()
            for found, expected in zip(model.parameters(), eager.parameters(), strict=True):
                assert (found.grad is None) == (expected.grad is None)
                if expected.grad is not None:
                    torch.testing.assert_close(machine.read(found.grad), expected.grad, rtol=1e-3, atol=1e-6)
    assert cudagraph.stats()["replays"] > 0
    cudagraph.reset()
