"""The worker's side of ``join``: a pause lasts from the call until all servers let the worker go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from kvstore import wire
from kvstore.client.clocks import PushClocks
from kvstore.client.plans.entries import Entries, Entry, Segment
from kvstore.client.requests import Requests
from kvstore.errors import DeadlineExceeded, KVStoreError
from kvstore.spec import Key
from kvstore.ticket import Operation


class Joining:
    """The pauses of one worker in one store, one after the other.

    An exception may end any call here; the next ``join`` continues from that point.

    Args:
        requests: to the scheduler and the servers.
        clocks: of this worker's keys.
    """

    def __init__(self, requests: Requests, clocks: PushClocks) -> None:
        self._requests = requests
        self._clocks = clocks
        self._number = 0  # of the last pause
        self._operation: Operation | None = None  # of the one that is under way
        self._last = 0
        self._rounds: dict[int, int] = {}  # by segment: where its rounds are when the worker goes on

    @property
    def under_way(self) -> bool:
        """Whether this worker pauses."""
        return self._operation is not None

    def begin(self, entries: Entries) -> None:
        """Announce a pause to the scheduler, then to the servers. Nothing may be pushed from here to ``end``."""
        number = self._number + 1
        self._requests.announce_pause(number)
        self._requests.pause(
            number, partial(self._pushed, entries), entries.tables, self._take, partial(self._begun, number)
        )

    def _pushed(self, entries: Mapping[Key, Entry]) -> Mapping[Segment, int]:
        """Return how often each segment has been pushed."""
        pushed = self._clocks.pushed
        return {segment: int(pushed[entry.place]) for entry in entries.values() for segment in entry.segments}

    def _begun(self, number: int, operation: Operation) -> None:
        self._rounds = {}
        self._number = number
        self._operation = operation

    def wait(self, timeout: float | None) -> None:
        """Return when all servers let this worker go on. After ``DeadlineExceeded`` the pause goes on."""
        if self._operation is None:
            return
        try:
            self._operation.wait(timeout)
        except DeadlineExceeded:
            raise
        except KVStoreError:
            self._operation = None
            raise

    def end(self, entries: Mapping[Key, Entry]) -> int:
        """Move the clocks up to the rounds that others have made meanwhile; return the rank that joined last."""
        self._clocks.resume(list(entries.values()), self._rounds)
        self._operation = None
        return self._last

    def _take(self, ids: Sequence[int], reply: wire.Resume) -> None:
        self._last = reply.last
        self._rounds.update(zip(ids, reply.clocks, strict=True))
