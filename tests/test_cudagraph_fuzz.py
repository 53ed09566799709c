"""A few random programs each time; fuzz_cudagraph.py runs as many as one likes. Seeds that once failed stay here."""

from __future__ import annotations

import fuzz_cudagraph
import pytest
from tree_programs import World

from cudagraph import node, tree
from cudagraph.liveness import Watch

KEPT = (
    # where storages can be moved only once, outputs that alias one another were given out as separate copies
    *(5081, 5220, 5290, 5686, 5841),
    # the backward of a warm-up was taken for that of a forward that still waited
    *(41151, 41201),
)


@pytest.fixture(params=["simulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request):
    tree.reset()
    yield World(request.param)
    tree.reset()
    tree.forget_marks()


def test_programs_are_as_in_eager(world):
    assert fuzz_cudagraph.run_seeds(range(1, 41), world) == []


@pytest.mark.parametrize("moves", ["all", "made"])
def test_programs_that_once_differed(moves):
    tree.reset()
    assert fuzz_cudagraph.run_seeds(KEPT, World("simulator", moves=moves)) == []


def test_the_fuzzer_notices(monkeypatch):
    """What must be dead before a replay is not looked at any more."""

    def replay(self, inputs, original=node.Node.replay):
        self.watch_dead = Watch(())
        return original(self, inputs)

    monkeypatch.setattr(node.Node, "replay", replay)
    wrong = fuzz_cudagraph.run_seeds(list(range(60)), World("simulator"))
    assert any("differs" in message for _, message in wrong)
