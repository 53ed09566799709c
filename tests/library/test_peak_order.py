"""Inductor's search for the order of kernels with the least memory knows the sizes of packed inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.memory as memory
from torch._inductor.virtualized import V

import aot_hooks
from aot_hooks.torch_private import inductor_fusion


def freed_and_held(block: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """For each packed input of the backward: the bytes that Inductor expects its last read to free, and its bytes."""
    found: dict[str, tuple[int, int]] = {}
    find = memory.get_freeable_input_buf

    def note(nodes: Any, graph_inputs: Any) -> Any:
        buffers = find(nodes, graph_inputs)
        for name, buffer in buffers.items():
            held = V.graph.graph_inputs[name]
            found[name] = buffer.mpi_buffer.size_free, int(held.get_numel()) * held.get_dtype().itemsize
        return buffers

    monkeypatch.setattr(memory, "get_freeable_input_buf", note)
    torch._dynamo.reset()

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = (x @ w).view(2, 16, 4, 1024).transpose(1, 2)
        return torch.nn.functional.gelu(h) @ w[:, :8]

    w = torch.eye(1024, requires_grad=True)
    with torch._inductor.config.patch(fx_graph_cache=False), aot_hooks.saved_tensors_hooks(aot_hooks.int8(block)):
        torch.compile(f, backend="aot_hooks", fullgraph=True)(torch.randn(128, 1024), w).sum().backward()
    return {name: sizes for name, sizes in found.items() if "packed" in name}


@pytest.mark.core
@pytest.mark.slow
def test_a_packed_input_frees_no_more_than_it_holds(monkeypatch):
    sizes = freed_and_held(64, monkeypatch)
    assert len(sizes) >= 4
    assert all(freed <= held for freed, held in sizes.values()), sizes
    assert sum(held for _, held in sizes.values()) == sum(freed for freed, _ in sizes.values())


@pytest.mark.slow
def test_by_itself_inductor_counts_a_scale_once_a_value(monkeypatch):
    """That the test above can fail; should Inductor bound it by itself one day, `_bound_size_hints` can go."""
    monkeypatch.setattr(inductor_fusion, "_bound_size_hints", lambda graph: None)
    sizes = freed_and_held(64, monkeypatch)
    assert any(freed > 10 * held for freed, held in sizes.values()), sizes
