"""Compiling a function again while code runs: what a budget does whose first plan took too much."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

from aot_hooks.torch_private import dynamo


def test_what_dynamo_is_compiling_is_left_alone():
    x, done = torch.randn(3), []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        done.append(dynamo.compile_anew(dynamo.code_being_compiled(), while_running=True))
        return gm.forward

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    compiled = torch.compile(f, backend=backend)
    assert torch.equal(compiled(x), x.sin())
    assert torch.equal(compiled(x), x.sin())
    assert done == [False]
    assert dynamo.compile_anew(f.__code__)
    compiled(x)
    assert len(done) == 2


def test_nothing_compiles_alone_where_processes_compile_together(monkeypatch):
    """torch's compiler collectives: a process that compiled alone would wait for the others for ever."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    monkeypatch.setattr(dynamo, "process_count", lambda: 2)
    assert dynamo.compile_anew(f.__code__)
    with torch._dynamo.config.patch(enable_compiler_collectives=True):
        assert "wait for all processes" in dynamo.why_not_anew(f.__code__)
        assert not dynamo.compile_anew(f.__code__)
        monkeypatch.setattr(dynamo, "process_count", lambda: 1)
        assert dynamo.compile_anew(f.__code__)


def test_looking_for_running_code_keeps_no_frame_alive():
    """A hook of the backward looks, and has all gradients in its frame."""

    def hook(*held: torch.Tensor) -> bool:
        return dynamo.compile_anew(nn.Linear.forward.__code__) and bool(held)

    gradient = torch.ones(3)
    alive = weakref.ref(gradient)
    gc.disable()
    try:
        assert hook(gradient)
        del gradient
        assert alive() is None
    finally:
        gc.enable()
