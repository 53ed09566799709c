"""What stands before each line of docs/footguns.md about hooks."""

# ruff: noqa: F401 - the lines of the page use what is imported here

import asyncio
import decimal
import types

import torch

import aot_hooks
from aot_hooks import KEEP, Hook, float8, policies, saved_tensors_hooks

w = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()


def model(w):
    h = torch.tanh(w @ w)  # the saved tensor that hooks pack
    return h @ h


def compiled(fn=model, **options):
    return torch.compile(fn, backend="aot_hooks", options={"inner": "aten", **options})


def grad(fn):
    return torch.autograd.grad(fn(w).sum(), w)[0]


def hooked(pack, unpack=lambda packed: packed, fn=None):
    """The gradient of one step with these hooks."""
    with saved_tensors_hooks(pack, unpack):
        return grad(compiled() if fn is None else fn)


def same(x):
    return x


def double(x):  # a wrong hook, so that a gradient shows whether it ran
    return x * 2


class Scale:
    def times(self, x):
        return x * 2


def autocast(fn, x):
    with torch.autocast("cpu", torch.bfloat16):
        return fn(x)


@torch.no_grad()
def write_before_backward(fn, parameter):
    with torch.enable_grad():
        loss = autocast(fn, w).sum()
    parameter.mul_(2)
    loss.backward()


scale, config, table = Scale(), types.SimpleNamespace(k=2.0), torch.full((8, 4096), 2.0)
plain = grad(compiled())
assert not torch.equal(hooked(double), plain)


async def waits_in_a_context():
    with saved_tensors_hooks(double, same):
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def another_task():
    await asyncio.sleep(0)
    return grad(compiled())


async def both():
    _, gradient = await asyncio.gather(waits_in_a_context(), another_task())
    return gradient


def hooked_inside(w):
    with saved_tensors_hooks(double, same):
        return model(w)


def changed_inside(pack):
    """Two steps in one context, and a change between them."""
    step = compiled()
    with saved_tensors_hooks(pack, same):
        grad(step)
        config.k += 1
        grad(step)
