"""`torch.compile(..., backend="cudagraph_tree", options={...})`, read once and frozen.

    options dict + environment --parse--> Options, a value

A replay reads no options: a recording is built for them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import OptionError

CHOICES = {"inner": ("aten", "inductor"), "held_outputs": ("error", "copy")}
LOWEST = {"rerecord_limit": 0, "size_limit": 0, "warmup_steps": 1}
OR_ERROR_VARIABLES = ("CUDAGRAPH_OR_ERROR", "TORCHINDUCTOR_CUDAGRAPH_OR_ERROR")


@dataclass(frozen=True)
class Options:
    """How functions are captured.

    Attributes:
        inner: "aten" (AOTAutograd's graphs as they are) or "inductor".
        or_error: raise `NotCapturableError` where something would run without a graph. Default: True if
            `CUDAGRAPH_OR_ERROR=1` or `TORCHINDUCTOR_CUDAGRAPH_OR_ERROR=1` is set, else False.
        held_outputs: what happens to an output that is still held when its memory is reused: "error" (reading it
            raises) or "copy" (it is copied out and stays valid).
        rerecord_limit: for how many new sets of static addresses a function is recorded again at one node of the tree;
            known sets are free. Beyond it the function runs without a graph there, with one warning. With 0, inputs
            whose addresses repeat go on being copied, too.
        size_limit: for how many sizes (values of its integer inputs, shapes of its tensors) a function is recorded.
            Beyond it new sizes run without a graph, with one warning.
        warmup_steps: how often a function runs uncaptured before it is recorded, at least 1.
    """

    inner: str = "aten"
    or_error: bool = False
    held_outputs: str = "error"
    rerecord_limit: int = 128
    size_limit: int = 64
    warmup_steps: int = 1

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None = None) -> Options:
        """Raises `OptionError`, which names the unknown or wrong option and lists the valid ones."""
        from_environment = any(os.environ.get(name) == "1" for name in OR_ERROR_VARIABLES)
        values = {"or_error": from_environment, **(options or {})}
        valid = list(cls.__dataclass_fields__)
        unknown = [name for name in values if name not in valid]
        if unknown:
            raise OptionError(f"unknown option {unknown[0]!r}; valid options: {', '.join(valid)}")
        parsed = cls(**values)
        for name, choices in CHOICES.items():
            if getattr(parsed, name) not in choices:
                listing = " or ".join(map(repr, choices))
                raise OptionError(f"options[{name!r}] must be {listing}, got {getattr(parsed, name)!r}")
        if not isinstance(parsed.or_error, bool):
            raise OptionError(f"options['or_error'] must be True or False, got {parsed.or_error!r}")
        for name, lowest in LOWEST.items():
            value = getattr(parsed, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise OptionError(f"options[{name!r}] must be an integer of at least {lowest}, got {value!r}")
        return parsed
