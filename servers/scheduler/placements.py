"""Where the segments of one store's keys are, as rank 0's declarations have placed them. Pure.

A declaration may have 100,000 keys. So each property of the keys is a dict of its own, which takes all keys of a
declaration in one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from kvstore.errors import AlreadyInitialized
from kvstore.placement import ServerRange, place, require_few
from kvstore.spec import Key, Spec


class Columns(NamedTuple):
    """The segments of a list of keys, in columns; see ``Placed``."""

    counts: list[int]
    ids: list[int]
    servers: list[int]
    starts: list[int]
    stops: list[int]


class Placements:
    """The keys that have been placed.

    Args:
        loads: bytes of each server, shared by all stores of the job.

    Attributes:
        specs: by key.
        ready: the keys whose first values are on the servers.
    """

    def __init__(self, loads: list[int]) -> None:
        self.specs: dict[Key, Spec] = {}
        self.ready: set[Key] = set()
        self._loads = loads
        self._segments: dict[Key, tuple[ServerRange, ...]] = {}
        self._firsts: dict[Key, int] = {}  # the id of the first segment; the others follow it
        self._rules: dict[Key, tuple[int, int]] = {}  # the bound and the longest segment it was placed with
        self._next_id = 0

    def add(self, specs: Mapping[Key, Spec], bound: int, longest: int) -> None:
        """Place keys. A key that is placed already, but has no value, is placed again if anything differs.

        Raises:
            AlreadyInitialized: a key has its first value.
            UsageError: see ``place``; nothing new has been placed.
        """
        before = specs.keys() & self.specs.keys()
        if before & self.ready:
            key = next(key for key in specs if key in self.ready)
            raise AlreadyInitialized(f"key {key!r} is already initialized; push a new value instead")
        for key in before:  # by a call that was interrupted
            if (self.specs[key], self._rules[key]) != (specs[key], (bound, longest)):
                self._drop(key)
        new = {key: spec for key, spec in specs.items() if key not in self.specs} if before else specs
        segments = place(new, self._loads, bound, longest)
        counts = map(len, segments.values())
        firsts = list(itertools.accumulate(counts, initial=self._next_id))
        self._next_id = firsts.pop()
        self._firsts.update(zip(segments, firsts, strict=True))
        self._segments.update(segments)
        self._rules.update(dict.fromkeys(segments, (bound, longest)))
        self.specs.update(new)

    def clear(self) -> None:
        """Forget all keys, and take them off the servers' loads."""
        for key in list(self.specs):
            self._drop(key)
        self.ready.clear()

    def contradicted(self, specs: Mapping[Key, Spec]) -> Key | None:
        """Return the first key whose spec here differs from that in ``specs``."""
        return first_other(specs, self.specs)

    def missing(self, keys: Collection[Key]) -> set[Key]:
        """Return those of ``keys`` that have no value yet."""
        return set(keys) - self.ready

    def columns(self, keys: Sequence[Key]) -> Columns:
        """Return where ``keys`` are.

        Raises:
            UsageError: they have more segments than fit into one message; keys may have been placed call by call.
        """
        placed = list(map(self._segments.__getitem__, keys))
        counts = list(map(len, placed))
        require_few(keys, counts)
        firsts = map(self._firsts.__getitem__, keys)
        segments = list(itertools.chain.from_iterable(placed))
        if len(segments) == len(keys):
            ids = list(firsts)
        else:
            ids = [first + place for first, count in zip(firsts, counts, strict=True) for place in range(count)]
        servers, starts, stops = (list(map(itemgetter(place), segments)) for place in range(3))
        return Columns(counts, ids, servers, starts, stops)

    def _drop(self, key: Key) -> None:
        spec = self.specs.pop(key)
        for server, start, stop in self._segments.pop(key):
            self._loads[server] -= (stop - start) * spec.itemsize
        del self._firsts[key], self._rules[key]


def first_other(specs: Mapping[Key, Spec], others: Mapping[Key, Spec]) -> Key | None:
    """Return the first key of ``specs`` whose spec in ``others`` differs; None if no common key differs."""
    common = list(specs.keys() & others.keys())
    if list(map(specs.__getitem__, common)) == list(map(others.__getitem__, common)):
        return None
    return next(key for key, spec in specs.items() if key in others and others[key] != spec)
