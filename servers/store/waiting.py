"""Requests of one store that wait: for which rounds, for whose pushes, and when that is over. No I/O, no clock.

``Waiting`` says which requests wait no more, and why; ``ServedStore`` answers them.

Nobody on the server ends a waiting call when a worker dies, unless the job goes on without it: then ``lost`` says so,
and rounds are over without it. Else the scheduler tells the waiting worker, and ``Client.fail`` ends the call there.
The server could not decide it: a worker that is silent here may be alive, and its round may close.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from kvstore import wire
from kvstore.errors import NodeLost, UsageError
from kvstore.rule import Rule
from kvstore.spec import Key, shorten
from servers.activity import Waits
from servers.names import MOST, have, name, workers
from servers.requests.reasons import Reason
from servers.store.buckets import Buckets
from servers.store.lateness import ArrivalTimes
from servers.store.target import AnyTarget, ParkedRequest, PushRequest, WaitingRequest

FEW = 8  # requests, and segments of each, that a report looks at
Missing = dict[tuple[int, int], dict[Key, None]]  # by worker and number of its first missing push: the keys


@dataclass(frozen=True)
class _Paused:
    peer: bytes
    request: wire.Pause
    clocks: Mapping[int, int]  # by segment: how often it has been pushed


class Pauses:
    """The workers of one store that are inside ``join``, until all are: they have nothing more to contribute for now.

    A worker that pauses says how often it has pushed each segment, so the effect of its pause does not depend on when
    the message arrives: the worker is in every round up to that push, and in none after it. When all workers have
    paused, all contribute again. (This is Horovod's ``join``, without its zeros.)
    """

    def __init__(self) -> None:
        self._paused: dict[int, _Paused] = {}
        self._known = Counter[int]()  # by segment: how many of those that pause know it

    @property
    def ranks(self) -> Set[int]:
        return self._paused.keys()

    @property
    def requests(self) -> list[wire.Pause]:
        return [paused.request for paused in self._paused.values()]

    @property
    def last(self) -> int:
        """The rank that has pushed most, the highest of several. At equal speeds it is the last to pause."""
        return max(self._paused, key=lambda rank: (self._paused[rank].request.pushes, rank))

    def add(self, peer: bytes, request: wire.Pause) -> dict[int, int]:
        """Note that a worker pauses; return how often it has pushed each segment that it knows."""
        if request.node.rank in self._paused:
            raise UsageError(f"{request.node} is inside join() already")
        clocks = dict(zip(request.ids, request.clocks, strict=True))
        self._paused[request.node.rank] = _Paused(peer, request, clocks)
        self._known.update(clocks.keys())
        return clocks

    def knows(self, rank: int, segment: int) -> bool:
        """Return whether ``rank`` pauses, and has said how often it has pushed ``segment``."""
        return rank in self._paused and segment in self._paused[rank].clocks

    def all_know(self, segments: Collection[int]) -> bool:
        """Return whether each worker that pauses knows all ``segments``."""
        everyone = len(self._paused)
        return all(self._known[number] == everyone for number in segments)

    def require_before(self, push: wire.Push | wire.PushRows) -> None:
        """Raise ``UsageError`` if ``push`` comes after the pause of one of its workers."""
        if not self._paused:
            return
        for place, rank in enumerate(push.workers):
            paused = self._paused.get(rank)
            if paused is None:
                continue
            own = push.rank_clocks if isinstance(push, wire.Push) else ()
            clocks = [own[place]] * len(push.ids) if own else push.clocks
            if any(clock > paused.clocks.get(number, 0) for number, clock in zip(push.ids, clocks, strict=True)):
                raise UsageError(f"worker {rank} is inside join(), and must not push before all workers are")

    def lose(self, rank: int) -> None:
        """Forget that a worker pauses that is lost: it will not go on when the others do."""
        paused = self._paused.pop(rank, None)
        if paused is not None:
            self._known.subtract(paused.clocks.keys())

    def end(self) -> list[tuple[bytes, wire.Pause]]:
        """Return, and forget, the requests of all workers that pause, with their links, in the order of ranks."""
        everyone = [(paused.peer, paused.request) for _, paused in sorted(self._paused.items())]
        self._paused.clear()
        self._known.clear()
        return everyone

    def explain(self, node: wire.Node, seq: int, workers: Collection[int]) -> Reason:
        """Say what request ``seq`` of ``node`` waits for; nothing if it is no pause that waits."""
        paused = self._paused.get(node.rank)
        if paused is None or (paused.request.node, paused.request.seq) != (node, seq):
            return Reason()
        missing = set(workers) - self.ranks
        if not missing:
            return Reason("waits for pushes that are still on their way, since all workers have joined")
        return Reason(f"waits for {name('worker', missing)} to join", missing)


# How the wait of a request ends.
#
#   why                                                where                              the answer
#   its rounds are over                                release                            values, or the round's error
#   a worker has left that its rounds need             give_up_hopeless, park             NodeLost
#   a worker inside join does not know its keys        give_up_hopeless, park             UsageError
#   an update may be half made                         give_up_hopeless, park             WeightsInDoubt
#   all workers are inside join, or one has left       end_join                           Resume, or NodeLost
#   the store is closed                                close                              UsageError
#   a worker dies, and the job goes on without it      ``ServedStore.depart``, release     as its rounds are over
#   a worker, or this server, dies, and the job fails  in the worker: ``Client.fail``     none


class Waiting:
    """The requests that wait.

    Attributes:
        pauses: the workers inside ``join``.
        departed: the workers that have left in order.
        lost: the workers that have died, and without which the job goes on.
    """

    def __init__(self, rule: Rule, workers: frozenset[int], buckets: Buckets, times: ArrivalTimes) -> None:
        self.pauses = Pauses()
        self.departed: frozenset[int] = frozenset()
        self.lost: frozenset[int] = frozenset()
        self._rule = rule
        self._needs_all = rule.mode == "sync" and rule.quorum is None  # rounds wait for workers that have left, too
        self._workers = workers
        self._buckets = buckets
        self._times = times
        self._parked: dict[tuple[wire.Node, int], ParkedRequest] = {}  # by sender and number

    @property
    def parked(self) -> list[WaitingRequest]:
        return [parked.request for parked in self._parked.values()]

    @property
    def uneven(self) -> bool:
        """Whether some workers have left, or are inside ``join``: then a request may wait in vain."""
        return bool(self.departed or self.pauses.ranks)

    def park(
        self, peer: bytes, message: WaitingRequest, late: int = 0, targets: Sequence[AnyTarget] | None = None
    ) -> list[ParkedRequest]:
        """Keep ``message`` until the rounds that it needs are over; return it if it does not have to wait, or must not.

        ``late`` of its segments came when their round was over. ``targets`` of None are still to be looked up.
        """
        parked = ParkedRequest(peer, message, late, since=self._times.now)
        for target, clock in self._needs(message, targets):
            if target.rounds.version < clock:
                target.parked.append((clock, parked))
                parked.left += 1
            elif target.failures and isinstance(message, PushRequest):
                parked.error = parked.error or target.failures.get(clock)
        if not parked.left:
            return [parked]
        self._parked[message.sender[:2]] = parked
        return [parked] if (self.uneven or self._buckets.doubts) and self._give_up_if_hopeless(parked) else []

    def wait(self, peer: bytes, message: PushRequest, target: AnyTarget, clock: int) -> None:
        """Keep ``message`` until round ``clock`` of ``target``, which is open, is over. Not for ``uneven`` stores."""
        parked = ParkedRequest(peer, message, left=1, since=self._times.now)
        target.parked.append((clock, parked))
        self._parked[message.sender[:2]] = parked

    def release(self, targets: Sequence[AnyTarget], errors: Mapping[Any, Exception]) -> list[ParkedRequest]:
        """Return the requests that are complete now that ``targets`` have advanced, some with ``errors``."""
        ready: list[ParkedRequest] = []
        for target in targets:
            for parked in target.release(errors.get(target)) if target.parked else ():
                del self._parked[parked.request.sender[:2]]
                ready.append(parked)
        return ready

    def depart(self, workers: Collection[int], lost: Collection[int]) -> None:
        self.departed, self.lost = frozenset(workers), frozenset(lost)
        for rank in self.lost & self.pauses.ranks:
            self.pauses.lose(rank)

    def forget(self, node: wire.Node) -> None:
        """Forget the requests of ``node``, which is lost: others repeat them, with numbers of their own."""
        gone = {id(parked): parked for (sender, _), parked in self._parked.items() if sender == node}
        for parked in gone.values():
            del self._parked[parked.request.sender[:2]]
            for target in self._buckets.targets_of(parked.request.ids):
                target.parked = [entry for entry in target.parked if id(entry[1]) not in gone]

    def give_up_hopeless(self) -> list[ParkedRequest]:
        """Give up, and return with their errors, the requests that wait in vain.

        They wait for workers that will not push, or for values that are served no more.
        """
        if (
            not self._buckets.doubts
            and not (self.departed and self._needs_all)
            and self.pauses.all_know(self._buckets.ids)
        ):
            return []
        return [parked for parked in list(self._parked.values()) if self._give_up_if_hopeless(parked)]

    def end_join(self) -> tuple[list[tuple[bytes, wire.Pause]], int, NodeLost | None] | None:
        """End ``join`` if all are inside and their pushes have taken effect, or if one can never come; else None.

        Returns:
            The requests of the workers inside, with their links; the rank that has pushed most; why they cannot go on.
        """
        inside, expected = self.pauses.ranks, len(self._workers) - len(self.lost)
        if not inside or (len(inside) + len(self.departed) < expected and not self._needs_all):
            return None
        gone = self.departed - inside
        error = None
        if gone and self._needs_all:
            error = NodeLost(f"{name('worker', gone)} {have(gone)} left the job without join()")
        elif len(inside) + len(gone) < expected or not self._settled():
            return None
        last = self.pauses.last
        return self.pauses.end(), last, error

    def close(self) -> tuple[list[ParkedRequest], list[tuple[bytes, wire.Pause]]]:
        """Return, and forget, the requests that wait for rounds, and those inside ``join``."""
        parked = list(self._parked.values())
        self._parked.clear()
        return parked, self.pauses.end()

    def explain(self, node: wire.Node, about: int) -> Reason:
        """Say what request ``about`` of ``node`` waits for; nothing if it does not wait."""
        parked = self._parked.get((node, about))
        if parked is None:
            return self.pauses.explain(node, about, self._workers - self.lost)
        missing = self._missing(parked.request, lambda *_: True)
        text = f"waits for {_words(missing)}"
        if any(target.rounds.awaited() is not None for target in self._buckets.targets_of(parked.request.ids)):
            return Reason(f"{text}, until the grace of the round is over")  # whatever these do: so it names nobody
        return Reason(text, {rank for rank, _ in missing})

    def waits(self, now: float) -> Waits:
        """Return which workers wait for which. The cost is bounded: only the oldest requests are looked at."""
        if not self._parked:
            return Waits()
        everybody = list(self._parked.values())
        oldest = everybody[0]
        missing: Missing = {}
        for parked in everybody[:FEW]:
            missing |= self._missing(parked.request, lambda *_: True, FEW)
        words = _words(self._missing(oldest.request, lambda *_: True, FEW))
        why = f"waits for {words or 'rounds of some of its keys'}"
        waiting = {rank for parked in everybody for rank in parked.request.workers}
        return Waits(sorted(waiting), sorted({rank for rank, _ in missing}), now - oldest.since, why)

    def _settled(self) -> bool:
        return all(target.rounds.settled for target in self._buckets.targets())

    def _needs(
        self, message: WaitingRequest, targets: Sequence[AnyTarget] | None = None
    ) -> list[tuple[AnyTarget, int]]:
        """Return the targets of a request, each with the round that must be over before the answer; see ``park``."""
        if self._rule.mode == "async" and isinstance(message, PushRequest) and not message.want:
            return []  # the push has taken effect
        targets = self._buckets.targets_of(message.ids) if targets is None else targets
        clocks = message.clocks
        if clocks and clocks.count(clocks[0]) == len(clocks):  # the usual case
            clock = self._rule.needs(clocks[0])
            return [(target, clock) for target in targets]
        latest = dict.fromkeys(targets, 0)
        for number, clock in zip(message.ids, clocks, strict=True):
            target = self._buckets.target(number)
            latest[target] = max(latest[target], self._rule.needs(clock))
        return list(latest.items())

    def _give_up_if_hopeless(self, parked: ParkedRequest) -> bool:
        error = self._hopeless(parked.request)
        if error is None:
            return False
        del self._parked[parked.request.sender[:2]]
        for target in self._buckets.targets_of(parked.request.ids):
            target.parked = [entry for entry in target.parked if entry[1] is not parked]
        parked.error = error
        return True

    def _hopeless(self, message: WaitingRequest) -> Exception | None:
        """Return why rounds that a request waits for will never be over, or give it nothing; None if they may be."""
        if (doubt := self._buckets.doubt_of(message.ids)) is not None:
            return doubt
        if self.departed and self._needs_all:
            missing = self._missing(message, lambda rank, _: rank in self.departed)
            if missing:
                return NodeLost(_uneven(missing, message.workers))
        if self.pauses.ranks and not self.pauses.all_know(message.ids):
            missing = self._missing(message, self._ignorant)
            if missing:
                return UsageError(f"{_words(missing)}, is inside join() and has not initialized it")
        return None

    def _ignorant(self, rank: int, segment: int) -> bool:
        return rank in self.pauses.ranks and not self.pauses.knows(rank, segment)

    def _missing(self, message: WaitingRequest, among: Callable[[int, int], bool], most: int | None = None) -> Missing:
        """Return the pushes that a request waits for, of the workers for which ``among(rank, segment)`` is true.

        ``most`` of its segments are looked at, from all over it; None for all.
        """
        missing: Missing = {}
        rounds: dict[tuple[AnyTarget, int], dict[int, int]] = {}
        step = 1 if most is None else -(-len(message.ids) // most)
        for number, clock in zip(message.ids[::step], message.clocks[::step], strict=True):
            target = self._buckets.target(number)
            if (target, clock) not in rounds:
                rounds[target, clock] = target.rounds.missing(self._rule.needs(clock))
            for worker_and_push in rounds[target, clock].items():
                if among(worker_and_push[0], number):
                    missing.setdefault(worker_and_push, {})[target.segments.keys[target.places[number]]] = None
        return missing


def _words(missing: Missing) -> str:
    return _first(missing, lambda rank, push, keys: f"worker {rank}, whose push {push} of {keys} is missing")


def _uneven(missing: Missing, waiting: Sequence[int]) -> str:
    """Say which push of each worker that has left was its last, and which one the workers ``waiting`` need."""
    wait = "waits" if len(waiting) == 1 else "wait"
    reasons = _first(
        missing,
        lambda rank, push, keys: (
            f"worker {rank} has left the job {f'after push {push - 1}' if push > 1 else 'without a push'} of {keys}, "
            f"and {workers(waiting)} {wait} for push {push}"
        ),
    )
    return f"{reasons}: uneven batches? See join()"


def _first(missing: Missing, reason: Callable[[int, int, str], str]) -> str:
    more = f"; and {len(missing) - MOST} more" if len(missing) > MOST else ""
    return "; ".join(reason(*which, shorten(missing[which])) for which in heapq.nsmallest(MOST, missing)) + more
