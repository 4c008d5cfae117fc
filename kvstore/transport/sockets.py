"""Links over sockets of our own: what is sent leaves in the call that sends it.

ZeroMQ hands each message to a thread of its own, at both ends: that is four more switches between threads on a way
there and back, of 0.1 to 1 ms each where processors are few. Here a message that fits into the socket, as those do
whose values are in shared memory, takes one system call. For what does not fit, and until somebody listens, there is
one thread, the courier: of who connects from then on, of who listens from when it is needed.
"""

from __future__ import annotations

import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from kvstore.errors import WireError
from kvstore.memory import Heap, Parts, keep_freed
from kvstore.transport.base import Frames, Peer
from kvstore.transport.bell import Bell
from kvstore.transport.courier import Courier
from kvstore.transport.link import RETRY_S, Address, Link
from kvstore.transport.pacing import LOOK_S
from kvstore.transport.stream import packed
from kvstore.transport.system_errors import require_systems
from kvstore.wire import Buffer

HANDSHAKE_S = 10.0  # who has not shown by then that they speak the protocol is disconnected
_ARRIVING_S = 0.001  # between two looks at whether what was sent has arrived
_READS = 128  # from one link, before it is another's turn


class Places(Protocol):
    """Where sockets of one kind are, and who may come there."""

    def listen(self, endpoint: str) -> tuple[socket.socket, str]:
        """Return a socket that listens, and the endpoint to reach it by; raise ``ConfigError`` if that cannot be."""
        ...

    def check(self, endpoint: str) -> None:
        """Raise ``ConfigError`` if ``endpoint`` is none to connect to."""
        ...

    def addresses(self, endpoint: str, wait: bool) -> list[Address]:
        """Return the addresses of ``endpoint``, none if it has none, or if it takes ``wait`` to know."""
        ...

    def admit(self, made: socket.socket) -> bool:
        """Make a connection that somebody has made ready to be used; return whether they may."""
        ...

    def wake_at(self, made: socket.socket, count: int) -> None:
        """Have a connection count as readable only when so many bytes have come, if its kind can."""
        ...

    def share(self, made: Sequence[socket.socket], now: float) -> None:
        """See to it that connections share lines well; is called every ``LOOK_S``, while messages are waited for."""
        ...

    def on_way(self, made: socket.socket) -> bool:
        """Whether some of what was sent may get lost if the connection is closed now."""
        ...

    def leave(self) -> None:
        """Clear away what listening has left."""
        ...


class SocketTransport(Heap):
    """One member's end of its links over sockets; see ``Transport``.

    Args:
        places: the kind of sockets.
    """

    def __init__(self, places: Places) -> None:
        keep_freed()
        self._places = places
        self._selector = selectors.DefaultSelector()
        self._bell = Bell()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._numbers = itertools.count()
        self._listeners: list[socket.socket] = []
        self._links: dict[Peer, Link] = {}
        self._strangers: dict[Peer, float] = {}  # who have made a link and said nothing yet, and since when
        self._received: deque[tuple[Peer, Frames]] = deque()
        self._changed = threading.Condition()  # also guards what is sent, and which sockets links have
        self._courier = Courier(self._links, self._changed, partial(places.addresses, wait=True), self._begin)
        self._look_at = 0.0
        self._closed = False

    def bind(self, endpoint: str) -> str:
        """Listen at ``endpoint``.

        Raises:
            ConfigError: it cannot be bound; the message says why.
        """
        listener, endpoint = self._places.listen(endpoint)
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ)
        return endpoint

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        """Make a link; the courier goes on trying until someone listens there, and again if they are gone.

        Raises:
            ConfigError: the endpoint is none.
        """
        self._places.check(endpoint)
        peer = b"to:%d" % next(self._numbers)
        link = Link(peer, endpoint)
        addresses = self._places.addresses(endpoint, wait=False)
        with self._changed:
            self._courier.start()
            self._links[peer] = link
            made = link.dial(addresses, time.monotonic()) if addresses else None
            if made is not None:
                self._begin(link, made)
            if link.waits:
                self._courier.call()
        return peer

    def send(self, peer: Peer, frames: Sequence[Buffer | Parts], priority: int | None = None) -> None:
        """Send ``frames``, or leave what does not fit to the courier, who reads it later: it must stay as it is."""
        link = self._links.get(peer)
        if link is None or self._closed or link.lost:  # whoever is told of that asks again, in order
            return
        parts = packed(frames)
        with self._changed:
            if not link.put(parts, priority):
                self._courier.call()

    def gathers(self, peer: Peer) -> bool:
        """Yes: one system call takes what lies in many places."""
        return True

    def detach(self) -> None:
        """Copy what is queued."""
        with self._changed:
            for link in self._links.values():
                link.detach()

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
        """Return the next message."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look(now)
        deadline = now + timeout
        while not self._received and not self._closed:
            events = self._selector.select(timeout)
            rung = not events
            if timeout and not events:
                self._read_anyway()
            for key, _ in events:
                if key.fileobj is self._bell:
                    rung = True
                    self._bell.silence()
                elif key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                else:
                    self._read(key.data)
            if self._strangers:
                self._turn_away()
            if rung and not self._received:
                return None
            timeout = max(0.0, deadline - time.monotonic())
        if not self._received or self._closed:
            return None
        peer, frames = self._received.popleft()
        if not frames:
            self._links[peer].lost = False
        return peer, frames

    def interrupt(self) -> None:
        """Wake ``recv``."""
        self._bell.ring()

    def abandon(self) -> None:
        """Drop all links at once."""
        self._closed = True
        with self._changed:  # the courier must not be at what is closed; this thread may hold it already
            self._courier.abandon()
            for sock in [*self._listeners, *(link.socket for link in self._links.values())]:
                if sock is not None:
                    sock.close()
        with suppress(RuntimeError):  # in the end it is not held
            while True:
                self._changed.release()
        self._selector.close()
        self._places.leave()
        self._bell.close()

    def close(self, linger: float = 0.0) -> None:
        """Close the links; what is queued has ``linger`` seconds to leave."""
        if self._closed:
            return
        deadline = time.monotonic() + linger
        with self._changed:
            while any(link.queue for link in self._links.values()) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._closed = True
        self._courier.stop()
        while self._on_way() and time.monotonic() < deadline:
            time.sleep(_ARRIVING_S)
        self._selector.close()
        for sock in [*self._listeners, *(link.socket for link in self._links.values() if link.socket is not None)]:
            sock.close()
        self._links.clear()
        self._places.leave()
        self._bell.close()

    def _connections(self) -> list[socket.socket]:
        return [link.socket for link in self._links.values() if link.socket is not None and link.connected]

    def _on_way(self) -> bool:
        return any(map(self._places.on_way, self._connections()))

    def _look(self, now: float) -> None:
        """Look after how connections share their lines."""
        self._look_at = now + LOOK_S
        with self._changed:
            self._places.share(self._connections(), now)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                made, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many files are open: whoever waits must wait longer
                time.sleep(RETRY_S)
                return
            made.setblocking(False)
            if not self._places.admit(made):
                made.close()
                continue
            link = Link(b"from:%d" % next(self._numbers))
            with self._changed:
                link.take(made)
                self._links[link.peer] = link
                link.flush()
            self._strangers[link.peer] = time.monotonic() + HANDSHAKE_S
            self._selector.register(made, selectors.EVENT_READ, link)

    def _turn_away(self) -> None:
        """Close the links of those who have said nothing for too long."""
        now = time.monotonic()
        while self._strangers:
            peer, limit = next(iter(self._strangers.items()))
            if limit > now:
                return
            self._lose(self._links[peer])

    def _read_anyway(self) -> None:
        """Look where nothing wakes us: Linux before 5.8 may forget to, if its memory is full before enough has come."""
        for link in [link for link in self._links.values() if link.wakes_at > 1]:
            self._read(link)

    def _read(self, link: Link) -> None:
        """Take what has come over a link, and say when to look again."""
        incoming = link.incoming
        for _ in range(_READS):
            if link.socket is None:
                return
            room = incoming.room()
            try:
                count = link.socket.recv_into(room)
                for frames in incoming.take(count) if count else ():
                    self._received.append((link.peer, frames))
            except BlockingIOError:
                break
            except (OSError, WireError, MemoryError) as exc:  # of the last, only an announcement
                require_systems(exc)
                count = 0
            if not count:
                self._lose(link)
                return
            if self._strangers and incoming.greeted:
                self._strangers.pop(link.peer, None)
            if count < len(room):
                break
        enough = incoming.enough
        if enough != link.wakes_at and link.socket is not None:
            link.wakes_at = enough
            self._places.wake_at(link.socket, enough)

    def _lose(self, link: Link) -> None:
        """The other side has gone: forget a link that it made, make ours again."""
        self._strangers.pop(link.peer, None)
        with self._changed:
            if link.socket is not None:
                self._selector.unregister(link.socket)
            link.lose(time.monotonic())
            if not link.endpoint:
                del self._links[link.peer]
            if self._courier.needed:  # to dial again, and it may wait for the socket that has gone
                self._courier.call()

    def _begin(self, link: Link, made: socket.socket) -> None:
        """Use a connection that this side has made."""
        self._places.admit(made)
        self._selector.register(made, selectors.EVENT_READ, link)
        link.flush()
        if link.lost:
            self._received.append((link.peer, []))
            self._bell.ring()
