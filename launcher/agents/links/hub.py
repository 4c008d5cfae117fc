"""The links of agents that a cluster manager has started. They connect to launch.py over TCP with CURVE.

One socket takes all of them. Its file descriptor is ready only after a change, so both ends also poll the socket in
every turn of their loop. Acknowledgements hold back an agent that sends faster than launch.py prints.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from contextlib import suppress

from kvstore import wire
from kvstore.errors import WireError
from kvstore.job.curve_keys import CurveKeys, pair, with_key
from kvstore.transport import Peer
from kvstore.transport.zeromq.transport import ZmqTransport
from launcher.agents.links.link import AgentTicket, OnEnd, OnMessage
from launcher.agents.links.protocol import Bye, Output, OutputAck

_MANY = 1000  # messages at a time, so that other events get their turn
_LINGER_S = 1.0
_ACK = 1 << 18  # bytes


class Hub:
    """launch.py's end of all links.

    Args:
        address: the address of this machine by which the agents reach it.
    """

    def __init__(self, address: str) -> None:
        mine, theirs = pair(), pair()
        keys = CurveKeys(secret=mine[1], root=mine[0], members=frozenset({mine[0], theirs[0]}))
        self._transport = ZmqTransport(keys=keys)
        host = f"[{address}]" if ":" in address else address
        try:
            endpoint = self._transport.bind(f"tcp://{host}:0")
        except BaseException:
            self._transport.close()
            raise
        self.ticket = AgentTicket(endpoint.partition("?")[0], mine[0], theirs[0], theirs[1])
        self._links: dict[Peer, HubLink] = {}
        self._bell, self._wake = socket.socketpair()
        self._bell.setblocking(False)
        self._wake.setblocking(False)
        self._reading = True
        self._closed = False

    def open(self, selector: selectors.BaseSelector, on_link: Callable[[HubLink], None]) -> None:
        """Begin. `on_link` is called with the link of each agent that connects, before its first message."""
        self._on_link = on_link
        self._selector = selector
        selector.register(self._transport.fileno(), selectors.EVENT_READ, self.poll)
        selector.register(self._wake, selectors.EVENT_READ, self.poll)

    def poll(self) -> None:
        """Take what has come."""
        with suppress(BlockingIOError):
            self._wake.recv(4096)
        for _ in range(_MANY):
            received = self._transport.recv(0)
            if received is None:
                return
            peer, frames = received
            link = self._links.get(peer)
            if link is None:
                link = self._links[peer] = HubLink(self, peer)
                self._on_link(link)
            link.take(frames)
        self.ring()

    def ring(self) -> None:
        """Have the loop call `poll` soon."""
        with suppress(OSError):
            self._bell.send(b"\0")

    def send(self, peer: Peer, message: wire.Message) -> None:
        """Send a message; for links."""
        self._transport.send(peer, wire.encode(message))
        self.ring()  # sending may clear the event that something has come

    def close(self) -> None:
        """End all links."""
        if self._closed:
            return
        self._closed = True
        self._selector.unregister(self._transport.fileno())
        self._selector.unregister(self._wake)
        self._transport.close(linger=_LINGER_S)
        self._bell.close()
        self._wake.close()


class HubLink:
    """The link to one agent; see `AgentLink`. Its loss is noticed by silence, or by its manager."""

    pending = unsent = 0

    def __init__(self, hub: Hub, peer: Peer) -> None:
        self._hub, self._peer = hub, peer
        self._on_message: OnMessage | None = None
        self._on_end: OnEnd | None = None
        self._closed = False
        self._reading = True
        self._owed = 0

    def open(self, selector: selectors.BaseSelector, on_message: OnMessage, on_end: OnEnd) -> None:
        """See `AgentLink`. The hub waits for all links."""
        self._on_message, self._on_end = on_message, on_end

    def send(self, message: wire.Message) -> None:
        """See `AgentLink`."""
        if not self._closed:
            self._hub.send(self._peer, message)

    def reading(self, wanted: bool) -> None:
        """See `AgentLink`. An agent whose output is not acknowledged sends no more of it."""
        self._reading = wanted
        self._acknowledge(0)

    def poll(self) -> None:
        """See `AgentLink`. The hub does it."""

    def close(self) -> None:
        """See `AgentLink`."""
        self._closed = True

    def take(self, frames: list[bytes | bytearray | memoryview]) -> None:
        """Take a message; for the hub."""
        if self._closed or self._on_message is None or self._on_end is None:
            return
        try:
            message = wire.decode(frames)
        except WireError as error:
            self.close()
            self._on_end(str(error))
            return
        if isinstance(message, Output):
            self._acknowledge(sum(map(len, message.buffers)))
        self._on_message(message)

    def _acknowledge(self, count: int) -> None:
        self._owed += count
        if self._reading and self._owed >= _ACK:
            self.send(OutputAck(self._owed))
            self._owed = 0


class BackLink:
    """The agent's end; see `AgentLink`.

    Args:
        ticket: the ticket from launch.py.
    """

    unsent = 0  # the socket lingers

    def __init__(self, ticket: AgentTicket) -> None:
        keys = CurveKeys(ticket.secret, ticket.server_key, frozenset({ticket.server_key, ticket.public}))
        self._transport = ZmqTransport(keys=keys)
        self._peer = self._transport.connect(with_key(ticket.endpoint, ticket.server_key))
        self.pending = 0
        self._closed = False

    def open(self, selector: selectors.BaseSelector, on_message: OnMessage, on_end: OnEnd) -> None:
        """See `AgentLink`."""
        self._selector, self._on_message, self._on_end = selector, on_message, on_end
        selector.register(self._transport.fileno(), selectors.EVENT_READ, self.poll)

    def send(self, message: wire.Message) -> None:
        """See `AgentLink`."""
        if self._closed:
            return
        if isinstance(message, Output):
            self.pending += sum(map(len, message.buffers))
        elif isinstance(message, Bye):
            self.pending = 0  # the rest will not be acknowledged; `close` waits until it has been sent
        self._transport.send(self._peer, wire.encode(message))

    def poll(self) -> None:
        """See `AgentLink`."""
        while not self._closed and (received := self._transport.recv(0)) is not None:
            try:
                if not received[1]:  # messages may be lost, and launch.py would not know the next connection
                    raise WireError("the connection to launch.py has broken")
                message = wire.decode(received[1])
            except WireError as error:
                self.close()
                self._on_end(str(error))
                return
            if isinstance(message, OutputAck):
                self.pending = max(0, self.pending - message.count)
            else:
                self._on_message(message)

    def reading(self, wanted: bool) -> None:
        """See `AgentLink`. launch.py sends little."""

    def close(self) -> None:
        """See `AgentLink`."""
        if not self._closed:
            self._closed = True
            self._selector.unregister(self._transport.fileno())
            self._transport.close(linger=_LINGER_S)
