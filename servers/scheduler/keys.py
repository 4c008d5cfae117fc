"""Which keys a store has: what every worker says of them, and where rank 0's values are. Pure.

Rank 0's declaration places a key; the others' wait until its value is on the servers. Whoever declares a key with
another shape or dtype than someone else fails, and so does the one it contradicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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


Said = tuple[tuple[Key, ...], tuple[tuple[int, ...], ...], tuple[str, ...]]  # keys, shapes, dtypes


@dataclass(eq=False)
class _Group:
    """Declarations that say the same and wait: one however many workers there are, for they name all keys of a model.

    Attributes:
        missing: how many of the keys have no value yet.
        askers: whose declarations they are.
    """

    said: Said
    specs: Mapping[Key, Spec]
    missing: int
    askers: list[Asker] = field(default_factory=list)


class Keys:
    """The keys of one store.

    Args:
        loads: bytes by server, shared by all stores of the job.
    """

    def __init__(self, loads: list[int]) -> None:
        self._loads = loads
        self._placed: dict[Key, _Placed] = {}
        self._waiting: dict[Said, _Group] = {}
        self._by_key: dict[Key, dict[_Group, None]] = {}  # in order; whoever contradicts one of them does not wait
        self._by_rank: dict[int, dict[int, _Group]] = {}  # and then by the sequence number of the declaration
        self._latest: tuple[Said, list[Segments] | Exception] | None = None  # a declaration and its outcome
        self._next_id = 0

    def declare(self, peer: bytes, request: Declare) -> tuple[list[Outcome], Exception | None]:
        """Take a worker's declaration.

        Returns:
            The outcomes, for this worker and for those it contradicts: segments for each key, or an error; and what
            rank 0, whose own call was answered before, must be told.
        """
        asker = Asker(peer, request)
        said = (tuple(request.keys), tuple(map(tuple, request.shapes)), tuple(request.dtypes))
        if request.rank != 0 and said in self._waiting:
            self._wait(self._waiting[said], asker)
            return [], None
        if request.rank != 0 and self._latest is not None and said == self._latest[0]:
            return [(asker, self._latest[1])], None
        specs = {key: Spec(shape, dtype) for key, shape, dtype in zip(*said, strict=True)}
        if len(specs) < len(request.keys):
            return [(asker, UsageError("a key is declared twice in one call"))], None
        contradicted = self._contradicted(request.rank, specs)
        if contradicted:
            return [(asker, contradicted[0][1]), *contradicted], None
        if request.rank == 0:
            return self._place(asker, specs), None
        for key, spec in specs.items():
            known = self._placed.get(key)
            if known is not None and known.spec != spec:
                error = Mismatch(f"key {key!r} is {known.spec} on worker 0, but {spec} on worker {request.rank}")
                return [(asker, error)], error
        missing = sum(not self._ready(key) for key in specs)
        if not missing:
            return self._settle(said, [asker]), None
        group = self._waiting[said] = _Group(said, specs, missing)
        for key in specs:
            self._by_key.setdefault(key, {})[group] = None
        self._wait(group, asker)
        return [], None

    def ready(self, keys: Sequence[Key]) -> list[Outcome]:
        """Note that rank 0's values of ``keys`` are on the servers; return the outcomes of those who waited for it."""
        done: list[_Group] = []
        for key in keys:
            if key not in self._placed or self._placed[key].ready:
                continue
            self._placed[key].ready = True
            for group in self._by_key.get(key, ()):
                group.missing -= 1
                if not group.missing:
                    done.append(group)
        for group in done:
            self._remove(group)
        return [outcome for group in done for outcome in self._settle(group.said, group.askers)]

    def abandon(self) -> list[Asker]:
        """Return, and forget, those who wait for rank 0, because it has left."""
        hopeless = [asker for group in self._waiting.values() for asker in group.askers]
        self._waiting.clear()
        self._by_key.clear()
        self._by_rank.clear()
        return hopeless

    def forget(self) -> None:
        """The store is closed: its keys weigh nothing any more."""
        self._latest = None
        for key in list(self._placed):
            self._drop(key)

    def waits(self, rank: int) -> bool:
        """Whether a declaration of ``rank`` waits."""
        return rank in self._by_rank

    def explain(self, rank: int, seq: int) -> str:
        """Say what the declaration ``seq`` of worker ``rank`` waits for."""
        group = self._by_rank.get(rank, {}).get(seq)
        if group is None:
            return ""
        return f"waits for worker 0 to init {shorten(key for key in group.specs if not self._ready(key))}"

    def _wait(self, group: _Group, asker: Asker) -> None:
        peer, request = asker
        if group.askers:  # a thousand workers that name the same thousand keys name them in the same memory
            first = group.askers[0].request
            request = replace(request, keys=first.keys, shapes=first.shapes, dtypes=first.dtypes)
        group.askers.append(Asker(peer, request))
        self._by_rank.setdefault(request.rank, {})[request.seq] = group

    def _remove(self, group: _Group) -> None:
        """Nobody waits any more who has declared what ``group`` has."""
        del self._waiting[group.said]
        for key in group.specs:
            del self._by_key[key][group]
            if not self._by_key[key]:
                del self._by_key[key]
        for _, request in group.askers:
            del self._by_rank[request.rank][request.seq]
            if not self._by_rank[request.rank]:
                del self._by_rank[request.rank]

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
        return [(asker, self._outcome(list(specs)))]

    def _drop(self, key: Key) -> None:
        placed = self._placed.pop(key)
        for _, server, start, stop in placed.segments:
            self._loads[server] -= (stop - start) * placed.spec.itemsize

    def _contradicted(self, rank: int, specs: Mapping[Key, Spec]) -> list[tuple[Asker, Exception]]:
        """Return, and forget, those who wait, and said something else of a key."""
        found: list[tuple[Asker, Exception]] = []
        for key, spec in specs.items():
            for group in [group for group in self._by_key.get(key, ()) if group.specs[key] != spec]:
                self._remove(group)
                for asker in group.askers:
                    words = f"{group.specs[key]} on worker {asker.request.rank}, but {spec} on worker {rank}"
                    found.append((asker, Mismatch(f"key {key!r} is {words}")))
        return found

    def _ready(self, key: Key) -> bool:
        return key in self._placed and self._placed[key].ready

    def _settle(self, said: Said, askers: Sequence[Asker]) -> list[Outcome]:
        """Return the outcomes of those who have declared ``said``, since all these keys have their values."""
        outcome = self._outcome(said[0])
        self._latest = said, outcome
        return [(asker, outcome) for asker in askers]

    def _outcome(self, keys: Sequence[Key]) -> list[Segments] | Exception:
        segments = {key: self._placed[key].segments for key in keys}
        try:
            require_few({key: len(its) for key, its in segments.items()})  # others may have placed them call by call
        except UsageError as exc:
            return exc
        return list(segments.values())
