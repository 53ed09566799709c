"""`explain` of a whole step: how long the device waits for the host, and for which lines."""

from __future__ import annotations

import random
import sys
import time

import pytest
import torch
from torch.nn import functional as F
from whole_steps import Net, batches, sgd, steps

import cudagraph

SLEEP_S = 0.06


def slow_on_the_host(device, sleeps):
    """A step that reads a number, so that it can't be captured, and then has the device wait."""
    net = Net().to(device)
    optimizer = sgd(net)

    @cudagraph.whole_step
    def step(x, y):
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scale = loss.item()
        for _ in range(3):
            time.sleep(sleeps / 3)
        return loss * scale

    return step


def test_the_line_for_which_the_device_waits_is_named_with_its_time(device):
    step = slow_on_the_host(device, SLEEP_S)
    for x, y in batches(device, 3):
        step(x, y)
    found = cudagraph.explain(step, x, y)
    assert isinstance(found, cudagraph.StepExplanation) and "reads its result on the host" in found.refused
    assert "time.sleep(sleeps / 3)" in found.waits[0].line and "test_whole_step_waits.py" in found.waits[0].line
    assert 0.6 * SLEEP_S < found.waits[0].seconds <= found.waited <= found.seconds
    assert found.waited == sum(wait.seconds for wait in found.waits) and not found.replayed
    text = str(found)
    assert "runs without a CUDA graph" in text and "the device waited for the host" in text
    assert "time.sleep(sleeps / 3)" in text.splitlines()[2]


def test_python_code_that_calls_nothing_is_looked_at(device):
    """The interpreter changes threads by itself, also if this thread never gives the lock back."""
    net = Net().to(device)

    @cudagraph.whole_step
    def step(x):
        out, until = net(x).sum(), time.perf_counter() + SLEEP_S
        out.item()
        while time.perf_counter() < until:
            pass
        return out

    interval = sys.getswitchinterval()
    for x, _ in batches(device, 2):
        step(x)
    found = cudagraph.explain(step, x)
    busy = sum(wait.seconds for wait in found.waits if "until" in wait.line or "pass" in wait.line)
    assert busy > 0.5 * SLEEP_S and sys.getswitchinterval() == interval


def test_a_device_with_work_does_not_wait(device):
    """The host sleeps as long, but the device has been given enough."""
    net, work_s = Net().to(device), 3 * SLEEP_S

    @cudagraph.whole_step
    def step(x):
        out = net(x) * random.random()  # so that it is no graph
        if device.type == "cuda":
            torch.cuda._sleep(int(work_s * 2e9))  # cycles
        time.sleep(SLEEP_S)
        return out

    for x, _ in batches(device, 3):
        step(x)
    if device.type == "cpu":
        step.driver.is_idle = False
    found = cudagraph.explain(step, x)
    assert "random numbers" in found.refused
    assert found.waited < 0.3 * SLEEP_S and found.seconds > 0.6 * SLEEP_S


def test_a_replay_and_an_error_of_the_step(device):
    """A call is a real step, also here."""
    step, expected, models, _ = steps(device)
    for x, y in batches(device, 3):
        step(x, y)
        expected(x, y)
    found = cudagraph.explain(step, x, y)
    expected(x, y)
    assert found.replayed and (found.refused, found.update_refused) == ("", "") and "one CUDA graph" in str(found)
    assert all(map(torch.equal, *(each.state_dict().values() for each in models)))
    models[0].forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        cudagraph.explain(step, x, y)
