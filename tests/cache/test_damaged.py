"""A changed byte in a file of the caches: the file is removed, and what it held is compiled again."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch._aot_autograd.autograd_cache as autograd_cache
from torch import nn

import aot_hooks
from aot_hooks.cache import lookup, notes
from aot_hooks.errors import CacheWarning
from cudagraph.torch_private.damaged_entries import checked_entries

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(lookup, "_warned", set())


def pack(x: torch.Tensor) -> torch.Tensor:
    return x * 1.75


def unpack(packed: torch.Tensor) -> torch.Tensor:
    return packed


HOOK = aot_hooks.Hook("by 1.75", pack, unpack)


def step(backend: str = "aot_hooks", **options: Any) -> tuple[list[torch.Tensor], str]:
    """The gradients of a first step, as in a new process, and what the cache was for it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    torch.compile(model, backend=backend, options=options)(torch.randn(4, 8)).square().sum().backward()
    counted = torch._dynamo.utils.counters["aot_autograd"]
    seen = [kind for kind in ("hit", "miss", "bypass") if counted[f"autograd_cache_{kind}"]]
    return [p.grad for p in model.parameters() if p.grad is not None], " ".join(seen)


def files(directory: Path, pattern: str) -> list[Path]:
    return [path for path in sorted(directory.glob(pattern)) if path.is_file()]


def change(path: Path, at: int) -> None:
    """Changes one byte of the file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 2
    path.write_bytes(content)


def test_a_changed_constant_in_an_entry_is_no_hit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"inner": "aten", "policy": HOOK}
    with torch._functorch.config.patch(bundled_autograd_cache=True), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", CacheWarning)
        expected, seen = step(**options)
        assert seen == "miss" and step(**options)[1] == "hit"
        (path,) = files(tmp_path, "aotautograd/*/*")
        change(path, path.read_bytes().rindex(b"1.75"))
        found, seen = step(**options)
        assert seen == "miss" and not path.exists()
        assert aot_hooks.cache_stats()["reasons"] == {"miss: a file of torch's cache is damaged": 1}
        assert all(map(torch.equal, found, expected))
        assert step(**options)[1] == "hit"
    (message,) = [str(each.message) for each in said if each.category is CacheWarning]
    assert "compiled again, because a file of torch's cache is damaged" in message and str(path) in message


def test_every_byte_of_an_entry_counts(tmp_path: Path) -> None:
    with torch._functorch.config.patch(bundled_autograd_cache=True):
        step(inner="aten", policy=HOOK)
    (path,) = files(tmp_path, "aotautograd/*/*")
    intact, find = path.read_bytes(), autograd_cache.AOTAutogradCache.iterate_over_candidates

    def found() -> int:
        return len([*autograd_cache.AOTAutogradCache.iterate_over_candidates(True, None, path.parent.name)])

    with checked_entries() as damaged:
        assert found() == 1
        for at in range(0, len(intact), 97):  # each byte would take a minute
            path.write_bytes(intact)
            change(path, at)
            assert found() == 0
        assert set(damaged) == {str(path)} and not path.exists()
        path.write_bytes(intact[:-1])  # cut short
        assert found() == 0
        path.write_bytes(intact)
        change(path, 0)
        os.link(path, path.with_suffix(".linked"))  # a name of another form
        assert found() == 0
    assert autograd_cache.AOTAutogradCache.iterate_over_candidates == find


@pytest.mark.parametrize("backend", ["aot_hooks", "cudagraph_tree"])
def test_inductors_entries_and_their_code_are_checked(backend: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": HOOK} if backend == "aot_hooks" else {"inner": "inductor"}
    with torch._inductor.config.patch(fallback_by_default=True), warnings.catch_warnings():  # no C++ compiler
        warnings.simplefilter("ignore", CacheWarning)
        expected, seen = step(backend, **options)
        assert seen == "miss"
        entries, graphs = files(tmp_path, "aotautograd/*/*"), files(tmp_path, "fxgraph/*/*/*")
        code = [path for path in files(tmp_path, "*/*.py") if b"def call(" in path.read_bytes()]
        assert (len(entries), len(graphs), len(code)) == (1, 2, 2)
        written = [path.read_bytes() for path in code]
        for path in code:  # the entry has the same code
            path.write_bytes(path.read_bytes().replace(b"return (", b"return 0 * ("))
        for paths, outcome in (([], "hit"), (entries, "miss"), (graphs, "miss"), ([], "hit")):
            for path in paths:
                change(path, path.stat().st_size // 2)
            torch._inductor.codecache.PyCodeCache.cache_clear()
            found, seen = step(backend, **options)
            assert seen == outcome
            assert all(map(torch.equal, found, expected))
            assert [path.read_bytes() for path in code] == written


def test_graphs_without_hooks_are_checked_too(tmp_path: Path) -> None:
    with torch._inductor.config.patch(fallback_by_default=True):
        expected, _ = step()
        (path,) = files(tmp_path, "aotautograd/*/*")
        change(path, path.stat().st_size // 2)
        with pytest.warns(CacheWarning, match="damaged"):
            found, seen = step()
    assert seen == "miss" and all(map(torch.equal, found, expected))


def test_a_damaged_note_of_a_miss_is_left_out(tmp_path: Path) -> None:
    notes.add(notes.Note("key", "hook", "no entry of this key", (("constant", "1.75"),)))
    notes.add(notes.Note("other", "hook", "no entry of this key", (("constant", "2.75"),)))
    assert [note.key for note in notes.all_notes(str(tmp_path))] == ["key", "other"]
    (first, _) = files(tmp_path, "aot_hooks_keys/*")
    first.write_text(first.read_text().replace("1.75", "3.75"))
    assert [note.key for note in notes.all_notes(str(tmp_path))] == ["other"]
