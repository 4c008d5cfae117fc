"""Requests of one store that wait: for which rounds, for whose pushes, and what becomes of them. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter

from kvstore.errors import NodeLost, UsageError
from kvstore.rule import Rule
from kvstore.spec import Key, shorten
from kvstore.wire import Pull, Push, Reply, Resume
from servers.names import MOST, have, name
from servers.requests.replies import Answer, refuse
from servers.store.bucket import Bucket, Parked
from servers.store.buckets import Buckets
from servers.store.joins import Pauses

Missing = dict[tuple[int, int], dict[Key, None]]  # the keys, by worker and the number of the first push that is missing


class Waiting:
    """The requests that wait.

    Args:
        rule: how updates and reads go together.
        workers: the ranks of the job's workers.
        buckets: what requests are about.
        reply: makes the answer to a push or pull, of which so many segments came late.
    """

    def __init__(
        self, rule: Rule, workers: frozenset[int], buckets: Buckets, reply: Callable[[Push | Pull, int], Reply]
    ) -> None:
        self.pauses = Pauses()
        self.departed: frozenset[int] = frozenset()  # who has left in order
        self._rule = rule
        self._workers = workers
        self._buckets = buckets
        self._reply = reply
        self._parked: dict[tuple[int, int], Parked] = {}

    def park(self, peer: bytes, message: Push | Pull, late: int = 0) -> list[Answer]:
        """Answer ``message`` if the rounds it needs are over; else keep it until they are."""
        parked = Parked(peer, message, late)
        for bucket, clock in self._needs(message):
            if bucket.rounds.version < clock:
                bucket.parked.append((clock, parked))
                parked.left += 1
        if not parked.left:
            return [Answer(peer, message, self._reply(message, late))]
        self._parked[message.rank, message.seq] = parked
        return self._give_up(parked)

    def release(self, buckets: Sequence[Bucket], errors: Mapping[Bucket, Exception]) -> list[Answer]:
        """Answer whoever waits for nothing more now that ``buckets`` are where they are, some through an error."""
        answers: list[Answer] = []
        for bucket in buckets:
            for parked in bucket.release(errors.get(bucket)) if bucket.parked else ():
                del self._parked[parked.request.rank, parked.request.seq]
                if parked.error is not None:
                    answers.append(refuse(parked.peer, parked.request, parked.error))
                else:
                    answers.append(Answer(parked.peer, parked.request, self._reply(parked.request, parked.late)))
        return answers

    def despair(self) -> list[Answer]:
        """Fail whoever waits for workers that have left, or pause; let everybody go on if all pause."""
        return [answer for parked in list(self._parked.values()) for answer in self._give_up(parked)] + self.resume()

    def resume(self) -> list[Answer]:
        """If all workers have paused, and what they had pushed before is in, let them go on."""
        paused = self.pauses.ranks
        if not paused:
            return []
        missing = self._workers - paused
        gone = missing & self.departed
        if gone and self._rule.mode == "sync" and self._rule.quorum is None:
            error = NodeLost(f"{name('worker', gone)} {have(gone)} left the job without join()")
            return [refuse(peer, request, error) for peer, request in self.pauses.end()]
        buckets = self._buckets.all()
        if missing - gone or not all(bucket.rounds.settled for bucket in buckets):
            return []
        for bucket in buckets:
            bucket.rounds.resume()
        last = self.pauses.last
        return [
            Answer(peer, request, Resume(request.seq, last, self._buckets.versions(request.ids)))
            for peer, request in self.pauses.end()
        ]

    def close(self, error: Exception) -> list[Answer]:
        """Fail everybody."""
        answers = [refuse(parked.peer, parked.request, error) for parked in self._parked.values()]
        self._parked.clear()
        return answers + [refuse(peer, request, error) for peer, request in self.pauses.end()]

    def explain(self, rank: int, about: int) -> str:
        """Say what request ``about`` of worker ``rank`` waits for; nothing if it does not."""
        parked = self._parked.get((rank, about))
        if parked is None:
            return self.pauses.explain(rank, about, self._workers)
        return f"waits for {_words(self._missing(parked.request, lambda *_: True))}"

    def _needs(self, message: Push | Pull) -> list[tuple[Bucket, int]]:
        """Return the buckets of a request, and the round of each that it wants to be over."""
        if self._rule.mode == "async" and isinstance(message, Push) and not message.want:
            return []  # it has taken effect
        buckets, clocks = self._buckets.of(message.ids), message.clocks
        if clocks and clocks.count(clocks[0]) == len(clocks):  # which is usual
            return [(bucket, self._rule.needs(clocks[0])) for bucket in buckets]
        latest = dict.fromkeys(buckets, 0)
        for number, clock in zip(message.ids, clocks, strict=True):
            bucket, _ = self._buckets.find(number)
            latest[bucket] = max(latest[bucket], self._rule.needs(clock))
        return list(latest.items())

    def _give_up(self, parked: Parked) -> list[Answer]:
        """Fail a request that waits for workers that have left, or that pause and do not know what they should push."""
        error: Exception
        if self.departed and (missing := self._missing(parked.request, lambda rank, _: rank in self.departed)):
            error = NodeLost(_uneven(missing, parked.request.rank))
        elif self.pauses.ranks and (missing := self._missing(parked.request, self._ignorant)):
            error = UsageError(f"{_words(missing)}, has joined without having initialised it")
        else:
            return []
        del self._parked[parked.request.rank, parked.request.seq]
        for bucket in self._buckets.of(parked.request.ids):
            bucket.parked = [entry for entry in bucket.parked if entry[1] is not parked]
        return [refuse(parked.peer, parked.request, error)]

    def _ignorant(self, rank: int, segment: int) -> bool:
        return rank in self.pauses.ranks and not self.pauses.knows(rank, segment)

    def _missing(self, message: Push | Pull, among: Callable[[int, int], bool]) -> Missing:
        """Return for whose pushes a request waits, of those for which ``among(rank, segment)`` is true."""
        missing: Missing = {}
        rounds: dict[tuple[Bucket, int], dict[int, int]] = {}
        for number, clock in zip(message.ids, message.clocks, strict=True):
            bucket, place = self._buckets.find(number)
            if (bucket, clock) not in rounds:
                rounds[bucket, clock] = bucket.rounds.missing(self._rule.needs(clock))
            for worker_and_push in rounds[bucket, clock].items():
                if among(worker_and_push[0], number):
                    missing.setdefault(worker_and_push, {})[bucket.slots.keys[place]] = None
        return missing


def _words(missing: Missing) -> str:
    return _first(f"worker {rank}, whose push {push} of {keys} is missing" for rank, push, keys in _shortened(missing))


def _uneven(missing: Missing, waiting: int) -> str:
    """Say what workers that have left had pushed, and that ``waiting`` needs more."""
    reasons = _first(
        f"worker {rank} has left the job {f'after push {push - 1}' if push > 1 else 'without a push'} of {keys}, "
        f"and worker {waiting} waits for push {push}"
        for rank, push, keys in _shortened(missing)
    )
    return f"{reasons}: uneven batches? See join()"


def _shortened(missing: Missing) -> list[tuple[int, int, str]]:
    return [(rank, push, shorten(keys)) for (rank, push), keys in sorted(missing.items(), key=itemgetter(0))]


def _first(reasons: Iterable[str]) -> str:
    listed = list(reasons)
    more = f"; and {len(listed) - MOST} more" if len(listed) > MOST else ""
    return "; ".join(listed[:MOST]) + more
