"""The stores of a job, by number, and which workers wait in each: at barriers, for first values, in ``join``. Pure.

The n-th store that each worker makes is the same store, whenever each makes its own. Messages have room for few
numbers, so the number of a store that all workers have closed is used again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Sequence, Set
from typing import NamedTuple

from kvstore import wire
from kvstore.errors import KeyNotInitialized, Mismatch, NodeLost, UsageError
from kvstore.spec import Key
from servers.names import MOST, have, name, wait, workers
from servers.requests.reasons import Reason
from servers.requests.replies import Answer, refuse
from servers.scheduler.departures import Departures
from servers.scheduler.keys import DeclaredKeys, Outcome

Waiter = tuple[bytes, wire.Barrier]


# ---- one store


class Joins:
    """How often each worker has called ``join``, in one store.

    Servers decide when ``join`` returns. The scheduler must know, because a worker inside it comes to no barrier and
    gives no key its first value. ``inside`` are the ranks that wait for others.
    """

    def __init__(self, workers: Collection[int], gone: Collection[int] = ()) -> None:
        self.inside: set[int] = set()
        self._calls = {rank: 0 for rank in workers if rank not in gone}
        self._counts = Counter(self._calls.values())  # how many workers have called it so often; no zeros
        self._least = 0  # the smallest number of calls of any worker

    def arrive(self, rank: int, number: int) -> bool:
        """Take a worker's ``number``-th call, before servers learn of it; return whether it is inside."""
        before = self._calls.get(rank)
        if before is not None and number > before:
            self._calls[rank] = number
            self._counts[number] += 1
            self.inside.add(rank)
            self._uncount(before)
        return rank in self.inside

    def admit(self, rank: int, calls: int) -> None:
        """A worker that was started again goes on as one that has called ``join`` so often."""
        if rank not in self._calls:
            self._calls[rank] = calls
            self._counts[calls] += 1
            self._least = min(self._counts)

    def depart(self, rank: int) -> None:
        """A worker has left: nobody waits for it any more."""
        before = self._calls.pop(rank, None)
        if before is not None:
            self.inside.discard(rank)
            self._uncount(before)

    def _uncount(self, calls: int) -> None:
        """Count one worker less at ``calls``; let the workers out that wait for nobody any more."""
        self._counts[calls] -= 1
        if self._counts[calls]:
            return
        del self._counts[calls]
        if calls == self._least and self._counts:
            self._least = min(self._counts)
            self.inside = {rank for rank in self.inside if self._calls[rank] > self._least}


class UnfinishedBarrier(NamedTuple):
    """A barrier at which some wait, the first of them since ``since``, and ``missing`` have not come."""

    waiting: list[int]
    missing: Set[int]
    since: float


class Barriers:
    """The barriers of one store. The n-th call of each worker is its coming to barrier n."""

    def __init__(self, workers: Collection[int]) -> None:
        self._workers = frozenset(workers)
        # By number, the barriers that are not over: the arrivals by rank; None for a worker that was answered.
        self._arrived: dict[int, dict[int, Waiter | None]] = {}
        self._since: dict[int, float] = {}  # by number: when the first of those came
        self._passed: dict[int, int] = {}  # by rank, of workers that came later: the last barrier that is not theirs

    def arrive(self, peer: bytes, request: wire.Barrier, now: float = 0.0) -> list[Waiter]:
        arrived = self._arrived.setdefault(request.number, {})
        self._since.setdefault(request.number, now)
        arrived[request.node.rank] = (peer, request)
        return self._end(request.number)

    def admit(self, rank: int, passed: int) -> None:
        """Wait for ``rank``, which was started again, at the barriers after number ``passed``."""
        self._workers |= {rank}
        self._passed[rank] = passed

    def _awaited(self, number: int) -> Set[int]:
        late = [rank for rank, passed in self._passed.items() if number <= passed]
        return self._workers.difference(late) if late else self._workers

    def lose(self, rank: int) -> list[Waiter]:
        """Wait for ``rank``, which is lost, at no barrier; return the waiters at those that are over by that."""
        self._workers -= {rank}
        self._passed.pop(rank, None)
        for arrived in self._arrived.values():
            arrived.pop(rank, None)
        return [waiter for number in list(self._arrived) for waiter in self._end(number)]

    def _end(self, number: int) -> list[Waiter]:
        """Return, and forget, the waiters at a barrier if all have come to it, or nobody is at it any more."""
        arrived = self._arrived[number]
        if arrived and not arrived.keys() >= self._awaited(number):
            return []
        del self._arrived[number]
        self._since.pop(number, None)
        return _waiting(arrived)

    def missing(self, number: int, among: Collection[int]) -> set[int]:
        arrived = self._arrived.get(number, {})
        return {rank for rank in among if rank not in arrived}

    def without(self, rank: int) -> list[int]:
        """Return the numbers of the barriers to which others have come and ``rank`` has not."""
        return [number for number, arrived in self._arrived.items() if rank not in arrived]

    def fail(self, number: int) -> list[Waiter]:
        """Return the waiters at a barrier that cannot complete. They count as having come."""
        waiting = _waiting(self._arrived.get(number, {}))
        self._arrived[number] = dict.fromkeys(self._arrived.get(number, {}))
        return waiting

    def send_away(self, number: int, left: Collection[int]) -> list[Waiter]:
        """Return the waiters at barrier ``number``, which have to come again, unless they have ``left``."""
        arrived = self._arrived.pop(number, {})
        self._since.pop(number, None)
        stay = {rank: waiter for rank, waiter in arrived.items() if rank in left}
        if stay:
            self._arrived[number] = stay
        return _waiting({rank: waiter for rank, waiter in arrived.items() if rank not in left})

    def waits(self, rank: int) -> bool:
        return any(arrived.get(rank) is not None for arrived in self._arrived.values())

    def awaited(self, rank: int, seq: int) -> Set[int]:
        """Return the ranks that request ``seq`` of worker ``rank`` waits for; none if it does not wait at a barrier."""
        for arrived in self._arrived.values():
            waiter = arrived.get(rank)
            if waiter is not None and waiter[1].seq == seq:
                return self._awaited(waiter[1].number) - arrived.keys()
        return frozenset()

    def unfinished(self) -> list[UnfinishedBarrier]:
        barriers = []
        for number, arrived in self._arrived.items():
            waiting = sorted(rank for rank, waiter in arrived.items() if waiter is not None)
            if waiting:
                barriers.append(
                    UnfinishedBarrier(waiting, self._awaited(number) - arrived.keys(), self._since.get(number, 0.0))
                )
        return barriers


def _waiting(arrived: dict[int, Waiter | None]) -> list[Waiter]:
    return [waiter for waiter in arrived.values() if waiter is not None]


class Store:
    """One store: its keys, its barriers, and the workers that are inside ``join``.

    Workers wait for each other at a barrier, and for worker 0 to give a key its first value. A wait for a worker that
    has left, or that is inside ``join``, fails at once: the former never comes, and the latter not before all others
    have called ``join``, too. ``loads`` are the bytes of each server, shared by all stores of the job.
    """

    def __init__(self, workers: Collection[int], loads: list[int], departures: Departures) -> None:
        self.keys = DeclaredKeys(loads, departures.first)
        self.barriers = Barriers(frozenset(workers) - departures.lost.keys())
        self._joins = Joins(workers, departures.known | departures.lost.keys())
        self._departures = departures

    def declare(self, peer: bytes, request: wire.Declare) -> tuple[list[Answer], Exception | None]:
        """Return answers, and what to tell rank 0."""
        outcomes, fault = self.keys.declare(peer, request)
        if request.node.rank in self._departures.lost:
            fault = None  # started again, with another program perhaps: that is no error of those that go on
        return self._placed(outcomes) + self._without_values(), fault

    def ready(self, peer: bytes, request: wire.Ready) -> list[Answer]:
        """The first worker's values are on the servers: answer the workers that waited for them."""
        return [Answer(peer, request, wire.Ack(request.seq)), *self._placed(self.keys.ready(request.keys))]

    def barrier(self, peer: bytes, request: wire.Barrier, now: float = 0.0) -> list[Answer]:
        """A worker has come to a barrier; if it was the last, answer all."""
        if request.node.rank in self._departures.lost:  # started again, and not in yet: others have passed it
            return [Answer(peer, request, wire.Ack(request.seq))]
        released = self.barriers.arrive(peer, request, now)
        if released:
            return [Answer(link, arrival, wire.Ack(arrival.seq)) for link, arrival in released]
        return self._in_vain(request.number)

    def pause(self, rank: int, number: int) -> list[Answer]:
        """Take a worker's ``number``-th call of ``join``; fail the workers that wait for it elsewhere."""
        if not self._joins.arrive(rank, number):
            return []
        return self._without(rank)

    def depart(self, ranks: Sequence[int]) -> list[Answer]:
        """Fail the waits for workers that have left, now that this is announced."""
        for rank in ranks:
            self._joins.depart(rank)
        return [answer for rank in ranks for answer in self._without(rank)]

    def lose(self, rank: int) -> list[Answer]:
        """Go on without a worker that is lost: answer those that have waited for nobody else, and fail what is vain."""
        self._joins.depart(rank)
        self.keys.lose(rank)
        released = [Answer(link, arrival, wire.Ack(arrival.seq)) for link, arrival in self.barriers.lose(rank)]
        first = self._departures.first
        return released + (self._placed(self.keys.lead(first)) + self._without_values() if rank < first else [])

    def admit(self, rank: int, barriers: int, joins: int) -> list[Answer]:
        """Go on with a worker that was started again, as one that has passed so many barriers and joins."""
        self.barriers.admit(rank, barriers)
        self._joins.admit(rank, joins)
        first = self._departures.first
        return self._placed(self.keys.lead(first)) + self._without_values() if rank <= first else []

    def _placed(self, outcomes: list[Outcome]) -> list[Answer]:
        return [
            refuse(peer, request, outcome)
            if isinstance(outcome, Exception)
            else Answer(peer, request, wire.Placed(request.seq, *outcome, first=self.keys.gives(request)))
            for (peer, request), outcome in outcomes
        ]

    def forget(self) -> None:
        self.keys.forget()

    def whereabouts(self, rank: int) -> str:
        if rank in self._joins.inside:
            return "is inside join()"
        if self.barriers.waits(rank):
            return "is at another barrier"
        return "is in init()" if self.keys.waits(rank) else ""

    @property
    def inside_join(self) -> Collection[int]:
        return self._joins.inside

    def _without(self, rank: int) -> list[Answer]:
        answers = [answer for number in self.barriers.without(rank) for answer in self._in_vain(number)]
        return answers + self._without_values() if rank == self._departures.first else answers

    def _in_vain(self, number: int) -> list[Answer]:
        """Fail those at a barrier to which some worker will not come, or not before they have gone on."""
        error: Exception
        # A worker that has left never comes: the barrier is over for good, and later arrivals fail, too. A worker
        # inside ``join`` comes later, when all have called it: the others are sent away and may come again. Known
        # departures come first: what can never complete must not be told to try again.
        if self.barriers.missing(number, self._departures.known):
            error, waiting = NodeLost(self._reasons(number)), self.barriers.fail(number)
        elif self.barriers.missing(number, self._joins.inside) - self._departures.left:
            error = UsageError(self._reasons(number))
            waiting = self.barriers.send_away(number, self._departures.left)
        else:
            return []
        return [refuse(peer, request, error) for peer, request in waiting]

    def _reasons(self, number: int) -> str:
        left = self.barriers.missing(number, self._departures.left)
        inside = self.barriers.missing(number, self._joins.inside) - left
        reasons = []
        if left:
            reasons.append(f"{name('worker', left)} {have(left)} left the job without coming to the barrier")
        if inside:
            reasons.append(
                f"{name('worker', inside)} {have(inside)} called join(): "
                "nobody inside join() comes to a barrier until all workers have called it"
            )
        return "; ".join(reasons)

    def _without_values(self) -> list[Answer]:
        """Fail the waits for first values, if the first worker will not give them."""
        error: Exception
        first = self._departures.first
        if first in self._departures.known:
            error = NodeLost(f"worker {first} has left the job without giving these keys their first values")
        elif first in self._joins.inside and first not in self._departures.left:
            error = UsageError(
                f"worker {first} has called join(), and gives no key its first value until all workers have"
            )
        else:
            return []
        return self._placed([(asker, error) for asker in self.keys.abandon()])


# ---- all stores


class Stores:
    """The stores of one job."""

    def __init__(self, workers: Collection[int], num_servers: int, departures: Departures) -> None:
        self._workers = frozenset(workers)
        self._departures = departures
        self._loads = [0] * num_servers  # bytes by server
        self._numbers: dict[int, int] = {}  # by ordinal
        self._named: dict[str, int] = {}  # ordinals, by the names by which readers find stores
        self._makers = Makers()
        self._closed: dict[int, set[int]] = {}  # by number: the ranks that have closed it
        self._stores: dict[int, Store] = {}  # by number

    def open(self, ordinal: int) -> int:
        """Return the number of everybody's ``ordinal``-th store; ``UsageError`` says that no number is left."""
        number = self._numbers.get(ordinal)
        if number is None:
            free = set(range(wire.MAX_STORES)) - set(self._numbers.values())
            if not free:
                raise UsageError(
                    f"this job has {wire.MAX_STORES} dist stores already, the most that may be open at once; "
                    "close() those that are not needed any more, on all workers"
                )
            number = self._numbers[ordinal] = min(free)
            self._closed[number] = set()
        return number

    def make(self, request: wire.OpenStore) -> int:
        """Return the number of the store that a worker makes.

        Raises:
            Mismatch: another worker has made another store there.
        """
        number = self.open(request.ordinal)
        self._makers.note(request)
        if request.name:  # after shutdown() and init() the group has another store: the later one counts
            self._named[request.name] = max(request.ordinal, self._named.get(request.name, 0))
        return number

    def close(self, rank: int, number: int) -> None:
        closed = self._closed.get(number)
        if closed is None:
            return
        closed.add(rank)
        self._forget_if_closed(number)

    def _forget_if_closed(self, number: int) -> None:
        if not self._closed[number] or not self._closed[number] | self._departures.lost.keys() >= self._workers:
            return
        del self._closed[number]
        for ordinal in [ordinal for ordinal, other in self._numbers.items() if other == number]:
            del self._numbers[ordinal]
            self._makers.forget(ordinal)
            self._named = {name: other for name, other in self._named.items() if other != ordinal}
        store = self._stores.pop(number, None)
        if store is not None:
            store.forget()

    def of(self, number: int) -> Store:
        store = self._stores.get(number)
        if store is None:
            store = self._stores[number] = Store(self._workers, self._loads, self._departures)
        return store

    def find(self, name: str) -> tuple[int, Store]:
        """Return the store that readers find by ``name``, with its number; ``KeyNotInitialized`` if there is none."""
        ordinal = self._named.get(name)
        if ordinal is None:
            raise KeyNotInitialized(f"the job has no store {name}: no worker has made it yet, or all have closed it")
        number = self._numbers[ordinal]
        return number, self.of(number)

    def having(self, key: Key) -> list[str]:
        """Return the names of the stores that have a value of ``key``, in the order in which they were made."""
        named = sorted(self._named.items(), key=lambda item: item[1])
        return [name for name, ordinal in named if key in self.of(self._numbers[ordinal]).keys.with_values]

    def serve(
        self, peer: bytes, request: wire.Request, now: float = 0.0
    ) -> tuple[list[Answer], wire.Fault | None] | None:
        """Do what a worker asks of a store.

        Return answers, and what rank 0 must be told of a call of its own; None if it is not such a request.
        """
        node, done = request.node, [Answer(peer, request, wire.Ack(request.seq))]
        if node.role != "worker":
            return None
        if isinstance(request, wire.OpenStore):
            return [Answer(peer, request, wire.StoreOpened(request.seq, self.make(request)))], None
        if isinstance(request, wire.CloseStore):
            self.close(node.rank, request.store)
            return done, None
        if isinstance(request, wire.Declare):
            answers, error = self.of(request.store).declare(peer, request)
            return answers, None if error is None else wire.Fault(request.store, type(error).__name__, str(error))
        if isinstance(request, wire.Ready) and node.rank == self._departures.first:
            return self.of(request.store).ready(peer, request), None
        if isinstance(request, wire.Barrier):
            return self.of(request.store).barrier(peer, request, now), None
        if isinstance(request, wire.Pause):
            return done + self.of(request.store).pause(node.rank, request.number), None
        return None

    def depart(self, ranks: Sequence[int]) -> list[Answer]:
        return [answer for store in self._stores.values() for answer in store.depart(ranks)]

    def lose(self, rank: int) -> list[Answer]:
        """Go on without a worker that is lost, as ``Departures`` knows already."""
        answers = [answer for store in self._stores.values() for answer in store.lose(rank)]
        for number in list(self._closed):
            self._forget_if_closed(number)
        return answers

    def admit(self, message: wire.Admitted) -> list[Answer]:
        """Go on with a worker that was started again, as ``Departures`` knows already."""
        passed = dict(zip(message.stores, zip(message.barriers, message.joins, strict=True), strict=True))
        return [
            answer
            for number, store in self._stores.items()
            for answer in store.admit(message.rank, *passed.get(number, (0, 0)))
        ]

    def explain(self, rank: int, seq: int) -> Reason:
        """Say what request ``seq`` of worker ``rank`` waits for; nothing if it does not wait in any store."""
        for store in self._stores.values():
            missing = store.barriers.awaited(rank, seq)
            if missing:
                return Reason(f"waits at the barrier for {self._with_reasons(missing)}", missing)
            text = store.keys.explain(rank, seq)
            if text:
                return Reason(text + self._makers.unmade(self._ordinal(store), [0]), [0])
        return Reason()

    def _ordinal(self, store: Store) -> int:
        number = next(number for number, other in self._stores.items() if other is store)
        return next((ordinal for ordinal, other in self._numbers.items() if other == number), 0)

    def waits(self, now: float) -> Reason:
        found = [reason for _, store in sorted(self._stores.items()) for reason in self._waits_in(store, now)]
        missing = {rank for reason in found for rank in reason.missing}
        return Reason("; ".join(reason.text for reason in found), missing - self._departures.left)

    def _waits_in(self, store: Store, now: float) -> Iterator[Reason]:
        for waiting, missing, since in store.barriers.unfinished():
            who, whom = f"{workers(waiting)} {wait(waiting)}", self._with_reasons(missing)
            yield Reason(f"{who} at the barrier for {whom}, for {max(0.0, now - since):.1f} s", missing)
        waiting = store.keys.waiting
        if waiting:
            yield Reason(f"{workers(waiting)} {wait(waiting)} for worker 0 to init keys", [0])
        waiting = sorted(store.inside_join)
        if waiting:
            yield Reason(f"{workers(waiting)} {wait(waiting)} in join() for all others to call it, too")

    def _with_reasons(self, missing: Set[int]) -> str:
        """Name the workers that have not come to a barrier, each with what the scheduler knows of where it is."""
        left = missing & self._departures.left
        first = [*sorted(left), *heapq.nsmallest(MOST, missing - left)][:MOST]
        more = f" and {len(missing) - MOST} more" if len(missing) > MOST else ""
        return ", ".join(f"worker {rank} ({self._whereabouts(rank)})" for rank in first) + more

    def _whereabouts(self, rank: int) -> str:
        if rank in self._departures.left:
            return "has left the job"
        for store in self._stores.values():
            place = store.whereabouts(rank)
            if place:
                return place
        return "has not come yet"


# ---- whether all workers make the same stores

# Stores that were made at different places and are compared with all later ones. A program may have a branch for each
# worker, which is legal: their number must not make each ``note`` dearer.
MOST_APART = 8


class _Pair(NamedTuple):
    """Two workers that have made their stores of one number at different places."""

    one: wire.OpenStore
    other: wire.OpenStore


class Makers:
    """Which workers have made which stores, and where in their programs: all must make the same ones, in one order.

    A store that a single worker makes shifts all its later ones, so that it waits in them for pushes which the others
    make elsewhere. The cost of each store is the same, however many workers there are.
    """

    def __init__(self) -> None:
        self._first: dict[int, wire.OpenStore] = {}  # by ordinal: the first request to make it
        self._by: dict[int, set[int]] = {}  # by ordinal: the ranks that have made it
        self._places: dict[int, dict[int, str]] = {}  # by rank and ordinal, with some that are forgotten
        self._apart: dict[int, _Pair] = {}  # by ordinal

    def note(self, request: wire.OpenStore) -> None:
        """Take the news that a worker makes a store.

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
        if len(places) > 2 * len(self._first) + MOST_APART:
            self._places[rank] = {number: place for number, place in places.items() if number in self._first}
        if request.place != first.place and len(self._apart) < MOST_APART:
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
        self._first.pop(ordinal, None)
        self._by.pop(ordinal, None)
        self._apart.pop(ordinal, None)

    def _elsewhere(self, one: wire.OpenStore, other: wire.OpenStore) -> bool:
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
