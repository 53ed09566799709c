"""What a graph gets of a budget: the bytes that its device has, and what is alive beside it in a step of many calls.

Budget("fit", ...) --of--> Assignment --fitted--> free bytes --many.py--> moments, steps around its calls
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch

from ..errors import BudgetError
from ..hook import Hook
from .budget import Budget
from .device_memory import Outside, outside_of_step
from .recipe import Recipe
from .simulated import Whole
from .step import ALONE, Moment

UNSEEN = 0.003
"""The share of the peak that a plan leaves free on CUDA: what the allocator rounds up, and kernels' small workspaces.

Measured on an H200 with 20 plans of 4 and 16 large layers.
"""
_FIT = 0.95  # The share of the device's free memory that "fit" may take.


class TightCalls(NamedTuple):
    """How many calls of a graph may hold the least that it can, the first ones, so that the others may hold more.

    Attributes:
        ms: the time of a call that holds the least.
        calls: how many there are.
        peak: bytes that the whole step may take.
        counts: possible numbers of calls that hold the least. Each number comes with what is alive beside one of the
            other calls, and with the bytes of the step while a call at its least runs.
    """

    ms: float
    calls: int
    peak: int
    counts: tuple[tuple[int, tuple[Moment, ...], int], ...]


@dataclass(frozen=True, repr=False)
class Assignment(Budget):
    """A budget with what one graph gets of it. Cache keys contain it, so it has nothing of a solver.

    Attributes:
        free: of "fit" and of `total`: bytes that the device had for a step when the graph was compiled; None: not asked
            yet.
        outside: what the device holds beside the step, for messages.
        over: bytes by which a measured step was over `peak`; the plan takes less by that, see measured.py.
        moments: what is alive beside the graph in a step of many compiled calls, see many.py.
        moments_at_least: the same if graphs that are compiled later hold their least; (): as `moments`.
        apart: how many calls may hold less than others, which is taken if it is faster.
        wholes: the steps around the graph's calls, in which ways that a user can type are tried, see candidates.py.
        least: the graph shall hold the least that it can: other calls hold saved tensors, nobody knows yet how many.
        lenient: if nothing stays under the peak, the least is taken, with a warning: a step was planned before, or has
            gathered parameters, or a loss outside of graphs. Their bytes are an estimate.
        tentative: sizes of data were not measured yet. Another plan follows, so that nothing warns of this one.
        recipe: the plan to make again, in place of a search; None: search for one.
        around: of `check_gradients`: makes of each lossy hook of the plan the one that is put into the graphs.
    """

    free: int | None = None
    outside: str = field(default="", compare=False)
    over: int = 0
    moments: tuple[Moment, ...] = ALONE
    moments_at_least: tuple[Moment, ...] = ()
    apart: TightCalls | None = None
    wholes: tuple[Whole, ...] = ()
    least: bool = False
    lenient: bool = False
    tentative: bool = False
    recipe: Recipe | None = None
    around: Callable[[Hook], Hook] | None = None

    @staticmethod
    def of(budget: Budget, **named: Any) -> Assignment:
        """The assignment of a graph that is the whole step."""
        if isinstance(budget, Assignment):
            return replace(budget, **named)
        return Assignment(budget.peak, budget.max_slowdown, budget.allow, budget.max_error, budget.total, **named)

    @property
    def asked(self) -> Budget:
        """What the user said."""
        return Budget(self.peak, self.max_slowdown, self.allow, self.max_error, self.total)

    @property
    def peak_bytes(self) -> int | None:
        """The peak in bytes. None: the lowest is asked for, or it depends on a device and none is known."""
        return self.free if self.asks_device else cast("int | None", self.peak)


def fitted(budget: Budget, devices: Iterable[torch.device], inputs: Sequence[Any] = ()) -> Assignment:
    """The assignment of a graph that is the whole step, with the bytes that the largest of `devices` has for it.

    `inputs` are those of the graph. The bytes are rounded down to 1/128 of the device, or of `total`: cache keys
    contain them, and a process with nearly as much free memory finds the same plan. Other budgets don't ask the device.
    """
    kinds = ("cuda",) if budget.total is None else ("cuda", "cpu")
    found = {device for device in devices if device.type in kinds} if budget.asks_device else set()
    found = {device for device in found if device.type == "cuda"} or found  # with a GPU, the host's memory is not it
    rooms = [_room(budget.total, device, outside_of_step(device, inputs)) for device in found]
    if not rooms:
        return Assignment.of(budget)
    free, outside = min(rooms, key=lambda room: room[0])
    if free <= 0 and budget.total is not None:
        raise BudgetError(
            f"{budget!r}: {outside} leave nothing for a step. Shard or offload the weights, take an optimizer with "
            "less state, or raise the total"
        )
    return Assignment.of(budget, free=free, outside=str(outside))


def _room(total: int | None, device: torch.device, outside: Outside) -> tuple[int, Outside]:
    """The bytes that `device` has for a step beside `outside`, under `total` or, if that is None, in free memory."""
    if total is not None:
        size, room = total, float(total - outside.nbytes)
    else:
        free, size = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch can give these out
        room = _FIT * free - (outside.nbytes - outside.allocated)
    step = max(size // 128, 1)
    return max(int(room) // step * step, 0), outside
