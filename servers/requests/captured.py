"""The captures that worker 0 has asked a server for: which are under way, how they ended, and who waits for that."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from kvstore import wire
from kvstore.errors import KVStoreError, UsageError
from servers.requests.replies import Answer, refuse

C = TypeVar("C")

MOST = 4  # checkpoints whose outcome is remembered
MOST_ASKERS = 16  # of one checkpoint: worker 0 over its links


class _Asker(NamedTuple):
    peer: bytes
    request: wire.AwaitCapture


class CaptureDesk(Generic[C]):
    """The captures of one server. A capture is known by the numbers of its store and of its checkpoint."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[int, int], C | None] = {}
        self._outcomes: dict[tuple[int, int], wire.Captured | KVStoreError] = {}
        self._waiting: dict[tuple[int, int], list[_Asker]] = {}

    def begin(self, store: int, number: int) -> None:
        """Note that a capture is about to begin.

        Raises:
            UsageError: there was one of this number.
        """
        if (store, number) in self._under_way or (store, number) in self._outcomes:
            raise UsageError(f"checkpoint {number} of store {store} has been asked for before")
        self._under_way[store, number] = None

    def forget(self, store: int, number: int) -> None:
        """Note that a capture has not begun after all."""
        self._under_way.pop((store, number), None)

    def ended(self, store: int, number: int, outcome: wire.Captured | KVStoreError) -> list[Answer]:
        """Note how a capture ended; ``seq`` of ``outcome`` does not matter. Return the answer to who waits."""
        self._under_way.pop((store, number), None)
        self._outcomes[store, number] = outcome
        while len(self._outcomes) > MOST:
            del self._outcomes[next(iter(self._outcomes))]
        return [self._answer(*asker, outcome) for asker in self._waiting.pop((store, number), ())]

    def wait(self, peer: bytes, request: wire.AwaitCapture) -> list[Answer]:
        """Answer ``request`` now, or when its capture has ended; a repeat is answered over its link, too."""
        which = request.store, request.number
        if which in self._under_way:
            askers = self._waiting.setdefault(which, [])
            if (peer, request) not in askers:
                askers.append(_Asker(peer, request))
                del askers[:-MOST_ASKERS]
            return []
        outcome = self._outcomes.get(which)
        if outcome is None:
            outcome = UsageError(f"checkpoint {request.number} is not known here: this server has taken over since")
        return [self._answer(peer, request, outcome)]

    def explain(self, node: object, about: int) -> str:
        """Say what request ``about`` of ``node`` waits for; empty if it does not wait."""
        for (_, number), askers in self._waiting.items():
            if any(asker.request.node == node and asker.request.seq == about for asker in askers):
                return f"is writing checkpoint {number}"
        return ""

    def _answer(self, peer: bytes, request: wire.Request, outcome: wire.Captured | KVStoreError) -> Answer:
        if isinstance(outcome, KVStoreError):
            return refuse(peer, request, outcome)
        return Answer(
            peer,
            request,
            wire.Captured(request.seq, outcome.nbytes, outcome.sha256, outcome.clocks, outcome.optimizer, outcome.path),
        )
