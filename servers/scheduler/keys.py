"""Which keys a store has: what every worker says of them, and where rank 0's values are. Pure.

Rank 0's declaration places a key; the others' wait until its value is on the servers. Whoever declares a key with
another shape or dtype than someone else fails, and so does the one it contradicts.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from kvstore.errors import Mismatch, UsageError
from kvstore.spec import Key, Spec, shorten
from kvstore.wire import Declare
from servers.scheduler.placements import Columns, Placements, first_other


class Asker(NamedTuple):
    """Who waits for the answer to ``request``."""

    peer: bytes
    request: Declare


Outcome = tuple[Asker, "Columns | Exception"]
Said = tuple[tuple[Key, ...], tuple[int, ...], tuple[Spec, ...]]  # keys, kinds, and what these are


@dataclass(eq=False)
class _Group:
    """Declarations that say the same and wait: one however many workers there are, for they name all keys of a model.

    Attributes:
        number: it grows from one to the next.
        missing: how many of the keys have no value yet.
        askers: whose declarations they are.
    """

    number: int
    said: Said
    specs: Mapping[Key, Spec]
    missing: int
    askers: list[Asker] = field(default_factory=list)


class DeclaredKeys:
    """The keys of one store.

    Args:
        loads: bytes by server, shared by all stores of the job.
    """

    def __init__(self, loads: list[int]) -> None:
        self._placements = Placements(loads)
        self._specs: dict[Spec, Spec] = {}  # one for all arrays that are alike: to compare them costs nothing then
        self._numbers = itertools.count()
        self._waiting: dict[Said, _Group] = {}
        self._by_key: dict[Key, tuple[_Group, ...]] = {}  # in order; whoever contradicts one of them does not wait
        self._by_rank: dict[int, dict[int, _Group]] = {}  # and then by the sequence number of the declaration
        self._latest: tuple[Said, Columns | Exception] | None = None  # a declaration and its outcome

    def declare(self, peer: bytes, request: Declare) -> tuple[list[Outcome], Exception | None]:
        """Take a worker's declaration.

        Returns:
            The outcomes, for this worker and for those it contradicts: segments, or an error; and what rank 0, whose
            own call was answered before, must be told.
        """
        asker = Asker(peer, request)
        said = (tuple(request.keys), tuple(request.kinds), self._known(request))
        if request.node.rank != 0 and said in self._waiting:
            self._wait(self._waiting[said], asker)
            return [], None
        if request.node.rank != 0 and self._latest is not None and said == self._latest[0]:
            return [(asker, self._latest[1])], None
        specs = dict(zip(request.keys, map(said[2].__getitem__, request.kinds), strict=True))
        if len(specs) < len(request.keys):
            return [(asker, UsageError("a key is declared twice in one call"))], None
        contradicted = self._contradicted(request.node.rank, specs)
        if contradicted:
            return [(asker, contradicted[0][1]), *contradicted], None
        if request.node.rank == 0:
            return [(asker, self._place(request, specs))], None
        key = self._placements.contradicted(specs)
        if key is not None:
            known = self._placements.specs[key]
            error = Mismatch(f"key {key!r} is {known} on worker 0, but {specs[key]} on {request.node}")
            return [(asker, error)], error
        missing = len(self._placements.missing(specs.keys()))
        if not missing:
            return self._settle(said, [asker]), None
        group = self._waiting[said] = _Group(next(self._numbers), said, specs, missing)
        others = {key: (*self._by_key[key], group) for key in specs.keys() & self._by_key.keys()}
        self._by_key.update(dict.fromkeys(specs, (group,)))
        self._by_key.update(others)
        self._wait(group, asker)
        return [], None

    def ready(self, keys: Sequence[Key]) -> list[Outcome]:
        """Note that rank 0's values of ``keys`` are on the servers; return the outcomes of those who waited for it."""
        new = self._placements.missing(keys) & self._placements.specs.keys()
        self._placements.ready |= new
        done: list[_Group] = []
        for group in self._waiting_for(new):
            group.missing -= len(new & group.specs.keys())
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
        self._specs.clear()
        self._placements.clear()

    def waits(self, rank: int) -> bool:
        """Whether a declaration of ``rank`` waits."""
        return rank in self._by_rank

    def explain(self, rank: int, seq: int) -> str:
        """Say what the declaration ``seq`` of worker ``rank`` waits for."""
        group = self._by_rank.get(rank, {}).get(seq)
        if group is None:
            return ""
        missing = self._placements.missing(group.specs.keys())
        return f"waits for worker 0 to init {shorten(key for key in group.specs if key in missing)}"

    def _known(self, request: Declare) -> tuple[Spec, ...]:
        """Return what the arrays of a declaration are, by kind."""
        specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(request.shapes, request.dtypes, strict=True)]
        return tuple(self._specs.setdefault(spec, spec) for spec in specs)

    def _waiting_for(self, keys: Collection[Key]) -> list[_Group]:
        """Return who waits, and has declared some of ``keys``, in the order in which they came."""
        groups = {group for listed in set(map(self._by_key.get, keys)) if listed is not None for group in listed}
        return sorted(groups, key=attrgetter("number"))

    def _wait(self, group: _Group, asker: Asker) -> None:
        peer, request = asker
        if group.askers:  # a thousand workers that name the same thousand keys name them in the same memory
            first = group.askers[0].request
            request = replace(request, keys=first.keys, kinds=first.kinds, shapes=first.shapes, dtypes=first.dtypes)
        group.askers.append(Asker(peer, request))
        self._by_rank.setdefault(request.node.rank, {})[request.seq] = group

    def _remove(self, group: _Group) -> None:
        """Nobody waits any more who has declared what ``group`` has."""
        del self._waiting[group.said]
        for key in group.specs:
            listed = self._by_key.pop(key)
            if len(listed) > 1:
                self._by_key[key] = tuple(other for other in listed if other is not group)
        for _, request in group.askers:
            del self._by_rank[request.node.rank][request.seq]
            if not self._by_rank[request.node.rank]:
                del self._by_rank[request.node.rank]

    def _place(self, request: Declare, specs: Mapping[Key, Spec]) -> Columns | Exception:
        try:
            self._placements.add(specs, request.bound, request.longest)
            return self._placements.columns(request.keys)
        except UsageError as exc:
            return exc

    def _contradicted(self, rank: int, specs: Mapping[Key, Spec]) -> list[tuple[Asker, Exception]]:
        """Return, and forget, those who wait, and said something else of a key."""
        found: list[tuple[Asker, Exception]] = []
        for group in self._waiting_for(specs.keys()):
            key = first_other(specs, group.specs)
            if key is not None:
                self._remove(group)
                for asker in group.askers:
                    words = f"{group.specs[key]} on {asker.request.node}, but {specs[key]} on worker {rank}"
                    found.append((asker, Mismatch(f"key {key!r} is {words}")))
        return found

    def _settle(self, said: Said, askers: Sequence[Asker]) -> list[Outcome]:
        """Return the outcomes of those who have declared ``said``, since all these keys have their values."""
        outcome: Columns | Exception
        try:
            outcome = self._placements.columns(said[0])
        except UsageError as exc:
            outcome = exc
        self._latest = said, outcome
        return [(asker, outcome) for asker in askers]
