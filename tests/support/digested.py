"""For tests of digests: functions made of a source text, and closures made anew."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["function", "scale"]


def function(source: str, name: str | None = None, **globals: Any) -> Any:
    """The function that `source` defines, in a module of its own."""
    namespace: dict[str, Any] = {"torch": torch, "math": math, "__name__": "user", **globals}
    exec(textwrap.dedent(source), namespace)
    return namespace[name or next(k for k in reversed(namespace) if callable(namespace[k]))]


def scale(k: Any) -> Callable[[Any], Any]:
    return lambda x: x * k
