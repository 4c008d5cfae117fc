"""The links of agents that a cluster manager has started. They connect to launch.py over TCP with CURVE.

One socket takes all of them. Its file descriptor is ready only after a change, so both ends also poll the socket in
every turn of their loop. Acknowledgements hold back an agent that sends faster than launch.py prints.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore import wire
from kvstore.job.curve_keys import CurveKeys, pair, with_key
from kvstore.transport import Peer
from kvstore.transport.zeromq import ZmqTransport
from launcher.agents.links.link import AgentLink, AgentTicket, OnEnd, OnMessage

_MANY = 1000  # messages at a time, so that other events get their turn
_LINGER_S = 1.0


class Hub:
    """launch.py's end of all links. `address`: the address of this machine by which the agents reach it."""

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
        self._closed = False

    def open(self, selector: selectors.BaseSelector, on_link: Callable[[HubLink], None]) -> None:
        """Begin. `on_link` is called with the link of each agent that connects, before its first message."""
        self._on_link = on_link
        self._selector = selector
        selector.register(self._transport.fileno(), selectors.EVENT_READ, self.poll)
        selector.register(self._wake, selectors.EVENT_READ, self.poll)

    def poll(self) -> None:
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

    def send(self, peer: Peer, frames: Sequence[wire.Buffer]) -> None:
        self._transport.send(peer, frames)
        self.ring()  # sending may clear the event that something has come

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._selector.unregister(self._transport.fileno())
        self._selector.unregister(self._wake)
        self._transport.close(linger=_LINGER_S)
        self._bell.close()
        self._wake.close()


class HubLink(AgentLink):
    """The link to one agent, of which the hub waits for all. Its loss is noticed by silence, or by its manager."""

    def __init__(self, hub: Hub, peer: Peer) -> None:
        super().__init__()
        self._hub, self._peer = hub, peer

    def _write(self, frames: Sequence[wire.Buffer]) -> None:
        self._hub.send(self._peer, frames)


class BackLink(AgentLink):
    """The agent's end. `ticket`: the ticket from launch.py."""

    def __init__(self, ticket: AgentTicket) -> None:
        super().__init__()
        keys = CurveKeys(ticket.secret, ticket.server_key, frozenset({ticket.server_key, ticket.public}))
        self._transport = ZmqTransport(keys=keys)
        self._peer = self._transport.connect(with_key(ticket.endpoint, ticket.server_key))

    def open(self, selector: selectors.BaseSelector, on_message: OnMessage, on_end: OnEnd) -> None:
        super().open(selector, on_message, on_end)
        selector.register(self._transport.fileno(), selectors.EVENT_READ, self.poll)

    def poll(self) -> None:
        while not self._closed and (received := self._transport.recv(0)) is not None:
            if received[1]:
                self.take(received[1])
            else:  # messages may be lost, and launch.py would not know the next connection
                self._end("the connection to launch.py has broken")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._selector.unregister(self._transport.fileno())
            self._transport.close(linger=_LINGER_S)

    def _write(self, frames: Sequence[wire.Buffer]) -> None:
        self._transport.send(self._peer, frames)
