"""What is known of a graph's captures, as it is kept beside its code: it comes back, or is refused and why.

Graphs of fake CUDA tensors, nothing is compiled; test_tree_warm_start.py takes compiled programs from torch's
cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pieces import CUDA, piece_as_data, scaled, traced
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache

from cudagraph.compile import entry
from cudagraph.compile.compilation import Compilation
from cudagraph.graph.analyse import Kind, analyse
from cudagraph.options import Options
from cudagraph.torch_private import cuda as torch_cuda

INDUCTOR = Options.parse({"inner": "inductor"})


# --- without compiling: graphs of fake CUDA tensors ------------------------------------------------------------------


def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x @ w).sin()
    w.add_(1)
    z = scaled(y, 2.0).cos() * y
    return y, z.cpu()


def found_in(fn: Callable[..., Any], trace: Callable[[int], str | None] = lambda i: f'  File "m.py", line {i}, in f'):
    gm = traced(fn, lambda: (torch.randn(4, 4, device=CUDA), torch.randn(4, 4, device=CUDA)))
    for i, node in enumerate(gm.graph.nodes):
        node.meta["stack_trace"] = trace(i)
    kind = Kind("forward", 7, static_inputs=(1,), returned_count=1)
    return gm, entry.analysed_graph(gm, kind, analyse(gm, kind, INDUCTOR, "cuda"))


def as_data(found: entry.AnalysedGraph) -> Any:
    return found.verdict, None if found.piece is None else piece_as_data(found.piece), found.operators


def store_of(gm: torch.fx.GraphModule) -> entry.Store:
    return entry.Store(gm, INDUCTOR, "cuda", lambda code, found: code)


def kept(gm: torch.fx.GraphModule, *found: entry.AnalysedGraph, monkeypatch: pytest.MonkeyPatch) -> bytes:
    data: list[bytes] = []
    monkeypatch.setattr(entry.autograd_cache, "attacher", lambda name: data.append)
    store = store_of(gm)
    for each in found:
        store.add(each)
    return data[-1]


@pytest.mark.core
def test_what_is_kept_comes_back_with_the_lines_of_the_program_that_takes_it(monkeypatch) -> None:
    gm, found = found_in(step)
    assert [b.op for b in found.verdict.blockers] == [str(scaled._opoverload), "aten._to_copy.default"]
    assert found.piece is not None and found.piece.placeholders[1].mutating_use_stack_trace is not None
    attached = kept(gm, found, monkeypatch=monkeypatch)
    (same,) = store_of(gm).load(attached, ("forward",))
    assert as_data(same) == as_data(found)
    moved, expected = found_in(step, lambda i: f'  File "renamed.py", line {i + 100}, in g')
    (taken,) = store_of(moved).load(attached, ("forward",))
    assert as_data(taken) == as_data(expected) != as_data(found)
    named = taken.numbered(3)
    assert named.verdict.kind.name == named.piece.name == "forward 3"
    with pytest.raises(AssertionError, match="before its code"):
        taken.piece.run([])


@pytest.mark.core
def test_a_remark_that_torch_adds_to_a_line_comes_back_too(monkeypatch) -> None:
    """As in the backward of `x = x + f(x)`, where the gradients of two readers are added up."""
    gm, _ = found_in(step)
    remark = "\nGradient addition node due to multiple use of tensor around:"
    _, sums = found_in(step, lambda i: f'  File "m.py", line {i}, in f{remark}')
    attached = kept(gm, sums, monkeypatch=monkeypatch)
    moved, _ = found_in(step, lambda i: f'  File "renamed.py", line {i + 100}, in g')
    _, there = found_in(step, lambda i: f'  File "renamed.py", line {i + 100}, in g{remark}')
    (taken,) = store_of(moved).load(attached, ("forward",))
    assert as_data(taken) == as_data(there)
    _, strange = found_in(step, lambda i: f'  File "m.py", line {i}, in f\n  File "other.py", line 1, in h')
    elsewhere = kept(gm, strange, monkeypatch=monkeypatch)
    with pytest.raises(entry.Refused, match="a line of its messages is of no operator"):
        store_of(gm).load(elsewhere, ("forward",))


@pytest.mark.core
def test_what_is_stored_for_another_program_is_refused_with_the_reason(monkeypatch) -> None:
    gm, found = found_in(step)
    attached = kept(gm, found, monkeypatch=monkeypatch)

    def reason(data: bytes | None, *words: str, graph: torch.fx.GraphModule = gm) -> str:
        with pytest.raises(entry.Refused) as raised:
            store_of(graph).load(data, words or ("forward",))
        return str(raised.value)

    assert "nothing of its captures" in reason(None)
    for cut in (attached[:-40], attached[: len(attached) // 2], b""):
        assert "cannot be read" in reason(cut)
    assert "it is of forward and backward; stored of captures: forward" in reason(attached, "forward", "backward")
    store, loaded = store_of(gm), SimpleNamespace(has_backward=True, attached=lambda name: attached)
    with pytest.raises(BypassAOTAutogradCache):
        store.accept(loaded)
    assert store.refused == reason(attached, "forward", "backward")
    small, _ = found_in(lambda x, w: (x @ w,))
    assert "cannot be read (IndexError" in reason(attached, graph=small)
    gm_2, strange = found_in(step)
    gm_2.graph.find_nodes(op="placeholder")[0].meta["stack_trace"] = "nowhere"
    elsewhere = kept(gm_2, strange, monkeypatch=monkeypatch)
    assert "a line of its messages is of no operator" in reason(elsewhere)
    monkeypatch.setattr(entry, "is_host_operator", lambda operator: True)
    assert "scaled.default is '" in reason(attached) and "host True" in reason(attached)


@pytest.mark.core
def test_what_decides_the_capture_is_in_the_key_and_what_acts_later_is_not(monkeypatch) -> None:
    gm, _ = found_in(step)
    keys = [entry.key_of(gm, INDUCTOR, "cuda")]
    for later in ({"held_outputs": "copy"}, {"rerecord_limit": 1}, {"size_limit": 1}, {"warmup_steps": 3}):
        assert entry.key_of(gm, dataclasses.replace(INDUCTOR, **later), "cuda") == keys[0]
    keys.append(entry.key_of(gm, dataclasses.replace(INDUCTOR, or_error=True), "cuda"))
    keys.append(entry.key_of(gm, INDUCTOR, "cpu"))
    keys.append(entry.key_of(found_in(lambda x, w: (x @ w,))[0], INDUCTOR, "cuda"))
    monkeypatch.setattr(entry, "is_host_operator", lambda operator: True)
    keys.append(entry.key_of(gm, INDUCTOR, "cuda"))
    monkeypatch.setattr(entry, "sources", lambda: "other sources")
    keys.append(entry.key_of(gm, INDUCTOR, "cuda"))
    assert len(set(keys)) == len(keys)


@pytest.mark.core
def test_where_it_cannot_be_stored_the_reason_is_said() -> None:
    assert Compilation(INDUCTOR).why_not_stored == ""
    assert "inner 'aten'" in Compilation(Options()).why_not_stored
    with torch._inductor.config.patch(freezing=True):
        assert Compilation(INDUCTOR).why_not_stored == ""
        with torch.no_grad():
            assert Compilation(INDUCTOR).why_not_stored == "parameters are frozen"
    with torch._functorch.config.patch(bundled_autograd_cache=True):
        assert "bundles" in Compilation(INDUCTOR).why_not_stored
    if torch_cuda.has("torch._inductor.config.cudagraph_policy"):
        with torch._inductor.config.patch(cudagraph_policy=object()):
            assert "cudagraph_policy" in Compilation(INDUCTOR).why_not_stored
