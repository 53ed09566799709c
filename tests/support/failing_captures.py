"""A driver whose captures fail where they are told to, around any other: the simulator, or CUDA.

FailingDriver(driver).fail = Fault("operator", 2, error)     the third operator of a capture raises it, once

What `seen` lists is all that can fail in a capture that does not: each of its points is a test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from capture_simulator import CaptureError, Simulator
from torch.utils._python_dispatch import TorchDispatchMode


class Interrupt(BaseException):
    """As a KeyboardInterrupt, which would stop the tests."""


POINTS = (
    "restore",
    "stage",
    "staged",
    "capture",
    "operator",
    "run",
    "captured",
    "live",
    "checkpoint",
    "disown",
    "launcher",
)


@dataclass
class Fault:
    """Raise `error` the time number `nth` (from 0) that a capture comes to `point`, and not again."""

    point: str
    nth: int
    error: BaseException
    happened: bool = False


@dataclass(eq=False)
class FailingDriver:
    driver: Any
    fail: Fault | None = None
    capturing: bool = False
    seen: dict[str, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def at(self, point: str) -> None:
        count = self.seen.get(point, 0)
        self.seen[point] = count + 1
        if self.fail is not None and self.fail.point == point and self.fail.nth == count:
            fault, self.fail = self.fail, None
            fault.happened = True
            raise fault.error

    def armed(self, fault: Fault | None) -> None:
        """From now on, fail as `fault` says; it is counted from here."""
        self.seen = {}
        self.fail = fault

    def not_permitted(self) -> RuntimeError:
        """What says that something can't be captured."""
        text = "operation not permitted when stream is capturing"
        return CaptureError(text) if isinstance(self.driver, Simulator) else RuntimeError(text)

    def open_pool(self, device: torch.device) -> Any:
        return FailingPool(self.driver.open_pool(device), self)

    def launcher(self, graph: Any) -> Callable[[], None]:
        self.at("launcher")
        launch: Callable[[], None] = self.driver.launcher(graph)
        return launch


class _Counted(TorchDispatchMode):
    def __init__(self, driver: FailingDriver, point: str) -> None:
        super().__init__()
        self.driver, self.point = driver, point

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.driver.at(self.point)
        return func(*args, **(kwargs or {}))


class FailingPool:
    def __init__(self, pool: Any, driver: FailingDriver) -> None:
        self.pool, self.driver = pool, driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    @property
    def broken(self) -> bool:
        return bool(self.pool.broken)

    @broken.setter
    def broken(self, value: bool) -> None:
        self.pool.broken = value

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        with self.pool.staging(), _Counted(self.driver, "stage"):
            yield
        self.driver.at("staged")

    def capture(self, run: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Any, Any]:
        self.driver.at("capture")

        def counted() -> Any:
            self.driver.capturing = True
            try:
                with _Counted(self.driver, "operator"):
                    result = run()
            finally:
                self.driver.capturing = False
            self.driver.at("run")
            return result

        made = self.pool.capture(counted, generators)
        self.driver.at("captured")
        return made  # type: ignore[no-any-return]

    def restore(self, *args: Any) -> None:
        self.driver.at("restore")
        self.pool.restore(*args)

    def checkpoint(self) -> Any:
        self.driver.at("checkpoint")
        return self.pool.checkpoint()

    def live_blocks_are(self, addresses: set[int]) -> bool:
        self.driver.at("live")
        return self.pool.live_blocks_are(addresses)  # type: ignore[no-any-return]

    def disown(self, storage: torch.UntypedStorage) -> None:
        self.driver.at("disown")
        self.pool.disown(storage)


def trying_again(call: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """`call`, for a program that catches an interrupt and calls once more, with what it has."""

    def calling(inputs: list[Any]) -> Sequence[Any]:
        count = len(inputs)
        try:
            return call(inputs)
        except Interrupt:
            assert len(inputs) == count, "the inputs of a call that raised are not whole"
            return call(inputs)

    return calling
