"""Sends a member's requests to the scheduler and the servers, and waits for their replies.

The callers' own threads do the work. The thread that makes a request sends it, and a thread that waits takes in
replies, so nothing is handed from thread to thread. ``LinkAccess`` lets one thread at a time use the links, and leaves
nothing half done when an exception comes in the middle: a request either has not been made at all, or is noted as
outstanding.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kvstore import wire
from kvstore.errors import DeadlineExceeded, KVStoreError, UsageError, again
from kvstore.member.link_access import LinkAccess, under_way
from kvstore.member.links import Links, Prepare
from kvstore.member.mutual_waits import LOOK_S, BlockedTime, MutualWaits, ThreadWaits
from kvstore.member.outstanding import Question, ready
from kvstore.member.window import WindowSize
from kvstore.ticket import Operation, WaitLimits
from kvstore.tracer import Tracer
from kvstore.transport import Peer, Transport

log = logging.getLogger(__name__)

T = TypeVar("T")

SLICE_S = 0.5  # the longest single wait for the transport
# If no answer comes for so long, requests that a caller waits for go out of turn: the answer that would make room in
# the window may itself wait for a worker that waits for this one.
STALL_S = 0.1
NEWS_S = 60.0  # how often a wait that goes on logs what it waits for
EXPLAIN_S = 15.0  # how long a peer may take to explain what a late request waits for
LOCATE_S = 3.0  # how long the answer may take where those are that it waits for


def find_out(client: Client, operation: Operation, requests: Mapping[Peer, int]) -> Explanations:
    """Ask what ``operation`` waits for; ``requests`` has one request without an answer for each peer."""
    explanations, question = Explanations(requests), Operation("explanation")
    for peer, seq in requests.items():
        client.ask(question, Question(peer, question, wire.Explain, {"about": seq}, partial(explanations.take, peer)))
    client.wait_until(lambda: not question.open, EXPLAIN_S)
    if client.guide is not None and client.guide.decode() not in explanations.silent:
        _locate(client, client.guide, operation, explanations)
    return explanations


def _locate(client: Client, guide: Peer, operation: Operation, explanations: Explanations) -> None:
    """Ask where the members are that ``operation`` waits for. Without an answer the message says less."""
    question = Operation("question where others are")
    with contextlib.suppress(UsageError):
        for role, ranks in explanations.awaited(client.node).items():
            take = partial(explanations.take_places, role)
            client.ask(question, Question(guide, question, wire.Locate, {"role": role, "ranks": ranks}, take))
        client.wait_until(lambda: not (question.open and operation.open), LOCATE_S)
    client.give_up(question)


class Client:
    """Sends requests to peers, and waits for their replies. Any thread may use it.

    ``make_transport`` returns a new transport, which only this object uses. ``clock`` is monotonic. Waits without
    limits of their own have ``limits``. ``window`` bounds the bytes of answers in flight from one peer.

    Attributes:
        links: the links and the requests on them. Only code that runs ``alone`` may change them.
        alone: calls a function while no other thread uses the links; see ``LinkAccess.alone``.
        failure: the error that has ended the job; None as long as it goes on.
        guide: the link to the scheduler, which can tell where members are; None where it is not asked.
    """

    def __init__(
        self,
        make_transport: Callable[[], Transport],
        clock: Callable[[], float],
        limits: WaitLimits,
        role: str,
        incarnation: int,
        window: int,
    ) -> None:
        self.limits = limits
        self.failure: KVStoreError | None = None
        self.blocked = BlockedTime()
        self.mutual = MutualWaits(self.blocked)
        self.guide: Peer | None = None
        self._clock = clock
        self.links = Links(make_transport, wire.Node(role, -1, incarnation), window)
        self._access = LinkAccess(self.links, limits.answer_s)
        self.alone = self._access.alone
        self._tracer: Tracer | None = None

    @property
    def node(self) -> wire.Node:
        return self.links.node

    @node.setter
    def node(self, node: wire.Node) -> None:
        self.links.node = node

    def trace(self, tracer: Tracer | None) -> None:
        self._tracer = self.links.tracer = tracer

    # ---- links

    def connect(self, endpoint: str, name: str, *, bulk: bool = False, window: WindowSize | None = None) -> Peer:
        """Connect to a peer, which is called ``name`` in messages. ``window`` is the send window of its link alone."""
        return self.alone(self.links.connect, name.encode(), endpoint, bulk, window)

    def allocate(self, nbytes: int) -> memoryview:
        """Return memory that the transport sends from. Only for code that runs ``alone`` at the links."""
        return self.links.allocate(nbytes)

    def busy(self, buffer: wire.Buffer) -> bool:
        """Whether a peer may still read a message from the memory of ``buffer``; True if that is not known."""
        return self.links.busy(buffer)

    def gathers(self, peer: Peer) -> bool:
        """Whether frames for ``peer`` may be scattered buffers, which then need no copy."""
        return self.links.gathers(peer)

    def close(self, linger: float = 0.0) -> None:
        self.alone(self.links.close, linger)

    # ---- requests

    # A push is handed down as a function (``prepare``) and comes up again as requests. Requests that are made before
    # and handed down would be simpler, but making them numbers clocks and takes residuals. That must be done alone at
    # the links, or two threads push with one clock; and it may be interrupted between any two lines. So ``prepare``
    # only reads: an exception in it costs nothing. What is to change is its effect, which runs together with
    # ``Outstanding.add`` as one change, and may run twice.
    def submit(self, operation: Operation, prepare: Prepare, *args: Any) -> None:
        """Make all requests of ``operation`` or, if this raises before they are outstanding, none.

        If this raises later, the requests are made all the same, and their answers are not taken. ``prepare`` is called
        with ``operation`` and ``args``, alone at the links; it returns the requests, and the effect of making them, and
        changes nothing itself.
        """
        try:
            self.check()
            self._require_returned()
            self.alone(self.links.submit, operation, prepare, args)
        except BaseException:
            self.give_up(operation)
            raise

    def exchange(self, operation: Operation, prepare: Prepare, *args: Any) -> Any:
        """``submit``, and wait for ``operation``. Meanwhile requests may read the caller's arrays."""
        try:
            self.submit(operation, prepare, *args)
            result = operation.wait()
        except BaseException:
            self.give_up(operation)
            raise
        self.links.lent.pop(operation, None)
        return result

    def ask(self, operation: Operation, *questions: Question) -> None:
        self.submit(operation, ready, questions)

    def call(
        self, peer: Peer, what: str, kind: type[wire.Request], timeout: float | None = None, /, **fields: Any
    ) -> Any:
        """Send one request and wait; return the reply. ``what`` names the call in messages."""
        operation = Operation(what, (), self)
        self.ask(operation, Question(peer, operation, kind, fields, operation.take))
        return operation.wait(timeout)

    def tell(self, peer: Peer, kind: type[wire.Request], /, **fields: Any) -> None:
        """Send a request whose answer nobody waits for, even if the job has failed."""
        operation = Operation("farewell")
        self.alone(self.links.submit, operation, ready, ([Question(peer, operation, kind, fields)],))

    def notify(self, peer: Peer, notice: wire.Message) -> None:
        """Send a notice, behind the requests that have left. It is lost if the link is."""
        self.alone(self.links.notify, peer, notice)

    def reconnect(self) -> None:
        """Reconnect all links: what was sent over the old ones may take long to come. Any thread may call it."""
        self.links.suspect()
        self._access.wake()

    def move(self, peer: Peer, endpoint: str) -> None:
        """Have the link to ``peer`` lead to ``endpoint`` from now on. Any thread may call it."""
        self.links.move(peer, endpoint)
        self._access.wake()

    def bypass(self, peer: Peer, aggregator: int) -> None:
        """Send what is for ``peer``, ``aggregator`` of this host, which is lost, elsewhere. Any thread may call it."""
        self.links.bypass(peer, aggregator)
        self._access.wake()

    def give_up(self, operation: Operation) -> None:
        """Give up the rest of ``operation``: from now on the caller's arrays are neither read nor written."""
        if operation.open:
            self.alone(self.links.give_up, operation)
        self.links.lent.pop(operation, None)

    def of(self, kind: type[T]) -> list[T]:
        return [request for request in self.links.outstanding if isinstance(request, kind)]

    # ---- the job

    @property
    def over(self) -> bool:
        """Whether the job has failed, or this process has left it."""
        return self.failure is not None or self.links.closed

    def check(self) -> None:
        if self.failure is not None:
            raise again(self.failure)
        if self.links.closed:
            raise UsageError("this process has left the job")

    def fail(self, error: KVStoreError) -> None:
        """Make all waits, now and later, raise ``error``. The first error stays. Any thread may call it."""
        if self.failure is None:
            self.failure = error
        self._access.wake()

    # ---- waiting

    def poll(self) -> None:
        """Take in what has arrived; raise the error that has ended the job, if there is one."""
        self.check()
        self.alone(self.links.receive, self._failed, 0.0)

    def wait(self, operation: Operation, timeout: float | None = None) -> None:
        """Return when ``operation`` is done; see ``Operation.wait``. Here all waiting is done that callers notice."""
        waits = self.blocked.here()
        began = self._clock()
        try:
            waits.since = began
            waits.operation = operation if timeout is None else None
            self._wait(operation, timeout, began, waits)
        finally:
            waits.over_s, waits.since = waits.over_s + self._clock() - began, 0.0
            waits.operation = None
            self.mutual.go_on()
            if self._tracer is not None and self._tracer.open:
                self._tracer.span("wait", began, operation.keys)

    def _wait(self, operation: Operation, timeout: float | None, began: float, waits: ThreadWaits) -> None:
        # Where this ends when a worker dies: no server ends the wait, since a server cannot tell a dead worker from a
        # slow one. The scheduler can, by heartbeats. It tells all members (``JobFailed``) over the links of their
        # heartbeats, whose thread calls ``fail``: that sets ``failure`` and wakes this thread, and ``wait_until``
        # raises it. Servers refuse only what waits for workers that have left in order, once the scheduler has
        # announced that.
        answer_s, patience_s = operation.limits or self.limits
        waited = answer_s if timeout is None else timeout
        look = LOOK_S if timeout is None and self.mutual.say is not None else math.inf  # else nobody can end it
        now = began  # nothing has taken time yet, most often
        if operation.open and self.links.congested:
            self._pace(operation, began + waited)
            if self.failure is None:  # the rest out of turn: a caller that waits must not depend on other answers
                self.alone(self.links.hurry, operation)
            now = self._clock()
        over = (lambda: not operation.open) if look == math.inf else lambda: not operation.open or self.mutual.prompted
        while True:
            self.wait_until(over, began + min(waited, look) - now, now)
            if not operation.open:
                return
            if waits.verdict[0] == waits.number:
                raise DeadlineExceeded(f"{operation} never ends: {waits.verdict[1]}")
            now = self._clock()
            if look < waited or (look < math.inf and self.mutual.prompted):
                look = max(look, min(2 * (now - began), now - began + NEWS_S))
                self._look_for_deadlock()
            else:
                late = self._find_out(operation)
                if not operation.open:  # the answer came while this was found out
                    return
                if timeout is not None or late.silent or waited >= patience_s:
                    raise DeadlineExceeded(f"{operation} is not done after {waited:.3g} s: {late.known}", late.silent)
                log.warning("%s is not done after %.0f s: %s", operation, waited, late.known)
                waited = min(waited + NEWS_S, patience_s)
            now = self._clock()

    def _look_for_deadlock(self) -> None:
        self.mutual.look(
            self.alone(lambda: list(self.links.outstanding)), self.ask, lambda over: self.wait_until(over, EXPLAIN_S)
        )

    def prompt(self, number: int) -> None:
        """Look once more whether this worker waits in vain. Any thread may call it."""
        self.mutual.prompt(number)
        self._access.wake()

    def condemn(self, waits: Sequence[int], text: str) -> None:
        """End ``waits``, by their numbers, which are in vain for ``text``. Any thread may call it."""
        self.mutual.condemn(waits, text)
        self._access.wake()

    def settle(self, operation: Operation, timeout: float) -> bool:
        """Wait for ``operation`` for at most ``timeout`` seconds, and ask nobody why; return whether it is done."""
        return self.wait_until(lambda: not operation.open, timeout)

    def unanswered(self, operation: Operation) -> list[Peer]:
        """Return the peers that have not answered requests of ``operation``, one for each request."""
        return list(self.alone(self.links.outstanding.of, operation).values())

    def wait_all(self, operations: Sequence[Operation], timeout: float | None = None) -> None:
        """Return when all ``operations`` are done, without raising their errors. ``timeout`` is for all together."""
        deadline = None if timeout is None else self._clock() + timeout
        for operation in operations:
            self.wait(operation, None if deadline is None else max(0.0, deadline - self._clock()))

    def wait_until(self, condition: Callable[[], bool], timeout: float, now: float | None = None) -> bool:
        """Take in answers until ``condition``, for at most ``timeout`` seconds; return whether it holds."""
        now = self._clock() if now is None else now
        deadline = now + timeout
        while not condition():
            if self.failure is not None and self._arrived(condition):
                return True
            self.check()
            if deadline <= now:
                return False
            left = min(deadline - now, SLICE_S)
            self.alone(self.links.receive, lambda: condition() or self._failed(), left, yielding_s=left)
            if condition():
                return True
            now = self._clock()
        return True

    def _pace(self, operation: Operation, deadline: float) -> None:
        """Wait for ``operation`` while its requests go in their turn, as long as answers keep coming."""
        while operation.open and self.links.congested and (left := deadline - self._clock()) > 0:
            before = self.links.answers
            self.wait_until(partial(self._answered_since, before), min(STALL_S, left))
            if self.links.answers == before:
                return

    def _answered_since(self, before: int) -> bool:
        return self.links.answers > before

    def _find_out(self, operation: Operation) -> Explanations:
        first: dict[Peer, int] = {}  # request of each peer
        for seq, peer in self.alone(self.links.outstanding.of, operation).items():
            first.setdefault(peer, seq)
        return find_out(self, operation, first)

    # ---- helpers

    def _arrived(self, condition: Callable[[], bool]) -> bool:
        """Take in what has arrived; return whether ``condition`` holds. An answer says more than the end of the job."""
        for _ in range(2):  # the first may end at once: the wake-up that told of the failure was for it
            self.alone(self.links.receive, condition, 0.0)
        return condition()

    def _failed(self) -> bool:
        return self.failure is not None

    def _require_returned(self) -> None:
        """Fail if exceptions have cut a call of this thread short twice: arrays that it lent may have changed."""
        if self.links.lent and not under_way(_EXCHANGE):
            self.alone(self._look_for_lent)
            self.check()

    def _look_for_lent(self) -> None:
        me = threading.get_ident()
        for operation in [operation for operation, thread in self.links.lent.items() if thread == me]:
            if any(request.borrows for request in self.links.outstanding.requests_of(operation)):
                self.fail(
                    KVStoreError(
                        f"a {operation.what} was interrupted twice, the second time while it cleaned up: its arrays "
                        "may have changed before they were sent, so this worker cannot go on"
                    )
                )
            del self.links.lent[operation]


_EXCHANGE = Client.exchange.__code__


# ---- what peers say a late answer waits for, and where the members are that it waits for

MOST_PLACES = 4  # that one message names; members elsewhere are counted
MOST_RANGES = 8  # of ranks, before a place
_SILENT = "does not answer"
_PLURALS = {"is": "are", "has": "have", "does": "do"}


class Explanations:
    """What peers say their late answers wait for, as it comes; messages name ``peers`` in this order."""

    def __init__(self, peers: Iterable[Peer]) -> None:
        self._texts: dict[Peer, str | None] = dict.fromkeys(peers)
        self._missing: set[int] = set()
        self._places: list[str] = []
        self._silent_too: set[Peer] = set()  # of whom the scheduler says so, and more

    def take(self, peer: Peer, reply: wire.Explanation) -> None:
        """Take in what ``peer`` says; an empty text says that it knows nothing of a reason."""
        self._texts[peer] = reply.text or "has not answered yet"
        self._missing.update(reply.missing)

    def take_places(self, role: str, reply: wire.Located) -> None:
        """Take in where members of ``role`` are. What is said of a peer that says nothing replaces that."""
        for rank, place in zip(reply.ranks, reply.places, strict=True):
            peer = f"{role} {rank}".encode()
            if peer in self._texts and place.startswith(_SILENT):
                self._silent_too.add(peer)
        self._places += grouped(role, reply.ranks, reply.places)

    @property
    def silent(self) -> tuple[str, ...]:
        return tuple(peer.decode() for peer, text in self._texts.items() if text is None)

    def awaited(self, me: wire.Node) -> dict[str, list[int]]:
        """Return the members that are waited for, but for ``me``, by role: workers, and peers that say nothing."""
        ranks: dict[str, set[int]] = {"worker": set(self._missing)}
        for name in self.silent:
            role, _, rank = name.partition(" ")
            if rank.isdecimal():
                ranks.setdefault(role, set()).add(int(rank))
        if me.role == "worker":
            ranks["worker"].discard(me.rank)
        return {role: sorted(of_role) for role, of_role in ranks.items() if of_role}

    @property
    def known(self) -> str:
        said = [
            f"{peer.decode()} {text or _SILENT}" for peer, text in self._texts.items() if peer not in self._silent_too
        ]
        return "; ".join(said + self._places)


def grouped(role: str, ranks: Sequence[int], places: Sequence[str]) -> list[str]:
    """Return sentences that say which members are where, those at one place together."""
    at: dict[str, list[int]] = {}
    for rank, place in zip(ranks, places, strict=True):
        at.setdefault(place, []).append(rank)
    said = [f"{_named(role, group)} {_plural(place) if len(group) > 1 else place}" for place, group in at.items()]
    rest = sum(map(len, list(at.values())[MOST_PLACES:]))
    return [*said[:MOST_PLACES], f"{rest} more {role}s are elsewhere"] if rest else said


def _named(role: str, ranks: Sequence[int]) -> str:
    """Return "worker 3", or "workers 1-7, 9"; ``ranks`` rise."""
    if len(ranks) == 1:
        return f"{role} {ranks[0]}"
    runs = [
        [rank for _, rank in run] for _, run in itertools.groupby(enumerate(ranks), lambda entry: entry[1] - entry[0])
    ]
    named = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:MOST_RANGES])
    more = sum(map(len, runs[MOST_RANGES:]))
    return f"{role}s {named}" + (f" and {more} more" if more else "")


def _plural(place: str) -> str:
    verb, _, rest = place.partition(" ")
    return f"{_PLURALS.get(verb, verb)} {rest}"
