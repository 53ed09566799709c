"""What holds for every test of `cudagraph`: no recordings and no logged warnings of tests before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pieces import Noted

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
