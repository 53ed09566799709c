"""What stands before each line of docs/footguns.md about CUDA graphs. On a CPU the tests replace `graphed` and more."""

# ruff: noqa: F401 - the lines of the page use what is imported here

import contextlib
import io
import os
import random
import threading
import types

import numpy
import torch

import cudagraph

device = "cuda" if torch.cuda.is_available() else "cpu"
ones, w = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device, requires_grad=True)


def graphed(fn, **options):
    return torch.compile(fn, backend="cudagraph_tree", options={"inner": "aten", **options})


def third(fn, x):
    """The result of the third step. The first one warms up, the second is recorded, the third is replayed."""
    for _ in range(3):
        result = None
        cudagraph.mark_step_begin()
        result = fn(x)
    return result


def read(x):
    return x.clone()


class Config:
    scale = 2.0


class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * numbers.scale


numbers, net, settings, flag = (
    types.SimpleNamespace(scale=2.0),
    Scaled(),
    types.ModuleType("settings"),
    threading.Event(),
)
deep = types.SimpleNamespace(a=types.SimpleNamespace(b=numbers))
settings.scale = 2.0
