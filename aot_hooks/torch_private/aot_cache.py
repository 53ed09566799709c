"""torch's cache of AOTAutograd's results: by a key of ours, with data of ours in its entries (2.11 to 2.15).

autograd_cache(digest, ...)    torch's key, made under names of ours, and the digest; entries that may be refused
attach(data)                   into the entry of the graph that is being compiled
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import torch
from torch.fx import GraphModule

from .symbols import needing
from .values import SizeNumbers

# symbol -> what needs it
SYMBOLS = {
    "torch._guards.TracingContext": "caching graphs with hooks",
    "torch._inductor.codecache.torch_key": "caching graphs with hooks",
    "torch._inductor.runtime.triton_compat.triton_key": "caching graphs with hooks",
    "torch._inductor.runtime.runtime_utils.cache_dir": "saying why a graph was not in the cache",
    "torch._functorch._aot_autograd.autograd_cache": "caching graphs with hooks",
    "torch._functorch._aot_autograd.autograd_cache.autograd_cache_key": "caching graphs with hooks",
    "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache._lookup": "caching graphs with hooks",
    "torch._functorch._aot_autograd.autograd_cache.should_use_local_autograd_cache": "caching graphs with hooks",
    "torch._functorch._aot_autograd.autograd_cache.should_use_remote_autograd_cache": "caching graphs with hooks",
    "torch._functorch.config": "saying why a graph was not in the cache",
    "torch._functorch.config.enable_autograd_cache": "keeping torch's cache away from graphs it has no key for",
    "torch._inductor.config": "saying why a graph was not in the cache",
}

need = needing(SYMBOLS)


@dataclasses.dataclass
class CacheEvent:
    """What torch's cache of AOTAutograd's results did in one compilation.

    Attributes:
        key: of the entry, "" if none was looked for.
        lines: what torch's part of the key is made of, if torch says it (only with its logger at debug).
        bypass: why torch made no key, or nothing is to be stored.
        found: entries were there; and `refused` why the last of them was not taken, "" if it was.
        guards_failed: entries were there, for other sizes.
        compiled: something was compiled.
    """

    key: str = ""
    lines: tuple[str, ...] = ()
    bypass: str = ""
    found: bool = False
    refused: str = ""
    guards_failed: bool = False
    compiled: bool = False


_keying = threading.RLock()


@functools.cache
def _triton_hash(pid: int) -> futures.Future[Any]:
    """torch's hash of Triton's files, which is in all of its keys, on its way in a thread.

    A process makes it once, at its first key: 0.4 s, nearly all of it to read and to hash one library of 400 MB, for
    which the interpreter is free to import the compiler. The hash of torch's own files is not made so: it is thousands
    of short calls, and a thread waits after each until the one that imports lets go of the interpreter.

    Whoever forks meanwhile has no such thread, hence `pid`. A hash that fails is made again by torch, which knows what
    to say. Goes when torch has it in a file, as it has inside Meta.
    """
    threads = futures.ThreadPoolExecutor(1, "aot_hooks_hash")
    hashed = threads.submit(need("torch._inductor.runtime.triton_compat.triton_key"))
    threads.shutdown(wait=False)
    # torch makes it under a lock, which a child would inherit taken
    os.register_at_fork(before=lambda: hashed.exception(timeout=10))
    return hashed


@contextlib.contextmanager
def autograd_cache(
    digest: str,
    normalized: Callable[[GraphModule], contextlib.AbstractContextManager[None]],
    refuse: Callable[[bytes | None, bool], str],
    give_up: Callable[[int], str],
    missed: Callable[[], None] = lambda: None,
) -> Iterator[CacheEvent]:
    """What is compiled inside, on this thread, goes through torch's cache of AOTAutograd's results by a key of ours.

    Functions of `torch._functorch._aot_autograd.autograd_cache` are called through ours and put back on exit:

    - `autograd_cache_key`: torch's key, made under `normalized(graph)`, with symbols by `SizeNumbers` and without the
      names in the sources of arguments (kept everywhere else: AOTAutograd writes guards with them), and `digest`.
    - `AOTAutogradCache._lookup`: an entry is passed over if `refuse(attached, has_backward)` says why; `attached` is
      what `attach` put into it, None if nothing. Then the next one of the key is looked at. If all were refused,
      `give_up(how_many)` says why nothing is to be stored beside them, "" if the new one is.

    `missed()` is called as soon as it is known that there is no key or no entry.

    Goes when torch takes a part of its key, and data to store with an entry, from a backend.
    """
    module = need("torch._functorch._aot_autograd.autograd_cache")
    cache = module.AOTAutogradCache
    make_key, own_lookup = module.autograd_cache_key, cache.__dict__["_lookup"]
    event, thread = CacheEvent(), threading.get_ident()
    hashed = _triton_hash(os.getpid())

    def keyed(mod: Any, inputs: Any, config: Any, *rest: Any, **named: Any) -> Any:
        if threading.get_ident() != thread:
            return make_key(mod, inputs, config, *rest, **named)
        sources = config.aot_autograd_arg_pos_to_source
        if sources is not None:
            config = dataclasses.replace(config, aot_autograd_arg_pos_to_source=[source_shape(s) for s in sources])
        try:
            need("torch._inductor.codecache.torch_key")()  # torch keeps it for what follows; Triton's goes on meanwhile
            futures.wait((hashed,))
            with normalized(mod if isinstance(mod, GraphModule) else mod.gm), _sizes_by_number(module, inputs):
                key, lines = make_key(mod, inputs, config, *rest, **named)
        except Exception as e:  # torch goes on without its cache, whatever it is; we only say so
            event.bypass = str(e).splitlines()[0] if str(e) else type(e).__name__
            missed()
            raise
        # both in torch's own key since 2.13
        static = sorted(getattr(config, "static_input_indices", None) or ())
        autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
        own = hashlib.sha256(f"{digest} {static} {autocast}".encode()).hexdigest()[: len(digest)]
        event.key = f"{key}_{own}"
        event.lines = (*map(str, lines), f"static inputs: {static}", f"autocast: {autocast}")
        return event.key, lines

    refused: set[bytes] = set()  # entries as they are stored
    candidates = cache.iterate_over_candidates

    def others(*args: Any, **named: Any) -> Iterator[Any]:
        for candidate in candidates(*args, **named):
            if candidate[1] not in refused:
                yield candidate

    def lookup(*args: Any, **named: Any) -> Any:
        result = own_lookup.__func__(*args, **named)
        if threading.get_ident() != thread:
            return result
        while result is not None:
            event.found = True
            event.refused = refuse(_attached(result[0]), result[0].compiled_bw is not None)
            if not event.refused:
                return result
            refused.add(result[1])
            result = own_lookup.__func__(*args, **named)
        missed()
        if refused and (why := give_up(len(refused))):
            event.bypass = why
            raise module.BypassAOTAutogradCache(why)
        info = named.get("cache_info", args[4] if len(args) > 4 else {})
        event.guards_failed = info.get("cache_status_detailed") == "guard_miss"
        return None

    with _keying:
        module.autograd_cache_key, cache._lookup = keyed, staticmethod(lookup)
        cache.iterate_over_candidates = staticmethod(others)
        try:
            yield event
        finally:
            module.autograd_cache_key, cache._lookup = make_key, own_lookup
            del cache.iterate_over_candidates  # inherited


@contextlib.contextmanager
def _sizes_by_number(module: Any, inputs: Sequence[Any]) -> Iterator[None]:
    """torch's pickler of keys writes symbolic sizes by number. torch 2.15 does so for those that are a symbol alone."""
    pickler, numbers, thread = module.AOTAutogradCachePickler, SizeNumbers(inputs), threading.get_ident()

    class Numbering(pickler):  # type: ignore[misc, valid-type]
        def _reduce_symint(self, size: Any) -> Any:
            return str, (numbers.text(size) if threading.get_ident() == thread else str(size),)

        _reduce_symbool = _reduce_symint

    module.AOTAutogradCachePickler = Numbering
    try:
        yield
    finally:
        module.AOTAutogradCachePickler = pickler


def source_shape(source: Any) -> tuple[str, ...]:
    """How an argument is reached (a local, an item of an attribute of a module, ...), without names."""
    steps = []
    while source is not None:
        steps.append(type(source).__name__)
        source = getattr(source, "base", None)
    return tuple(steps)


_ATTACHED = "aot_hooks"


def attach(data: bytes) -> None:
    """Have AOTAutograd store `data` in the entry of the graph that is being compiled.

    In its metadata of the forward, which goes into the entry as it is, also when that is made at the first backward.
    """
    context = need("torch._guards.TracingContext").try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is not None:
        setattr(metadata, _ATTACHED, data)


def _attached(entry: Any) -> bytes | None:
    inner = getattr(getattr(entry, "maybe_subclass_meta", None), "fw_metadata", None)
    found: bytes | None = getattr(entry.runtime_metadata, _ATTACHED, None) or getattr(inner, _ATTACHED, None)
    return found


def without_autograd_cache() -> Any:
    """torch's cache of AOTAutograd's results off, see lookup.py for when; Inductor's own stays on."""
    return need("torch._functorch.config").patch({"enable_autograd_cache": False})


def autograd_cache_is_on() -> bool:
    module = need("torch._functorch._aot_autograd.autograd_cache")
    return bool(module.should_use_local_autograd_cache() or module.should_use_remote_autograd_cache())


def cache_dir() -> str:
    """Where torch keeps what it compiled (`TORCHINDUCTOR_CACHE_DIR`)."""
    return str(need("torch._inductor.runtime.runtime_utils.cache_dir")())


def settings_of_torch() -> dict[str, str]:
    """The configuration that torch's key holds, as text, for comparing."""
    found = {}
    for name in ("torch._inductor.config", "torch._functorch.config"):
        found.update({f"{name}.{k}": repr(v) for k, v in need(name).get_config_copy().items()})
    return found
