"""What a device holds beside a step, so that a budget can be the whole of its memory: `budget(total="80GiB")`, "fit".

      |<---------------------------- total, 80 GiB ---------------------------->|
      | allocated now: weights, data | optimizer state, later | left for a step |
        16.1                           32.1                     31.8

The optimizer makes its state in its first step, after the first graphs are compiled. So its bytes are found by a step
on meta tensors: no memory is taken, and no parameter changes.
"""

from __future__ import annotations

import copy
import gc
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import BudgetWarning, warn_user
from ..settings.byte_sizes import size_text
from ..steps.parameters import plain_parts
from ..torch_private import values as torch_values

_WITHOUT_FUSION = {"foreach": False, "fused": False, "capturable": False}  # these have no implementation on meta


@dataclass(frozen=True)
class Outside:
    """Bytes on a device that do not belong to a step.

    Attributes:
        allocated: now: parameters, buffers, data, and state that an optimizer has made.
        state: that each class of optimizers will make in its first step.
    """

    allocated: int
    state: tuple[tuple[str, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return self.allocated + sum(nbytes for _, nbytes in self.state)

    def __str__(self) -> str:
        parts = [f"weights and data {size_text(self.allocated)}"]
        parts += [f"state of {name} {size_text(nbytes)} (from the second step on)" for name, nbytes in self.state]
        return ", ".join(parts)


def outside_of_step(device: torch.device, inputs: Sequence[Any]) -> Outside:
    """What `device` holds now, and what optimizers will add.

    On a CPU nothing knows what is allocated: there `inputs`, of a graph, and the state of optimizers count.
    """
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
    else:
        storages = {
            torch_values.storage_key(part): part.untyped_storage().nbytes()
            for x in inputs
            if isinstance(x, torch.Tensor)
            for part in plain_parts(x)
            if part.device == device and part.layout is torch.strided
        }
        states = [state for optimizer in _optimizers() for state in optimizer.state.values()]
        allocated = sum(storages.values()) + sum(map(_tensor_bytes, states))
    return Outside(allocated, tuple(sorted(_future_state(device).items())))


def _future_state(device: torch.device) -> Counter[str]:
    """The bytes of state that the live optimizers have not made yet for parameters on `device`, by their class."""
    found: Counter[str] = Counter()
    counted: set[int] = set()  # a parameter has one optimizer; one that was replaced may not be collected yet
    for optimizer in _optimizers():
        groups = [
            {**group, "params": _without_state(optimizer, group, device, counted)} for group in optimizer.param_groups
        ]
        if any(group["params"] for group in groups):
            found[type(optimizer).__name__] += _state_bytes(optimizer, groups)
    return +found


def _without_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device, counted: set[int]
) -> list[torch.Tensor]:
    """The parameters of `group` on `device` without state, as plain tensors. They are `counted` from now on."""
    new = [p for p in group["params"] if p.requires_grad and p not in optimizer.state and id(p) not in counted]
    counted.update(map(id, new))
    return [part for p in new for part in plain_parts(p) if part.device == device]


def _optimizers() -> Iterator[torch.optim.Optimizer]:
    """The live optimizers, without those around others, as Accelerate and Lightning make them."""
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer))
    return (each for each in found if not _is_around_another(each))


def _is_around_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state of `optimizer` is that of another which it holds, and which is counted by itself."""
    held = (x for x in vars(optimizer).values() if isinstance(x, torch.optim.Optimizer) and x is not optimizer)
    return any(x.state is optimizer.state for x in held)


def _state_bytes(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> int:
    """The bytes of the state that `optimizer` makes for the parameters of `groups`."""
    kind = type(optimizer)
    if not f"{kind.__module__}.".startswith("torch.optim.") or kind is torch.optim.LBFGS:
        return _unknown(kind.__name__)
    # without the hooks of the program's, and without a scheduler's replacement of the method
    step = getattr(kind.step, "__wrapped__", kind.step)
    nbytes = 0
    for group in groups:
        twin = copy.copy(optimizer)
        twin.state, twin.param_groups = defaultdict(dict), [_on_meta(group)]
        try:
            step(twin)
        except RuntimeError:  # Adafactor reads a norm, which has no value on meta; its state is made by then
            if not all(twin.state.get(p) for p in twin.param_groups[0]["params"]):
                return _unknown(kind.__name__)
        nbytes += sum(map(_tensor_bytes, twin.state.values()))
    return nbytes


def _unknown(name: str) -> int:
    """Warns that the state of an optimizer counts nothing, as nobody knows it before the first step."""
    warn_user(
        f"aot_hooks: a budget of all that a device holds counts no state of {name} before its first step makes it, "
        "because only optimizers of torch are known. Lower the total by that state, or give the peak of a step",
        BudgetWarning,
    )
    return 0


def _tensor_bytes(state: dict[str, Any]) -> int:
    """The bytes of the tensors in the state of one parameter, without its counts of steps."""
    tensors = (x for x in state.values() if isinstance(x, torch.Tensor) and x.dim() > 0)
    return sum(x.numel() * x.element_size() for x in tensors)


def _on_meta(group: dict[str, Any]) -> dict[str, Any]:
    parameters = []
    for p in group["params"]:
        meta = torch.empty_like(p, device="meta").requires_grad_()
        meta.grad = torch.empty_like(meta)
        parameters.append(meta)
    settings = {name: value for name, value in _WITHOUT_FUSION.items() if name in group}
    rates = {name: float(value) for name, value in group.items() if name == "lr"}  # may be a tensor on a device
    return {**group, **settings, **rates, "params": parameters}
