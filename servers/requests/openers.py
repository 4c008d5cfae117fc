"""Which workers have opened and closed each store of a process. Pure."""

from __future__ import annotations

from collections.abc import Collection

from kvstore import wire
from kvstore.errors import Mismatch
from kvstore.rule import Rule


class Openers:
    """The workers that have opened each store, and closed it, by the store's number; ``workers`` are all that may."""

    def __init__(self, workers: Collection[int]) -> None:
        self.opened_by: dict[int, set[int]] = {}
        self.closed_by: dict[int, set[int]] = {}
        self._workers = frozenset(workers)
        self._lost: frozenset[int] = frozenset()

    def open(self, message: wire.Open, known: Rule | None) -> Rule | None:
        """Note that a worker opens a store, which has the rule ``known`` here; return its rule if it must be made."""
        rule = Rule.of(message)
        opened_by = self.opened_by.setdefault(message.store, set())
        mine = {message.node.rank}
        # A worker that was interrupted while it made a store may make another with the same number.
        made = known is None or (known != rule and opened_by <= mine)  # no set of all workers for a message
        if not made and known != rule:
            other = min(opened_by - mine)
            raise Mismatch(f"store {message.store} is {rule} on {message.node}, but {known} on worker {other}")
        opened_by.add(message.node.rank)
        if made:
            self.closed_by[message.store] = set()
        return rule if made else None

    def close(self, message: wire.Close) -> bool:
        """Note that a worker closes a store; return whether all have, so that it is to be forgotten."""
        closed_by = self.closed_by.get(message.store)
        if closed_by is None:
            return False
        closed_by.add(message.node.rank)
        return self._close_if_over(message.store)

    def lose(self, workers: Collection[int]) -> list[int]:
        """Wait for these workers, which are lost, to close no store; return the stores that are to be forgotten."""
        self._lost = frozenset(workers)
        return [store for store in list(self.closed_by) if self._close_if_over(store)] if workers else []

    def _close_if_over(self, store: int) -> bool:
        closed_by = self.closed_by[store]
        if not closed_by or not closed_by | self._lost >= self._workers:
            return False
        del self.opened_by[store], self.closed_by[store]
        return True
