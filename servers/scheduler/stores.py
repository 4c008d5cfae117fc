"""The stores of a job, by number. Pure.

The n-th store that each worker makes is the same store, whenever each makes its own. Messages have room for few
numbers, so the number of a store that all workers have closed is used again.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence, Set

from kvstore import wire
from kvstore.errors import KeyNotInitialized, UsageError
from kvstore.spec import Key
from servers.names import MOST, wait, workers
from servers.requests.reasons import Reason
from servers.requests.replies import Answer
from servers.scheduler.departures import Departures
from servers.scheduler.makers import Makers
from servers.scheduler.store import Store


class Stores:
    """The stores of one job.

    Args:
        workers: the ranks of all workers.
        num_servers: over which keys are placed.
        departures: the workers that have left.
    """

    def __init__(self, workers: Collection[int], num_servers: int, departures: Departures) -> None:
        self._workers = frozenset(workers)
        self._departures = departures
        self._loads = [0] * num_servers  # bytes by server
        self._numbers: dict[int, int] = {}  # by ordinal
        self._named: dict[str, int] = {}  # ordinals, by the names by which readers find stores
        self._makers = Makers()
        self._closed: dict[int, set[int]] = {}  # by number: who has closed it
        self._stores: dict[int, Store] = {}  # by number

    def open(self, ordinal: int) -> int:
        """Return the number of everybody's ``ordinal``-th store.

        Raises:
            UsageError: no number is left.
        """
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
            UsageError: no number is left.
        """
        number = self.open(request.ordinal)
        self._makers.note(request)
        if request.name:  # after shutdown() and init() the group has another store: the later one counts
            self._named[request.name] = max(request.ordinal, self._named.get(request.name, 0))
        return number

    def close(self, rank: int, number: int) -> None:
        """Note that ``rank`` has closed store ``number``; when all have, forget it."""
        closed = self._closed.get(number)
        if closed is None:
            return
        closed.add(rank)
        if len(closed) < len(self._workers):
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
        """Return the store with this number."""
        store = self._stores.get(number)
        if store is None:
            store = self._stores[number] = Store(self._workers, self._loads, self._departures)
        return store

    def find(self, name: str) -> tuple[int, Store]:
        """Return the store that readers find by ``name``, with its number.

        Raises:
            KeyNotInitialized: no worker has made it, or all have closed it.
        """
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

        Returns:
            Answers, and what rank 0 must be told of a call of its own; None if it is not such a request.
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
        if isinstance(request, wire.Ready) and node.rank == 0:
            return self.of(request.store).ready(peer, request), None
        if isinstance(request, wire.Barrier):
            return self.of(request.store).barrier(peer, request, now), None
        if isinstance(request, wire.Pause):
            return done + self.of(request.store).pause(node.rank, request.number), None
        return None

    def depart(self, ranks: Sequence[int]) -> list[Answer]:
        """Fail those who wait for workers that have left, now that the others are to know."""
        return [answer for store in self._stores.values() for answer in store.depart(ranks)]

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
        """Return which of each worker's stores ``store`` is; 0 if that is not known."""
        number = next(number for number, other in self._stores.items() if other is store)
        return next((ordinal for ordinal, other in self._numbers.items() if other == number), 0)

    def waits(self, now: float) -> Reason:
        """Say what workers wait for in all stores; nothing if nobody does."""
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
