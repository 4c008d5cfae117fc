"""Requests out, replies in: what a member does with the links to the scheduler and the servers.

Callers' own threads do the work: a request is sent by the thread that makes it, and replies are taken in by whoever
waits, so nothing is handed between threads on the way. ``Turns`` makes sure that one thread at a time is at the
transport; a sender interrupts a waiting one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from kvstore.drops import Drops
from kvstore.errors import DeadlineExceeded, KVStoreError, UsageError, WireError, rebuild
from kvstore.member.io_lock import Turns
from kvstore.member.outstanding import Outstanding, Sent
from kvstore.member.window import Lane
from kvstore.memory import Memory
from kvstore.ticket import Ticket
from kvstore.transport import Peer, Transport
from kvstore.wire import Buffer, Explain, Explanation, Failure, Message, Node, Reply, decode, encode, require_short

log = logging.getLogger(__name__)

SLICE_S = 0.5  # the longest single wait on the transport
_Waiting: TypeAlias = "tuple[int, Ticket, Callable[[Me], Message]]"  # its number, on whose behalf, the request
Me: TypeAlias = tuple[str, int, int, int, int]  # a request's role, rank, incarnation, seq and done

STALL_S = 0.1  # without an answer for so long, what somebody waits for goes whether or not it is its turn
FEW = 4  # requests; with more of them outstanding, replies are taken in between two that are sent
EXPLAIN_S = 1.0  # how long a peer may take to say what a late request waits for


class Client:
    """Asks peers over one transport, and waits for their answers.

    Args:
        transport: the links; only this object uses it from now on.
        clock: seconds, monotonic.
        timeout_s: the deadline of a wait that gives none.
        incarnation: who this is until the scheduler has said it.
        window: bytes of answers that may be on their way from one peer, of requests that are made in turn.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Callable[[], float],
        timeout_s: float,
        role: str,
        incarnation: int,
        window: int,
    ) -> None:
        self.node = Node(role, -1, incarnation)
        self.timeout_s = timeout_s
        self.failure: KVStoreError | None = None
        self.memory: Memory = transport
        self._transport = transport
        self._clock = clock
        self._turns = Turns(transport.interrupt)
        self._outstanding = Outstanding()
        self._names: dict[Peer, str] = {}
        self._lanes: dict[Peer, Lane[_Waiting]] = {}
        self._window = window
        self._answers = 0
        self._drops = Drops(log)
        self._closed = False

    def connect(self, endpoint: str, name: str, *, bulk: bool = False) -> Peer:
        """Make a link to ``name``, which is what messages call it; see ``Transport.connect``."""
        with self._turns.send():
            peer = self._transport.connect(endpoint, bulk=bulk)
        self._names[peer] = name
        self._lanes[peer] = Lane(self._window)
        return peer

    def ask(
        self,
        peer: Peer,
        ticket: Ticket,
        make: Callable[[Me], Message],
        on_reply: Callable[[Any], None] | None = None,
        priority: int | None = None,
    ) -> None:
        """Send a request on behalf of ``ticket``.

        Args:
            peer: whom to ask.
            ticket: is done when all its requests are answered.
            make: the message, from its first five fields.
            on_reply: takes the answer, unless it is a failure, in the thread that received it.
            priority: see ``Transport.send``.
        """
        self.check()
        with self._turns.send():
            self._send(peer, ticket, make, on_reply, priority)
            if len(self._outstanding) > FEW:
                self._drain()

    def ask_in_turn(
        self,
        peer: Peer,
        ticket: Ticket,
        make: Callable[[Me], Message],
        on_reply: Callable[[Any], None],
        nbytes: int,
        priority: int,
    ) -> None:
        """Send a request when it is its turn, or answers stall while somebody waits; see ``ask`` and ``Lane``.

        Somebody must wait for ``ticket`` soon, or its requests may stay here.

        Args:
            make: is called when the request goes.
            nbytes: how large the answer will be.
            priority: the highest goes first.
        """
        self.check()
        with self._turns.send():
            seq = self._outstanding.add(peer, ticket, on_reply)
            self._lanes[peer].add(seq, nbytes, priority, (seq, ticket, make))
            self._go_on(peer)
            if len(self._outstanding) > FEW:
                self._drain()

    def tell(self, peer: Peer, make: Callable[[Me], Message]) -> None:
        """Send a request whose answer nobody waits for, even if the job has failed."""
        with self._turns.send():
            self._send(peer, Ticket("farewell"), make, None)

    def gathers(self, peer: Peer) -> bool:
        """See ``Transport.gathers``."""
        return self._transport.gathers(peer)

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Send what stays as it is until it is answered, and wait for that, in this block; if it fails, it need not."""
        try:
            yield
        except BaseException:
            with self._turns.send():
                self._transport.detach()
                self._outstanding.detach()
            raise

    def call(self, peer: Peer, what: str, make: Callable[[Me], Message], timeout: float | None = None) -> Any:
        """Ask and wait; return the reply."""
        ticket = Ticket(what, (), self)
        self.ask(peer, ticket, make, ticket.take)
        return ticket.wait(timeout)

    def check(self) -> None:
        """Raise what has ended the job, if anything has."""
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise UsageError("this process has left the job")

    def fail(self, error: KVStoreError) -> None:
        """Make all waits, now and later, raise ``error``. Any thread may call it; the first error stays."""
        if self.failure is None:
            self.failure = error
        self._turns.wake()

    def poll(self) -> None:
        """Take in what has arrived, unless the job has ended."""
        self.check()
        with self._turns.send():
            self._drain()

    def wait(self, ticket: Ticket, timeout: float | None = None) -> None:
        """Return when ``ticket`` is done; see ``Ticket.wait``."""
        timeout = self.timeout_s if timeout is None else timeout
        deadline = self._clock() + timeout
        if ticket.open and any(self._lanes.values()):
            try:
                self._pace(ticket, deadline)
            finally:
                self._hurry(ticket)
        if not self._wait_until(lambda: not ticket.open, max(0.0, deadline - self._clock())):
            overdue = self._overdue(ticket, timeout)
            if ticket.open:  # or the answer came while this was found out
                raise overdue

    def wait_all(self, tickets: list[Ticket], timeout: float | None = None) -> None:
        """Return when all ``tickets`` are done, without raising their errors."""
        deadline = self._clock() + (self.timeout_s if timeout is None else timeout)
        for ticket in tickets:
            self.wait(ticket, max(0.0, deadline - self._clock()))

    def close(self, linger: float = 0.0) -> None:
        """Close the links."""
        with self._turns.send():
            self._closed = True
            self._transport.close(linger)

    def _wait_until(self, condition: Callable[[], bool], timeout: float) -> bool:
        deadline = self._clock() + timeout
        while not condition():
            self.check()
            left = deadline - self._clock()
            if left <= 0:
                return False
            with self._turns.receive(min(left, SLICE_S)) as mine:
                if mine and not condition() and self.failure is None:
                    received = self._transport.recv(min(left, SLICE_S))
                    if received is not None:
                        self._take(*received)
                        del received  # its sender waits for the memory
                        if not condition():
                            self._drain()
        return True

    def _send(
        self,
        peer: Peer,
        ticket: Ticket,
        make: Callable[[Me], Message],
        on_reply: Callable[[Any], None] | None,
        priority: int | None = None,
    ) -> None:
        seq = self._outstanding.add(peer, ticket, on_reply)
        try:
            frames = self._encoded(seq, make)
        except BaseException:
            self._outstanding.withdraw(seq)
            raise
        self._transmit(peer, seq, frames, priority)

    def _transmit(self, peer: Peer, seq: int, frames: list[Buffer], priority: int | None = None) -> None:
        self._outstanding.sent(seq, Sent(frames, priority))
        self._transport.send(peer, frames, priority)

    def _ask_again(self, peer: Peer) -> None:
        """Send what has not been answered once more, for the link has been made anew; peers know a repeat as one."""
        for frames, priority in self._outstanding.again(peer):
            self._transport.send(peer, frames, priority)

    def _encoded(self, seq: int, make: Callable[[Me], Message]) -> list[Buffer]:
        node = self.node
        frames = encode(make((node.role, node.rank, node.incarnation, seq, self._outstanding.done)))
        require_short(frames)
        return frames

    def _go_on(self, peer: Peer) -> None:
        """Send what may go by now."""
        for seq, _, make in self._lanes[peer].ready():
            self._transmit(peer, seq, self._encoded(seq, make))

    def _pace(self, ticket: Ticket, deadline: float) -> None:
        """Wait for ``ticket`` while requests go in their turn, as long as answers keep coming."""
        while ticket.open and any(self._lanes.values()) and (left := deadline - self._clock()) > 0:
            before = self._answers
            self._wait_until(partial(self._answered_since, before), min(STALL_S, left))
            if self._answers == before:
                return

    def _answered_since(self, before: int) -> bool:
        return self._answers > before

    def _hurry(self, ticket: Ticket) -> None:
        """Send what ``ticket`` still waits to ask, for somebody waits for it: that must not depend on other answers."""
        if self.failure is not None:
            return
        with self._turns.send():
            for peer, lane in self._lanes.items():
                for seq, _, make in lane.urgent(lambda waiting: waiting[1] is ticket):
                    self._transmit(peer, seq, self._encoded(seq, make))

    def _drain(self) -> None:
        while (received := self._transport.recv(0)) is not None:
            self._take(*received)
            del received

    def _take(self, peer: Peer, frames: list[Any]) -> None:
        if not frames:
            self._ask_again(peer)
            return
        try:
            reply = decode(frames)
        except WireError as exc:
            self._drop("a bad message", peer, exc)
            return
        if not isinstance(reply, Reply):
            self._drop("a message", peer, f"{type(reply).__name__} is no answer")
            return
        error = rebuild(reply.kind, reply.text) if isinstance(reply, Failure) else None
        self._outstanding.settle(peer, reply, error)
        self._answers += 1
        lane = self._lanes.get(peer)
        if lane is not None:
            lane.answered(reply.seq)
            self._go_on(peer)

    def _drop(self, what: str, peer: Peer, why: object) -> None:
        self._drops.note(f"{what} from {self._names.get(peer, 'a stranger')}", why)

    def _overdue(self, ticket: Ticket, waited: float) -> DeadlineExceeded:
        """Ask those who have not answered what they wait for, and put it into words."""
        missing = self._outstanding.of(ticket)
        silence = "does not answer"
        answers: dict[Peer, str] = {}
        question = Ticket("explanation", (), self)

        def ask_about(seq: int, peer: Peer) -> None:
            def take(reply: Explanation) -> None:
                answers[peer] = reply.text or "has not answered yet"

            answers[peer] = silence
            self.ask(peer, question, lambda me: Explain(*me, about=seq), take)

        for seq, peer in missing.items():
            if peer not in answers:
                ask_about(seq, peer)
        self._wait_until(lambda: not question.open, EXPLAIN_S)
        reasons = "; ".join(f"{self._names[peer]} {text}" for peer, text in answers.items())
        silent = tuple(self._names[peer] for peer, text in answers.items() if text is silence)
        return DeadlineExceeded(f"{ticket} is not done after {waited:.3g} s: {reasons}", silent)
