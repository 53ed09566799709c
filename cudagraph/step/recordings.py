"""What is known of one step, what it has recorded, and the memory that its graphs share. whole.py adds how calls run.

known    calls and captures find out which numbers change, which tensors the step stores, whether it reads gradients.
         The next snapshot and the next capture allow for that
by key   the recordings of a key lie in the order in which they were made, beside the snapshots of its last warm-ups
a pool   the memory of all graphs, and of gradients that replays have given out
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .. import counters
from ..tree.driver import CaptureDriver
from ..tree.node import Cursor
from .gradients import ReadsGradients
from .host import HostState
from .outputs import Unforeseen
from .states import State

# Calls in a row, each with other host values than those before. Of so many the snapshots are kept, for each key: before
# and after each, as far as flags are concerned.
MOST_UNSTABLE_CALLS = 4


class Recordings:
    """What a step has recorded, and what is known of it. Its recordings are `StepRecording`s."""

    driver: CaptureDriver
    cursor: Cursor | None = None
    roots: dict[str, Any]  # what was declared, by name
    update_roots: dict[str, Any]  # what the update reads besides

    def _begin(self) -> None:
        self.state = State.ALL
        self.numbers: set[str] = set()  # paths of numbers that have changed: graphs read them on the device
        self.outputs: set[str] = set()  # paths at which the step stores tensors
        self.objects: dict[str, Any] = {}  # modules, optimizers and the like that it was called with
        # Where gradients from before it are that the step may read, as for `Gradients`: captures find out.
        self.read_gradients: frozenset[tuple[int, str]] = frozenset()
        self.calls_compiled = False  # whether a function was called that Dynamo compiles
        self.latest: Any = None
        self.recordings: dict[tuple[Any, ...], list[Any]] = {}
        # By key: snapshots, the latest last, with other values each, as where a flag comes and goes; and how many calls
        # have warmed up with these values.
        self.warm: dict[tuple[Any, ...], list[tuple[HostState, int]]] = {}
        self._pool: Any = None

    def host_roots(self) -> dict[str, Any]:
        """What a step around this one reads through it."""
        return {**self.roots, **self.update_roots}

    def _host(self) -> HostState:
        """A snapshot of what graphs of the step depend on."""
        roots = self.host_roots() if self.state.has_update else self.roots
        return HostState({**roots, **self.objects}, self.driver.device_type, outputs=self.outputs)

    def _remember(self, objects: Mapping[str, Any]) -> bool:
        """Have modules and the like among the arguments compared from now on. Returns whether there are new ones."""
        known = {id(x) for x in self.objects.values()}
        new = {name: x for name, x in objects.items() if id(x) not in known}
        self.objects |= {f"{name} ({id(x):x})" if name in self.objects else name: x for name, x in new.items()}
        return bool(new)

    def _allow_for(self, error: Exception) -> bool:
        """Allow for what a capture has found that the step stores or reads. False if nothing is new, or numbers can't
        be read on the device."""
        if isinstance(error, ReadsGradients):
            known, self.read_gradients = self.read_gradients, self.read_gradients | error.places
            return known != self.read_gradients
        if not isinstance(error, Unforeseen):
            return False
        outputs, numbers = {*error.outputs} - self.outputs, {*error.numbers} - self.numbers
        if not (outputs or numbers) or (numbers and self.state.by_number):
            return False
        self.outputs |= outputs
        self.numbers |= numbers
        if outputs:
            self.warm.clear()  # these snapshots have the tensors as dependencies
        return True

    # --- recordings

    def every_recording(self) -> list[Any]:
        """All recordings that it has."""
        return [recording for known in self.recordings.values() for recording in known]

    def _hosts(self) -> list[HostState]:
        warm = (host for known in self.warm.values() for host, _ in known)
        return [*(one.host for one in self.every_recording()), *warm]

    def _close(self, recordings: Collection[Any]) -> None:
        """Close `recordings`. The pool goes on, so gradients that somebody holds move out."""
        for recording in recordings:
            recording.gradients.move_out(self.driver)
            recording.close()
            self.latest = None if recording is self.latest else self.latest

    def _drop_recordings(self) -> None:
        self._close(self.every_recording())
        self.recordings = {}
        self.warm.clear()

    def _keep(self, recording: Any, warm_ups: int) -> None:
        """Add a new recording. The next call tries it first."""
        known = self.recordings.setdefault(recording.key, [])
        counters.add("recordings")
        counters.add("rerecordings", bool(known))
        known.append(recording)
        self._watch_later_gradients()
        self._note_warm(recording.key, recording.host, warm_ups)
        self.latest = recording
        if self.calls_compiled:  # nobody watches, so each capture finds out which ones its own call reads
            self.read_gradients = frozenset()

    def _note_warm(self, key: tuple[Any, ...], host: HostState, warm_ups: int) -> None:
        """Note how many calls have warmed up with the values of `host`, whatever its numbers are."""
        others = [
            (one, n) for one, n in self.warm.get(key, []) if not one.differences(host).keys() <= host.places.keys()
        ]
        self.warm[key] = [*others, (host, warm_ups)][-2 * MOST_UNSTABLE_CALLS :]

    def _close_stale_recordings(self, host: HostState) -> str:
        """Close recordings that read tensors which `host` does not reach, such as an optimizer's old state. Returns the
        path of such a tensor of a step that has no recording yet, or ""."""
        reached = {id(x) for x in host.tensors.values()}
        for key, known in self.recordings.items():
            stale = [
                one
                for one in known
                if one.host.is_left_by(host) or not reached.issuperset(map(id, one.host.tensors.values()))
            ]
            self._close(stale)
            self.recordings[key] = [one for one in known if one not in stale]
        self._watch_later_gradients()
        gone = ""
        for key, warm in self.warm.items():
            lost = [next((path for path, x in one.tensors.items() if id(x) not in reached), "") for one, _ in warm]
            kept = [each for each, path in zip(warm, lost, strict=True) if not path and not each[0].is_left_by(host)]
            self.warm[key] = kept or [(host, 0)]
            if all(lost) and not self.recordings.get(key):
                gone = lost[-1]
        return gone

    # --- memory

    def opened_pool(self) -> Any:
        """The pool of all graphs; a new one if the last capture has broken it."""
        assert self.cursor is not None
        if self._pool is not None and self._pool.broken:
            self._pool.release()  # now: its graph must not be destroyed in a later capture
            self._pool = None
        if self._pool is None:
            self._pool = self.driver.open_pool(self.cursor.device)
        return self._pool

    def blocks_in_use(self) -> set[int]:
        """The blocks of the pool that recordings need between replays, by address."""
        return {a for one in self.every_recording() if one.pool is self._pool for a in one.blocks}

    def _watch_later_gradients(self) -> None:
        """Have each recording watch the gradients of later recordings, which may lie where it writes to."""
        every = self.every_recording()
        for recording in every:
            later = [other for other in every if other.pool is recording.pool and other.order > recording.order]
            recording.gradients.watch_also([slot for other in later for slot in other.gradients.slots.values()])
