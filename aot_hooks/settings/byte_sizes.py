"""Numbers of bytes as users write them: 25769803776, "24GiB", "500 MB"; and as they are shown to users."""

from __future__ import annotations

import numbers
import re
from typing import Any

from ..errors import OptionError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_UNITS["ti"] = 1 << 40
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?(b)?\s*", re.IGNORECASE)
SIZES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1))  # of texts for people
# No step that is worth planning fits in less than this, while the GiB and MiB of any device are smaller numbers.
_LEAST_WITHOUT_UNIT = 1 << 20
# The largest GPUs have fewer GiB than this, so a larger number without a unit is taken for MiB.
_MOST_GIB = 320


def parse_size(size: Any, name: str = "peak") -> int:
    """`size` in bytes. Below 1 MiB it needs a unit: "12345B", so that 24 is not taken for 24 bytes.

    `name`: of the argument, for the `OptionError` that is raised for anything else.
    """
    whole = not isinstance(size, bool) and isinstance(size, numbers.Integral)  # also numpy's
    text = str(int(size)) if whole else size
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    number, prefix, unit = match.groups() if match is not None else ("0", None, None)
    if number.isdecimal() and not prefix:
        nbytes = int(number)  # a float has too few digits for it
    else:
        nbytes = int(float(number) * _UNITS[(prefix or "").lower()])
    if nbytes == 0:
        raise OptionError(
            f'budget: {name} must be bytes as an int, "24GiB", "500MB" or "fit", got {size!r}{_hint(size)}'
        )
    if nbytes < _LEAST_WITHOUT_UNIT and not (prefix or unit):
        raise OptionError(
            f"budget: {name} is in bytes, and {size!r} is less than 1 MiB; did you mean {likely(size)!r}? If bytes are "
            f"meant, write '{nbytes}B'"
        )
    return nbytes


def likely(size: float | str) -> float | str:
    """What was probably meant by `size`: 24 is "24GiB", 24000 is "24000MiB". A size with a unit comes back as it is."""
    try:
        number = float(size)
    except ValueError:
        return size
    if not 0 < number < _LEAST_WITHOUT_UNIT:
        return int(number) if number.is_integer() else size
    digits = f"{number:.3f}".rstrip("0").rstrip(".")
    return f"{digits}{'GiB' if number < _MOST_GIB else 'MiB'}"


def as_argument(nbytes: int) -> int | str:
    """`nbytes` as an argument that `parse_size` takes, as one would type it where that is exact: "24GiB"."""
    for unit, size in SIZES[:-1]:
        text = f"{nbytes / size:.4g}{unit}"  # with more digits any number of bytes has one
        if nbytes >= size and "e" not in text and parse_size(text) == nbytes:
            return text
    return nbytes if nbytes >= _LEAST_WITHOUT_UNIT else f"{nbytes}B"


def size_text(nbytes: int) -> str:
    """`nbytes` for people, in the largest unit that leaves a number of at least 1: "38.91 GiB"."""
    unit, size = next((each for each in SIZES if nbytes >= each[1]), SIZES[-1])
    return f"{nbytes / size:.4g} {unit}"


def _hint(size: Any) -> str:
    """What to write instead of `size`, which is no number of bytes: a share of a device, or a float; else ""."""
    text = str(size).strip() if isinstance(size, float | str) else ""
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return ""
    if 0 < number <= 1:
        return (
            "; a share of a device is not taken. Write 'fit' for 95% of what is free when a graph is compiled, or "
            f"int({number:g} * torch.cuda.mem_get_info()[1]) for that share of all memory"
        )
    return f"; write {likely(number)!r}" if 1 < number < float("inf") and not text.endswith("%") else ""
