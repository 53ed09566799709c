"""Where whole programs run: on the simulator of captures, and on CUDA with both inner compilers where there is one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from cudagraph.backend import compile_graph
from cudagraph.options import Options
from cudagraph.tree.driver import cuda_driver


def backend_with(driver: Any, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """`backend="cudagraph_tree"` with these options; `driver` makes its captures, or CUDA's own if it is None."""
    driver, parsed = cuda_driver() if driver is None else driver, Options.parse(options)

    # A function, which nobody copies. Lightning copies deeply what `torch.compile` is given, where it is imported: two
    # simulators would free the same storages.
    def backend(gm: Any, inputs: Any) -> Any:
        return compile_graph(gm, inputs, mode=None, options=parsed, driver=driver)

    return backend


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
