"""Generators of random numbers on the host, of Python and NumPy: a replay would draw none of their numbers.

before a capture: the states of Python's own, NumPy's own, and those that the step reaches
after it:         another state means that the step drew there; a capture that fails puts all back
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

Access = tuple[Callable[[], Any], Callable[[Any], Any]]


def _access(value: Any) -> Access | None:
    """Functions that return and set the state of a generator; None if `value` is none."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # that one has no state
        return value.getstate, value.setstate
    numpy: Any = sys.modules.get("numpy.random")  # unless it is imported, nothing is of it
    if numpy is None:
        return None
    if isinstance(value, numpy.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, numpy.Generator):
        value = value.bit_generator
    if isinstance(value, numpy.BitGenerator):
        return (lambda: value.state), (lambda state: setattr(value, "state", state))
    return None


class HostRandom:
    """The states of all generators on the host that a step may draw from: the global ones, and those of `objects`."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._generators: list[Access] = [(random.getstate, random.setstate)]
        if (numpy := sys.modules.get("numpy.random")) is not None:
            self._generators.append((numpy.get_state, numpy.set_state))
        self._generators += [access for value in objects if (access := _access(value)) is not None]
        self._states = [read() for read, _ in self._generators]

    def changed(self) -> bool:
        """Whether numbers were drawn since this was made."""
        now = [read() for read, _ in self._generators]
        return any(pickle.dumps(a) != pickle.dumps(b) for a, b in zip(now, self._states, strict=True))

    def restore(self) -> None:
        for (_, write), state in zip(self._generators, self._states, strict=True):
            write(state)
