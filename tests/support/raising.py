"""What tests of errors expect, and functions that are wrong wherever they stand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from aot_hooks import AotHooksError

__all__ = ["fails", "raises", "returns_none"]


@contextlib.contextmanager
def raises(kind: type[AotHooksError], *parts: str) -> Iterator[None]:
    """An error of ours is raised, alone or wrapped by Dynamo, and its message has all `parts`."""
    with pytest.raises(Exception) as info:
        yield
    error: BaseException | None = info.value
    while error is not None and not isinstance(error, AotHooksError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    assert type(error) is kind, f"expected a {kind.__name__}, got {info.value!r}"
    missing = [part for part in parts if part not in str(error)]
    assert not missing, f"{missing} missing in: {error}"


def fails(x: Any) -> Any:
    raise KeyError("no such thing")


def returns_none(x: Tensor) -> Any:
    x * 2
