"""What operators allocate inside on a CPU, beside the table that plans count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from profiled import most_allocated
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import aot_hooks
from aot_hooks.graphs.workspaces import workspace_bytes

Tensor = torch.Tensor
ATEN = torch.ops.aten
OF_A_THREAD = 64 << 10  # buffers of a fixed size, which plans don't count: 51 KB for a small image in bfloat16
HALVES = (torch.float32, torch.bfloat16)
# shape of the input and the weight, stride, padding, transposed, groups
CONVOLUTIONS: dict[str, Any] = {
    "3x3": ((8, 16, 32, 32), (32, 16, 3, 3), 1, 1, False, 1),
    "strided": ((8, 3, 32, 32), (16, 3, 4, 4), 2, 1, False, 1),
    "transposed": ((8, 32, 8, 8), (32, 16, 4, 4), 2, 1, True, 1),
    "from one pixel": ((8, 32, 1, 1), (32, 32, 4, 4), 1, 0, True, 1),
    "depthwise": ((8, 16, 32, 32), (16, 1, 3, 3), 1, 1, False, 16),
    "1d": ((8, 16, 256), (32, 16, 5), 1, 2, False, 1),
    "3d": ((2, 4, 8, 8, 8), (8, 4, 3, 3, 3), 1, 1, False, 1),
    "one small image": ((1, 4, 8, 8), (4, 4, 3, 3), 1, 1, False, 1),
}


def inside(f: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> tuple[int, int]:
    """The bytes that the only operator of `f` takes beside its results: measured, and as plans count them."""
    graph = make_fx(f, tracing_mode="fake")(*args).graph
    f(*args)
    results = {r.untyped_storage().data_ptr(): r for r in _tensors(f(*args))}
    made = sum(r.untyped_storage().nbytes() for r in results.values())
    return most_allocated(lambda: f(*args), folder) - made, sum(map(workspace_bytes, graph.nodes))


def _tensors(result: Any) -> list[Tensor]:
    return [r for r in (result if isinstance(result, tuple) else (result,)) if isinstance(r, Tensor)]


@pytest.mark.parametrize("dtype", HALVES)
def test_convolutions_take_at_most_what_plans_count(dtype: torch.dtype, tmp_path: Path) -> None:
    measured, counted, own = 0, 0, ()

    def forward(x: Tensor, w: Tensor) -> Any:
        return ATEN.convolution.default(x, w, None, *own)

    def backward(g: Tensor, x: Tensor, w: Tensor) -> Any:
        return ATEN.convolution_backward.default(g, x, w, [g.shape[1]], *own, [True, True, True])

    for name, (x_shape, w_shape, stride, padding, transposed, groups) in CONVOLUTIONS.items():
        x, w = torch.randn(x_shape).to(dtype), torch.randn(w_shape).to(dtype)
        d = x.dim() - 2
        own = ([stride] * d, [padding] * d, [1] * d, transposed, [0] * d, groups)

        g = torch.randn_like(forward(x, w))
        for f, args in ((forward, (x, w)), (backward, (g, x, w))):
            took, bound = inside(f, args, tmp_path)
            assert took <= bound + OF_A_THREAD, (name, f.__name__, took, bound)
            measured, counted = measured + took, counted + bound
    # No plan would fit a budget if each bound were far too high. An AMD Zen 5 multiplies bfloat16 itself and orders
    # fewer images anew: 2.97 there, at most 2.5 on others.
    assert counted <= 3.5 * measured


def test_other_operators_take_at_most_what_plans_count(tmp_path: Path) -> None:
    x, image, ones = torch.randn(64, 256), torch.randn(4, 8, 16, 16), torch.ones(8)

    def norm_backward(x: Tensor, s: Tensor) -> Any:
        return ATEN.native_batch_norm_backward.default(x, x, s, s, s, s, s, True, 1e-5, [True, True, True])

    rows = torch.zeros(64, 512).bfloat16(), torch.arange(64)[:, None], torch.ones(64, 1).bfloat16()
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "scatter": (lambda x, i, y: ATEN.scatter.src(x, 1, i, y), rows),
        "scatter_add": (lambda x, i, y: ATEN.scatter_add.default(x, 1, i, y), rows),
        "dropout": (lambda x: ATEN.native_dropout.default(x, 0.2, True), (x,)),
        "dropout backward": (lambda g, m: ATEN.native_dropout_backward.default(g, m, 1.25), (x, x > 0)),
        "dropout backward in half": (
            lambda g, m: ATEN.native_dropout_backward.default(g, m, 1.25),
            (x.bfloat16(), x > 0),
        ),
        "dropout in half": (lambda x: ATEN.native_dropout.default(x, 0.2, True), (x.bfloat16(),)),
        "batch norm": (norm_backward, (image, ones)),
        "upsample": (lambda x: ATEN.upsample_bilinear2d.default(x, [32, 32], False), (image,)),
    }
    for name, (f, args) in programs.items():
        took, bound = inside(f, args, tmp_path)
        assert 0 < took <= bound + 1024 and bound <= 2 * took, (name, took, bound)


@pytest.mark.parametrize("dtype", HALVES)
def test_losses_take_at_most_what_plans_count(dtype: torch.dtype, tmp_path: Path) -> None:
    x, y = torch.rand(2, 64, 256).to(dtype)
    whole = [
        *(ATEN.binary_cross_entropy.default, ATEN.binary_cross_entropy_with_logits.default, ATEN.mse_loss.default),
        *(ATEN.huber_loss.default, ATEN.smooth_l1_loss.default, ATEN.soft_margin_loss.default),
    ]
    programs: list[tuple[Any, ...]] = [(loss, x, y) for loss in whole]
    programs.append((lambda x: ATEN.logsumexp.default(x, [-1]), x))
    for f, *args in programs:
        took, bound = inside(lambda *args, f=f: f(*args), tuple(args), tmp_path)
        assert took <= bound + 1024 and bound <= 2 * took + 1024, (f, took, bound)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(
            nn.ConvTranspose2d(32, 32, 4, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1)
        )
        self.judge = nn.Sequential(nn.Conv2d(16, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(self.make(x)).square().mean()


def test_a_step_of_convolutions_takes_at_most_what_its_plan_says(tmp_path: Path) -> None:
    """Products of images and a mask: without the table, the step took 1.3 times its plan."""
    torch.manual_seed(0)
    model, x = Images(), torch.randn(8, 32, 1, 1)
    policy = aot_hooks.budget(max_slowdown=1.0, max_error=0)
    step = torch.compile(model, backend="aot_hooks", options={"inner": "aten", "policy": policy})
    for _ in range(2):
        step(x).backward()
    model.zero_grad(set_to_none=True)
    (plan,) = aot_hooks.last_plans(step)
    took = most_allocated(lambda: step(x).backward(), tmp_path)
    assert took <= plan.peak_bytes <= 1.2 * took
