"""The aggregator as a process: it joins the job, and serves its host's workers until they are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

from kvstore import wire
from kvstore.devices import device_memory
from kvstore.errors import KVStoreError
from kvstore.member.client import STALL_S
from kvstore.member.links import Links
from kvstore.member.outstanding import PendingRequest, Question, Turn, ready
from kvstore.spec import Key
from kvstore.ticket import Operation
from kvstore.tracer import Tracer
from kvstore.transport import Peer, Transport
from kvstore.transport.transport import Frames
from servers.activity import ServedActivity
from servers.aggregator.aggregator import Aggregator
from servers.aggregator.exchanges import Exchange
from servers.aggregator.loans import Loans
from servers.member import ServingMember, Surroundings
from servers.requests.reasons import Reason
from servers.requests.replies import Outbox


class AggregatorProcess(ServingMember):
    """A member that serves its host's workers until all workers are done or the job has failed."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around, self._renew)
        config = around.config
        self._outbox: Outbox = []
        self._upstream = Upstream(
            self._transport,
            self._session.client.node,
            self._session.addresses,
            config.window_bytes,
            around.clock,
            lambda peer, seq, reason: self._outbox.extend(self._aggregator.explained(peer, seq, reason)),
        )
        self._session.when_traced(self._upstream.trace)
        workers = self._session.aggregated[self._session.rank]
        keys = self._session.worker_keys
        self._aggregator = Aggregator(
            workers,
            self._transport,
            self._upstream,
            self._transport,
            {rank: keys[rank] for rank in workers} if keys else {},
            Loans(None if config.device_sum == "off" else partial(device_memory, config.device_sum)),
        )

    def _serve(self) -> None:
        self._service.run(self._handle, self._tick, self._due, self._take)

    # ---- in the loop

    def _handle(self, peer: bytes, message: wire.Message) -> Outbox:
        return self._with_answers(self._aggregator.handle(peer, message, self._clock()), [])

    def _take(self, peer: bytes, frames: list[wire.Buffer]) -> Outbox | None:
        answers = self._upstream.take(peer, frames)
        return None if answers is None else self._with_answers([], answers)

    def _tick(self) -> Outbox:
        if self._failed():
            return []
        self._report()
        return self._with_answers(self._aggregator.tick(self._clock()), self._upstream.tick())

    def _activity(self) -> ServedActivity:
        return self._aggregator.activity(self._clock())

    def _due(self) -> float | None:
        times = [due for due in (self._aggregator.due(), self._upstream.due()) if due is not None]
        return min(times, default=None)

    def _notice(self, notice: wire.Message) -> Outbox:
        if isinstance(notice, wire.Roster):
            return self._with_answers(self._aggregator.depart(notice.departed, [*notice.lost, *notice.came]), [])
        if isinstance(notice, wire.Moved):
            self._upstream.move(notice.rank, notice.address)
            return self._with_answers([], self._upstream.tick())
        return []

    def _renew(self) -> Outbox:
        self._upstream.renew()
        return self._with_answers([], self._upstream.tick())

    def _with_answers(self, outbox: Outbox, answers: list[tuple[Exchange, wire.Reply]]) -> Outbox:
        """Return ``outbox``, and the answers to workers that follow from the servers' answers."""
        for exchange, reply in answers:
            outbox += self._aggregator.answered(exchange, reply)
        outbox += self._outbox
        self._outbox = []
        return outbox


SILENT_S = 10.0  # after so long without a word of a server a worker is told that; it gives up waiting for one later


class _Asked(NamedTuple):
    """A worker's question what its request waits for, which was passed on to a server."""

    peer: bytes
    seq: int
    server: int
    since: float


class Upstream:
    """The requests to servers, over the same transport as the requests of this host's workers: one loop serves both.

    ``Links`` has the requests, sends them in turn, and resends them when a link was lost. It sees the transport through
    ``_MadeLinks``, without the links that workers have made. ``explained`` takes a worker's link, the number of its
    question, and the reason that a server gives.
    """

    def __init__(
        self,
        transport: Transport,
        node: wire.Node,
        addresses: Sequence[str],
        window: int,
        clock: Callable[[], float],
        explained: Callable[[bytes, int, Reason], None],
    ) -> None:
        self._clock = clock
        self._explained = explained
        self._asked: dict[Operation, _Asked] = {}
        self._answers: list[tuple[Exchange, wire.Reply]] = []
        self._made = _MadeLinks(transport)
        self._links = Links(lambda: cast("Transport", self._made), node, window)
        self._servers = [
            self._links.connect(f"server {rank}".encode(), address, True) for rank, address in enumerate(addresses)
        ]
        self._progress = (0, 0.0)  # how many answers had come, and since when requests wait without another

    def trace(self, tracer: Tracer) -> None:
        self._links.tracer = tracer

    def send(self, exchange: Exchange) -> None:
        """Send a request; its answer comes from ``take`` or ``tick``."""
        # ``submit`` takes a function that prepares requests, for a worker prepares them while it holds the links: an
        # exception between two lines there leaves nothing, or requests that are noted and resent. Here one thread has
        # the links, and the requests are ready.
        operation = _Forwarding(exchange, self._answers)
        request = _Forwarded(self._servers[exchange.listed.server], operation, exchange, self._answers)
        self._links.submit(operation, ready, ([request],))
        exchange.seq = request.seq

    def explain(self, exchange: Exchange, peer: bytes, seq: int) -> None:
        """Ask a server what ``exchange`` waits for: a worker's request ``seq`` wants to know."""
        operation = Operation("explanation")
        self._asked[operation] = _Asked(peer, seq, exchange.listed.server, self._clock())
        question = Question(
            self._servers[exchange.listed.server], operation, wire.Explain, {"about": exchange.seq}, operation.take
        )
        self._links.submit(operation, ready, ([question],))

    def take(self, peer: Peer, frames: list[wire.Buffer]) -> list[tuple[Exchange, wire.Reply]] | None:
        """Take a message; return the requests that are answered, each with its answer. None: a worker has sent it."""
        if not self._made.has(peer):
            return None
        self._links.take(peer, frames)
        return self._taken()

    def tick(self) -> list[tuple[Exchange, wire.Reply]]:
        """Do the work that is due; return the requests that have failed."""
        now = self._clock()
        if self._links.in_doubt:
            self._links.recover()
        if not self._links.congested or self._links.answers != self._progress[0]:
            self._progress = (self._links.answers, now)
        elif now >= self._progress[1] + STALL_S:
            self._links.hurry(None)
            self._progress = (self._links.answers, now)
        for operation, asked in [(op, asked) for op, asked in self._asked.items() if now - asked.since > SILENT_S]:
            del self._asked[operation]
            self._explained(asked.peer, asked.seq, Reason(f"waits for server {asked.server}, which does not answer"))
        return self._taken()

    def due(self) -> float | None:
        """Return when ``tick`` has something to do; None if nothing waits for the time."""
        return self._progress[1] + STALL_S if self._links.congested else None

    def move(self, rank: int, address: str) -> None:
        """Send requests for server ``rank`` to ``address`` from the next tick on."""
        self._links.move(self._servers[rank], address)

    def renew(self) -> None:
        self._links.suspect()  # any thread may call it: the links are reconnected at the next tick

    def _taken(self) -> list[tuple[Exchange, wire.Reply]]:
        for operation in [operation for operation in self._asked if not operation.open]:
            asked = self._asked.pop(operation)
            answer = operation.result
            reason = Reason(answer.text, answer.missing) if isinstance(answer, wire.Explanation) else Reason()
            self._explained(asked.peer, asked.seq, reason)
        answers = list(self._answers)
        self._answers.clear()
        return answers


class _Forwarding(Operation):
    """The operation of one exchange, whose failure is an answer, too."""

    def __init__(self, exchange: Exchange, answers: list[tuple[Exchange, wire.Reply]]) -> None:
        super().__init__("push" if exchange.fields.get("want") is not None else "pull")
        self._exchange = exchange
        self._answers = answers

    def fail(self, error: KVStoreError) -> None:
        super().fail(error)
        self._answers.append((self._exchange, wire.Failure(0, type(error).__name__, str(error)[: wire.MAX_REASON])))


class _Forwarded(PendingRequest):
    """The request of one exchange."""

    __slots__ = ("answers", "exchange")

    def __init__(
        self, peer: Peer, operation: Operation, exchange: Exchange, answers: list[tuple[Exchange, wire.Reply]]
    ) -> None:
        priority = exchange.fields.get("priority")
        turn = Turn(exchange.turn_bytes, priority or 0) if exchange.wants else None
        super().__init__(peer, operation, None if turn is not None else priority, turn)
        self.exchange = exchange
        self.answers = answers

    def message(self, sender: wire.Sender) -> wire.Message:
        return self.exchange.kind(sender, **self.exchange.fields)

    @property
    def traced(self) -> tuple[str, Sequence[Key], int]:
        return self.operation.what, list(self.exchange.listed.keys), self.exchange.listed.nbytes

    def take(self, reply: wire.Reply) -> None:
        self.answers.append((self.exchange, reply))


class _MadeLinks:
    """The links that this process has made, of a transport that others use, too: what ``Links`` uses of one."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._routes: set[Peer] = set()
        self.allocate, self.busy = transport.allocate, transport.busy
        self.admit, self.refuse = transport.admit, transport.refuse
        self.identity, self.gone = transport.identity, transport.gone
        self.gathers, self.shares, self.interrupt = transport.gathers, transport.shares, transport.interrupt
        self.bind, self.send, self.detach = transport.bind, transport.send, transport.detach

    def has(self, peer: Peer) -> bool:
        """Whether ``peer`` is a link that was made here, perhaps one that is not used any more."""
        return peer in self._routes

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        route = self._transport.connect(endpoint, bulk=bulk)
        self._routes.add(route)
        return route

    def disconnect(self, peer: Peer) -> None:
        self._transport.disconnect(peer)
        self._routes.discard(peer)

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
        return None  # the loop of this process receives

    def abandon(self) -> None: ...  # the loop drops messages of old links

    def close(self, linger: float = 0.0) -> None: ...  # the loop of this process closes the transport
