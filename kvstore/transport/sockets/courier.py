"""The courier: the thread that connects links, mends lost ones, and sends what did not leave at once."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from kvstore.transport.base import Peer
from kvstore.transport.bell import Bell
from kvstore.transport.sockets.link import Address, Link

JOIN_S = 1.0


class Courier:
    """Looks after links. The thread begins when it is started or called.

    Args:
        links: all links, by peer.
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
        """Whether the thread has begun."""
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
        """Return what to wait for, and for how many milliseconds at most."""
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
