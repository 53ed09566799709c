"""Compiling through torch's caches: when it may, what came of it, and why.

      graph, settings --key_of--> Key --+-- torch has it --> take it, its plans with it      hit
                                        |      `-- for other hooks, all of them --> compile, store   miss
                                        |      `-- damaged ----------------> compile, store  miss     one warning
                                        +-- it has not ----> compile, store, plans beside    miss

torch's stores are used, none is added: `TORCHINDUCTOR_CACHE_DIR`, `save_cache_artifacts` and all switches hold. What
keys are made of is noted for `explain-miss`, see notes.py.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import gc
import logging
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from ..errors import CacheWarning
from ..graphs.saved import place_of
from ..passes.plan import Plan
from ..settings.setting import Setting
from ..torch_private import aot_cache
from . import notes
from .entry import Checks, ForAnother, Refused, Unusable, pack_up, unpack
from .key import Key, key_of, nodes_of, normalized

__all__ = ["bypassed", "cache_stats", "forget", "through_cache"]

log = logging.getLogger("aot_hooks")

_RESULTS = ("hit", "miss", "bypass")
_MOST_ENTRIES = 32  # of one key for the same sizes: policies that always say something else must not fill the disk
_PLURAL = {"hit": "hits", "miss": "misses", "bypass": "bypasses"}


class _Stats:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.warned: set[str] = set()


_stats = _Stats()


def cache_stats() -> dict[str, Any]:
    """What torch's caches did for graphs with hooks, since the process began or `aot_hooks.reset()`.

    `{"hits": int, "misses": int, "bypasses": int, "reasons": {"bypass: <why>": int, ...}}`; reasons add up to them.
    Graphs without hooks are torch's own business, see `torch._dynamo.utils.counters["aot_autograd"]`.
    """
    with _stats.lock:
        counts = dict(_stats.counts)
    totals = {_PLURAL[r]: sum(n for (result, _), n in counts.items() if result == r) for r in _RESULTS}
    return {**totals, "reasons": {f"{result}: {why}": n for (result, why), n in sorted(counts.items())}}


def forget() -> None:
    """Count from zero."""
    with _stats.lock:
        _stats.counts.clear()


def _count(result: str, why: str) -> None:
    with _stats.lock:
        _stats.counts[result, why] += 1
    log.info("cache %s: %s", result, why)


def _warn_once(about: str, message: str) -> None:
    with _stats.lock:
        known = about in _stats.warned
        _stats.warned.add(about)
    if not known:
        warnings.warn(message, CacheWarning, stacklevel=2)


def bypassed(why: str, compile_graph: Callable[[], Any]) -> Any:
    """`compile_graph()` without torch's cache of AOTAutograd's results."""
    _count("bypass", why)
    with aot_cache.without_autograd_cache():
        return compile_graph()


def through_cache(
    gm: GraphModule,
    inputs: Sequence[Any],
    ambient: Setting | None,
    regions: Mapping[str, Setting],
    *,
    options: Mapping[str, Any],
    roots: Mapping[str, str],
    plans: list[Plan],
    compile_graph: Callable[[Callable[[], None]], Any],
    refused: Callable[[], str] = lambda: "",
) -> Any:
    """What `compile_graph(compiling)` gives, from torch's cache if it has it; then `plans` is filled from there.

    Args:
        gm, inputs, ambient, regions, options, roots: see `key_of`.
        plans: where compiling puts what it decided.
        compile_graph: to call `compiling()` before each graph that is compiled.
        refused: why `compile_graph` did not take an entry that it was offered, "" if it did.
    """
    _use_writable_directory()
    if not aot_cache.autograd_cache_is_on():
        return bypassed("torch's cache is switched off", lambda: compile_graph(lambda: None))
    key = key_of(gm, inputs, ambient, regions, options=options, roots=roots)
    if key.opaque:
        what = f"{_hooks(key)} {', '.join(key.opaque)}"
        _warn_once(
            what,
            f"graphs with {_hooks(key)} are compiled anew in each process: what the operators {', '.join(key.opaque)} "
            "do is in no graph, so no cache key holds it. Give the hook Hook(..., cache_hash='1'), a text that you "
            "change whenever they do something else",
        )
        return bypassed(f"operators of others in {what}", lambda: compile_graph(lambda: None))
    nodes = nodes_of(gm)  # now: Inductor's passes change the graph
    stored: list[Plan] = []
    checks = Checks(key)
    unusable, damaged = "", False

    def places() -> list[tuple[str, str]]:
        return [place_of(node, roots) for node in nodes]

    def refuse(attached: bytes | None, has_backward: bool) -> str:
        nonlocal unusable, damaged
        if attached is None:
            unusable = "nothing is stored beside it" if has_backward else ""
            return unusable
        try:
            stored.extend(unpack(attached, checks, places))
        except Unusable as e:
            unusable = str(e)
            return unusable
        except Refused as e:
            damaged = damaged or not isinstance(e, ForAnother)
            return str(e)
        return ""

    def give_up(refused: int) -> str:
        if not unusable and refused >= _MOST_ENTRIES:
            return f"{refused} entries of the same key are for other hooks or answers of policies"
        return unusable

    attached = False

    def compiling() -> None:
        nonlocal attached
        collect()
        event.compiled = True
        if not attached:
            attached = True
            aot_cache.attach(pack_up(plans, checks, places))

    with _without_dynamos_copies(gm), _without_collections() as collect:
        with aot_cache.autograd_cache(key.digest, normalized, refuse, give_up, missed=collect) as event:
            compiled = compile_graph(compiling)
    event.bypass = event.bypass or refused()
    if not event.compiled:
        plans.extend(stored)
    _tell(key, event, damaged)
    return compiled


@contextlib.contextmanager
def _without_collections() -> Iterator[Callable[[], None]]:
    """No garbage collections until the end, or until what is given is called.

    To take an entry makes next to no garbage, but so many objects that stay (the compiler is imported for it) that
    Python looks through all there are again and again, 7% of a warm start. Without an entry they go on at once.
    """
    paused = True
    _pause(1)

    def collect() -> None:
        nonlocal paused
        if paused:
            paused = False
            _pause(-1)

    try:
        yield collect
    finally:
        collect()


_pauses, _thresholds = 0, (0, 0, 0)
_pause_lock = threading.Lock()


def _pause(more: int) -> None:
    """The threshold, of which 0 means never, and not `gc.disable()`: that one is the user's, also meanwhile."""
    global _pauses, _thresholds
    with _pause_lock:
        before, _pauses = _pauses, _pauses + more
        if before == 0:
            _thresholds = gc.get_threshold()
            gc.set_threshold(0, *_thresholds[1:])
        elif _pauses == 0 and gc.get_threshold() == (0, *_thresholds[1:]):
            gc.set_threshold(*_thresholds)  # unless somebody else has set another one


@contextlib.contextmanager
def _without_dynamos_copies(gm: GraphModule) -> Iterator[None]:
    """Without the hook pair that Dynamo puts into its graphs for torch's keys: ours holds the functions' content."""
    modules = vars(gm)["_modules"]
    taken = {name: modules.pop(name) for name in list(modules) if name.startswith("saved_tensors_hooks_")}
    try:
        yield
    finally:
        modules.update(taken)


def _hooks(key: Key) -> str:
    return ", ".join(dict.fromkeys(repr(s.rule) for s in key.settings if s is not None))


def _tell(key: Key, event: aot_cache.CacheEvent, damaged: bool) -> None:
    """Count what came of it, and note what the key of a miss is made of."""
    if event.found and event.bypass:
        _warn_once(event.bypass, f"{_hooks(key)}: compiled anew in each process, because {event.bypass}")
        return _count("bypass", event.bypass)
    if event.bypass or not event.key:
        return _count("bypass", f"torch: {event.bypass or 'it did not look for an entry'}")
    if not event.compiled:
        return _count("hit", "an entry of the same key")
    if event.refused and not damaged:
        why = f"entries of the same key are for other hooks: {event.refused}"
    elif event.refused:
        why = f"an entry of the same key was refused: {event.refused}"
        _warn_once(why, f"{_hooks(key)}: compiled again, because {why}")
    elif event.found:
        why = "an entry of the same key, but its generated code is gone or damaged"
        _warn_once(why, f"{_hooks(key)}: compiled again, because there was {why}")
    elif event.guards_failed:
        why = "entries of the same key are for other sizes"
    else:
        why = "no entry of this key"
    _count("miss", why)
    note = notes.Note(event.key, _hooks(key), why, key.lines, event.lines, aot_cache.settings_of_torch())
    try:
        if log.isEnabledFor(logging.DEBUG) and (other := notes.nearest(note, notes.read())) is not None:
            log.debug("cache miss: the nearest key differs in\n%s", notes.difference(other, note))
        notes.write(note)
    except OSError as e:
        _warn_once("notes", f"explain-miss will know nothing of this process: {e}")


def _use_writable_directory() -> None:
    """torch writes generated code to its cache directory and fails if it can't: then use another one meanwhile."""
    try:
        directory = aot_cache.cache_dir()
        if directory in _writable:
            return
        with tempfile.TemporaryFile(dir=directory):
            _writable.add(directory)
    except OSError as e:
        fresh = tempfile.mkdtemp(prefix="aot-hooks-")
        atexit.register(shutil.rmtree, fresh, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = fresh
        _writable.add(fresh)
        _warn_once(
            "directory", f"torch's cache directory cannot be written ({e}); this process uses {fresh} and removes it"
        )


_writable: set[str] = set()
