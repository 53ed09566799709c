"""The table of states of a whole step: what a failed capture, or a value that changes, makes of each."""

from __future__ import annotations

import pytest

from cudagraph.step.states import Came, State, state_after

ALL, EACH, NO_UPDATE, NO_UPDATE_EACH, NOTHING = State
MORE, NUMBERS, FAILED, VALUE = Came

ROWS = {
    ALL: {MORE: ALL, NUMBERS: EACH, FAILED: NO_UPDATE, VALUE: NOTHING},
    EACH: {MORE: EACH, FAILED: NO_UPDATE, VALUE: NOTHING},
    NO_UPDATE: {MORE: NO_UPDATE, NUMBERS: NO_UPDATE_EACH, FAILED: NOTHING, VALUE: NOTHING},
    NO_UPDATE_EACH: {MORE: NO_UPDATE_EACH, FAILED: NOTHING, VALUE: NOTHING},
}


@pytest.mark.parametrize("state", ROWS)
def test_the_next_state_is_that_of_the_table(state: State) -> None:
    assert {came: state_after(state, came, has_update=True) for came in ROWS[state]} == ROWS[state]
    without = {came: NOTHING if after is NO_UPDATE is not state else after for came, after in ROWS[state].items()}
    assert {came: state_after(state, came, has_update=False) for came in ROWS[state]} == without


def test_no_state_is_followed_by_one_with_more_in_graphs() -> None:
    order = list(State)
    for state in order[:-1]:
        for came in Came:
            after = state_after(state, came, has_update=True)
            assert order.index(after) >= order.index(state), (state, came)


def test_what_a_state_says_of_its_graphs() -> None:
    assert [state for state in State if state.by_number] == [EACH, NO_UPDATE_EACH]
    assert [state for state in State if not state.has_update] == [NO_UPDATE, NO_UPDATE_EACH]
