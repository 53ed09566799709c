"""What one rank has measured, the others plan with."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import group_of_one
from torch._subclasses.fake_tensor import FakeTensorMode

import aot_hooks
from aot_hooks.graphs import speeds
from aot_hooks.planning import many
from aot_hooks.planning.assignment import Assignment
from aot_hooks.planning.measured import StepTime
from aot_hooks.torch_private.ranks import agreed, meet

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as both ranks of a job, which share a store."""
    with group_of_one():
        monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
        yield


def test_the_first_rank_says_it(two_ranks: None) -> None:
    assert [agreed("a", "1"), agreed("a", "2"), agreed("b", "3"), agreed("b", ""), agreed("a", "1")] == [*"11331"]
    assert [agreed("c", ""), agreed("c", "1"), agreed("c", "")] == ["", "", ""]


def test_a_process_alone_keeps_its_own() -> None:
    assert agreed("a", "1") == "1" and agreed("a", "2") == "2"
    with group_of_one():
        assert agreed("a", "1") == "1" and agreed("a", "2") == "2"


def test_a_store_that_can_not_agree_is_no_error(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise dist.DistStoreError("the host of the store is gone")

    monkeypatch.setattr(dist.HashStore, "compare_set", fails)
    monkeypatch.setattr(dist.PrefixStore, "compare_set", fails)
    assert [agreed("a", "1"), agreed("a", "2")] == ["1", "2"]


def test_ranks_meet_or_go_on(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that comes alone, as a stage of a pipeline that plans alone, goes on after the time that it gives."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    began = time.monotonic()
    assert not meet("nobody else", 0.1) and 0.1 <= time.monotonic() - began < 2.0
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda _: meet("both", 10.0), range(2))] == [True, True]
    assert time.monotonic() - began < 8.0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert not meet("the only rank of a host", 10.0), "nobody shares its link"


def test_the_link_is_as_slow_on_all_ranks(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of all ranks at once say it. Where one does not come, none of them counts on less."""
    monkeypatch.setattr(speeds, "_measured", lambda _: speeds.Rates(55e9, 55e9, 1.0, 1.0, 1.0))
    monkeypatch.setattr(speeds, "_copied_together", lambda index: [36e9, 55e9][index])
    monkeypatch.setattr(speeds.ranks, "meet", lambda *_: True)

    def shares() -> list[float]:
        speeds._link_share.cache_clear()
        return [speeds.link_share(torch.device("cuda", rank)) for rank in range(2)]

    assert speeds.link_share(torch.device("cpu")) == 1.0
    assert shares() == [0.7, 0.7]
    monkeypatch.setattr(speeds.ranks, "agreed", lambda name, value: value)
    assert shares() == [0.7, 1.0]
    monkeypatch.setattr(speeds, "_copied_together", lambda index: [1e9, 55e9][index])
    assert shares() == [0.1, 1.0], "copies that take for ever can't be planned"
    monkeypatch.setattr(speeds.ranks, "meet", lambda *_: False)
    assert shares() == [1.0, 1.0]
    speeds._link_share.cache_clear()


def test_attention_takes_as_long_on_all_ranks(two_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def ms(seconds: float, *sizes: int) -> float | None:
        speeds._alone_ms.cache_clear()
        monkeypatch.setattr(speeds, "_seconds", lambda work: seconds)
        q = torch.empty(sizes, dtype=torch.bfloat16, device="meta")
        return speeds._alone_ms(torch.ops.aten.add.Tensor, *speeds.leaves_of(((q, q), {})), 0)

    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.random, "fork_rng", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(speeds, "_cuda", lambda _: torch.device("cpu"))
    assert [ms(2e-3, 2, 4, 64, 8), ms(3e-3, 2, 4, 64, 8), ms(3e-3, 4, 4, 64, 8)] == [2.0, 2.0, 3.0]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another GPU")
    assert ms(4e-3, 2, 4, 64, 8) == 4.0


def test_a_graph_is_one_program_on_the_devices_of_a_host() -> None:
    """Each rank has a GPU of its own, and their graphs differ in its number alone."""

    def digest(device: str, operator: Any = torch.sin) -> str:
        with FakeTensorMode():
            x = torch.empty(4, 4, device=device)
        graph = torch.fx.Graph()
        node = graph.placeholder("x")
        node.meta["example_value"] = x
        graph.output(graph.call_function(operator, (node,)))
        gm = torch.fx.GraphModule({}, graph)
        found = many.graph_of(Assignment.of(aot_hooks.budget("1GiB")), gm, [x], {})
        assert found is not None
        return found.digest

    assert digest("cuda:0") == digest("cuda:1") != digest("cpu")
    assert digest("cuda:0") != digest("cuda:1", torch.cos)


class Clock:
    def __init__(self, ms: float) -> None:
        self.ms = ms

    def now(self) -> None:
        pass

    def ms_since(self, began: Any) -> float:
        return self.ms

    def link_share(self) -> float:
        return 1.0


def test_a_step_is_as_slow_on_all_ranks(two_ranks: None) -> None:
    """Else one rank sends much more than the others, and all wait for it in their next exchange."""

    def measured(ms: float, program: str) -> float:
        step = StepTime(_clock=Clock(ms))  # type: ignore[arg-type]
        assert not step.waits(step.begins(), 10.0, program) and step.is_known
        return step.slowness

    assert [measured(12.6, "one"), measured(12.4, "one"), measured(12.4, "another")] == [1.25, 1.25, 1.0]
