"""What a terminal shows while a budget plans and compiles."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from steps import ATEN
from torch import nn

from aot_hooks import budget, enable
from aot_hooks.planning import progress


class Terminal:
    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal, self.written = is_terminal, ""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None: ...


def train() -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    with enable(budget(max_slowdown=0.5), options=ATEN):
        compiled(torch.randn(8, 32)).sum().backward()


def test_a_terminal_shows_one_line_that_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    train()
    first, *lines = terminal.written.split("\r\x1b[K")
    assert first == "" and "\n" not in terminal.written
    assert lines[0].startswith("aot_hooks: budget(max_slowdown=0.5): planning: ")
    assert any("1 plans tried, the least takes 0.00 GiB" in line for line in lines)
    assert lines[-2].startswith("aot_hooks: budget(max_slowdown=0.5): compiling forward and backward: ")
    assert lines[-1] == "" and max(map(len, lines)) <= 110


def test_elsewhere_one_record_says_that_planning_begins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    terminal = Terminal(False)
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, logger="aot_hooks"):
        train()
    said = [r.getMessage() for r in caplog.records if "planning and compiling" in r.getMessage()]
    assert said == ["aot_hooks: budget(max_slowdown=0.5): planning and compiling a graph"]
    assert "\r" not in terminal.written


def test_nothing_is_shown_of_a_plan_that_is_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    progress.tried(1 << 30)
    progress.say("compiling")
    assert terminal.written == ""
