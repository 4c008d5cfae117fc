"""A member's links to the scheduler and the servers, the requests on them, and how lost links are reconnected.

``Client`` lets one thread at a time use ``Links``. An exception may end any method here between two of its lines. Then
``recover`` completes what is outstanding, and reconnects all links if their state is in doubt.

A single link that is lost is reconnected by the transport, which reports it as a message without frames. ``receive``
then resends each request on it that has no answer. So does ``recover`` on a link to a peer that has moved.
"""

# The state of all links together, and what ``recover`` does about it:
#
#     _doubtful   _suspect   _moves     closed    state                                     ``recover``
#     no          no         empty      no        in use                                    is not called
#     yes         any        any        no        an exception came while they were used    reconnects all
#     no          yes        any        no        another thread has heard of an outage     reconnects all
#     no          no         some       no        servers have moved                        reconnects these
#     yes         any        any        yes       an exception came in ``close``            drops them
#
# ``_doubtful`` is set before a method touches a transport and cleared at its end, without ``finally``: staying set is
# the whole point. Other threads may only set ``_suspect``, ``_moves`` and ``_lost``, which the thread at the links
# reads. A lost aggregator (``_lost``) is like an outage: requests to it get another peer, then all links are made anew,
# so that each begins with the news, whatever comes between.

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from kvstore import wire
from kvstore.errors import KVStoreError, NodeLost, WireError, rebuild
from kvstore.member.outstanding import Effect, Outstanding, PendingRequest
from kvstore.member.window import Window, WindowSize
from kvstore.rare_log import Drops
from kvstore.ticket import Operation
from kvstore.tracer import Tracer
from kvstore.transport import Peer, Transport
from kvstore.transport.memory import ScatteredFrame

# Called with an operation, and more; returns its requests, and what changes when they are made.
Prepare: TypeAlias = Callable[..., "tuple[Sequence[PendingRequest], Effect | None]"]

# With more requests outstanding than this, replies are taken in after each submit: a program that pushes and never
# waits would leave all answers unread. With fewer, looking for them would cost each push a system call.
FEW = 4


class Routes:
    """The links of one transport: ``names`` is what the transport calls each peer, ``peers`` the reverse.

    An exception may end a method between two lines: then use ``renewed``.
    """

    __slots__ = ("_addresses", "names", "peers", "transport")

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.names: dict[Peer, Peer] = {}
        self.peers: dict[Peer, Peer] = {}
        self._addresses: dict[Peer, tuple[str, bool]] = {}  # the arguments that each link was made with

    @property
    def endpoints(self) -> dict[Peer, str]:
        return {peer: endpoint for peer, (endpoint, _) in self._addresses.items()}

    def leads(self, peer: Peer, endpoint: str, bulk: bool) -> bool:
        return self._addresses.get(peer) == (endpoint, bulk)

    def add(self, peer: Peer, endpoint: str, bulk: bool) -> None:
        self._addresses[peer] = endpoint, bulk
        self._connect(peer)

    def drop(self, peer: Peer) -> None:
        """Forget ``peer``. Its link goes with the transport; see ``reconnected``."""
        self._addresses.pop(peer, None)

    def misleads(self, peer: Peer, endpoint: str) -> bool:
        return peer in self._addresses and self._addresses[peer][0] != endpoint

    def replace(self, peer: Peer, endpoint: str) -> None:
        """Replace the link to ``peer`` by one to where it is now. What still comes over the old one is a stranger's."""
        self._addresses[peer] = endpoint, self._addresses[peer][1]
        before = self.names[peer]
        self._connect(peer)
        del self.peers[before]
        self.transport.disconnect(before)

    def reconnected(self, transport: Transport, moves: Mapping[Peer, str]) -> Routes:
        """Return routes to the same peers over another transport, to ``moves`` for peers that are elsewhere now."""
        routes = Routes(transport)
        for peer, (endpoint, bulk) in self._addresses.items():
            routes.add(peer, moves.get(peer, endpoint), bulk)
        return routes

    def _connect(self, peer: Peer) -> None:
        endpoint, bulk = self._addresses[peer]
        name = self.transport.connect(endpoint, bulk=bulk)
        self.names[peer], self.peers[name] = name, peer


class Links:
    """The links of one process, and its requests on them.

    Attributes:
        answers: how many answers have come.
        sent, received: bytes of what messages to and from each peer carry, repeats included, headers apart.
        lent: operations whose requests may read the caller's arrays, and the thread of that call.
        tracer: notes requests and answers; None notes nothing.
        blamed: an exception that an operation has been given, so that the thread at the links must not raise it.
    """

    def __init__(self, make_transport: Callable[[], Transport], node: wire.Node, window: int) -> None:
        self.node = node
        self.process = ""  # its name in reports; see ``process_name``
        self.outstanding = Outstanding()
        self.answers = 0
        self.sent: dict[Peer, int] = {}
        self.received: dict[Peer, int] = {}
        self.lent: dict[Operation, int] = {}
        self.closed = False
        self.tracer: Tracer | None = None
        self.blamed: Exception | None = None
        self._make_transport = make_transport
        self._routes = Routes(make_transport())
        self._doubtful = False  # whether an exception may have left the links in any state
        self._suspect = False  # likewise, in the eyes of another thread
        self._moves: deque[tuple[Peer, str]] = deque()  # peers, and where they are from now on
        self._lost: tuple[Peer, int] | None = None  # the aggregator of this host and its rank, if it is lost
        self._bypassed = -1  # its rank, once requests go elsewhere
        self._recovering = False
        self._windows: dict[Peer, Window[PendingRequest]] = {}
        self._window = WindowSize(window, window)
        self._sizes: dict[Peer, WindowSize] = {}  # of the windows of some peers
        self._drops = Drops(logging.getLogger(__name__))

    # ---- any thread may call these

    def trim(self) -> None:
        """Give back memory for messages; see ``Transport.trim``. Any thread may call it."""
        self._routes.transport.trim()

    def interrupt(self) -> None:
        self._routes.transport.interrupt()

    @property
    def endpoints(self) -> dict[Peer, str]:
        return self._routes.endpoints

    @property
    def in_doubt(self) -> bool:
        """Whether an exception has left something half done, or the links have to be reconnected."""
        doubtful = self._doubtful or self._suspect or bool(self._moves) or self.outstanding.in_doubt
        return doubtful or (self._lost is not None and self._bypassed < 0)

    def suspect(self) -> None:
        """Have the links reconnected before they are used again."""
        self._suspect = True

    def move(self, peer: Peer, endpoint: str) -> None:
        """Have the link to ``peer`` lead to ``endpoint`` from now on, before the links are used again."""
        self._moves.append((peer, endpoint))

    def bypass(self, peer: Peer, aggregator: int) -> None:
        """Have what is for ``peer``, which is ``aggregator`` and lost, sent elsewhere before the links are used again.

        See ``PendingRequest.bypass``.
        """
        self._lost = peer, aggregator

    @property
    def congested(self) -> bool:
        return any(self._windows.values())

    # ---- memory, and what a link can do

    def allocate(self, nbytes: int) -> memoryview:
        return self._routes.transport.allocate(nbytes)

    def busy(self, buffer: wire.Buffer) -> bool:
        return self._routes.transport.busy(buffer)

    def gathers(self, peer: Peer) -> bool:
        return self._routes.transport.gathers(self._routes.names[peer])

    # ---- each of these puts the links in doubt until it is done

    def connect(self, peer: Peer, endpoint: str, bulk: bool, window: WindowSize | None = None) -> Peer:
        if self._routes.leads(peer, endpoint, bulk):  # made already, but an exception came before the caller knew
            return peer
        self._doubtful = True
        if window is not None:
            self._sizes[peer] = window
        self._windows[peer] = self._new_window(peer)
        self.sent.setdefault(peer, 0)
        self.received.setdefault(peer, 0)
        self._routes.add(peer, endpoint, bulk)
        self._introduce(peer)
        self._doubtful = False
        return peer

    def submit(self, operation: Operation, prepare: Prepare, args: Sequence[Any]) -> None:
        requests, effect = prepare(operation, *args)
        if not requests:
            return
        self.outstanding.number(requests)
        # Messages are made in the transport's memory: if one cannot be made, nothing is outstanding yet, and the call
        # has no effect. Requests that are made late read the caller's arrays when they leave, after ``add``.
        self._doubtful = True
        for request in requests:
            if request.early:
                request.frames = self._message(request)
        lends = not requests[0].early
        if lends:
            self.lent[operation] = threading.get_ident()
        self.outstanding.add(requests, effect)
        if self._bypassed >= 0:
            requests = self._rerouted(requests)
        for request in requests:
            if request.turn is None:
                self._send(request)
            else:
                self._windows[request.peer].add(request.seq, *request.turn, request)
        for peer in dict.fromkeys(request.peer for request in requests if request.turn is not None):
            self._send_next(peer)
        if len(self.outstanding) > FEW:
            self._drain()
        self._doubtful = False
        if lends and not any(request.borrows for request in requests):
            self.lent.pop(operation, None)

    def notify(self, peer: Peer, notice: wire.Message) -> None:
        self._doubtful = True
        self._routes.transport.send(self._routes.names[peer], wire.encode(notice))
        self._doubtful = False

    def hurry(self, operation: Operation | None) -> None:
        """Send the requests of ``operation`` that wait for their turn; None sends all that do."""
        self._doubtful = True
        for window in self._windows.values():
            for request in window.urgent(lambda request: operation in (None, request.operation)):
                self._send(request)
        self._doubtful = False

    def give_up(self, operation: Operation) -> None:
        """Let the requests of ``operation`` neither read nor write the caller's arrays from now on."""
        self._doubtful = True
        for request in self.outstanding.requests_of(operation):
            request.forsake()
            if request.frames is None and request.borrows:
                request.frames = self._message(request)
            request.own()
        # Whatever the caller asks for next must not overtake what waits here for its turn: a pull would miss a push.
        for window in self._windows.values():
            for request in window.urgent(lambda request: request.operation is operation):
                self._send(request)
        self._routes.transport.detach()
        self._doubtful = False

    def receive(self, over: Callable[[], bool], timeout: float) -> None:
        """Take in messages for at most ``timeout`` seconds, until ``over`` returns True."""
        if over() or self.closed:
            return
        self._doubtful = True
        received = self._routes.transport.recv(timeout)
        if received is not None:
            self._take(*received)
            del received  # the sender may not reuse its shared memory before the last view of it is gone
            if not over():
                self._drain()
        self._doubtful = False

    def take(self, route: Peer, frames: list[Any]) -> None:
        """Take in a message that another loop has received over a link of these."""
        self._doubtful = True
        self._take(route, frames)
        self._doubtful = False

    def close(self, linger: float) -> None:
        self.closed = True
        self._doubtful = True
        self._routes.transport.close(linger)
        self._doubtful = False

    # ---- after an exception

    def recover(self) -> None:
        """Complete what an exception has cut short. If an exception ends this too, call it again."""
        self._recovering = True
        self.outstanding.finish()
        moves, lost = list(self._moves), self._lost
        places = dict(moves)  # of several moves of a peer, the last
        if lost is not None:
            self._doubtful = self._doubtful or self._bypassed < 0
            self._routes.drop(lost[0])
            self._rerouted(self.outstanding)
        if self._doubtful or self._suspect:
            self._doubtful, self._suspect = True, False
            self._routes.transport.abandon()
            if not self.closed:
                self._reconnect(places)
        elif not self.closed:
            for peer, endpoint in places.items():
                if self._routes.misleads(peer, endpoint):
                    self._doubtful = True
                    self._routes.replace(peer, endpoint)
                    self._resend(peer)
        for _ in moves:
            self._moves.popleft()
        if lost is not None:
            self._bypassed = lost[1]
        self._doubtful = self._recovering = False

    def _rerouted(self, requests: Iterable[PendingRequest]) -> list[PendingRequest]:
        """Send those of ``requests`` elsewhere that are for the lost aggregator; return those that somebody needs."""
        needed = []
        for request in requests:
            if self._lost is not None and request.peer == self._lost[0]:
                peer = request.bypass()
                if peer is None:
                    self.outstanding.settle(request, request.moot(), None)
                    continue
                request.peer = peer
            needed.append(request)
        return needed

    def _reconnect(self, places: Mapping[Peer, str]) -> None:
        """Reconnect all links, and resend the requests without an answer."""
        self._routes = self._routes.reconnected(self._make_transport(), places)
        for peer in self._routes.names:
            self._introduce(peer)
        self._windows = {peer: self._new_window(peer) for peer in self._routes.names}
        for request in self.outstanding:
            window = self._windows[request.peer]
            if request.turn is not None and not request.in_flight:
                window.add(request.seq, *request.turn, request)
                continue
            self._send(request)
            if request.turn is not None:
                window.begin(request.seq, request.turn.nbytes)
        for peer in self._routes.names:
            self._send_next(peer)

    # ---- helpers

    def _new_window(self, peer: Peer) -> Window[PendingRequest]:
        return Window(self._sizes.get(peer, self._window))

    def _introduce(self, peer: Peer) -> None:
        """Say first whose link this is. A process that has not joined yet has no rank, and says nothing."""
        if self.node.rank >= 0:
            bypassed = -1 if self._lost is None else self._lost[1]
            self._routes.transport.send(self._routes.names[peer], wire.encode(wire.Here(self.node, bypassed)))

    def _resend(self, peer: Peer) -> None:
        """Resend, over a new link, what has gone to ``peer`` and has not been answered."""
        self._introduce(peer)
        for request in self.outstanding:
            if request.peer == peer and request.in_flight:
                self._send(request)

    def _message(self, request: PendingRequest) -> Sequence[wire.Buffer | ScatteredFrame]:
        message = request.message(wire.Sender(self.node, request.seq, self.outstanding.done))
        frames = wire.encode(message)
        wire.require_short(message, frames)
        return frames

    def _send(self, request: PendingRequest) -> None:
        frames = request.frames
        if frames is None:
            frames = self._made(request)
            if frames is None:
                return
            request.frames = frames  # kept: a resent request must be the same bytes, whatever the caller does since
        if self.tracer is not None and self.tracer.open and not request.in_flight:
            self.tracer.asked(request.seq, request.peer, *request.traced)
        request.in_flight = True
        self._routes.transport.send(self._routes.names[request.peer], frames, request.priority)
        for frame in frames[1:]:
            self.sent[request.peer] += sum(map(len, frame)) if isinstance(frame, ScatteredFrame) else len(frame)

    def _made(self, request: PendingRequest) -> Sequence[wire.Buffer | ScatteredFrame] | None:
        """Return the message of a request; None if it cannot be made, which fails the request's operation alone.

        The first exception may come from a signal's handler, which may have left memory in any state. So it is raised,
        and the message is made again after the links have been made anew. A second exception is the message's own.
        """
        try:
            return self._message(request)
        except Exception as exc:
            if request.failure is None and not self._recovering:
                request.failure = exc
                raise
            if request.failure is not None:
                self.blamed = request.failure
            error = exc if isinstance(exc, KVStoreError) else KVStoreError(f"a message could not be made: {exc!r}")
        self.outstanding.settle(request, None, error)
        return None

    def _send_next(self, peer: Peer) -> None:
        for request in self._windows[peer].ready():
            self._send(request)

    def _drain(self) -> None:
        while (received := self._routes.transport.recv(0)) is not None:
            self._take(*received)
            del received

    def _take(self, route: Peer, frames: list[Any]) -> None:
        peer = self._routes.peers.get(route)
        if peer is None:
            self._drops.note("a message from a stranger", "no link of this process leads there")
            return
        if not frames:  # the link was reconnected
            self._resend(peer)
            return
        try:
            reply = wire.decode(frames)
        except WireError as exc:
            self._drops.note(f"a bad message from {peer.decode()}", exc)
            return
        if not isinstance(reply, wire.Reply):
            self._drops.note(f"a message from {peer.decode()}", f"expected a reply, got {type(reply).__name__}")
            return
        request = self.outstanding.find(peer, reply.seq)
        if request is None:
            return
        if self.tracer is not None:
            self.tracer.answered(reply.seq, peer)
        error = self._error(reply) if isinstance(reply, wire.Failure) else None
        self.outstanding.settle(request, reply, error)
        self.answers += 1
        for frame in frames[1:]:
            self.received[peer] += len(frame)
        self._windows[peer].answered(reply.seq)
        self._send_next(peer)

    def _error(self, failure: wire.Failure) -> KVStoreError:
        error = rebuild(failure.kind, failure.text)
        if isinstance(error, NodeLost) and failure.text == f"{self.node} {wire.GIVEN_UP}":
            error.cause = self.process  # or the supervisor would take the end of this process for that of the job
        return error
