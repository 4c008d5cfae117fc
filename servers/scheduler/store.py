"""One store in the scheduler: its keys, its barriers, and who is inside ``join``. Pure.

Workers wait for each other at a barrier, and for worker 0 to give a key its first value. A wait for a worker that has
left, or that is inside ``join``, fails at once: the former never comes, and the latter not before all others have
called ``join``, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvstore import wire
from kvstore.errors import NodeLost, UsageError
from servers.names import have, name
from servers.requests.replies import Answer, refuse
from servers.scheduler.barriers import Barriers
from servers.scheduler.departures import Departures
from servers.scheduler.joins import Joins
from servers.scheduler.keys import DeclaredKeys, Outcome


class Store:
    """One store.

    Args:
        workers: the ranks of all workers.
        loads: bytes of each server, shared by all stores of the job.
        departures: the workers that have left.

    Attributes:
        keys: of the store.
        barriers: of the store.
    """

    def __init__(self, workers: Collection[int], loads: list[int], departures: Departures) -> None:
        self.keys = DeclaredKeys(loads)
        self.barriers = Barriers(workers)
        self._joins = Joins(workers, departures.known)
        self._departures = departures

    def declare(self, peer: bytes, request: wire.Declare) -> tuple[list[Answer], Exception | None]:
        """Take a declaration of keys; return answers, and what to tell rank 0; see ``DeclaredKeys.declare``."""
        outcomes, fault = self.keys.declare(peer, request)
        return _placed(outcomes) + self._without_values(), fault

    def ready(self, peer: bytes, request: wire.Ready) -> list[Answer]:
        """Note that rank 0's values are on the servers; answer those who waited for them."""
        return [Answer(peer, request, wire.Ack(request.seq)), *_placed(self.keys.ready(request.keys))]

    def barrier(self, peer: bytes, request: wire.Barrier, now: float = 0.0) -> list[Answer]:
        """Note that a worker has come to a barrier; if it was the last, answer all."""
        released = self.barriers.arrive(peer, request, now)
        if released:
            return [Answer(link, arrival, wire.Ack(arrival.seq)) for link, arrival in released]
        return self._in_vain(request.number)

    def pause(self, rank: int, number: int) -> list[Answer]:
        """Note a worker's ``number``-th call of ``join``; fail those who wait for it elsewhere."""
        if not self._joins.arrive(rank, number):
            return []
        return self._without(rank)

    def depart(self, ranks: Sequence[int]) -> list[Answer]:
        """Fail those who wait for workers that have left, now that the others are to know."""
        for rank in ranks:
            self._joins.depart(rank)
        return [answer for rank in ranks for answer in self._without(rank)]

    def forget(self) -> None:
        """Forget the keys: all workers have closed the store."""
        self.keys.forget()

    def whereabouts(self, rank: int) -> str:
        """Say in which call of this store ``rank`` is, for a barrier to which it has not come; empty if in none."""
        if rank in self._joins.inside:
            return "is inside join()"
        if self.barriers.waits(rank):
            return "is at another barrier"
        return "is in init()" if self.keys.waits(rank) else ""

    @property
    def inside_join(self) -> Collection[int]:
        """The ranks that are inside ``join``."""
        return self._joins.inside

    def _without(self, rank: int) -> list[Answer]:
        """Fail those who wait for ``rank``, which will not come."""
        answers = [answer for number in self.barriers.without(rank) for answer in self._in_vain(number)]
        return answers + self._without_values() if rank == 0 else answers

    def _in_vain(self, number: int) -> list[Answer]:
        """Fail those at a barrier to which some worker will not come, or not before they have gone on."""
        error: Exception
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
        """Fail those who wait for first values, if worker 0 will not give them."""
        error: Exception
        if 0 in self._departures.known:
            error = NodeLost("worker 0 has left the job without giving these keys their first values")
        elif 0 in self._joins.inside and 0 not in self._departures.left:
            error = UsageError("worker 0 has called join(), and gives no key its first value until all workers have")
        else:
            return []
        return _placed([(asker, error) for asker in self.keys.abandon()])


def _placed(outcomes: list[Outcome]) -> list[Answer]:
    return [
        refuse(asker.peer, asker.request, outcome)
        if isinstance(outcome, Exception)
        else Answer(asker.peer, asker.request, wire.Placed(asker.request.seq, *outcome))
        for asker, outcome in outcomes
    ]
