"""Whether a worker's calls wait for workers that wait for this one: what it tells the scheduler, and hears of it.

Such calls never end. A worker whose every thread that could go on is inside a call without a timeout of its own says so
(``Stuck``): its waits, and the workers that they need. The scheduler looks for workers that wait for each other only,
has each of them ask and say it once more, and then ends their calls (``servers/scheduler/deadlocks.py``).

A worker says nothing where it cannot be sure: if a peer does not know one of its requests, which may be on its way; if
a thread of the program is elsewhere; or if a timer of signals runs, whose handler may raise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvstore import wire
from kvstore.member.outstanding import PendingRequest, Question
from kvstore.member.stacks import only_these_act, place_of_thread
from kvstore.ticket import Operation
from kvstore.transport import Peer

LOOK_S = 5.0  # how long a call waits before its worker asks whether it waits in vain
MOST_REQUESTS = 1024  # without an answer; a worker with more says nothing
MOST_TEXT = 2000  # characters


class ThreadWaits:
    """Of one thread: the seconds of its waits that are over, when the present one began, and what it waits for.

    ``operation`` is None if the call has a timeout of its own, or if there is no wait. ``verdict`` is the number of a
    wait that has been found to be in vain, and why.
    """

    __slots__ = ("operation", "over_s", "since", "verdict")

    def __init__(self) -> None:
        self.over_s = self.since = 0.0
        self.operation: Operation | None = None
        self.verdict: tuple[int, str] = (-1, "")

    @property
    def number(self) -> int:
        """A number for the wait that goes on, which no other long wait of the thread has."""
        return int(1e6 * self.since)


class BlockedTime:
    """How long the callers of a process have waited for answers, summed over threads. Any thread may use it.

    Each thread has a record of its own, so no lock is needed where callers wait.
    """

    def __init__(self) -> None:
        self._threads: dict[int, ThreadWaits] = {}

    def here(self) -> ThreadWaits:
        """Return the record of the calling thread, which alone may change it."""
        waits = self._threads.get(threading.get_ident())
        if waits is None:
            waits = self._threads[threading.get_ident()] = ThreadWaits()
        return waits

    def waiting(self) -> dict[int, ThreadWaits]:
        return {ident: waits for ident, waits in list(self._threads.items()) if waits.since}

    def total(self, now: float) -> float:
        records = [(waits.over_s, waits.since) for waits in list(self._threads.values())]
        # A wait may have begun since the caller looked at the clock.
        return sum(over_s + (max(0.0, now - since) if since else 0.0) for over_s, since in records)


class Findings(NamedTuple):
    """What a worker knows of its waits; see ``Stuck``."""

    waits: Sequence[int] = ()
    missing: Sequence[int] = ()
    text: str = ""


class MutualWaits:
    """The waits of one worker, as far as they may be in vain.

    Attributes:
        say: tells the scheduler ``Findings``, and the number of its latest prompt; None where nobody is told.
        prompted: whether the scheduler has asked to look again, or has found something, since the last look.
    """

    def __init__(self, blocked: BlockedTime) -> None:
        self.say: Callable[[int, Findings], None] | None = None
        self.prompted = False
        self.only_these_act: Callable[[Collection[int]], bool] = only_these_act
        self._blocked = blocked
        self._prompt = 0
        self._said = False

    # ---- what the scheduler says. Any thread may call these; whoever waits is to be woken then.

    def prompt(self, number: int) -> None:
        """Take ``StillStuck``."""
        self._prompt, self.prompted = number, True

    def condemn(self, waits: Collection[int], text: str) -> None:
        """Take ``Deadlock``."""
        for thread in self._blocked.waiting().values():
            if thread.number in waits:
                thread.verdict = (thread.number, text)
        self.prompted = True

    # ---- the threads that wait

    def look(
        self,
        requests: Sequence[PendingRequest],
        ask: Callable[..., None],
        wait: Callable[[Callable[[], bool]], bool],
    ) -> None:
        """Ask what all waits are for, and tell the scheduler if they are only for other workers.

        Args:
            requests: those of this worker without an answer.
            ask: makes questions of an operation.
            wait: waits for a condition, for as long as peers may take to explain something.
        """
        prompt, self.prompted = self._prompt, False
        before = self._waiting()
        if self.say is None or before is None or len(requests) > MOST_REQUESTS:
            return
        question, found = Operation("explanation"), dict[int, wire.Explanation]()
        known = [
            request for request in requests if not isinstance(request, Question) or request.kind is not wire.Explain
        ]
        for request in known:
            take = partial(found.__setitem__, request.seq)
            ask(question, Question(request.peer, question, wire.Explain, {"about": request.seq}, take))
        wait(lambda: not question.open)
        if self._waiting() != before or any(
            not (said := found.get(request.seq)) or not said.missing for request in known
        ):
            return
        self._said = True
        self.say(prompt, _findings(self._blocked.waiting(), known, found))

    def go_on(self) -> None:
        """Take back what has been said, if anything: a call has ended."""
        if self._said and self.say is not None:
            self._said = False
            self.say(self._prompt, Findings())

    def _waiting(self) -> Mapping[int, int] | None:
        """Return the number of each thread's wait; None if something else may happen in this process."""
        waiting = self._blocked.waiting()
        if any(thread.operation is None for thread in waiting.values()):
            return None
        return {ident: thread.number for ident, thread in waiting.items()} if self.only_these_act([*waiting]) else None


def _findings(
    waiting: Mapping[int, ThreadWaits], requests: Sequence[PendingRequest], found: Mapping[int, wire.Explanation]
) -> Findings:
    missing: set[int] = set()
    texts = []
    for ident, thread in waiting.items():
        of_peers: dict[Peer, str] = {}
        for request in requests:
            if request.operation is thread.operation:
                missing.update(found[request.seq].missing)
                of_peers.setdefault(request.peer, found[request.seq].text)
        place = place_of_thread(ident)
        reasons = "; ".join(f"{peer.decode()} {text}" for peer, text in of_peers.items())
        texts.append(f"{thread.operation}{f' at {place}' if place else ''}: {reasons}")
    return Findings([thread.number for thread in waiting.values()], sorted(missing), " | ".join(texts)[:MOST_TEXT])
