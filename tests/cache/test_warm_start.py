"""What a warm start does beside its work: a hash of torch's in a thread, and no garbage collections meanwhile."""

from __future__ import annotations

import gc
import os
import threading
import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch._aot_autograd.autograd_cache as autograd_cache
import torch._inductor.codecache as codecache
import torch._inductor.runtime.triton_compat as triton_compat

import aot_hooks
from aot_hooks import partitioner
from aot_hooks.cache import lookup
from aot_hooks.cache.key import Key
from aot_hooks.torch_private import aot_cache

pytestmark = pytest.mark.core


@pytest.fixture
def first_key() -> Iterator[None]:
    """As if this process had made no key."""
    aot_cache._triton_hash.cache_clear()
    yield
    aot_cache._triton_hash.cache_clear()


@pytest.fixture(autouse=True)
def collections_on() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("broken", [False, True], ids=["", "no Triton"])  # torch will say so, or need none
def test_a_key_is_made_when_the_hashes_are_there(first_key: None, monkeypatch: pytest.MonkeyPatch, broken) -> None:
    order: list[str] = []
    of_torch_made = threading.Event()

    def of_torch() -> bytes:
        assert threading.current_thread() is threading.main_thread()
        order.append("torch's hash")
        of_torch_made.set()
        return b""

    def of_triton() -> str:
        assert threading.current_thread() is not threading.main_thread()
        assert of_torch_made.wait(60), "it holds up what goes on beside it"
        if broken:
            raise RuntimeError("no Triton")
        time.sleep(0.2)
        order.append("Triton's hash")
        return ""

    monkeypatch.setattr(codecache, "torch_key", of_torch)
    monkeypatch.setattr(triton_compat, "triton_key", of_triton)

    def make_key(*_: Any) -> tuple[str, list[str]]:
        order.append("key")
        return "torch's", []

    monkeypatch.setattr(autograd_cache, "autograd_cache_key", make_key)
    graph = torch.fx.symbolic_trace(torch.nn.Identity())
    config = SimpleNamespace(aot_autograd_arg_pos_to_source=None, static_input_indices=())
    event = lookup._Lookup(Key((), ()), [], list, lambda: None)
    aot_cache.start_hashing()
    with aot_cache.extended(event):
        autograd_cache.autograd_cache_key(graph, [], config)
    assert order == ["torch's hash", *([] if broken else ["Triton's hash"]), "key"]
    assert event.full_key.startswith("torch's_")


def test_the_hash_is_the_one_that_torch_asks_for(first_key: None) -> None:
    hashed = aot_cache._triton_hash(os.getpid())
    assert (hashed.exception() is None) == triton_compat.HAS_TRITON
    if triton_compat.HAS_TRITON:
        assert hashed.result() == triton_compat.triton_key()


def test_a_process_that_was_forked_off_waits_for_no_thread_of_its_parent(first_key: None) -> None:
    here = aot_cache._triton_hash(os.getpid())
    assert aot_cache._triton_hash(os.getpid()) is here and aot_cache._triton_hash(-1) is not here


def test_collections_wait_for_an_entry_and_not_for_a_compilation() -> None:
    before = gc.get_threshold()
    with lookup.without_collections() as collect:
        assert gc.get_threshold()[0] == 0  # never
        with lookup.without_collections() as inner:  # a graph in a graph, or another thread
            inner()
        assert gc.get_threshold()[0] == 0
        collect()
        assert gc.get_threshold() == before
    with pytest.raises(ValueError, match="broken"), lookup.without_collections():
        raise ValueError("broken")
    assert gc.get_threshold() == before


def test_what_a_user_says_of_collections_meanwhile_stays() -> None:
    before = gc.get_threshold()
    try:
        with lookup.without_collections():
            gc.disable()
        assert not gc.isenabled() and gc.get_threshold() == before
        with lookup.without_collections():
            gc.enable()
        assert gc.isenabled()
        with lookup.without_collections():
            gc.set_threshold(5, 6, 7)
        assert gc.get_threshold() == (5, 6, 7)
    finally:
        gc.enable()
        gc.set_threshold(*before)


def test_pauses_that_overlap_end_with_the_last() -> None:
    before = gc.get_threshold()
    first, second = lookup.without_collections(), lookup.without_collections()
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] == 0
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


@pytest.mark.slow
def test_collections_are_on_when_graphs_are_compiled_and_after_all(monkeypatch) -> None:
    tag = uuid.uuid4().hex
    on: dict[str, list[bool]] = {"rewrite": [], "pack_up": [], "unpack": []}
    for name in on:
        module = partitioner if name == "rewrite" else lookup
        make = getattr(module, name)

        def noting(*given: Any, make: Any = make, name: str = name, **named: Any) -> Any:
            on[name].append(gc.get_threshold()[0] > 0)
            return make(*given, **named)

        monkeypatch.setattr(module, name, noting)
    for result in ("misses", "hits"):
        torch._dynamo.reset()
        aot_hooks.reset()
        x = torch.randn(8, 8, requires_grad=True)
        inductor = torch._inductor.config.patch(fallback_by_default=True)  # no C++ is built
        with torch.compiler.config.patch(cache_key_tag=tag), inductor:
            with aot_hooks.saved_tensors_hooks(aot_hooks.cast(torch.bfloat16)):
                torch.compile(lambda x: x.sin().exp(), backend="aot_hooks")(x).sum().backward()
        assert aot_hooks.cache_stats()[result] == 1 and gc.get_threshold()[0] > 0
    assert on == {"rewrite": [True], "pack_up": [True], "unpack": [False]}


def test_plans_are_those_of_the_entry_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another extension may refuse an entry that ours has accepted."""
    monkeypatch.setattr(lookup, "unpack", lambda data, *_: [data])
    event = lookup._Lookup(Key((), ()), [], list, lambda: None)
    for data, plans in ((b"first", [b"first"]), (b"second", [b"second"]), (None, [])):
        entry: Any = SimpleNamespace(attached=lambda _, data=data: data, has_backward=data is not None)
        assert event.refuse(entry) == "" and event.stored_plans == plans
