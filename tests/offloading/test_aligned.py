"""Kernels that read fetched tensors load 16 bytes at once."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aot_hooks.offloading import at_run_time, transfers
from aot_hooks.steps.plan import Terms

# In a process of its own, because it pretends that there is a GPU. Prints the arguments that each kernel may take to
# be aligned, beside all of its arguments.
PROGRAM = """
import re
import triton_code
triton_code.pretend()
import torch
from aot_hooks.offloading import at_run_time as r, transfers as t

device = torch.device("cuda", 0)

def backward(host, ticket, grad, weight):
    x = t.reload_wait(t.reload_start(host, device), host, device)
    y, = r.reload_together(ticket, [], device, r.layouts_of([host]))
    return x * grad, (y * grad) @ weight

def inputs():
    host = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(1, dtype=torch.int64)
    return *host, *(torch.empty(64, 64, dtype=torch.bfloat16, device=device) for _ in range(2))

for line in triton_code.code(backward, inputs).splitlines():
    if "triton_meta=" in line:
        arguments = re.search(r"'signature': {(.*?)}", line)[1].count("*")
        print(arguments, len(re.findall(r"\\(\\d+,\\): \\[\\['tt.divisibility', 16\\]\\]", line.split("'xnumel'")[-1])))
"""


@pytest.mark.slow
def test_kernels_load_16_bytes_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1] / "support",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert kernels
    assert all(aligned == pointers + 1 for pointers, aligned in kernels), "all pointers, and the number of elements"


@pytest.mark.parametrize("max_stall_ms", [0.0, math.inf])
def test_what_comes_back_is_aligned(max_stall_ms: float) -> None:
    """A tensor that stays may be a view that begins anywhere."""
    terms = Terms(1 << 30, max_stall_ms, 1.0, 1.0).numbers()
    x = torch.arange(4096.0)[1:2049]
    assert x.is_contiguous()
    assert x.data_ptr() % 16
    xs = x, x[8:]
    (ticket,) = at_run_time.offload_together(xs, transfers.NO_LIMIT, terms, [])
    backs = at_run_time.reload_together(ticket, [], x.device, at_run_time.layouts_of(xs))
    for back, expected in zip(backs, xs, strict=True):
        assert back.data_ptr() % 16 == 0
        assert torch.equal(back, expected)
