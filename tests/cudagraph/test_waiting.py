"""The thread that ends a wait for a process that is gone."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from cudagraph.errors import RanksError
from cudagraph.step.ranks import Watchdog, raise_in

LIMIT_S = 0.4


class Event:
    def __init__(self, done):
        self.done, self.queries, self.recorded = done, 0, []

    def record(self, stream):
        self.recorded.append(stream)

    def query(self):
        self.queries += 1
        return self.done


def wait(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)


def test_a_wait_that_takes_too_long_ends_with_an_error_in_the_thread_of_the_last_call():
    event, given_up = Event(done=False), []

    def give_up(thread):
        given_up.append(thread)
        raise_in(thread, RanksError("rank 1 did not come to it"))

    watchdog = Watchdog(event, LIMIT_S, give_up)
    watchdog.launched("stream")
    with pytest.raises(RanksError, match="rank 1 did not come to it"):
        wait(10)
    wait(2 * LIMIT_S)
    assert given_up == [threading.get_ident()] and event.recorded == ["stream"] and event.queries == 1


def test_what_is_done_or_followed_by_another_call_is_no_wait():
    event = Event(done=False)
    watchdog = Watchdog(event, LIMIT_S, lambda thread: pytest.fail("gave up"))
    for _ in range(6):
        watchdog.launched("stream")
        wait(LIMIT_S / 4)
    assert event.queries == 0, "the device is asked while calls follow each other"
    event.done = True
    wait(2 * LIMIT_S)
    assert event.queries == 1


def test_a_question_and_a_new_call_do_not_meet():
    """An event that a new call has just recorded is not done, and must not count for the call before it."""

    class Slow(Event):
        def record(self, stream):
            self.done = False
            time.sleep(LIMIT_S / 4)  # the watchdog looks now
            super().record(stream)

    event = Slow(done=False)
    watchdog = Watchdog(event, LIMIT_S, lambda thread: pytest.fail("gave up"))
    for _ in range(3):
        watchdog.launched("stream")
        event.done = True
        wait(0.9 * LIMIT_S)  # idle: the next call comes when the watchdog is about to ask
    assert len(event.recorded) == 3


def test_an_event_that_can_not_be_asked_ends_no_watch(caplog):
    event, given_up = Event(done=False), []
    watchdog = Watchdog(event, LIMIT_S, given_up.append)
    ask, event.query = event.query, lambda: (_ for _ in ()).throw(RuntimeError("of the device"))
    watchdog.launched("stream")
    wait(2 * LIMIT_S)
    assert "nobody watches the last call for ranks that are gone: of the device" in caplog.text and not given_up
    event.query = ask
    watchdog.launched("stream")
    wait(2 * LIMIT_S)
    assert given_up == [threading.get_ident()]


def test_the_thread_ends_with_its_watchdog():
    before = {*threading.enumerate()}  # those of other tests may end meanwhile
    watchdog = Watchdog(Event(done=True), LIMIT_S, lambda thread: None)
    (thread,) = {*threading.enumerate()} - before
    del watchdog
    gc.collect()
    thread.join(10 * LIMIT_S)
    assert not thread.is_alive()
