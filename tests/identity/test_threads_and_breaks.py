"""Two threads call one function with a graph break, under hooks of the user's own."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from aot_hooks import saved_tensors_hooks


@pytest.mark.core
def test_the_part_after_the_break_is_compiled_in_both_threads():
    """While a probe ran as `fullgraph=True` in one thread, the other one's parts ran eagerly, with other gradients."""

    def f(x: Tensor) -> Tensor:
        y = torch.tanh(x @ x)
        torch._dynamo.graph_break()
        z = torch.tanh(y @ y)
        return (z @ z).sum()

    compiled = torch.compile(f, backend="aot_hooks", options={"inner": "aten"})
    x0 = torch.eye(4, dtype=torch.float64) * 0.3 + 0.1

    def double(t: Tensor) -> Tensor:
        return t * 2

    def same(p: Tensor) -> Tensor:
        return p

    def gradient() -> Tensor:
        x = x0.clone().requires_grad_()
        with saved_tensors_hooks(double, same):
            loss = compiled(x)
        return torch.autograd.grad(loss, x)[0]

    _, expected = gradient(), gradient()
    wrong: list[str] = []

    def run() -> None:
        for _ in range(300):
            try:
                if not torch.equal(gradient(), expected):
                    wrong.append("another gradient")
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"{len(wrong)} of 600: {wrong[:3]}"
