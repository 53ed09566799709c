"""torch's keys of AOTAutograd's results, made without names and without waiting for hashes (2.11 to 2.15).

The cache itself is extended in `cudagraph/torch_private/autograd_cache.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

from torch.fx import GraphModule

from cudagraph.torch_private import autograd_cache

from .symbols import needing
from .values import SizeNumbers

SYMBOLS = {
    "caching graphs with hooks": "torch._dynamo.convert_frame.compile_lock "
    "torch._functorch._aot_autograd.autograd_cache "
    "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCachePickler .should_use_local_autograd_cache "
    ".should_use_remote_autograd_cache torch._guards.TracingContext torch._inductor.codecache.torch_key "
    "torch._inductor.runtime.triton_compat.triton_key",
    "saying why a graph was not in the cache": "torch._functorch.config torch._inductor.config "
    "torch._inductor.runtime.runtime_utils.cache_dir",
    "keeping torch's cache away from graphs it has no key for": "torch._functorch.config.enable_autograd_cache",
}
PROTOCOLS = {
    "caching graphs with hooks": {
        "torch._functorch._aot_autograd.schemas.AOTConfig": "aot_autograd_arg_pos_to_source static_input_indices",
        "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCachePickler": "_reduce_symint",
    },
}

need = needing(SYMBOLS)


@functools.cache
def _triton_hash(pid: int) -> futures.Future[Any]:
    """torch's hash of Triton's files, which is in all of torch's keys, computed in a thread.

    A process computes it once, for its first key, in 0.4 s: nearly all of that reads and hashes one library of 400 MB,
    without the interpreter's lock, so that the compiler can be imported meanwhile. The hash of torch's own files stays
    in the main thread: it is thousands of short calls, each of which would wait for that lock.

    A forked process has no such thread, hence `pid`. If the hash fails, torch computes it again and raises. Goes when
    torch has it in a file, as inside Meta.
    """
    threads = futures.ThreadPoolExecutor(1, "aot_hooks_hash")
    hashed = threads.submit(need("torch._inductor.runtime.triton_compat.triton_key"))
    threads.shutdown(wait=False)
    # torch makes it under a lock, which a child would inherit taken
    os.register_at_fork(before=lambda: hashed.exception(timeout=10))
    return hashed


def start_hashing() -> futures.Future[Any]:
    """Start the thread that computes a hash for the key that will be made, if no call has."""
    return _triton_hash(os.getpid())


@contextlib.contextmanager
def key_without_names(
    mod: Any,
    inputs: Sequence[Any],
    config: Any,
    without_names: Callable[[GraphModule], GraphModule],
) -> Iterator[tuple[GraphModule, Any]]:
    """Inside, torch makes the same key for graphs that differ in names only; yields the graph and `AOTConfig` for it.

    Symbols stand in the key by `SizeNumbers`, and sources of arguments without their names. (Everywhere else they keep
    them: AOTAutograd writes guards with them.)
    """
    sources = config.aot_autograd_arg_pos_to_source
    if sources is not None:
        config = dataclasses.replace(config, aot_autograd_arg_pos_to_source=[_source_shape(s) for s in sources])
    need("torch._inductor.codecache.torch_key")()  # torch keeps it for what follows; Triton's goes on meanwhile
    futures.wait((start_hashing(),))
    module = need("torch._functorch._aot_autograd.autograd_cache")
    with _sizes_by_number(module, inputs):
        yield without_names(mod if isinstance(mod, GraphModule) else mod.gm), config


@contextlib.contextmanager
def _sizes_by_number(module: Any, inputs: Sequence[Any]) -> Iterator[None]:
    """Has torch's pickler of keys number symbolic sizes. torch 2.15 itself numbers those that are one symbol."""
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


def _source_shape(source: Any) -> tuple[str, ...]:
    """The kinds of access to an argument (a local, an item of an attribute of a module, ...), without names."""
    steps = []
    while source is not None:
        steps.append(type(source).__name__)
        source = getattr(source, "base", None)
    return tuple(steps)


extended = functools.partial(autograd_cache.extended, need=need)
attacher = functools.partial(autograd_cache.attacher, need=need)
without_autograd_cache = functools.partial(autograd_cache.without_autograd_cache, need=need)


def autograd_cache_is_on() -> bool:
    module = need("torch._functorch._aot_autograd.autograd_cache")
    return bool(module.should_use_local_autograd_cache() or module.should_use_remote_autograd_cache())


def cache_dir() -> str:
    """Where torch keeps what it compiled (`TORCHINDUCTOR_CACHE_DIR`)."""
    return str(need("torch._inductor.runtime.runtime_utils.cache_dir")())


def settings_of_torch() -> dict[str, str]:
    """The configuration that torch's key holds, as text, for comparing."""
    names = ("torch._inductor.config", "torch._functorch.config")
    return {f"{name}.{k}": repr(v) for name in names for k, v in need(name).get_config_copy().items()}
