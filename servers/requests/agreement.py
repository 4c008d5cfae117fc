"""Calls that all workers make and that take effect once: rank 0's call does, the others' are compared with it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from kvstore.errors import Mismatch

T = TypeVar("T")  # a proposal
A = TypeVar("A")  # an asker


class Agreement(Generic[T, A]):
    """One kind of call. The n-th call of one worker is compared with the n-th of the others: that is its ``version``.

    Args:
        what: the name of the call, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._decided: dict[int, tuple[T, Exception | None, A]] = {}
        self._waiting: dict[int, list[tuple[A, T]]] = {}

    @property
    def decided(self) -> list[tuple[int, A, Exception | None]]:
        """Rank 0's calls in their order: version, asker, and the error of those that have failed."""
        return [(version, who, error) for version, (_, error, who) in self._decided.items()]

    def restore(self, version: int, proposal: T, who: A, error: Exception | None) -> None:
        """Note a call of rank 0's on which another server has acted."""
        self._decided[version] = (proposal, error, who)

    @property
    def waiting(self) -> list[A]:
        """Those whose call waits for rank 0's."""
        return [who for waiting in self._waiting.values() for who, _ in waiting]

    def decide(self, version: int, proposal: T, who: A, act: Callable[[T], None]) -> list[tuple[A, Exception | None]]:
        """Take rank 0's call: act, and return the outcome for ``who`` and for those who waited for it."""
        error: Exception | None = None
        try:
            act(proposal)
        except Exception as exc:
            error = exc
        self._decided[version] = (proposal, error, who)
        waiting = [(other, self._outcome(version, proposed)) for other, proposed in self._waiting.pop(version, [])]
        return [(who, error), *waiting]

    def propose(self, version: int, proposal: T, who: A) -> list[tuple[A, Exception | None]]:
        """Take another rank's call: return its outcome if rank 0 has called, else nothing yet."""
        if version in self._decided:
            return [(who, self._outcome(version, proposal))]
        self._waiting.setdefault(version, []).append((who, proposal))
        return []

    def abandon(self) -> list[A]:
        """Return, and forget, those who wait for rank 0, because its call will not come."""
        waiting = self.waiting
        self._waiting.clear()
        return waiting

    def _outcome(self, version: int, proposal: T) -> Exception | None:
        decided, error, _ = self._decided[version]
        if proposal != decided:
            return Mismatch(f"{self._what} differs from worker 0's: {proposal} here, {decided} there")
        return error
