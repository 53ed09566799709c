"""Policies as text, of a command line or of a trainer's configuration file: "offload(then=float8())".

text --evaluated in the names of aot_hooks, its policies and torch--> a hook or policy
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from .. import policies
from ..errors import OptionError


def evaluated(option: str, expression: str) -> Any:
    """The hook or policy that `expression` makes. `option`: where it was written, for the `OptionError`."""
    package = sys.modules[__name__.partition(".")[0]]
    dtypes = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    names = {**dtypes, **vars(policies), **vars(package), "torch": torch, "math": math}
    try:
        return eval(expression, names)
    except Exception as e:
        raise OptionError(
            f"{option} {expression!r}: {type(e).__name__}: {e}; expected an expression such as "
            "'float8(scaling=\"blockwise\")' or 'cast(bfloat16)' in the names of aot_hooks and torch"
        ) from e
