"""Steps of many graphs beside tensors that something keeps, and steps that are never the same."""

from __future__ import annotations

import warnings

import pytest
import torch
from test_across_graphs import HOOK, assert_equal, by_blocks, clock, copies, counted, step  # noqa: F401
from torch import nn

import aot_hooks
from aot_hooks.errors import UnusedWarning
from aot_hooks.offloading import at_run_time
from aot_hooks.steps import recorder

pytestmark = pytest.mark.filterwarnings("error::aot_hooks.errors.UnusedWarning")


def test_an_output_that_is_held_disturbs_no_step() -> None:
    plain, hooked = by_blocks(None), by_blocks(HOOK)
    aot_hooks.reset()
    held = hooked(torch.randn(64, 16))
    with pytest.warns(UnusedWarning, match=r"6 calls .* and 48 others .*no_grad\(\)") as caught:
        for _ in range(14):
            x = torch.randn(64, 16)
            assert_equal(step(hooked, x), step(plain, x))
    assert len(caught) == 1
    assert counted(lambda: step(hooked, x))[0] > 0, "steps end without what is held"
    for _ in range(3):
        again = hooked(torch.randn(64, 16))
        for _ in range(3):
            assert_equal(step(hooked, x), step(plain, x))
        assert counted(lambda: step(hooked, x))[0] > 0
    again.sum().backward()
    held.sum().backward()
    for _ in range(4):
        assert_equal(step(hooked, x), step(plain, x))
    assert counted(lambda: step(hooked, x))[0] > 0


def test_steps_that_all_differ_are_said_to_send_nothing() -> None:
    """Six microbatches of a short or a long static length, in another order in each step."""
    plain, hooked = by_blocks(None, 1), by_blocks(None, 1)
    hooked[0].compile(backend="aot_hooks", options={"inner": "aten", "policy": HOOK}, dynamic=False)
    with pytest.warns(UnusedWarning, match=r"the last 32 steps all differ .* offload\(\), which plans each") as caught:
        for i in range(40):
            xs = [torch.randn(64 if i >> n & 1 else 32, 16) for n in range(6)]
            assert_equal(*(step(model, xs, lambda xs, model=model: together(model, xs)) for model in (hooked, plain)))
    assert len(caught) == 1


def together(model: nn.Module, xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model(x) for x in xs])


def test_steps_that_differ_in_symbolic_sizes_share_a_plan() -> None:
    """Each length is new. Sizes within a fifth have a plan together; a step of others sends all, and is timed."""
    plain, hooked = by_blocks(None), by_blocks(HOOK)
    for block in hooked:
        block.compile(backend="aot_hooks", options={"inner": "aten", "policy": HOOK}, dynamic=True)
    planned = 0
    for i in range(40):
        x = torch.randn(40 + 7 * i % 41, 16)
        sent, fetched = counted(lambda x=x: assert_equal(step(hooked, x), step(plain, x)))
        assert sent == fetched > 0, (i, sent)
        planned += sent < 30
    assert planned >= 28, "all but the first, and one for each plan"


@pytest.mark.parametrize(("updates", "equal"), [(1, False), (5, False), (5, True)])
def test_what_is_alive_beside_complete_backwards_is_of_the_step(updates: int, equal: bool) -> None:
    """A GAN: the generator's tensors wait while the discriminator is trained. If its graphs are equal to the
    generator's, that looks like a kept output, until the generator's backward."""
    aot_hooks.reset()
    generator, critic = by_blocks(HOOK, 1), by_blocks(HOOK, 3)
    if not equal:
        generator = torch.compile(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh()),
            backend="aot_hooks",
            options={"inner": "aten", "policy": HOOK},
        )

    def train() -> None:
        fake = generator(torch.randn(64, 16 if equal else 8))
        for _ in range(updates):
            critic(torch.randn(64, 16)).mean().backward()
            critic(fake.detach()).mean().backward()
        critic(fake).mean().backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(24):
            train()
    assert len([w for w in caught if w.category is UnusedWarning]) == equal
    (found,) = at_run_time.all_followers()
    whole = found.known.steps[-1]
    assert len(whole.trace.events) > 12 * updates and whole.plan is not None


def test_a_step_that_never_ends_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_MOST_EVENTS", 14)  # a step has 12
    plain, hooked = by_blocks(None), by_blocks(HOOK)
    held = [hooked(torch.randn(64, 16))]
    with pytest.warns(UnusedWarning, match="6 calls of compiled graphs keep"):
        for _ in range(8):
            x = torch.randn(64, 16)
            assert_equal(step(hooked, x), step(plain, x))
    assert counted(lambda: step(hooked, x))[0] > 0, "what is held is of another step"
    held.clear()
