"""Links over sockets without ZeroMQ: a message that fits leaves in the call that sends it.

ZeroMQ hands each message to a thread of its own at both ends. That is four more thread switches for a round trip, of
0.1 to 1 ms each where processors are few. Here a message that fits into the socket takes one system call; messages
whose values are in shared memory fit. One thread, the courier, sends what does not fit, and connects. The connecting
side starts it when it connects, the listening side when it is needed. A lost link is mended in ``courier.py`` and
``link.py``.
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

from kvstore import wire
from kvstore.errors import WireError
from kvstore.transport.base import Frames, Peer
from kvstore.transport.bell import Bell
from kvstore.transport.memory import Heap, ScatteredFrame, keep_freed
from kvstore.transport.sockets.courier import Courier
from kvstore.transport.sockets.link import Address, Link
from kvstore.transport.sockets.pacing import LOOK_S
from kvstore.transport.sockets.strangers import StrangerLimits, Strangers
from kvstore.transport.sockets.stream import packed
from kvstore.transport.system_errors import require_systems

_ARRIVING_S = 0.001  # between two looks at whether what was sent has arrived
_READS = 128  # from one link, before it is another's turn


class Places(Protocol):
    """One kind of sockets: how to listen and connect, and who may connect."""

    def listen(self, endpoint: str) -> tuple[socket.socket, str]:
        """Return a listening socket and its endpoint; raise ``ConfigError`` if that is not possible."""
        ...

    def check(self, endpoint: str) -> None:
        """Raise ``ConfigError`` if ``endpoint`` cannot be connected to."""
        ...

    def addresses(self, endpoint: str, wait: bool) -> list[Address]:
        """Return the addresses of ``endpoint``; empty if it has none, or if they are slow to find and not ``wait``."""
        ...

    def admit(self, made: socket.socket) -> bool:
        """Prepare a new connection for use; return whether its peer may connect."""
        ...

    def wake_at(self, made: socket.socket, count: int) -> None:
        """Have a connection count as readable only when so many bytes have come, if the kind can do that."""
        ...

    def share(self, made: Sequence[socket.socket], now: float) -> None:
        """Balance the connections that share a network line. Called every ``LOOK_S`` while a thread receives."""
        ...

    def on_way(self, made: socket.socket) -> bool:
        """Whether closing the connection now may lose some of what was sent."""
        ...

    def leave(self) -> None:
        """Remove what listening has left behind."""
        ...


class SocketTransport(Heap):
    """One member's end of its links over sockets; see ``Transport``.

    Args:
        places: the kind of sockets.
        limits: what peers may cost that have made a link and have not been admitted.

    Attributes:
        links: those that this side has made, and those of others that have been admitted.
        strangers: the others.
        courier: connects, and sends what did not leave at once.
    """

    def __init__(self, places: Places, limits: StrangerLimits | None = None) -> None:
        keep_freed()
        self._places = places
        self._selector = selectors.DefaultSelector()
        self._bell = Bell()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._numbers = itertools.count()
        self.links: dict[Peer, Link] = {}
        self.strangers = Strangers(self._selector, self._arrive, limits or StrangerLimits())
        self._handed_at = 0.0  # when ``recv`` last returned a message
        # For whom this thread works at strangers' cost, and since when, in the processor's time.
        self._bill: tuple[Peer, float] | None = None
        self._received: deque[tuple[Peer, Frames]] = deque()
        self._changed = threading.Condition()  # also guards what is sent, and which sockets links have
        self.courier = Courier(self.links, self._changed, partial(places.addresses, wait=True), self._begin)
        self._look_at = 0.0
        self._closed = False

    def bind(self, endpoint: str) -> str:
        """Listen at ``endpoint``.

        Raises:
            ConfigError: it cannot be bound; the message says why.
        """
        listener, endpoint = self._places.listen(endpoint)
        listener.setblocking(False)
        self.strangers.listen(listener)
        return endpoint

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        """Make a link. The courier tries until somebody listens there, and again if the listener is gone.

        Raises:
            ConfigError: the endpoint is not valid.
        """
        self._places.check(endpoint)
        peer = b"to:%d" % next(self._numbers)
        link = Link(peer, endpoint)
        addresses = self._places.addresses(endpoint, wait=False)
        with self._changed:
            self.courier.start()
            self.links[peer] = link
            made = link.dial(addresses, time.monotonic()) if addresses else None
            if made is not None:
                self._begin(link, made)
            if link.waits:
                self.courier.call()
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Drop a link that this side has made, and what has come over it."""
        self._received = deque(entry for entry in self._received if entry[0] != peer)
        with self._changed:
            link = self.links.pop(peer, None)
            if link is None:
                return
            if link.socket is not None and link.connected:
                self._selector.unregister(link.socket)
            link.hang_up()
            self.courier.call()

    def send(self, peer: Peer, frames: Sequence[wire.Buffer | ScatteredFrame], priority: int | None = None) -> None:
        """Send ``frames``. The courier sends later what does not fit now, so the buffers must not change."""
        link = self.links.get(peer)
        if link is None:
            if peer in self.strangers.links:
                self.strangers.answer(peer, packed(frames))
            return
        if self._closed or link.lost:  # the caller asks again, in order, when it is told that the link was lost
            return
        parts = packed(frames)
        with self._changed:
            if not link.put(parts, priority):
                self.courier.call()

    def gathers(self, peer: Peer) -> bool:
        """True: one system call takes many buffers."""
        return True

    def shares(self, peer: Peer) -> bool:
        """False: all frames are copied."""
        return False

    def detach(self) -> None:
        """Copy what is queued."""
        with self._changed:
            for link in self.links.values():
                link.detach()

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
        """Return the next message."""
        now = time.monotonic()
        self._settle(now)
        if now >= self._look_at:
            self._look(now)
        deadline = now + timeout
        while not self._received and not self._closed:
            until = min(deadline, self.strangers.opens_at)
            events = self._selector.select(max(0.0, until - now))
            rung = visited = False
            if timeout and not events:
                self._read_anyway()
            for key, _ in events:
                if key.fileobj is self._bell:
                    rung = True
                    self._bell.silence()
                elif key.data is self.strangers:
                    visited = True
                else:
                    self._read(key.data)
            now = time.monotonic()
            if visited or self.strangers.links or self.strangers.opens_at <= now:
                now = self._see_to_strangers(visited, now)
            if not self._received and (rung or now >= deadline):
                return None
        if not self._received or self._closed:
            return None
        peer, frames = self._received.popleft()
        if not frames:
            self.links[peer].lost = False
        self._handed_at = now
        if peer in self.strangers.links:
            self._bill = peer, time.thread_time()
        return peer, frames

    def admit(self, peer: Peer) -> None:
        """Take messages of any length from ``peer``, and charge them to no stranger."""
        self._settle(time.monotonic())  # what is done for a member from now on is not done for a stranger
        link = self.strangers.admit(peer)
        if link is None or link.socket is None:
            return
        link.known()
        with self._changed:
            self.links[peer] = link
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def refuse(self, peer: Peer) -> None:
        """Drop a link that the other side has made, and what has come over it."""
        link = self.links.get(peer)
        if link is not None and link.endpoint:
            return
        if self._bill is None:
            self._bill = peer, time.thread_time() - (time.monotonic() - self._handed_at)
        self._received = deque(entry for entry in self._received if entry[0] != peer)
        self.strangers.drop(peer)
        if link is not None:
            self._lose(link)

    def gone(self, peer: Peer) -> bool:
        """Whether a link that the other side has made was lost."""
        return peer not in self.links and peer not in self.strangers.links

    def identity(self, peer: Peer) -> str:
        """Empty: there are no keys."""
        return ""

    def interrupt(self) -> None:
        """Wake ``recv``."""
        self._bell.ring()

    def abandon(self) -> None:
        """Drop all links at once."""
        self._closed = True
        with self._changed:  # the courier must not be at what is closed; this thread may hold it already
            self.courier.abandon()
            for sock in [link.socket for link in self.links.values()]:
                if sock is not None:
                    sock.close()
            self.strangers.close()
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
            while any(link.queue for link in self.links.values()) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._closed = True
        self.courier.stop()
        while self._on_way() and time.monotonic() < deadline:
            time.sleep(_ARRIVING_S)
        self._selector.close()
        self.strangers.close()
        for link in self.links.values():
            if link.socket is not None:
                link.socket.close()
        self.links.clear()
        self._places.leave()
        self._bell.close()

    def _connections(self) -> list[socket.socket]:
        return [link.socket for link in self.links.values() if link.socket is not None and link.connected]

    def _on_way(self) -> bool:
        return any(map(self._places.on_way, self._connections()))

    def _look(self, now: float) -> None:
        """Balance the connections that share a network line."""
        self._look_at = now + LOOK_S
        with self._changed:
            self._places.share(self._connections(), now)

    def _settle(self, now: float) -> None:
        """Charge strangers for what this thread has done for them."""
        if self._bill is not None:
            peer, since = self._bill
            self.strangers.spend(peer, time.thread_time() - since, now)
            self._bill = None

    def _arrive(self, made: socket.socket) -> Link | None:
        """Greet the peer that has made a connection, if it may connect."""
        if not self._places.admit(made):
            return None
        link = Link(b"from:%d" % next(self._numbers))
        link.take(made)
        link.flush()
        return link

    def _see_to_strangers(self, visited: bool, now: float) -> float:
        """Hear strangers if it is time, and drop silent ones; return the time afterwards."""
        if self.strangers.opens_at <= now:
            self.strangers.open()
        if visited:
            message = self.strangers.attend(now)
            if message is not None:
                self._received.append(message)
            now = time.monotonic()
        self.strangers.dismiss(now)
        return now

    def _read_anyway(self) -> None:
        """Read links that wait for many bytes: Linux before 5.8 may not wake us if its memory is full before."""
        for link in [link for link in self.links.values() if link.wakes_at > 1]:
            self._read(link)

    def _read(self, link: Link) -> None:
        """Take what has come over a link, and set how many bytes must come before the next look."""
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
            if count < len(room):
                break
        enough = incoming.enough
        if enough != link.wakes_at and link.socket is not None:
            link.wakes_at = enough
            self._places.wake_at(link.socket, enough)

    def _lose(self, link: Link) -> None:
        """The other side is gone: forget a link that it made; mend one that this side made."""
        with self._changed:
            if link.socket is not None:
                self._selector.unregister(link.socket)
            link.lose(time.monotonic())
            if not link.endpoint:
                del self.links[link.peer]
            if self.courier.needed:  # to dial again, and it may wait for the socket that has gone
                self.courier.call()

    def _begin(self, link: Link, made: socket.socket) -> None:
        """Begin to use a connection that this side has made."""
        self._places.admit(made)
        self._selector.register(made, selectors.EVENT_READ, link)
        link.flush()
        if link.lost:
            self._received.append((link.peer, []))
            self._bell.ring()
