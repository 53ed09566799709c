"""Graphs with hooks in torch's caches: who gets what is stored, what comes of what is damaged, and what is said of it.

cache_rows.py has all rows of who gets what, in processes of their own; here are the few that tell most. Its entries are
made once, in another process; each test has a copy, so that only what it changes is compiled again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cache_rows
import pytest
import torch
from cache_rows import Row
from torch.testing._internal.two_tensor import TwoTensor

import aot_hooks
from aot_hooks.__main__ import main
from aot_hooks.cache import entry, lookup, notes
from aot_hooks.cache.entry import Unusable
from aot_hooks.errors import CacheWarning
from aot_hooks.torch_private import aot_cache
from cudagraph.torch_private.autograd_cache import Entry

pytestmark = pytest.mark.slow

# Entries are of graphs, whatever Inductor makes of them. Calls of aten take no C++ compiler.
NO_CPP = {"torch._inductor.config.fallback_by_default": True}
ROWS = {row.name: dataclasses.replace(row, config={**NO_CPP, **row.config}) for row in cache_rows.ROWS}
BASE = ROWS["base"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory that another process compiled the base row into."""
    directory = tmp_path_factory.mktemp("made")
    report = cache_rows.run_row(BASE, directory)
    assert (report["seen"], report["gradient_error"]) == ("miss", 0.0), report
    return directory


@pytest.fixture
def directory(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it that this process uses."""
    copy = tmp_path / "cache"
    shutil.copytree(made, copy)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(copy))
    monkeypatch.setattr(lookup, "_warned", set())
    aot_hooks.reset()
    # torch's key holds all three; they are those of the other process
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch._inductor.config.patch(compile_threads=1, fallback_by_default=True):
        yield copy
    torch.set_num_threads(threads)


def run(row: Row = BASE) -> dict[str, Any]:
    """`row` in this process."""
    torch._dynamo.reset()
    report = cache_rows.child(row, stock=False)
    assert report["gradient_error"] == 0.0
    return report


def cut(directory: Path, kind: str) -> int:
    """Cut all entries of one of torch's stores in half; how many there were."""
    paths = [path for path in (directory / kind).rglob("*") if path.is_file()]
    for path in paths:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return len(paths)


@pytest.mark.core
def test_another_process_takes_what_is_stored_under_other_names(directory: Path) -> None:
    first = cache_rows.run_row(ROWS["renamed attribute"], directory)
    assert (first["seen"], first["gradient_error"]) == ("hit", 0.0), first
    assert {module for _, _, module in first["rows"]} >= {"up", "last"}  # its own names, in the plans too
    again = run()
    assert again["seen"] == "hit"
    assert {module for _, _, module in again["rows"]} >= {"first", "last"}
    assert [row[:2] for row in again["rows"]] == [row[:2] for row in first["rows"]]
    assert (again["packed_bytes"], again["saved_bytes"]) == (first["packed_bytes"], first["saved_bytes"])
    assert again["packed_bytes"] < again["saved_bytes"]


@pytest.mark.core
def test_a_changed_constant_is_never_answered_with_the_old_graph(directory: Path) -> None:
    assert run()["seen"] == "hit"
    assert run(Row("", "miss", text={"constant": "1.25"}))["seen"] == "miss"


@pytest.mark.core
def test_counters_say_why(directory: Path) -> None:
    nothing = {"hits": 0, "misses": 0, "bypasses": 0, "reasons": {}}
    assert aot_hooks.cache_stats() == nothing
    f = torch.compile(lambda x: x.sin().cos(), backend="aot_hooks", options={"inner": "aten"})
    for n in (3, 4):
        with aot_hooks.saved_tensors_hooks(aot_hooks.float8()):
            f(torch.randn(n, 2, requires_grad=True))
    why = "bypass: inner 'aten' is stored with torch's bundled_autograd_cache only"
    assert aot_hooks.cache_stats() == {"hits": 0, "misses": 0, "bypasses": 2, "reasons": {why: 2}}
    torch._dynamo.reset()
    assert aot_hooks.cache_stats() == nothing
    assert run()["reasons"] == {"hit: an entry of the same key": 1}


@pytest.mark.core
@pytest.mark.parametrize("kind", ["aotautograd", "fxgraph"])
def test_damaged_entries_are_compiled_again(directory: Path, kind: str) -> None:
    assert cut(directory, kind) > 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", CacheWarning)
        assert run()["seen"] == "miss"
    said = [str(w.message) for w in seen if w.category is CacheWarning]
    assert len(said) == 1 and "damaged" in said[0]
    assert run()["seen"] == "hit"  # what was made instead


@pytest.mark.core
def test_damaged_plans_are_refused_with_one_warning(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attached, first = Entry.attached, []

    def damaged(self: Entry, name: str) -> bytes | None:
        """As if the first entry that is looked at were from torch's remote cache, whose entries have no file names."""
        data, made_in_ns = attached(self, name), self.stored.forward_time_taken_ns
        first.append(made_in_ns)  # the entry made instead has equal plans, and another time
        return b"?" + data[1:] if data is not None and made_in_ns == first[0] else data

    monkeypatch.setattr(Entry, "attached", damaged)
    with pytest.warns(CacheWarning, match=r"compiled again.*is damaged") as seen:
        assert run()["seen"] == "miss"
        assert run()["seen"] == "hit"  # the other one is passed over
    assert [w.category for w in seen].count(CacheWarning) == 1  # torch's imports may warn, too


@pytest.mark.core
def test_one_key_has_an_entry_for_each_answer_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key holds what hooks do to one example; what they do to the saved tensor itself is compared."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(lookup, "_warned", set())
    x = torch.randn(4, 6, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def hook_of(dtype: torch.dtype, **said: Any) -> aot_hooks.Hook:
        def pack(x: torch.Tensor) -> Any:
            return x.to(dtype if x.shape == (4, 6) else torch.float16), x.dtype

        return aot_hooks.Hook("by shape", pack, lambda p: p[0].to(p[1]) * 1.5, **said)

    def step(hook: aot_hooks.Hook) -> str:
        torch._dynamo.reset()
        no_cpp = torch._inductor.config.patch(fallback_by_default=True)
        with no_cpp, aot_hooks.saved_tensors_hooks(hook, scope="all"):
            y = torch.compile(f, backend="aot_hooks")(x)
        (found,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(found, hook.unpack(hook.pack(x)).cos(), rtol=1e-6, atol=1e-6)
        (reason,) = aot_hooks.cache_stats()["reasons"]
        return str(reason)

    def entries() -> int:
        return len([*(tmp_path / "aotautograd").glob("*/*")])

    dtypes = (torch.bfloat16, torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        reasons = [step(hook_of(dtype)) for dtype in (*dtypes, *dtypes)]
    assert [reason.split(":")[0] for reason in reasons] == ["miss", "miss", "hit", "hit"]
    assert "entries of the same key are for other hooks: hook 'by shape' traces to another program" in reasons[1]
    assert entries() == 2
    monkeypatch.setattr(lookup, "_MOST_ENTRIES", 2)
    with pytest.warns(CacheWarning, match="compiled anew in each process, because 2 entries of the same key are for"):
        assert step(hook_of(torch.float64)).startswith("bypass: 2 entries of the same key")
    assert entries() == 2

    def no(*_: Any) -> Any:
        raise Unusable("this cannot be checked")

    monkeypatch.setattr(entry.Checks, "programs", no)
    with pytest.warns(CacheWarning, match="because this cannot be checked"):
        reasons = [step(hook_of(torch.float16, cache_hash="1")) for _ in range(3)]
    assert [reason.split(":")[0] for reason in reasons] == ["miss", "bypass", "bypass"]
    assert entries() == 3


@pytest.mark.core
def test_operators_of_others_are_compiled_anew_and_say_so_once(directory: Path) -> None:
    row = ROWS["operator of a library"]
    with pytest.warns(CacheWarning, match=r"cache_rows\.pack.* do is in no graph.*cache_hash") as seen:
        report = run(row)
        assert report["seen"] == "bypass"
        assert run(row)["seen"] == "bypass"
    assert [w.category for w in seen].count(CacheWarning) == 1
    assert any("cache_rows.pack" in reason for reason in report["reasons"])
    assert run(ROWS["operator with cache_hash"])["seen"] == "miss"
    assert run(ROWS["operator with cache_hash"])["seen"] == "hit"


def test_a_renamed_tensor_subclass_hits_and_symbolic_sizes_of_one_have_no_key() -> None:
    tag = uuid.uuid4().hex  # a directory of its own would have Inductor try out the C++ compiler

    def step(f: Any, dynamic: bool) -> list[str]:
        torch._dynamo.reset()
        aot_hooks.reset()
        a, y = torch.rand(6, 4), torch.rand(6, 4, requires_grad=True)
        x = TwoTensor(a, a.clone()).requires_grad_()
        hook = aot_hooks.Hook("double", lambda x: x.double(), lambda p: p.float())
        with torch.compiler.config.patch(cache_key_tag=tag), torch._inductor.config.patch(fallback_by_default=True):
            with aot_hooks.saved_tensors_hooks(hook):
                out = torch.compile(f, backend="aot_hooks", dynamic=dynamic)(x, y)
        found = torch.autograd.grad(out.sum(), (x, y))
        for grad, expected in zip(found, torch.autograd.grad(f(x, y).sum(), (x, y)), strict=True):
            torch.testing.assert_close(grad.a, expected.a)
        return [reason.split(":")[0] for reason in aot_hooks.cache_stats()["reasons"]]

    programs = (lambda x, y: x.sin() * y, lambda other, name: other.sin() * name)
    assert [step(f, False) for f in programs] == [["miss"], ["hit"]]
    assert [step(f, True) for f in programs] == [["bypass"], ["bypass"]]


class Odd(torch.nn.Module):
    """With a constant, a buffer that each step changes, dropout, and a number from outside that hooks see as a size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.dropout(torch.relu(self.norm(self.up(x))), 0.5)
        return self.down(h * torch.tensor([1.0, 2.0] * 8)).tanh() * x.shape[0]


def of_other_dtypes(row: aot_hooks.SavedTensor) -> str | None:
    return None if row.dtype == torch.float32 else "no number"


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.core)])
def test_graphs_that_run_as_they_are_are_stored_if_torch_is_told_to(
    dynamic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    table = torch.tensor([1.0, 0.5, 0.25, 2.0])  # a constant of the hook's

    def step(gain: float, batch: int = 6) -> tuple[list[torch.Tensor], Any, str]:
        torch._dynamo.reset()

        def unpack(packed: Any) -> torch.Tensor:
            value, dtype = packed
            return value.to(dtype) * gain * table[1] * table[3]

        hook = aot_hooks.Hook("h", lambda x: (x.half(), x.dtype), unpack, declines=of_other_dtypes)
        torch.manual_seed(0)
        model, x = Odd(), torch.randn(batch, 8, requires_grad=True)
        compiled = torch.compile(model, backend="aot_hooks", dynamic=dynamic, options={"inner": "aten"})
        with aot_hooks.saved_tensors_hooks(hook):
            compiled(x).sum().backward()
        with torch.no_grad(), aot_hooks.saved_tensors_hooks(hook):
            out = compiled(x)
        found = [out, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
        seen = [why.split(":")[0] for why in aot_hooks.cache_stats()["reasons"]]  # of both graphs
        return found, aot_hooks.last_plans(compiled), " ".join(seen)

    without, plans, seen = step(1.0)
    assert seen == "bypass"
    with torch._functorch.config.patch(bundled_autograd_cache=True):
        for gain, batch, expected in ((1.0, 6, "miss"), (1.0, 6, "hit"), (2.0, 6, "miss")):
            found, stored_plans, seen = step(gain, batch)
            assert seen == expected
            assert all(torch.equal(a, b) for a, b in zip(found, without, strict=True)) == (gain == 1.0)
            assert len(stored_plans) == len(plans) == 1 and plans[0].packed_bytes < plans[0].saved_bytes
            assert stored_plans[0].packed_bytes == plans[0].packed_bytes
        if dynamic:
            other, _, seen = step(1.0, 10)
            assert seen == "hit"
    if dynamic:
        expected_other, _, _ = step(1.0, 10)
        assert all(torch.equal(a, b) for a, b in zip(other, expected_other, strict=True))


@pytest.mark.core
def test_what_is_no_plain_data_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    x = torch.randn(5)
    with torch._functorch.config.patch(bundled_autograd_cache=True):
        for _ in range(2):
            torch._dynamo.reset()
            with aot_hooks.saved_tensors_hooks(aot_hooks.float8()):
                torch.testing.assert_close(torch.compile(f, backend="aot_hooks", options={"inner": "aten"})(x), f(x))
            assert aot_hooks.cache_stats()["hits"] == 0
    assert not [*(tmp_path / "aotautograd").glob("*/*")]


@pytest.mark.core
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("names", [("bundled_autograd_cache",), ("bundled_autograd_cache", "force_autograd_cache")])
def test_a_graph_without_hooks_that_runs_as_it_is_is_not_stored(
    names: tuple[str, ...], backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's key holds no partition, so an entry of `aot_eager` would be found, whose backward may be wrong."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(4, 8, requires_grad=backward)
    with torch._functorch.config.patch({name: True for name in names if hasattr(torch._functorch.config, name)}):
        for _ in range(2):
            torch._dynamo.reset()
            out = torch.compile(lambda x: x.sin().cos(), backend="aot_hooks", options={"inner": "aten"})(x)
            assert torch.equal(out, x.sin().cos())
            if backward:
                assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, x.sin().cos())))
    assert not [*(tmp_path / "aotautograd").glob("*/*")]


@pytest.mark.core
def test_torchs_switches_hold(directory: Path) -> None:
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert run()["reasons"] == {"bypass: torch's cache is switched off": 1}
    with torch._inductor.config.patch(fx_graph_cache=False):
        assert run()["reasons"] == {"bypass: torch: FX graph cache is not enabled": 1}
    with torch.compiler.config.patch(force_disable_caches=True):
        assert not aot_cache.autograd_cache_is_on()


@pytest.mark.core
def test_entries_travel_as_torchs_cache_artifacts(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.compiler._cache import CacheArtifactManager

    with CacheArtifactManager.with_fresh_cache():
        run()
        artifacts = torch.compiler.save_cache_artifacts()
    assert artifacts is not None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    torch.compiler.load_cache_artifacts(artifacts[0])
    assert run()["seen"] == "hit"


@pytest.mark.core
def test_a_directory_that_cannot_be_written_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(blocked / "below"))
    monkeypatch.setattr(lookup, "_warned", set())
    with pytest.warns(CacheWarning, match="cannot be written"):
        lookup._use_writable_directory()
    used = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert used != str(blocked / "below") and Path(used).is_dir()
    lookup._use_writable_directory()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == used


def test_processes_that_start_together_do_not_disturb_each_other(directory: Path) -> None:
    """As under torchrun: four find nothing, compile and write the same entries."""
    for kind in ("aotautograd", "fxgraph", "aot_hooks_keys"):
        shutil.rmtree(directory / kind)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda _: cache_rows.run_row(BASE, directory), range(4)))
    assert [r["gradient_error"] for r in reports] == [0.0] * 4
    assert {r["seen"] for r in reports} <= {"miss", "hit"} and "miss" in {r["seen"] for r in reports}
    assert not any("Warning: " in r["stderr"] and "cache" in r["stderr"] for r in reports)
    assert run()["seen"] == "hit"


@pytest.mark.core
def test_explain_miss_shows_what_differs(
    directory: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("", "miss", text={"constant": "1.25"})
    with caplog.at_level("DEBUG", logger="aot_hooks"):
        assert run(row)["seen"] == "miss"
    logged = "\n".join(r.getMessage() for r in caplog.records if "the nearest key differs" in r.getMessage())
    assert main(["explain-miss", "--dir", str(directory)]) == 0
    printed = capsys.readouterr().out
    assert "no entry of this key" in printed
    for text in (logged, printed):
        lines = [line for line in text.splitlines() if line.startswith(("- ", "+ "))]
        assert [re.sub(r"unpack \d+: .*", "", line) for line in lines] == ["- ambient hook 0 ", "+ ambient hook 0 "]
        assert "1.5" in lines[0] and "1.25" in lines[1]
    assert main(["explain-miss", "--json", "--dir", str(directory)]) == 0
    data = json.loads(capsys.readouterr().out)
    (differs,) = data["differences"]
    assert lines == [f"- {differs['name']}: {differs['before']}", f"+ {differs['name']}: {differs['after']}"]
    assert data["why"] == "no entry of this key" and not data["was_stored"]
    assert data["key"] != data["nearest"]["key"] and data["time_s"] > data["nearest"]["time_s"]


@pytest.mark.core
def test_explain_miss_compares_no_two_models_line_by_line() -> None:
    def note(key: str, *operators: str) -> notes.Note:
        lines = tuple((f"node {i}", name) for i, name in enumerate(operators))
        return notes.Note(key, "float8()", "no entry of this key", lines)

    mlp, other = note("1", "addmm", "gelu", "addmm", "sum"), note("3", "embedding", "addmm", "softmax", "bmm")
    changed = note("2", "addmm", "relu", "addmm", "sum")
    assert notes.difference(mlp, changed) == "- node 1: gelu\n+ node 1: relu"
    said = notes.explain(notes.Miss(other, was_stored=False, other=mlp))
    assert "all but 0 of 4 lines: it is of another model" in said and "- node" not in said


@pytest.mark.core
def test_explain_miss_without_a_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-miss", "--dir", str(tmp_path)]) == 1
    assert "no graph with hooks has missed" in capsys.readouterr().err


@pytest.mark.core
@pytest.mark.gpu
def test_on_cuda_what_is_taken_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = (
        torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda().bfloat16()
    )
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[list[torch.Tensor], Any, dict[str, Any]]:
        torch._dynamo.reset()
        aot_hooks.reset()  # counts of other tests too
        model.zero_grad()
        compiled = torch.compile(model, backend="aot_hooks")
        with aot_hooks.saved_tensors_hooks(aot_hooks.float8()):
            y = compiled(x)
        y.square().sum().backward()
        return [p.grad.clone() for p in model.parameters()], aot_hooks.last_plans(compiled), aot_hooks.cache_stats()

    cold, plans, stats = step()
    assert (stats["hits"], stats["misses"]) == (0, 1), stats
    warm, plans_again, stats = step()
    assert (stats["hits"], stats["misses"]) == (1, 0), stats
    assert [p.packed_bytes for p in plans] == [p.packed_bytes for p in plans_again]
    for a, b in zip(cold, warm, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
