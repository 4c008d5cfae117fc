"""Links over sockets without ZeroMQ: a message that fits leaves in the call that sends it.

ZeroMQ hands each message to a thread of its own at both ends. That is four more thread switches for a round trip, of
0.1 to 1 ms each where processors are few. Here a message that fits into the socket takes one system call; messages
whose values are in shared memory fit. One thread, the courier, sends what does not fit, and connects. The connecting
side starts it when it connects, the listening side when it is needed. The courier reconnects a
lost link (``link.py``).
"""

from __future__ import annotations

import itertools
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from kvstore import wire
from kvstore.errors import WireError
from kvstore.transport.memory import ScatteredFrame, keep_freed
from kvstore.transport.sockets.link import Address, Link
from kvstore.transport.sockets.places import LOOK_S, Places, TcpPlaces, UnixPlaces
from kvstore.transport.sockets.strangers import StrangerLimits, Strangers
from kvstore.transport.sockets.stream import packed
from kvstore.transport.system_errors import require_systems
from kvstore.transport.system_sockets import Bell
from kvstore.transport.transport import Frames, Peer, Transport

_ARRIVING_S = 0.001  # between two looks at whether what was sent has arrived
_READS = 128  # from one link, before it is another's turn: a fast sender must not starve the others
JOIN_S = 1.0  # how long ``stop`` waits for the courier, which may be resolving a name


class Courier:
    """The thread that connects links, reconnects lost ones, and sends what did not leave at once.

    It begins when it is started or called.

    Args:
        changed: guards the links; notified when something has left.
        addresses: returns the addresses of an endpoint; may take as long as resolving a name.
        begin: called with a link that has just been connected, and its socket.
    """

    def __init__(
        self,
        links: Mapping[Peer, Link],
        changed: threading.Condition,
        addresses: Callable[[str], Sequence[Address]],
        begin: Callable[[Link, socket.socket], None],
    ) -> None:
        self._links = links
        self._changed = changed
        self._addresses = addresses
        self._begin = begin
        self._bell = Bell()  # wakes the thread while it waits for sockets
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def needed(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Begin the thread before it is called: since Python 3.12 no thread can start while a program ends."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="kvstore courier", daemon=True)
            thread.start()
            self._thread = thread

    def call(self) -> None:
        """Have the courier look at all links. The caller holds the lock."""
        self.start()
        self._changed.notify_all()
        self._bell.ring()

    def stop(self) -> None:
        """End the thread. If it is resolving a name, it ends when that returns."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
            self._bell.ring()
        if self._thread is not None:
            self._thread.join(JOIN_S)
        self._bell.close()

    def abandon(self) -> None:
        """Let the thread end by itself, soon. The caller holds the lock."""
        self._stopping.set()
        self._changed.notify_all()
        self._bell.ring()
        if self._thread is None:
            self._bell.close()

    def _run(self) -> None:
        try:
            self._see_to_all()
        finally:
            self._bell.close()

    def _see_to_all(self) -> None:
        while True:
            with self._changed:
                while not self._stopping.is_set() and not any(link.waits for link in self._links.values()):
                    self._changed.wait()
                if self._stopping.is_set():
                    return
                now = time.monotonic()
                lonely = [link for link in self._links.values() if link.lonely and link.due <= now]
            to_dial = [(link, self._addresses(link.endpoint)) for link in lonely]
            with self._changed:
                if self._stopping.is_set():
                    return
                self._bell.silence()
                now = time.monotonic()
                for link, addresses in to_dial:
                    if self._links.get(link.peer) is not link:  # it was dropped meanwhile
                        continue
                    made = link.dial(addresses, now)
                    if made is not None:
                        self._begin(link, made)
                for link in self._links.values():
                    self._see_to(link, now)
                self._changed.notify_all()  # somebody may wait for the last of it
                poll, wait = self._poll(now)
            poll.poll(wait)

    def _see_to(self, link: Link, now: float) -> None:
        if link.connected:
            link.flush()
            stalls_at = link.stalls_at(now)
            if stalls_at is not None and now >= stalls_at:
                link.cut()
            return
        made = link.arrive(now)
        if made is not None:
            self._begin(link, made)

    def _poll(self, now: float) -> tuple[select.poll, float | None]:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        due: list[float] = []
        for link in self._links.values():
            if link.waits:
                if link.socket is not None:
                    poll.register(link.socket, select.POLLOUT)
                stalls_at = link.stalls_at(now)
                due.append(link.due if stalls_at is None else stalls_at)
        return poll, 1000 * max(0.0, min(due) - now) + 1 if due else None


class SocketTransport(Transport):
    """One member's end of its links over sockets; see ``Transport``.

    Args:
        places: the kind of sockets.
        limits: what peers may cost that have made a link and have not been admitted.

    Attributes:
        links: outgoing links, and incoming ones whose peer has been admitted.
        strangers: incoming links whose peer has not been admitted yet.
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
        # Also guards what is sent, and which sockets links have. Not what is received: only the thread in ``recv``
        # reads, so a large frame that comes in keeps no sender waiting.
        self._changed = threading.Condition()
        self.courier = Courier(self.links, self._changed, partial(places.addresses, wait=True), self._begin)
        self._look_at = 0.0
        self._closed = False

    def bind(self, endpoint: str) -> str:
        listener, endpoint = self._places.listen(endpoint)
        listener.setblocking(False)
        self.strangers.listen(listener)
        return endpoint

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        """The courier tries until somebody listens there, and again if the listener is gone."""
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
        """The courier sends later what does not fit into the socket now."""
        link = self.links.get(peer)
        if link is None:
            if peer in self.strangers.links:
                self.strangers.answer(peer, packed(frames))
            return
        if self._closed or link.lost:  # the caller resends, in order, when ``recv`` says that the link was lost
            return
        parts = packed(frames)
        with self._changed:
            if not link.put(parts, priority):
                self.courier.call()

    def gathers(self, peer: Peer) -> bool:
        """True: one system call takes many buffers."""
        return True

    def detach(self) -> None:
        with self._changed:
            for link in self.links.values():
                link.detach()

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
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
                # Links that wait for many bytes: Linux before 5.8 may not wake us if its memory is full before.
                for link in [link for link in self.links.values() if link.wakes_at > 1]:
                    self._read(link)
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
        self._settle(time.monotonic())  # what is done for a member from now on is not done for a stranger
        link = self.strangers.admit(peer)
        if link is None or link.socket is None:
            return
        link.known()
        with self._changed:
            self.links[peer] = link
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def refuse(self, peer: Peer) -> None:
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
        return peer not in self.links and peer not in self.strangers.links

    def interrupt(self) -> None:
        self._bell.ring()

    def abandon(self) -> None:
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
        if self._closed:
            return
        deadline = time.monotonic() + linger
        with self._changed:
            while any(link.queue for link in self.links.values()) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._closed = True
        self.courier.stop()
        while any(map(self._places.on_way, self._connections())) and time.monotonic() < deadline:
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

    def _look(self, now: float) -> None:
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
        """The other side is gone: forget an incoming link; have the courier reconnect an outgoing one."""
        with self._changed:
            if link.socket is not None:
                self._selector.unregister(link.socket)
            link.lose(time.monotonic())
            if not link.endpoint:
                del self.links[link.peer]
            if self.courier.needed:  # to dial again, and it may wait for the socket that has gone
                self.courier.call()

    def _begin(self, link: Link, made: socket.socket) -> None:
        self._places.admit(made)
        self._selector.register(made, selectors.EVENT_READ, link)
        link.flush()
        if link.lost:
            self._received.append((link.peer, []))
            self._bell.ring()


class TcpTransport(SocketTransport):
    """Plain links over TCP."""

    def __init__(
        self, root_fd: int = -1, congestion: str = "", pacing: bool = True, limits: StrangerLimits | None = None
    ) -> None:
        super().__init__(TcpPlaces(root_fd, congestion, pacing), limits)


class UnixTransport(SocketTransport):
    """Links over unix sockets."""

    def __init__(self, limits: StrangerLimits | None = None) -> None:
        super().__init__(UnixPlaces(), limits)
