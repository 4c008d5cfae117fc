"""Links inside one process: queues instead of sockets. Unit tests of the logic use it."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvstore import wire
from kvstore.errors import ConfigError
from kvstore.transport.memory import Heap, ScatteredFrame, whole
from kvstore.transport.transport import Frames, Peer


class InprocNetwork:
    """The endpoints that the transports made from it share.

    ``deliver`` may be replaced to lose, repeat, delay or reorder messages. It is called with a function that puts the
    message into the receiver's queue.
    """

    def __init__(self) -> None:
        self.deliver: Callable[[Callable[[], None]], None] = lambda put: put()
        self._lock = threading.Lock()
        self._listeners: dict[str, InprocTransport] = {}
        self._waiting: dict[str, list[Callable[[InprocTransport], None]]] = {}
        self._numbers = itertools.count()

    def transport(self) -> InprocTransport:
        return InprocTransport(self)

    def new_peer(self) -> Peer:
        return b"%d" % next(self._numbers)

    def listen(self, endpoint: str, transport: InprocTransport) -> None:
        with self._lock:
            if endpoint in self._listeners:
                raise ConfigError(f"{endpoint} is in use: choose another name")
            self._listeners[endpoint] = transport
            waiting = self._waiting.pop(endpoint, [])
        for link in waiting:
            link(transport)

    def when_listening(self, endpoint: str, link: Callable[[InprocTransport], None]) -> None:
        """Call ``link`` with the transport that listens at ``endpoint``, now or when there is one."""
        with self._lock:
            listener = self._listeners.get(endpoint)
            if listener is None:
                self._waiting.setdefault(endpoint, []).append(link)
                return
        link(listener)

    def forget(self, transport: InprocTransport) -> None:
        with self._lock:
            self._listeners = {name: t for name, t in self._listeners.items() if t is not transport}


class InprocTransport(Heap):
    """One member's end of an ``InprocNetwork``; see ``Transport``."""

    def __init__(self, network: InprocNetwork) -> None:
        self._network = network
        self._inbox: deque[tuple[Peer, Frames] | None] = deque()
        self._bell = threading.Lock()  # held while nothing has come since the receiver last looked
        self._bell.acquire()
        self._lock = threading.Lock()
        self.links: dict[Peer, tuple[InprocTransport, Peer]] = {}
        self._unsent: dict[Peer, list[Frames]] = {}
        self._dropped: set[Peer] = set()
        self._closed = self._rung = False

    def bind(self, endpoint: str) -> str:
        if endpoint.endswith("*"):
            endpoint = endpoint[:-1] + self._network.new_peer().decode()
        self._network.listen(endpoint, self)
        return endpoint

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        peer, peer_there = self._network.new_peer(), self._network.new_peer()
        self._unsent[peer] = []

        def link(listener: InprocTransport) -> None:
            listener.links[peer_there] = (self, peer)
            with self._lock:  # what was sent before must arrive before what another thread sends now
                if peer in self._dropped:
                    return
                self.links[peer] = (listener, peer_there)
                for frames in self._unsent.pop(peer, []):
                    self._deliver(peer, frames)

        self._network.when_listening(endpoint, link)
        return peer

    def disconnect(self, peer: Peer) -> None:
        with self._lock:
            self._dropped.add(peer)
            self.links.pop(peer, None)
            self._unsent.pop(peer, None)

    def send(self, peer: Peer, frames: Sequence[wire.Buffer | ScatteredFrame], priority: int | None = None) -> None:
        sent = list(map(whole, frames))
        with self._lock:
            if peer in self._unsent:
                self._unsent[peer].append(sent)
                return
            if self._closed or peer not in self.links:
                return
        self._deliver(peer, sent)

    def admit(self, peer: Peer) -> None: ...

    def refuse(self, peer: Peer) -> None: ...

    def identity(self, peer: Peer) -> str:
        return ""

    def gone(self, peer: Peer) -> bool:
        return False

    def gathers(self, peer: Peer) -> bool:
        return False

    def shares(self, peer: Peer) -> bool:
        return True

    def detach(self) -> None: ...

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
        # Not ``queue.SimpleQueue``, whose ``get`` may wait for ever if its timeout is very short.
        until = time.monotonic() + timeout if timeout > 0 else 0.0
        while True:
            while not self._inbox:
                left = until - time.monotonic() if until else 0.0
                if left <= 0 or not self._bell.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
                    return None
            received = self._inbox.popleft()
            if received is None:
                self._rung = False
            if received is None or received[0] not in self._dropped:
                return received

    def interrupt(self) -> None:
        with self._lock:
            if not self._rung:  # else a wake-up is already there
                self._rung = True
                self._put(None)

    def abandon(self) -> None:
        self.close()

    def close(self, linger: float = 0.0) -> None:
        self._closed = True
        self._network.forget(self)

    def _deliver(self, peer: Peer, frames: Frames) -> None:
        other, name = self.links[peer]
        self._network.deliver(lambda: other.receive(name, frames))

    def receive(self, peer: Peer, frames: Frames) -> None:
        if not self._closed:
            self._put((peer, frames))

    def _put(self, received: tuple[Peer, Frames] | None) -> None:
        self._inbox.append(received)
        with contextlib.suppress(RuntimeError):  # another thread has rung it
            self._bell.release()
