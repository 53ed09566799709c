"""torch's cache of AOTAutograd's results, with keys and entries that packages extend (2.11 to 2.15).

    with extended(extension):          nested, if several packages extend one compilation; the outermost comes first
        key      torch's own, made inside `making_key`; `part` of each extension is added to it
        entry    an extension's `refuse` gives a reason: the next entry of the key is tried
                 else `accept` prepares the loaded entry
        none     `missed`; then torch compiles, and stores

`accept` and `missed` may call `bypass`: torch then compiles without its cache, and stores nothing. Data that an
`attacher` takes while torch compiles is stored in the entry.

This is the only patch of that cache in this project. It goes when torch takes a part of its key, and data to store with
an entry, from a backend, and lets the backend wrap what its cache loads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from .compilers import forward_metadata, no_cudagraphs
from .damaged_entries import checked_entries
from .symbols import need


class Entry:
    """An entry that torch found: of a forward and its backward, or of an inference graph."""

    def __init__(self, stored: Any) -> None:
        self.stored = stored
        self.has_backward = stored.compiled_bw is not None
        subclasses = stored.maybe_subclass_meta
        # The forward's metadata as TracingContext has it when torch compiles: after tensor subclasses are flattened.
        self.traced_metadata = stored.runtime_metadata if subclasses is None else subclasses.fw_metadata

    def attached(self, name: str) -> bytes | None:
        """What `attacher(name)` put into the entry; None if nothing."""
        return getattr(self.stored.runtime_metadata, name, None) or getattr(self.traced_metadata, name, None)

    def finish_with(self, finish: Callable[[Any, Any], Any], graphs: Sequence[Any]) -> None:
        """`finish(code, graph)` replaces the code that torch loads; `graphs` describe the forward and the backward."""
        loaded = [self.stored.compiled_fw] + ([self.stored.compiled_bw] if self.has_backward else [])
        for each, graph in zip(loaded, graphs, strict=True):
            each.post_compile = _finishing(each, graph, finish)
        context = need("torch._guards.TracingContext").try_get()
        if context is not None:  # torch puts it there only when it compiles; `runtime_only_passes_on` reads it
            context.fw_metadata = self.traced_metadata


def _finishing(loaded: Any, graph: Any, finish: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A `post_compile` for a loaded graph: torch's own, without CUDA graphs, then `finish`."""
    post_compile_of_torch = loaded.post_compile
    is_backward = hasattr(loaded, "backward_state_indices")

    def post_compile(code: Any, fx_config: Any) -> Any:
        post_compile_of_torch(code, {**fx_config, "cudagraphs": no_cudagraphs()})
        run = finish(code, graph)
        # Dynamo must not trace what autograd calls: torch's own method does the same for a backward
        return torch.compiler.disable(run) if is_backward else run

    return post_compile


class Extension:
    """What a package adds to one compilation: by default `part` to the key, and nothing else."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.thread = 0
        self.refused_entries: set[bytes] = set()  # the bytes that torch stored
        self.damaged_files: list[str] = []  # of torch's caches, which were passed over

    @contextlib.contextmanager
    def making_key(self, mod: Any, inputs: Sequence[Any], config: Any) -> Iterator[tuple[Any, Any, Any]]:
        """A context around torch's function that makes its key. It yields the arguments of that function."""
        yield mod, inputs, config

    def keyed(self, key: str, lines: tuple[str, ...]) -> None:
        """Called with the complete key. `lines`: torch's description of its own part, then the facts added to it."""

    def refuse(self, entry: Entry) -> str:
        """Why `entry` belongs to another program; "" if it does not."""
        return ""

    def accept(self, entry: Entry) -> None:
        """Prepare `entry`, which no extension refuses."""

    def missed(self, *, other_sizes: bool) -> None:
        """Called if there is no entry, or all are refused. `other_sizes`: there are entries, but their guards fail."""


def bypass(why: str) -> NoReturn:
    """Called by an extension: torch then compiles this graph without its cache."""
    raise need("torch._functorch._aot_autograd.autograd_cache.BypassAOTAutogradCache")(why)


_extensions: list[Extension] = []  # those in force, the outermost first; changed under Dynamo's compile lock


def _extensions_here() -> list[Extension]:
    return [each for each in _extensions if each.thread == threading.get_ident()]


@contextlib.contextmanager
def extended(extension: Extension) -> Iterator[None]:
    """A context in which compilations of this thread go through torch's cache with `extension`."""
    with need("torch._dynamo.convert_frame.compile_lock"):
        extension.thread = threading.get_ident()
        _extensions.append(extension)
        try:
            module = need("torch._functorch._aot_autograd.autograd_cache")
            with checked_entries() as extension.damaged_files:
                with _patched(module) if len(_extensions) == 1 else contextlib.nullcontext():
                    yield
        finally:
            _extensions.pop()


@contextlib.contextmanager
def _patched(module: Any) -> Iterator[None]:
    """A context in which torch's functions that make a key, list its entries and look one up call the extensions."""
    cache = module.AOTAutogradCache
    make_key, find, candidates = module.autograd_cache_key, cache.__dict__["_lookup"], cache.iterate_over_candidates

    def keyed(mod: Any, inputs: Any, config: Any, *rest: Any, **named: Any) -> Any:
        extensions = _extensions_here()
        with contextlib.ExitStack() as stack:
            for each in extensions:
                mod, inputs, config = stack.enter_context(each.making_key(mod, inputs, config))
            key, lines = make_key(mod, inputs, config, *rest, **named)
        # both in torch's own key since 2.13
        static = sorted(getattr(config, "static_input_indices", None) or ())
        autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
        for each in extensions:
            key = f"{key}_{hashlib.sha256(f'{each.part} {static} {autocast}'.encode()).hexdigest()[:32]}"
        for each in extensions:
            each.keyed(key, (*map(str, lines), f"static inputs: {static}", f"autocast: {autocast}"))
        return key, lines

    def not_refused(*args: Any, **named: Any) -> Iterator[Any]:
        refused = set().union(*(each.refused_entries for each in _extensions_here()))
        return (candidate for candidate in candidates(*args, **named) if candidate[1] not in refused)

    def lookup(*args: Any, **named: Any) -> Any:
        extensions = _extensions_here()
        while (result := find.__func__(*args, **named)) is not None:
            entry = Entry(result[0])
            refusing = next((each for each in extensions if each.refuse(entry)), None)
            if refusing is None:
                for each in extensions:
                    each.accept(entry)
                return result
            refusing.refused_entries.add(result[1])
        info = named.get("cache_info", args[4] if len(args) > 4 else {})
        for each in extensions:
            each.missed(other_sizes=info.get("cache_status_detailed") == "guard_miss")
        return None

    module.autograd_cache_key, cache._lookup = keyed, staticmethod(lookup)
    cache.iterate_over_candidates = staticmethod(not_refused)
    try:
        yield
    finally:
        module.autograd_cache_key, cache._lookup = make_key, find
        del cache.iterate_over_candidates  # inherited


def attacher(name: str) -> Callable[[bytes], None] | None:
    """While AOTAutograd compiles a forward or an inference graph: a function that puts data into the entry to be made.

    The data goes into the forward's metadata. torch stores that as it is, also where it makes the entry at the first
    backward. A second call replaces the data. None outside of a compilation.
    """
    metadata = forward_metadata()
    return None if metadata is None else functools.partial(setattr, metadata, name)


def without_autograd_cache() -> Any:
    """torch's cache of AOTAutograd's results off; Inductor's own cache of code stays on."""
    return need("torch._functorch.config").patch({"enable_autograd_cache": False})


def sources_digest(*folders: Path) -> str:
    """A hash of the sources in `folders`, for keys: an entry is for the version of a package that made it."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            found.update(path.relative_to(folder).as_posix().encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def why_captures_are_not_cached() -> str:
    """Why torch's cache can't store and load captured graphs under the current settings; "" if it can."""
    config = need("torch._inductor.config")
    if getattr(config, "cudagraph_policy", None) is not None:
        return "a cudagraph_policy is set, which changes what Inductor compiled"
    if config.freezing and not torch.is_grad_enabled():
        return "parameters are frozen"
    if need("torch._functorch._aot_autograd.autograd_cache.should_bundle_autograd_cache")():
        return "torch bundles compiled code with its entries"
    return ""
