"""Who has made which stores, where in its program: whether all workers make the same ones in the same order. Pure.

The n-th store of each worker is the same store. One that a single worker makes shifts all its later ones, so that it
waits in them for pushes which the others make elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kvstore import wire
from kvstore.errors import Mismatch

MOST = 8  # stores that were made at different places; a branch for each worker may make them so


class _Pair(NamedTuple):
    """Two workers that have made their stores of one number at different places."""

    one: wire.OpenStore
    other: wire.OpenStore


class Makers:
    """The stores that workers have made. The cost of each is the same, however many workers there are."""

    def __init__(self) -> None:
        self._first: dict[int, wire.OpenStore] = {}  # by ordinal: who has made it first
        self._by: dict[int, set[int]] = {}  # by ordinal: who has made it
        self._places: dict[int, dict[int, str]] = {}  # by rank and ordinal, with some that are forgotten
        self._apart: dict[int, _Pair] = {}  # by ordinal

    def note(self, request: wire.OpenStore) -> None:
        """Note that a worker makes a store.

        Raises:
            Mismatch: another worker has made something else there, or makes this one at another number.
        """
        ordinal, rank = request.ordinal, request.node.rank
        first = self._first.setdefault(ordinal, request)
        # What this worker has said of it before, it was interrupted at.
        if first.node.rank == rank:
            self._first[ordinal] = first = request
        if rank in [each.node.rank for each in self._apart.get(ordinal, ())]:
            del self._apart[ordinal]
        self._by.setdefault(ordinal, set()).add(rank)
        if request.made and first.made and request.made != first.made:
            raise Mismatch(_words(request, first))
        if not (request.place and first.place):
            return
        places = self._places.setdefault(rank, {})
        places[ordinal] = request.place
        if len(places) > 2 * len(self._first) + MOST:
            self._places[rank] = {number: place for number, place in places.items() if number in self._first}
        if request.place != first.place and len(self._apart) < MOST:
            self._apart.setdefault(ordinal, _Pair(request, first))
        for pair in self._apart.values():
            if self._elsewhere(*pair) or self._elsewhere(pair.other, pair.one):
                raise Mismatch(_words(*pair))

    def unmade(self, ordinal: int, among: Collection[int]) -> str:
        """Say which workers of ``among`` have not made store ``ordinal``; empty if all have."""
        absent = sorted(set(among) - self._by.get(ordinal, set(among)))
        if not absent:
            return ""
        first = self._first[ordinal]
        who = ", ".join(f"worker {rank}" for rank in absent)
        return f"; {who} made no {_nth(ordinal)} store, which is {_described(first)} on {first.node}: {_RULE}"

    def forget(self, ordinal: int) -> None:
        """Forget a store that all have closed."""
        self._first.pop(ordinal, None)
        self._by.pop(ordinal, None)
        self._apart.pop(ordinal, None)

    def _elsewhere(self, one: wire.OpenStore, other: wire.OpenStore) -> bool:
        """Return whether the worker of ``one`` has made, as another of its stores, what ``other`` is."""
        places = self._places[one.node.rank]
        return any(places.get(number) == other.place for number in self._first if number != one.ordinal)


_RULE = "all workers must make the same stores, in the same order"


def _words(one: wire.OpenStore, other: wire.OpenStore) -> str:
    nth = _nth(one.ordinal)
    return (
        f"the {nth} store of {one.node} is {_described(one)}, and the {nth} store of {other.node} is "
        f"{_described(other)}: the n-th stores of all workers are one store, so {_RULE}"
    )


def _described(request: wire.OpenStore) -> str:
    return (request.made or "a store") + (f", made at {request.place}" if request.place else "")


def _nth(number: int) -> str:
    return f"{number}{'th' if 10 <= number % 100 <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
