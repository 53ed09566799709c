"""Nothing in torch is replaced for good: a patch ends with the compilation or the context that needs it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame as eval_frame
import torch._functorch._aot_autograd.autograd_cache as autograd_cache
import torch._inductor.compile_fx as compile_fx

import aot_hooks
from aot_hooks.torch_private import dynamo_backends
from cudagraph.torch_private.autograd_cache import Entry, Extension, bypass, extended

pytestmark = pytest.mark.core

CACHE = autograd_cache.AOTAutogradCache


def replaced() -> set[str]:
    """What is not as it was when this file was imported."""
    now = functions()
    return {name for name in STOCK if now[name] is not STOCK[name]}


def functions() -> dict[str, Any]:
    return {
        "autograd_cache_key": autograd_cache.autograd_cache_key,
        "_lookup": vars(CACHE)["_lookup"],
        "iterate_over_candidates": vars(CACHE).get("iterate_over_candidates"),
        "AOTAutogradCachePickler": autograd_cache.AOTAutogradCachePickler,
        "_callback_from_stance": eval_frame._callback_from_stance,
    }


STOCK = functions()
OF_THE_CACHE = {"autograd_cache_key", "_lookup", "iterate_over_candidates"}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    assert replaced() == set()
    yield
    assert replaced() == set()


# --- enable -----------------------------------------------------------------------------------------------------------


def test_callbacks_are_exchanged_while_something_is_enabled_only() -> None:
    compiled = torch.compile(lambda x: x.sin())
    with aot_hooks.enable(aot_hooks.float8(), options={"inner": "aten"}):
        assert replaced() == {"_callback_from_stance"}
        with aot_hooks.enable(aot_hooks.int8(), options={"inner": "aten"}):
            compiled(torch.randn(3, requires_grad=True))
        assert replaced() == {"_callback_from_stance"}
        compiled(torch.randn(3, requires_grad=True))


def test_exchanges_of_callbacks_end_in_any_order() -> None:
    asked: list[str] = []

    def noting(name: str) -> Callable[[Any], Any]:
        def noted(callback: Any) -> Any:
            asked.append(name)
            return callback

        return noted

    ends = {name: dynamo_backends.exchange_callbacks(noting(name)) for name in ("first", "second", "third")}
    eval_frame._callback_from_stance(None)
    assert asked == ["third", "second", "first"]
    ends["first"]()
    ends["third"]()
    eval_frame._callback_from_stance(None)
    assert asked[3:] == ["second"] and replaced() == {"_callback_from_stance"}
    ends["second"]()
    assert replaced() == set()


# --- Inductor --------------------------------------------------------------------------------------------------------


def test_a_compilation_with_hooks_replaces_nothing_in_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def compile_nothing(graph: torch.fx.GraphModule, *_args: Any, **_named: Any) -> Callable[..., Any]:
        seen.append(replaced())

        def run(inputs: list[Any]) -> Any:
            return graph(*inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_nothing)
    torch._dynamo.reset()
    x = torch.randn(4, 8, requires_grad=True)
    with torch._functorch.config.patch(enable_autograd_cache=False), aot_hooks.saved_tensors_hooks(aot_hooks.float8()):
        torch.compile(lambda x: x.sin().exp().sin(), backend="aot_hooks")(x).sum().backward()
    assert seen == [set()] * 2  # forward and backward


# --- the cache of AOTAutograd's results -------------------------------------------------------------------------------


class Noting(Extension):
    """Writes down what it is asked; refuses entries whose content is in `others`."""

    def __init__(self, part: str, log: list[str], others: tuple[str, ...] = ()) -> None:
        super().__init__(part)
        self.log, self.others = log, others

    @contextlib.contextmanager
    def making_key(self, mod: Any, inputs: Any, config: Any) -> Iterator[tuple[Any, Any, Any]]:
        self.log.append(f"{self.part} makes a key")
        yield mod, inputs, config

    def keyed(self, key: str, lines: tuple[str, ...]) -> None:
        self.log.append(f"{self.part} has key {key[:5]}")

    def refuse(self, entry: Entry) -> str:
        return "of another" if entry.stored.name in self.others else ""

    def accept(self, entry: Entry) -> None:
        self.log.append(f"{self.part} takes {entry.stored.name}")

    def missed(self, *, other_sizes: bool) -> None:
        self.log.append(f"{self.part} missed, {other_sizes}")


def stored(name: str) -> Any:
    return SimpleNamespace(name=name, compiled_bw=None, maybe_subclass_meta=None, runtime_metadata=SimpleNamespace())


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """torch's cache has the entries with these names, whatever the key is."""
    names: list[str] = []

    def candidates(*_: Any) -> Iterator[Any]:
        yield from ((stored(name), name.encode(), True) for name in names)

    def find(key: str, local: bool, remote: bool, args: Any, cache_info: dict[str, Any], config: Any) -> Any:
        cache_info["cache_status_detailed"] = "guard_miss"
        return next(((entry, content) for entry, content, _ in CACHE.iterate_over_candidates()), None)

    guarded = type("GuardedCache", (), {"iterate_over_candidates": staticmethod(candidates)})
    cache = type("AOTAutogradCache", (guarded,), {"_lookup": staticmethod(find)})
    monkeypatch.setattr(sys.modules[__name__], "CACHE", cache)
    monkeypatch.setattr(autograd_cache, "AOTAutogradCache", cache)
    monkeypatch.setattr(autograd_cache, "autograd_cache_key", lambda *_: ("torch", []))
    monkeypatch.setattr(sys.modules[__name__], "STOCK", functions())
    yield names
    assert replaced() == set()


def compiled() -> Any:
    key, _ = autograd_cache.autograd_cache_key(None, [], SimpleNamespace(static_input_indices=(0,)))
    return key, CACHE._lookup(key, True, False, [], {}, None)


def test_nested_extensions_add_to_the_key_and_agree_on_an_entry(entries: list[str]) -> None:
    entries += ["a", "b", "c"]
    log: list[str] = []
    with extended(Noting("outer", log, ("a",))):
        assert replaced() == OF_THE_CACHE
        with extended(Noting("inner", log, ("b",))):
            key, found = compiled()
    assert found[1] == b"c" and key.count("_") == 2
    assert log == [
        *("outer makes a key", "inner makes a key", "outer has key torch", "inner has key torch"),
        *("outer takes c", "inner takes c"),
    ]
    with extended(Noting("outer", [])):
        assert compiled()[0] == key.rpartition("_")[0]


def test_where_all_entries_are_refused_each_extension_is_told(entries: list[str]) -> None:
    entries += ["a", "b"]
    log: list[str] = []
    with extended(Noting("outer", log, ("a",))), extended(Noting("inner", log, ("b",))):
        assert compiled()[1] is None
    assert log[-2:] == ["outer missed, True", "inner missed, True"]


def test_an_extension_may_bypass_the_cache(entries: list[str]) -> None:
    class Bypassing(Extension):
        def accept(self, entry: Entry) -> None:
            bypass("its captures are of another program")

    entries.append("a")
    with pytest.raises(autograd_cache.BypassAOTAutogradCache, match="of another program"), extended(Bypassing("")):
        compiled()


def test_another_thread_has_torchs_own_cache(entries: list[str]) -> None:
    entries.append("a")
    found: list[Any] = []
    with extended(Noting("here", [], ("a",))):
        thread = threading.Thread(target=lambda: found.append(compiled()))
        thread.start()
        thread.join()
    assert found[0][0] == "torch" and found[0][1][1] == b"a"


def test_cudagraph_needs_nothing_of_aot_hooks() -> None:
    code = "import sys, cudagraph; from cudagraph.compile import entry; print('aot_hooks' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
