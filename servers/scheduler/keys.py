"""The keys of one store, as workers declare them. Pure.

The first worker's declaration places a key; other workers' declarations wait until its value is on the servers. The
first is rank 0 or, if that is lost, the lowest rank that is not. When two workers declare a key with different shapes
or dtypes, both fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import NamedTuple

from kvstore import wire
from kvstore.errors import AlreadyInitialized, Mismatch, UsageError
from kvstore.placement import ServerRange, place, require_few
from kvstore.spec import Key, Spec, shorten, told_apart
from kvstore.table import Table, TableSpec


class Columns(NamedTuple):
    """The segments of a list of keys, in columns; see ``Placed``."""

    counts: list[int]
    ids: list[int]
    servers: list[int]
    starts: list[int]
    stops: list[int]


class Placements:
    """The placed keys of one store, by key, and those whose first values are on the servers (``ready``).

    ``loads`` are the bytes of each server, shared by all stores of the job.
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
        for key in list(self.specs):
            self._drop(key)
        self.ready.clear()

    def contradicted(self, specs: Mapping[Key, Spec]) -> Key | None:
        return first_other(specs, self.specs)

    def missing(self, keys: Collection[Key]) -> set[Key]:
        return set(keys) - self.ready

    def columns(self, keys: Sequence[Key]) -> Columns:
        """Return where ``keys`` are; ``UsageError`` if they have more segments than fit into one message."""
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


class Asker(NamedTuple):
    """A worker that waits for the answer to its ``request``, by its link."""

    peer: bytes
    request: wire.Declare


Outcome = tuple[Asker, "Columns | Exception"]
Declaration = tuple[tuple[Key, ...], tuple[int, ...], tuple[Spec, ...]]  # keys, kinds, and the specs of kinds


@dataclass(eq=False)
class _DeclarationGroup:
    """Equal declarations that wait. One for all workers, because each may name all keys of a model.

    ``missing`` is how many of the keys have no value yet. ``number`` grows from group to group.
    """

    number: int
    declaration: Declaration
    specs: Mapping[Key, Spec]
    missing: int
    askers: list[Asker] = field(default_factory=list)


class DeclaredKeys:
    """The keys of one store, and the declarations that wait for first values."""

    def __init__(self, loads: list[int], first: int = 0) -> None:
        self._placements = Placements(loads)
        self._first = first
        self._specs: dict[Spec, Spec] = {}  # equal specs are one object, so that comparing them is cheap
        self._numbers = itertools.count()
        self._waiting: dict[Declaration, _DeclarationGroup] = {}
        self._by_key: dict[Key, tuple[_DeclarationGroup, ...]] = {}  # in order; they do not contradict each other
        self._by_rank: dict[int, dict[int, _DeclarationGroup]] = {}  # then by the number of the request
        self._moved: dict[Key, Key] = {}  # by the key of an array, the key of the table that has its rows now
        self._latest: tuple[Declaration, Columns | Exception] | None = None  # the latest declaration with an outcome

    def declare(self, peer: bytes, request: wire.Declare) -> tuple[list[Outcome], Exception | None]:
        """Take a worker's declaration.

        Return the outcomes, segments or an error, of this worker and of the workers that it contradicts; and the error
        that rank 0 must be told, whose own declaration was answered before.
        """
        asker = Asker(peer, request)
        declaration = (tuple(request.keys), tuple(request.kinds), self._known(request))
        # A worker that was started again gives no value that is there.
        leads = request.node[1:] == (0, 1) or self.gives(request)
        if not leads and declaration in self._waiting:
            self._wait(self._waiting[declaration], asker)
            return [], None
        if not leads and self._latest is not None and declaration == self._latest[0]:
            return [(asker, self._latest[1])], None
        specs = dict(zip(request.keys, map(declaration[2].__getitem__, request.kinds), strict=True))
        if len(specs) < len(request.keys):
            return [(asker, UsageError("the same key was given twice in one call of init; give each key once"))], None
        contradicted = self._contradicted(request.node.rank, specs)
        if contradicted:
            return [(asker, contradicted[0][1]), *contradicted], None
        if leads:
            return [(asker, self._place(request, specs))], None
        key = self._placements.contradicted(specs)
        if key is not None:
            known, given = told_apart(self._placements.specs[key], specs[key])
            error = Mismatch(f"key {key!r} is {known} on worker {self._first}, but {given} on {request.node}")
            return [(asker, error)], error
        missing = len(self._placements.missing(specs.keys()))
        if not missing:
            return self._settle(declaration, [asker]), None
        group = self._waiting[declaration] = _DeclarationGroup(next(self._numbers), declaration, specs, missing)
        others = {key: (*self._by_key[key], group) for key in specs.keys() & self._by_key.keys()}
        self._by_key.update(dict.fromkeys(specs, (group,)))
        self._by_key.update(others)
        self._wait(group, asker)
        return [], None

    def gives(self, request: wire.Declare) -> bool:
        """Whether the sender of ``request`` is to give values, in place of worker 0, to keys that lack them."""
        others = self._first != 0 or request.node.incarnation > 1
        return request.node.rank == self._first and others and not self._placements.ready.issuperset(request.keys)

    def lose(self, rank: int) -> None:
        """Let worker ``rank``, which is lost, wait no more. The numbers of its requests may come again, of another."""
        for group in set(self._by_rank.pop(rank, {}).values()):
            group.askers = [asker for asker in group.askers if asker.request.node.rank != rank]

    def lead(self, rank: int) -> list[Outcome]:
        """Let worker ``rank`` be the first from now on, since those before it are lost: its declaration may wait."""
        self._first = rank
        outcomes: list[Outcome] = []
        for peer, request in sorted(self.abandon(), key=lambda asker: asker.request.node.rank != rank):
            outcomes += self.declare(peer, request)[0]  # no two of them contradict each other
        return outcomes

    def ready(self, keys: Sequence[Key]) -> list[Outcome]:
        """The first values of ``keys`` are on the servers; return the outcomes of the workers that waited for them."""
        new = self._placements.missing(keys) & self._placements.specs.keys()
        self._placements.ready |= new
        if any(isinstance(spec, TableSpec) and spec.table.parameter is not None for spec in self._specs):
            specs = {key: self._placements.specs[key] for key in new}
            self._moved |= {
                spec.table.parameter: key
                for key, spec in specs.items()
                if isinstance(spec, TableSpec) and spec.table.parameter is not None
            }
        done: list[_DeclarationGroup] = []
        for group in self._waiting_for(new):
            group.missing -= len(new & group.specs.keys())
            if not group.missing:
                done.append(group)
        for group in done:
            self._remove(group)
        return [outcome for group in done for outcome in self._settle(group.declaration, group.askers)]

    @property
    def with_values(self) -> Collection[Key]:
        """The keys whose first values are on the servers."""
        return self._placements.ready

    def look_up(self, keys: Sequence[Key]) -> tuple[list[Spec], Columns]:
        """Return what ``keys`` with values are, and where; of an array whose rows a table has, what the table is."""
        keys = [self._moved.get(key, key) for key in keys]
        return list(map(self._placements.specs.__getitem__, keys)), self._placements.columns(keys)

    def names(self, start: int, count: int) -> list[Key]:
        """Return up to ``count`` keys that have values, from the ``start``-th on, in the order of declaration.

        A table that has the rows of an array is known by the array's key.
        """
        hidden = set(self._moved.values())
        known = (key for key in self._placements.specs if key in self._placements.ready and key not in hidden)
        return list(itertools.islice(known, start, start + count))

    def abandon(self) -> list[Asker]:
        """Return, and forget, the workers that wait for the first one, because it gives no values."""
        askers = [asker for group in self._waiting.values() for asker in group.askers]
        self._waiting.clear()
        self._by_key.clear()
        self._by_rank.clear()
        return askers

    def forget(self) -> None:
        self._latest = None
        self._specs.clear()
        self._moved.clear()
        self._placements.clear()

    @property
    def waiting(self) -> list[int]:
        return sorted(self._by_rank)

    def waits(self, rank: int) -> bool:
        return rank in self._by_rank

    def explain(self, rank: int, seq: int) -> str:
        """Say what declaration ``seq`` of worker ``rank`` waits for; empty if it does not wait."""
        group = self._by_rank.get(rank, {}).get(seq)
        if group is None:
            return ""
        missing = self._placements.missing(group.specs.keys())
        return f"waits for worker {self._first} to init {shorten(key for key in group.specs if key in missing)}"

    def _known(self, request: wire.Declare) -> tuple[Spec, ...]:
        tables = request.tables or [None] * len(request.shapes)
        specs = [
            Spec(tuple(shape), dtype) if table is None else TableSpec.of(Table.of(table))
            for shape, dtype, table in zip(request.shapes, request.dtypes, tables, strict=True)
        ]
        return tuple(self._specs.setdefault(spec, spec) for spec in specs)

    def _waiting_for(self, keys: Collection[Key]) -> list[_DeclarationGroup]:
        groups = {group for listed in set(map(self._by_key.get, keys)) if listed is not None for group in listed}
        return sorted(groups, key=attrgetter("number"))

    def _wait(self, group: _DeclarationGroup, asker: Asker) -> None:
        peer, request = asker
        if group.askers:  # the lists of a thousand equal declarations are kept once
            first = group.askers[0].request
            request = replace(request, keys=first.keys, kinds=first.kinds, shapes=first.shapes, dtypes=first.dtypes)
        group.askers.append(Asker(peer, request))
        self._by_rank.setdefault(request.node.rank, {})[request.seq] = group

    def _remove(self, group: _DeclarationGroup) -> None:
        del self._waiting[group.declaration]
        for key in group.specs:
            listed = self._by_key.pop(key)
            if len(listed) > 1:
                self._by_key[key] = tuple(other for other in listed if other is not group)
        for _, request in group.askers:
            del self._by_rank[request.node.rank][request.seq]
            if not self._by_rank[request.node.rank]:
                del self._by_rank[request.node.rank]

    def _place(self, request: wire.Declare, specs: Mapping[Key, Spec]) -> Columns | Exception:
        if self.gives(request) and first_other(specs, self._placements.specs) is None:
            # This worker leads in place of a lost one, which may have declared some of the keys already.
            missing = self._placements.missing(specs)
            specs = {key: spec for key, spec in specs.items() if key in missing}
        try:
            self._placements.add(specs, request.bound, request.longest)
            return self._placements.columns(request.keys)
        except UsageError as exc:
            return exc

    def _contradicted(self, rank: int, specs: Mapping[Key, Spec]) -> list[tuple[Asker, Exception]]:
        """Return, and forget, the waiting workers that have declared one of the keys with another spec."""
        contradicted: list[tuple[Asker, Exception]] = []
        for group in self._waiting_for(specs.keys()):
            key = first_other(specs, group.specs)
            if key is not None:
                self._remove(group)
                for asker in group.askers:
                    waiting, given = told_apart(group.specs[key], specs[key])
                    words = f"{waiting} on {asker.request.node}, but {given} on worker {rank}"
                    contradicted.append((asker, Mismatch(f"key {key!r} is {words}")))
        return contradicted

    def _settle(self, declaration: Declaration, askers: Sequence[Asker]) -> list[Outcome]:
        outcome: Columns | Exception
        try:
            outcome = self._placements.columns(declaration[0])
        except UsageError as exc:
            outcome = exc
        self._latest = declaration, outcome
        return [(asker, outcome) for asker in askers]
