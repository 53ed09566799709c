"""Where whole programs run: on the simulator of captures, and on CUDA with both inner compilers where there is one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cudagraph.backend import backend_with


@dataclasses.dataclass
class Place:
    """Where programs run: on CUDA, or on the CPU with a simulator."""

    device: torch.device
    driver: Any
    inner: str

    def backend(self, **options):
        return backend_with(self.driver, {"inner": self.inner, **options})


PLACES = [
    "simulator",
    pytest.param("cuda aten", marks=pytest.mark.gpu),
    pytest.param("cuda inductor", marks=[pytest.mark.gpu, pytest.mark.slow]),
]
