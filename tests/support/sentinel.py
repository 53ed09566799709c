"""Hooks that show: what they pack comes back larger, so a gradient tells exactly which saved tensors were packed.

      x --@ w1--> h1 --@ w2--> h2 --@ w3--> out          saved: x, w1, h1, w2, h2, w3

Products of matrices are never recomputed, so a `Chain` saves the same tensors compiled and eager; all its numbers are
small integers, so its gradients are exact and compared bitwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aot_hooks import KEEP, Hook, SavedTensor, saved_tensors_hooks, saved_tensors_policy
from aot_hooks.policies import everything

__all__ = [
    "CONTEXTS",
    "DOUBLE",
    "TRIPLE",
    "Chain",
    "around_second",
    "around_second_by",
    "assert_same",
    "compiled",
    "double",
    "eager",
    "gradients",
    "graph_count",
    "hand_gradients",
    "integers",
    "quadruple",
    "scale",
    "seen",
]


def double(x: Tensor) -> Tensor:
    return x * 2


quadruple = (double, double)


def scale(k: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """A pair made anew: what it packs comes back `k` times as large."""
    return lambda x: x * k, lambda x: x.clone()


DOUBLE, TRIPLE = Hook("double", *scale(2)), Hook("triple", *scale(3))


# contexts that quadruple what they pack
CONTEXTS = {
    "hooks": lambda: saved_tensors_hooks(*quadruple),
    "policy": lambda: saved_tensors_policy(everything(Hook("quadruple", *quadruple))),
}


def integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape).float()


class Chain(nn.Module):
    """A product of matrices; `outputs` names intermediates ("h1") that it returns as well."""

    def __init__(self, *widths: int, outputs: Sequence[int] = ()) -> None:
        super().__init__()
        self.weights = nn.ParameterList(integers(a, b) for a, b in itertools.pairwise(widths))
        self.outputs = tuple(outputs)

    def forward(self, x: Tensor) -> Any:
        kept = []
        for i, w in enumerate(self.weights, 1):
            x = x @ w
            if i in self.outputs:
                kept.append(x)
        return (x, *kept) if kept else x


def compiled(fn: Callable[..., Any], *, fullgraph: bool = True, dynamic: bool | None = None, **options: Any) -> Any:
    options = {"inner": "aten"} | options
    return torch.compile(fn, backend="aot_hooks", fullgraph=fullgraph, dynamic=dynamic, options=options)


def eager(fn: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """In place of `compiled`: no compiler."""
    return fn


def around_second(model: Chain, *hooks: Any, **scope: str) -> Callable[[Tensor], Tensor]:
    """The chain with a context around its second product."""

    def forward(x: Tensor) -> Tensor:
        w1, w2, w3 = model.weights
        h1 = x @ w1
        with saved_tensors_hooks(*hooks, **scope):
            h2 = h1 @ w2
        return h2 @ w3

    return forward


def around_second_by(model: Chain, hooks: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    """The same with what `hooks` gives in each call."""

    def forward(x: Tensor) -> Tensor:
        w1, w2, w3 = model.weights
        h1 = x @ w1
        with saved_tensors_hooks(*hooks()):
            h2 = h1 @ w2
        return h2 @ w3

    return forward


def clone(x: Tensor) -> Tensor:
    return x.clone()


def gradients(call: Callable[..., Any], model: Chain, x: Tensor) -> list[Tensor]:
    """Gradients of the (first) output's sum for `x` and the weights."""
    out = call(x)
    out = out[0] if isinstance(out, tuple) else out
    return list(torch.autograd.grad(out.sum(), [x, *model.parameters()]))


def hand_gradients(model: Chain, x: Tensor, /, **factor: float) -> list[Tensor]:
    """What `gradients` gives if the saved tensors named in `factor` ("x", "h1", "w2"; "h", "w" for all) come back that
    many times as large."""
    weights = [w.detach() for w in model.weights]
    values = [x.detach()]
    for w in weights:
        values.append(values[-1] @ w)
    g = torch.ones_like(values[-1])
    grads: list[Tensor] = []
    for i in reversed(range(len(weights))):
        left = factor.get("x", 1) if i == 0 else factor.get(f"h{i}", factor.get("h", 1))
        right = factor.get(f"w{i + 1}", factor.get("w", 1))
        grads.insert(0, (left * values[i]).T @ g)
        g = g @ (right * weights[i]).T
    return [g, *grads]


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs: got {a}, expected {b}"


def graph_count() -> int:
    """Graphs compiled so far in this process; read before and after."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def seen(call: Callable[..., Tensor], *args: Tensor) -> list[SavedTensor]:
    """Rows of the intermediates with names; each once."""
    rows: dict[Any, SavedTensor] = {}

    class Spy:  # another class each time: equal policies are asked about what others of them were asked about
        def __call__(self, saved: SavedTensor) -> Hook:
            if saved.checkpoint_names:
                rows[saved.checkpoint_names, saved.op, saved.shape] = saved
            return KEEP

    with saved_tensors_policy(Spy()):
        call(*args).sum().backward()
    return list(rows.values())
