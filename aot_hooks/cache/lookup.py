"""Compiling through torch's caches: when it may, what came of it, and why.

      graph, settings --key_of--> Key --+-- torch has it --> take it, its plans with it      hit
                                        |      `-- for other hooks, all of them --> compile, store   miss
                                        |      `-- damaged ----------------> compile, store  miss     one warning
                                        +-- it has not ----> compile, store, plans beside    miss

Entries go to torch's stores: `TORCHINDUCTOR_CACHE_DIR`, `save_cache_artifacts` and all switches have their effect.
The lines of each missed key are noted for `explain-miss`, see notes.py.
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

from cudagraph.torch_private.autograd_cache import Entry, Extension, bypass

from ..errors import CacheWarning
from ..graphs.saved import place_of
from ..passes.plan import Plan
from ..settings.setting import SettingsOfGraph
from ..torch_private import aot_cache
from . import notes
from .entry import Checks, EntryRefused, ForAnother, Unusable, pack_up, unpack
from .key import Key, key_of, nodes_of, without_names

log = logging.getLogger("aot_hooks")

_NAME = "aot_hooks"  # of what is attached to an entry
_MOST_ENTRIES = 32  # of one key for the same sizes: policies that never choose alike must not fill the disk
_PLURAL = {"hit": "hits", "miss": "misses", "bypass": "bypasses"}

_lock = threading.Lock()  # of what this module counts
_counts: collections.Counter[tuple[str, str]] = collections.Counter()
_warned: set[str] = set()


def cache_stats() -> dict[str, Any]:
    """Hits, misses and bypasses of graphs with hooks, since the process began or `aot_hooks.reset()`.

    `{"hits": int, "misses": int, "bypasses": int, "reasons": {"bypass: <why>": int, ...}}`; reasons add up to them.
    Graphs without hooks are torch's own business, see `torch._dynamo.utils.counters["aot_autograd"]`.
    """
    with _lock:
        counts = dict(_counts)
    totals = {many: sum(n for (result, _), n in counts.items() if result == one) for one, many in _PLURAL.items()}
    return {**totals, "reasons": {f"{result}: {why}": n for (result, why), n in sorted(counts.items())}}


def forget() -> None:
    """Set all counts to zero."""
    with _lock:
        _counts.clear()


def _count(result: str, why: str) -> None:
    """Count a "hit", "miss" or "bypass" with its reason."""
    with _lock:
        _counts[result, why] += 1
    log.debug("cache %s: %s", result, why)  # not info: there `enable` logs, whose users never asked for a cache


def _warn_once(about: str, message: str) -> None:
    """Warn, unless there was a warning `about` the same before."""
    with _lock:
        known = about in _warned
        _warned.add(about)
    if not known:
        warnings.warn(message, CacheWarning, stacklevel=2)


def bypassed(why: str, compile_graph: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """`compile_graph()` without torch's cache of AOTAutograd's results."""
    _count("bypass", why)
    with aot_cache.without_autograd_cache():
        return compile_graph()


def without_hooks(
    gm: GraphModule, inputs: Sequence[Any], compile_graph: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """`compile_graph()` for a graph without hooks, which is torch's own: with torch's keys and counters.

    Without torch's cache if the key would not hold all that the graph computes.
    """
    if what := aot_cache.keyed_by_name(gm, inputs):
        log.info("cache bypass: the key would have the name of %s, and not what it computes", what)
        with aot_cache.without_autograd_cache():
            return compile_graph()
    with aot_cache.checked_entries() as damaged:
        compiled = compile_graph()
    if damaged:
        _warn_once(f"damaged {damaged[0]}", f"a file of torch's cache was damaged, and was not taken: {damaged[0]}")
    return compiled


def through_cache(
    gm: GraphModule,
    inputs: Sequence[Any],
    settings: SettingsOfGraph,
    *,
    options: Mapping[str, Any],
    roots: Mapping[str, str],
    plans: list[Plan],
    compile_graph: Callable[..., Any],
    refused: Callable[[], str] = lambda: "",
) -> Callable[..., Any]:
    """`compile_graph(compiling)`, from torch's cache if it has the entry; `plans` then come from the entry.

    Args:
        gm, inputs, options, roots: see `key_of`.
        settings: those in force.
        plans: the list that a compilation appends its plans to.
        compile_graph: gets a function, and calls it before each graph that it compiles. Without the cache it gets none.
        refused: why `compile_graph` did not take an entry that was found, "" if it did.
    """
    _use_writable_directory()
    if not aot_cache.autograd_cache_is_on():
        return bypassed("torch's cache is switched off", compile_graph)
    if what := aot_cache.keyed_by_name(gm, inputs):
        return bypassed(f"the key would have the name of {what}, and not what it computes", compile_graph)
    key = key_of(gm, inputs, settings.setting, settings.regions, options=options, roots=roots)
    if key.opaque:
        rules, operators = _rules_of(key), ", ".join(key.opaque)
        what = f"{rules} {operators}"
        _warn_once(
            what,
            f"graphs with {rules} are compiled anew in each process: what the operators {operators} do is in no "
            "graph, so no cache key holds it. Give the hook Hook(..., cache_hash='1'), a text that you change whenever "
            "they do something else",
        )
        return bypassed(f"operators of others in {what}", compile_graph)
    nodes = nodes_of(gm)  # now: Inductor's passes change the graph
    with without_collections() as collect:
        lookup = _Lookup(key, plans, lambda: [place_of(node, roots) for node in nodes], collect)
        aot_cache.start_hashing()
        with aot_cache.extended(lookup):
            compiled: Callable[..., Any] = compile_graph(lookup.compiling)
    lookup.bypass = lookup.bypass or refused()
    if not lookup.compiled:
        plans.extend(lookup.stored_plans)
    _report(lookup)
    return compiled


class _Lookup(Extension):
    """One graph of Dynamo on its way through torch's cache. `collect` ends the pause of garbage collections."""

    def __init__(
        self, key: Key, plans: list[Plan], places: Callable[[], list[tuple[str, str]]], collect: Callable[[], None]
    ) -> None:
        super().__init__(key.digest)
        self.key, self.plans, self.places, self.collect = key, plans, places, collect
        self.checks = Checks(key)
        self.full_key = ""  # torch's part and ours, "" if torch made none
        self.lines: tuple[str, ...] = ()  # what torch's part is made of, if torch's logger is at debug level
        self.bypass = ""  # why torch made no key, or stores nothing
        self.refused = ""  # why the last entry that was found was not taken, "" if it was
        self.unusable = ""  # why no entry of this graph can be checked
        self.found = self.other_sizes = False  # there were entries; there were some for other sizes
        self.damaged = False  # an entry was refused that is not simply for other hooks
        self.compiled = False
        self.stored_plans: list[Plan] = []  # of the entry that was taken

    @contextlib.contextmanager
    def making_key(self, mod: Any, inputs: Sequence[Any], config: Any) -> Iterator[tuple[Any, Any, Any]]:
        try:
            graph = mod if isinstance(mod, GraphModule) else mod.gm
            yield without_names(graph), *aot_cache.nameless(inputs, config)
        except Exception as e:  # torch goes on without its cache, whatever it is; we only say so
            self.bypass = str(e).splitlines()[0] if str(e) else type(e).__name__
            self.collect()
            raise

    def keyed(self, key: str, lines: tuple[str, ...]) -> None:
        self.full_key, self.lines = key, lines

    def refuse(self, entry: Entry) -> str:
        self.found, self.refused, self.stored_plans = True, "", []
        data = entry.attached(_NAME)
        try:
            if data is not None:
                self.stored_plans = unpack(data, self.checks, self.places)
            elif entry.has_backward:
                raise Unusable("nothing is stored beside it")
        except EntryRefused as e:
            self.refused = str(e)
            if isinstance(e, Unusable):
                self.unusable = str(e)
            elif not isinstance(e, ForAnother):
                self.damaged = True
        return self.refused

    def missed(self, *, other_sizes: bool) -> None:
        self.collect()
        self.other_sizes = other_sizes
        count = len(self.refused_entries)
        why = self.unusable if count else ""
        if not why and count >= _MOST_ENTRIES:
            why = f"{count} entries of the same key are for other hooks or answers of policies"
        if why:
            self.bypass = why
            bypass(why)

    def compiling(self) -> None:
        """A graph is about to be compiled: the plans are made, and go into the entry."""
        self.collect()
        if self.compiled:
            return
        self.compiled = True
        if (attach := aot_cache.attacher(_NAME)) is not None:
            attach(pack_up(self.plans, self.checks, self.places))


@contextlib.contextmanager
def without_collections() -> Iterator[Callable[[], None]]:
    """No garbage collections until the end, or until the function that is yielded is called.

    Taking an entry makes next to no garbage, but many objects that stay, because it imports the compiler. Collecting
    among them again and again was 7% of a warm start. Where there is no entry, collections go on at once. Planning a
    budget holds all graphs that it has tried: there collections were 12% of the time.
    """
    with contextlib.ExitStack() as stack:
        _pause(1)
        stack.callback(_pause, -1)
        yield stack.close


_pauses, _thresholds = 0, (0, 0, 0)


def _pause(more: int) -> None:
    """Begin (1) or end (-1) a pause: a threshold of 0 means never. Not `gc.disable()`, which the user may call."""
    global _pauses, _thresholds
    with _lock:
        before, _pauses = _pauses, _pauses + more
        if before == 0:
            _thresholds = gc.get_threshold()
            gc.set_threshold(0, *_thresholds[1:])
        elif _pauses == 0 and gc.get_threshold() == (0, *_thresholds[1:]):
            gc.set_threshold(*_thresholds)  # unless somebody else has set another one


def _rules_of(key: Key) -> str:
    """The hooks and policies of a key's settings, for messages: "float8(), larger_than(...)"."""
    return ", ".join(dict.fromkeys(repr(s.rule) for s in key.settings if s is not None))


def _report(lookup: _Lookup) -> None:
    """Count the result, and note what the key of a miss is made of."""
    rules, refused = _rules_of(lookup.key), lookup.refused
    if lookup.found and lookup.bypass:
        _warn_once(lookup.bypass, f"{rules}: compiled anew in each process, because {lookup.bypass}")
        return _count("bypass", lookup.bypass)
    if lookup.bypass or not lookup.full_key:
        return _count("bypass", f"torch: {lookup.bypass or 'it did not look for an entry'}")
    if not lookup.compiled:
        return _count("hit", "an entry of the same key")
    if refused and not lookup.damaged:
        why = f"entries of the same key are for other hooks: {refused}"
    elif refused:
        why = f"an entry of the same key was refused: {refused}"
        _warn_once(why, f"{rules}: compiled again, because {why}")
    elif lookup.damaged_files and not lookup.found:
        why = "a file of torch's cache is damaged"
        _warn_once(why, f"{rules}: compiled again, because {why}. It was removed: {lookup.damaged_files[0]}")
    elif lookup.found:
        why = "an entry of the same key, but its generated code is gone or damaged"
        _warn_once(why, f"{rules}: compiled again, because there was {why}")
    elif lookup.other_sizes:
        why = "entries of the same key are for other sizes"
    else:
        why = "no entry of this key"
    _count("miss", why)
    note = notes.Note(lookup.full_key, rules, why, lookup.key.lines, lookup.lines, aot_cache.settings_of_torch())
    try:
        if log.isEnabledFor(logging.DEBUG) and (other := notes.nearest(note, notes.all_notes())) is not None:
            log.debug("cache miss: the nearest key differs in\n%s", notes.difference(other, note))
        notes.add(note)
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
        fresh = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="aot-hooks-")
        atexit.register(shutil.rmtree, fresh, ignore_errors=True)
        _writable.add(fresh)
        why = f"torch's cache directory cannot be written ({e}); this process uses {fresh} and removes it"
        _warn_once("directory", why)


_writable: set[str] = set()
