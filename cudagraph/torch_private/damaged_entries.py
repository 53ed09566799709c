"""torch's caches of compiled graphs, without entries that are damaged on the disk (2.11 to 2.15).

with checked_entries() as damaged:    torch takes no file whose content is not what its name says
    compile                           `damaged` gets the paths of such files
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .symbols import need

log = logging.getLogger("cudagraph")

_lock = threading.Lock()
_listening: list[list[str]] = []  # lists to which the paths of damaged files are added; one for each open context
_candidates_of_torch: Any = None  # torch's own method, while a context is open


@contextlib.contextmanager
def checked_entries() -> Iterator[list[str]]:
    """A context in which torch's caches pass over damaged files. Yields a list that gets the paths of these.

    torch names the file of an entry by the SHA-256 of its content, and does not look at the name again. Here a file
    with another content is removed before torch reads it, so that what is compiled instead takes its place. The Python
    code that Inductor generated is in the entry, too: a file of code that differs from it is removed, and torch writes
    it again. Compiled kernels have no such copy, and are not checked.

    Goes when torch compares the name itself. While a context is open, other threads have their entries checked, too.
    """
    global _candidates_of_torch
    cache = need("torch._inductor.codecache.GuardedCache")
    damaged: list[str] = []
    with _lock:
        if not _listening:
            _candidates_of_torch = cache.__dict__["iterate_over_candidates"]
            cache.iterate_over_candidates = classmethod(_checked(_candidates_of_torch.__func__))
        _listening.append(damaged)
    try:
        yield damaged
    finally:
        with _lock:
            # by identity: equal lists are not the same context
            _listening[:] = [each for each in _listening if each is not damaged]
            if not _listening:
                cache.iterate_over_candidates = _candidates_of_torch


def _checked(candidates: Callable[..., Any]) -> Callable[..., Any]:
    """torch's `iterate_over_candidates`, without entries that are damaged."""
    named_after = need("torch._inductor.codecache.sha256_hash")

    def intact(cls: Any, local: bool, remote_cache: Any, key: str) -> Iterator[tuple[Any, bytes, bool]]:
        damaged = _remove_damaged(Path(cls._get_tmp_dir_for_key(key))) if local else set()
        for candidate in candidates(cls, local, remote_cache, key):
            entry, content, is_local = candidate
            if is_local and damaged and named_after(content) in damaged:  # it could not be removed
                continue
            for graph in _graphs_in(entry):
                _restore_code(graph)
            yield candidate

    return intact


def _remove_damaged(folder: Path) -> set[str]:
    """Removes the files of `folder` whose content has changed. Returns the hashes of what is in them now."""
    named_after = need("torch._inductor.codecache.sha256_hash")
    found = set()
    names: list[str] = []
    with contextlib.suppress(OSError):  # no entry, or none that can be read
        names = sorted(os.listdir(folder))
    for name in names:
        if name.startswith("."):  # being written
            continue
        path = folder / name
        try:
            now = named_after(path.read_bytes())
        except OSError:  # another process has removed it, or it can't be read: torch passes over it
            continue
        if now != name:
            found.add(now)
            _report_damaged(path)
            with contextlib.suppress(OSError):  # a directory that can't be written
                path.unlink()
    return found


def _graphs_in(entry: Any) -> Iterator[Any]:
    """The graphs of Inductor that `entry` holds with their generated code."""
    parts = [entry, *(getattr(getattr(entry, name, None), "result", None) for name in ("compiled_fw", "compiled_bw"))]
    return (part for part in parts if isinstance(getattr(part, "source_code", None), str))


def _restore_code(graph: Any) -> None:
    """Writes the file of Python code that torch will import for `graph` again, if it is not the code of `graph`."""
    path = Path(need("torch._inductor.codecache.get_path")(graph.cache_key, "py")[2])
    with contextlib.suppress(OSError):  # none yet: torch writes it
        if path.read_bytes() != graph.source_code.encode():
            _report_damaged(path)
            need("torch._inductor.codecache.write_atomic")(str(path), graph.source_code)


def _report_damaged(path: Path) -> None:
    log.info("a damaged file of torch's cache is not taken: %s", path)
    with _lock:
        for damaged in _listening:
            damaged.append(str(path))
