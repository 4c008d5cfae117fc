"""Which keys a store has: what every worker says of them, and where rank 0's values are. Pure.

Rank 0's declaration places a key; the others' wait until its value is on the servers. Whoever declares a key with
another shape or dtype than someone else fails, and so does the one it contradicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import AlreadyInitialised, Mismatch, UsageError
from kvstore.placement import place, require_few
from kvstore.spec import Key, Spec, shorten
from kvstore.wire import Declare


class Asker(NamedTuple):
    """Who waits for the answer to ``request``."""

    peer: bytes
    request: Declare


Segments = list[list[int]]
Outcome = tuple[Asker, "list[Segments] | Exception"]


@dataclass
class _Placed:
    spec: Spec
    segments: Segments
    bound: int
    longest: int
    ready: bool = False


class Keys:
    """The keys of one store.

    Args:
        loads: bytes by server, shared by all stores of the job.
    """

    def __init__(self, loads: list[int]) -> None:
        self._loads = loads
        self._placed: dict[Key, _Placed] = {}
        self._waiting: list[tuple[Asker, dict[Key, Spec]]] = []
        self._next_id = 0

    def declare(self, peer: bytes, request: Declare) -> tuple[list[Outcome], Exception | None]:
        """Take a worker's declaration.

        Returns:
            The outcomes, for this worker and for those it contradicts: segments for each key, or an error; and what
            rank 0, whose own call was answered before, must be told.
        """
        asker = Asker(peer, request)
        specs = {
            key: Spec(tuple(shape), dtype)
            for key, shape, dtype in zip(request.keys, request.shapes, request.dtypes, strict=True)
        }
        if len(specs) < len(request.keys):
            return [(asker, UsageError("a key is declared twice in one call"))], None
        contradicted = self._contradicted(request.rank, specs)
        if contradicted:
            others = [other for other, _ in contradicted]
            self._waiting = [entry for entry in self._waiting if entry[0] not in others]
            return [(asker, contradicted[0][1]), *contradicted], None
        if request.rank == 0:
            return self._place(asker, specs), None
        for key, spec in specs.items():
            known = self._placed.get(key)
            if known is not None and known.spec != spec:
                error = Mismatch(f"key {key!r} is {known.spec} on worker 0, but {spec} on worker {request.rank}")
                return [(asker, error)], error
        if self._ready(specs):
            return [self._outcome(asker, specs)], None
        self._waiting.append((asker, specs))
        return [], None

    def ready(self, keys: Sequence[Key]) -> list[Outcome]:
        """Note that rank 0's values of ``keys`` are on the servers; return the outcomes of those who waited for it."""
        for key in keys:
            if key in self._placed:
                self._placed[key].ready = True
        done = [(asker, specs) for asker, specs in self._waiting if self._ready(specs)]
        self._waiting = [entry for entry in self._waiting if not self._ready(entry[1])]
        return [self._outcome(asker, specs) for asker, specs in done]

    def abandon(self) -> list[Asker]:
        """Return, and forget, those who wait for rank 0, because it has left."""
        hopeless = [asker for asker, _ in self._waiting]
        self._waiting.clear()
        return hopeless

    def forget(self) -> None:
        """The store is closed: its keys weigh nothing any more."""
        for key in list(self._placed):
            self._drop(key)

    def explain(self, rank: int, seq: int) -> str:
        """Say what the declaration ``seq`` of worker ``rank`` waits for."""
        for asker, specs in self._waiting:
            if (asker.request.rank, asker.request.seq) == (rank, seq):
                missing = [key for key in specs if key not in self._placed or not self._placed[key].ready]
                return f"waits for worker 0 to init {shorten(missing)}"
        return ""

    def _place(self, asker: Asker, specs: Mapping[Key, Spec]) -> list[Outcome]:
        bound, longest = asker.request.bound, asker.request.longest
        placed_before = [key for key in specs if key in self._placed]
        for key in placed_before:
            if self._placed[key].ready:
                return [(asker, AlreadyInitialised(f"key {key!r} is initialised already"))]
        for key in placed_before:  # an earlier call was interrupted: this one is the same, or another
            known = self._placed[key]
            if (known.spec, known.bound, known.longest) != (specs[key], bound, longest):
                self._drop(key)
        try:
            new = {key: spec for key, spec in specs.items() if key not in self._placed}
            placed = place(new, self._loads, bound, longest)
        except UsageError as exc:
            return [(asker, exc)]
        for key, segments in placed.items():
            numbered = []
            for segment in segments:
                numbered.append([self._next_id, segment.server, segment.start, segment.stop])
                self._next_id += 1
            self._placed[key] = _Placed(specs[key], numbered, bound, longest)
        return [self._outcome(asker, specs)]

    def _drop(self, key: Key) -> None:
        placed = self._placed.pop(key)
        for _, server, start, stop in placed.segments:
            self._loads[server] -= (stop - start) * placed.spec.itemsize

    def _contradicted(self, rank: int, specs: Mapping[Key, Spec]) -> list[tuple[Asker, Exception]]:
        """Those who wait, and said something else of a key."""
        found: list[tuple[Asker, Exception]] = []
        for asker, theirs in self._waiting:
            key = next((key for key in theirs if key in specs and theirs[key] != specs[key]), None)
            if key is not None:
                words = f"{theirs[key]} on worker {asker.request.rank}, but {specs[key]} on worker {rank}"
                found.append((asker, Mismatch(f"key {key!r} is {words}")))
        return found

    def _ready(self, specs: Mapping[Key, Spec]) -> bool:
        return all(key in self._placed and self._placed[key].ready for key in specs)

    def _outcome(self, asker: Asker, specs: Mapping[Key, Spec]) -> Outcome:
        segments = {key: self._placed[key].segments for key in specs}
        try:
            require_few({key: len(its) for key, its in segments.items()})  # others may have placed them call by call
        except UsageError as exc:
            return asker, exc
        return asker, list(segments.values())
