"""The `error` that a hook of the library states is above that of normal data, and not far above it."""

from __future__ import annotations

import pytest
import torch

from aot_hooks import Hook, cast, float8, int4, int8

BLOCKS = (8, 16, 32, 64, 128, 256, 512, 1024)
HOOKS = [
    *[int8(b, s, power_of_two=p) for b in BLOCKS for s in (False, True) for p in (False, True)],
    *[int4(b, s) for b in BLOCKS for s in (False, True)],
    *[float8(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)],
    *[float8(scaling=scaling) for scaling in ("tensorwise", "blockwise")],
    *[cast(dtype) for dtype in (torch.bfloat16, torch.float16)],
]


@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_the_stated_error_is_that_of_normal_data(hook: Hook) -> None:
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    error = float((hook.unpack(hook.pack(x)) - x).norm() / x.norm())
    assert hook.error is not None
    assert error < hook.error < 2.6 * error
