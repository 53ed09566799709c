"""What holds for every test of `cudagraph`: no recordings and no logged warnings of tests before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from capture_simulator import Simulator
from pieces import Noted
from places import PLACES, Place
from tree_programs import World
from whole_steps import on_simulator

import cudagraph
from cudagraph.tree import dispatch


@pytest.fixture(autouse=True)
def fresh_cudagraph() -> Iterator[None]:
    cudagraph.reset()
    yield
    cudagraph.reset()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Captures are noted in this driver, and run as they are."""
    driver = Noted()
    monkeypatch.setattr(dispatch, "capture", driver.capture)
    return driver


@pytest.fixture(params=["simulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where whole steps run: the simulator has the CPU as its device, and optimizers may be capturable there."""
    if request.param == "cuda":
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        return torch.device("cuda", torch.cuda.current_device())
    on_simulator(monkeypatch)
    return torch.device("cpu")


@pytest.fixture
def simulated() -> World:
    """A program that runs on the simulator."""
    return World("simulator")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "simulator":
        return Place(torch.device("cpu"), Simulator(), "aten")
    return Place(torch.device("cuda", 0), None, request.param.split()[1])
