"""What parameters have on the device beside the calls of a step: gradients, and memory that is gathered for a while.

Also whether anything but the calls of a step holds what passes from one to the next, as from block to block of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .recorder import Phase, Step

# How often the bytes of a call's gathered parameters count: FSDP2 keeps the buffer that it has gathered into until it
# gathers the next.
_GATHERED = 2


def gradient_bytes(step: Step, *, made_before: bool) -> list[int]:
    """The bytes of gradients that earlier backwards left, at each event. They are those that parameters have now.
    Of a DTensor the part of this process counts.

    `made_before`: also of parameters that had a gradient before the step, to which a backward adds.
    """
    found: list[int] = []
    known: dict[int, int] = {}
    for event in step.events:
        found.append(sum(known.values()))
        if event.phase is Phase.BACKWARD:
            call = step.calls[event.call]
            for ref, accumulates in zip(call.parameters, call.accumulates, strict=True):
                if (p := ref()) is not None and p.grad is not None and (made_before or not accumulates):
                    known[id(p)] = local_bytes(p.grad)
    return found


def leaf_bytes(step: Step) -> int:
    """The bytes of all parameters, and other leaves, that the calls of a step have noted."""
    noted = {id(p): p for call in step.calls for ref in call.parameters if (p := ref()) is not None}
    return sum(map(local_bytes, noted.values()))


def gathered_bytes(step: Step) -> tuple[int, int]:
    """The bytes of parameters that have memory for a part of the step only, as with FSDP2: of the largest call, and of
    the first. With the buffer beside them.

    Those of the first call always count: when it begins again, they were gathered again or never freed.
    """
    noted = [[p for ref in call.parameters if (p := ref()) is not None] for call in step.calls]
    freed = [any(_is_freed(part) for p in parameters for part in plain_parts(p)) for parameters in noted]
    if not any(freed):
        return 0, 0
    gathered = [_GATHERED * sum(map(_parameter_bytes, parameters)) for parameters in noted]
    return max(n for i, n in enumerate(gathered) if freed[i] or not i), gathered[0]


def frees_inputs(step: Step, graph: Any) -> bool:
    """Whether the calls of `graph` are a chain, and what is between two of them is held by them alone.

    So it is a value of the step, as others inside of a graph are. A program that keeps hidden states holds their
    memory, also as `hidden.detach()`.
    """
    calls = [call for call in step.calls if call.what.graph is graph]
    last = step.events[-1].call  # this call may hold its inputs still: the end of the step is the end of its backward
    held = any(not memory.expired() for call in calls if call.number != last for memory in call.inputs)
    return len(calls) > 1 and not held and all(call.inputs and call.is_chained for call in calls[1:])


def plain_parts(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """`x`, or the plain tensors inside of a wrapper subclass, such as the local tensor of a DTensor."""
    if not hasattr(x, "__tensor_flatten__"):
        yield x
        return
    for part in (getattr(x, name) for name in x.__tensor_flatten__()[0]):
        if isinstance(part, torch.Tensor):  # from torch 2.13 on, parts of a DTensor are its mesh, too
            yield from plain_parts(part)


def _is_freed(x: torch.Tensor) -> bool:
    """Whether the storage of `x`, a plain tensor, was resized to 0 bytes."""
    return x.layout is torch.strided and x.numel() > 0 and x.untyped_storage().nbytes() == 0


def _parameter_bytes(x: torch.Tensor) -> int:
    return local_bytes(x) if isinstance(x, torch.nn.Parameter) else 0


def local_bytes(x: torch.Tensor) -> int:
    """The bytes of the elements of `x`, in this process."""
    return sum(part.numel() * part.element_size() for part in plain_parts(x))
