"""The records that a standby has not applied, in the order in which it does. Pure.

A standby may keep a round until the primary hands over what it has made of it. Then the standby drops the round, and
keeps what it was handed, until the next hand-over replaces that, too. Nothing is lost with that: a record is stored
when it is here, and whoever takes over applies all of them first. Rounds of different arrays, and of tables, can be
applied in any order. Any other record comes after all that came before it.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from kvstore import wire

MOST = 16  # rounds of the same arrays that are kept: a primary hands its arrays over sooner
_Arrays: TypeAlias = "tuple[int, tuple[int, ...], tuple[int, ...]]"


class Backlog:
    """See the module."""

    def __init__(self) -> None:
        self._due: deque[wire.Message] = deque()
        self._kept: dict[_Arrays, list[wire.ClosedRounds | wire.Updated]] = {}
        self._ids: set[tuple[int, int]] = set()  # the arrays of those that are kept, with their stores

    def __len__(self) -> int:
        return len(self._due) + sum(map(len, self._kept.values()))

    @property
    def ready(self) -> bool:
        """Whether there is something to apply now."""
        return bool(self._due)

    def add(self, message: wire.Message) -> None:
        """Take the next record."""
        if isinstance(message, wire.ClosedRowRounds):
            self._due.append(message)
        elif isinstance(message, wire.ClosedRounds) and message.kept:
            self._keep(message)
        elif isinstance(message, wire.Updated) and self._replaces(message):
            self._kept[_arrays_of(message)] = [message]
        else:
            self.hurry()
            self._due.append(message)

    def take(self) -> wire.Message | None:
        """Return what is to be applied next; None if nothing is due."""
        return self._due.popleft() if self._due else None

    def hurry(self) -> None:
        """Keep nothing any more."""
        for messages in self._kept.values():
            self._due.extend(messages)
        self._kept.clear()
        self._ids.clear()

    def _keep(self, message: wire.ClosedRounds) -> None:
        arrays = _arrays_of(message)
        if arrays not in self._kept:
            ids = {(message.store, number) for number in message.ids}
            if not self._ids.isdisjoint(ids):  # they are pushed in other lists now
                self.hurry()
            self._ids |= ids
            self._kept[arrays] = []
        self._kept[arrays].append(message)
        if len(self._kept[arrays]) > MOST:
            self.hurry()

    def _replaces(self, message: wire.Updated) -> bool:
        """Return whether ``message`` is what all kept rounds of its arrays have made."""
        kept = self._kept.get(_arrays_of(message))
        return kept is not None and kept[-1].versions == message.versions


def _arrays_of(message: wire.ClosedRounds | wire.Updated) -> _Arrays:
    return message.store, tuple(message.ids), tuple(message.sizes)
