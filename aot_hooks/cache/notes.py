"""What the keys of cache misses were made of, for `python -m aot_hooks explain-miss`.

      a miss --add--> <torch's cache directory>/aot_hooks_keys/<time>-<process>.json     the newest 32 are kept
                                     |
      explain-miss --all_notes, nearest, difference--> - region 1 content 3: float:0.5
                                                  + region 1 content 3: float:0.25

A note holds the graph's operators, the content of hooks, and of tensors the digests of constants only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..torch_private import aot_cache
from . import sealed

_KEPT = 32  # notes in a directory at most: the newest
_SHOWN = 40  # lines that differ, in an explanation
_ALIKE = 0.5  # a key that shares fewer of its lines is of another model: line by line they have nothing to say


@dataclass(frozen=True)
class Note:
    """One miss. `hooks`: the user's rules in words. `why`: the reason of the miss."""

    key: str  # under which the entry was stored
    hooks: str
    why: str
    lines: tuple[tuple[str, str], ...]  # this package's part of the key
    torch_lines: tuple[str, ...] = ()  # torch's part, if its logger was at debug level
    settings: dict[str, str] = dataclasses.field(default_factory=dict)  # torch's configuration
    time: float = 0.0

    def all_lines(self) -> dict[str, str]:
        torch_lines = {f"torch {i}": line for i, line in enumerate(self.torch_lines)}
        return dict(self.lines) | self.settings | torch_lines


def _folder(directory: str | None = None) -> Path:
    return Path(directory or aot_cache.cache_dir()) / "aot_hooks_keys"


def add(note: Note) -> None:
    """Add `note`, and drop the oldest beyond the newest 32. Raises `OSError` if the directory cannot be written."""
    folder, now = _folder(), time.time()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{int(now * 1e6)}-{os.getpid()}.json"
    sealed.write(path, dataclasses.asdict(note) | {"time": now})
    for old in sorted(folder.glob("*.json"))[:-_KEPT]:
        with contextlib.suppress(FileNotFoundError):  # another process was first
            old.unlink()


def all_notes(directory: str | None = None) -> list[Note]:
    """All notes, oldest first, without those that can't be read or are damaged."""
    notes = []
    for path in sorted(_folder(directory).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            data = sealed.read(path)
            data["lines"] = tuple((str(a), str(b)) for a, b in data["lines"])
            data["torch_lines"] = tuple(data["torch_lines"])
            notes.append(Note(**data))
    return notes


def nearest(note: Note, others: Iterable[Note]) -> Note | None:
    """The note of `others` that has another key and most lines in common."""
    lines = set(note.all_lines().items())
    candidates = [other for other in others if other.key != note.key]
    return max(candidates, key=lambda other: len(lines & set(other.all_lines().items())), default=None)


def _differences(before: Note, after: Note) -> list[tuple[str, str | None, str | None]]:
    """The lines that differ, as (name, text before, text after); None for a text that does not exist."""
    if not (before.torch_lines and after.torch_lines):
        before, after = (dataclasses.replace(note, torch_lines=()) for note in (before, after))
    old, new = before.all_lines(), after.all_lines()
    return [(name, old.get(name), new.get(name)) for name in new | old if old.get(name) != new.get(name)]


def difference(before: Note, after: Note) -> str:
    """The first 40 lines that differ, with `-` before and `+` after. Of another model: only that it is one."""
    found = _differences(before, after)
    same_count = len(set(before.lines) & set(after.lines))
    if same_count < _ALIKE * len(after.lines):
        return (
            f"all but {same_count} of {len(after.lines)} lines: it is of another model. This one was compiled "
            "here for the first time, or its entry is older than the 32 misses that are noted; --json lists the lines"
        )
    if not found:
        return (
            "nothing that this package knows of: torch's own part differs (devices, its sources, autocast, ...). Run "
            'both processes with TORCH_LOGS="+torch._functorch._aot_autograd.autograd_cache" and ask again'
        )
    signed = [(sign, name, text) for name, *both in found[:_SHOWN] for sign, text in zip("-+", both, strict=True)]
    shown = [f"{sign} {name}: {text}" for sign, name, text in signed if text is not None]
    if len(found) > _SHOWN:
        shown.append(f"... and {len(found) - _SHOWN} more")
    return "\n".join(shown)


@dataclass(frozen=True)
class Miss:
    """The newest miss; whether its key was stored before; the nearest note with another key, None if there is none."""

    note: Note
    was_stored: bool
    other: Note | None

    def as_data(self) -> dict[str, Any]:
        """For JSON; times in seconds since 1970, lines as `{"name", "before", "after"}`."""
        note, other = self.note, self.other
        found = _differences(other, note) if other is not None else []
        return {
            **{"time_s": note.time, "key": note.key, "hooks": note.hooks, "why": note.why},
            "was_stored": self.was_stored,
            "nearest": None if other is None else {"time_s": other.time, "key": other.key, "hooks": other.hooks},
            "differences": [{"name": name, "before": old, "after": new} for name, old, new in found],
        }


def last_miss(directory: str | None = None) -> Miss | None:
    """The newest miss; None if there are no notes."""
    notes = all_notes(directory)
    if not notes:
        return None
    *before, last = notes
    return Miss(last, any(note.key == last.key for note in before), nearest(last, before))


def explain(miss: Miss) -> str:
    """The reason of a miss, in words."""
    head = f"last miss: {_local_time(miss.note)}, {miss.note.hooks or 'no hooks'}: {miss.note.why}"
    if miss.was_stored and miss.note.why == "no entry of this key":
        head += "\nits key was stored before: that entry is gone, or could not be written or read"
    other = miss.other
    if other is None:
        return head + "\nno other key is known in this directory to compare it with"
    head += f"\nthe nearest other key is of {_local_time(other)}, {other.hooks or 'no hooks'}; they differ in"
    return f"{head}\n{difference(other, miss.note)}"


def _local_time(note: Note) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(note.time))
