"""torch's keys of AOTAutograd's results, made without names and without waiting for hashes (2.11 to 2.15).

The cache itself is extended in `cudagraph/torch_private/autograd_cache.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import torch

from cudagraph.torch_private import autograd_cache, cache_contents, damaged_entries

from .symbols import need
from .values import FakeTensor, SizeNumbers


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


def nameless(inputs: Sequence[Any], config: Any) -> tuple[Sequence[Any], Any]:
    """The inputs and the `AOTConfig` for torch's key, the same for graphs that differ in names only.

    Symbols of sizes are numbered, see `SizeNumbers`, and sources of arguments have no names. (Everywhere else they keep
    them: AOTAutograd writes guards with them.)
    """
    sources = config.aot_autograd_arg_pos_to_source
    if sources is not None:
        config = dataclasses.replace(config, aot_autograd_arg_pos_to_source=[_source_shape(s) for s in sources])
    need("torch._inductor.codecache.torch_key")()  # torch keeps it for what follows; Triton's goes on meanwhile
    futures.wait((start_hashing(),))
    sizes = SizeNumbers(inputs)
    return [_with_numbers(x, sizes) for x in inputs] if sizes.names else inputs, config


def _with_numbers(x: Any, sizes: SizeNumbers) -> Any:
    """An input as torch's key holds it, but with numbers for the symbols in its sizes."""
    if isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool):
        return sizes.text(x)
    if not isinstance(x, FakeTensor):
        return x
    metadata = need("torch._inductor.codecache.extract_tensor_metadata_for_cache_key")(x)
    texts = {name: [*map(sizes.text, getattr(metadata, name))] for name in ("shape", "stride")}
    return dataclasses.replace(metadata, **texts)


def _source_shape(source: Any) -> tuple[str, ...]:
    """The kinds of access to an argument (a local, an item of an attribute of a module, ...), without names."""
    steps = []
    while source is not None:
        steps.append(type(source).__name__)
        source = getattr(source, "base", None)
    return tuple(steps)


extended = autograd_cache.extended
attacher = autograd_cache.attacher
without_autograd_cache = autograd_cache.without_autograd_cache
keyed_by_name, checked_entries = cache_contents.keyed_by_name, damaged_entries.checked_entries


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
