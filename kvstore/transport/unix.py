"""Links over unix sockets, for the processes of one host: what is sent leaves in the call that sends it.

ZeroMQ hands each message to a thread of its own, at both ends: that is four more switches between threads on a way
there and back, of 0.1 to 1 ms each where processors are few. Here a message that fits into the socket, as those do
whose values are in shared memory, takes one system call. For what does not fit, and until somebody listens, there is
one thread, the courier, which is not started before.
"""

from __future__ import annotations

import itertools
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import ConfigError, WireError
from kvstore.memory import Heap, keep_freed
from kvstore.transport.base import Frames, Peer
from kvstore.transport.bell import Bell
from kvstore.transport.place import require_private
from kvstore.transport.stream import Incoming, packed
from kvstore.wire import Buffer

SCHEME = "ipc://"
BACKLOG = 1024  # connections that wait to be accepted
_PARTS = 256  # buffers in one system call
_READS = 128  # from one link, before it is another's turn
_RETRY_S, _RETRY_MAX_S = 0.02, 1.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class _Link:
    """One link: its socket, if it is connected, and what has not left or is not whole yet."""

    def __init__(self, peer: Peer, heap: Heap, path: str = "") -> None:
        self.peer = peer
        self.path = path  # where to connect; empty if the other side did
        self.socket: socket.socket | None = None
        self.queue: deque[memoryview] = deque()
        self.incoming = Incoming(heap)

    def flush(self) -> bool:
        """Send what can be sent now; return whether that is all. What nobody will read is dropped."""
        if self.socket is None:
            return not self.queue
        while self.queue:
            try:
                sent = self.socket.sendmsg(list(itertools.islice(self.queue, _PARTS)), (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError:
                self.queue.clear()  # whoever reads will find out
                return True
            while sent:
                first = self.queue[0]
                if sent < len(first):
                    self.queue[0] = first[sent:]
                    break
                sent -= len(first)
                self.queue.popleft()
        return True


class UnixTransport(Heap):
    """One member's end of its links over unix sockets; see ``Transport``. Endpoints are ``ipc://path``."""

    def __init__(self) -> None:
        keep_freed()
        self._selector = selectors.DefaultSelector()
        self._bell = Bell()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._numbers = itertools.count()
        self._listener: socket.socket | None = None
        self._path = ""
        self._links: dict[Peer, _Link] = {}
        self._received: deque[tuple[Peer, Frames]] = deque()
        self._changed = threading.Condition()  # also guards what is sent, and which sockets links have
        self._courier: threading.Thread | None = None
        self._closed = False

    def bind(self, endpoint: str) -> str:
        """Listen at ``ipc://path``, whose directory must be this user's alone; take it over from whoever did.

        Raises:
            ConfigError: the endpoint cannot be bound; the message says why.
        """
        path = _path(endpoint)
        require_private(Path(path))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        try:
            Path(path).unlink(missing_ok=True)
            listener.bind(path)
            listener.listen(BACKLOG)
        except OSError as exc:
            listener.close()
            raise ConfigError(f"cannot listen at {endpoint}: {exc.strerror}") from None
        self._listener, self._path = listener, path
        self._selector.register(listener, selectors.EVENT_READ)
        return endpoint

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        """Make a link; the courier goes on trying until someone listens there, and again if they are gone.

        Raises:
            ConfigError: the endpoint is none.
        """
        peer = b"to:%d" % next(self._numbers)
        link = _Link(peer, self, _path(endpoint))
        with self._changed:
            self._links[peer] = link
            if not self._connected(link):
                self._call_courier()
        return peer

    def send(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        """Send ``frames``, or leave what does not fit to the courier, who reads it later: it must stay as it is."""
        link = self._links.get(peer)
        if link is None or self._closed:
            return
        parts = packed(frames)
        with self._changed:
            before = bool(link.queue)  # then the courier is at it
            link.queue.extend(parts)
            if not before and not link.flush():
                self._call_courier()

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
        """Return the next message."""
        deadline = time.monotonic() + timeout
        while not self._received and not self._closed:
            events = self._selector.select(timeout)
            rung = not events
            for key, _ in events:
                if key.fileobj is self._bell:
                    rung = True
                    self._bell.silence()
                elif key.fileobj is self._listener:
                    self._accept(self._listener)
                else:
                    self._read(key.data)
            if rung and not self._received:
                return None
            timeout = max(0.0, deadline - time.monotonic())
        return self._received.popleft() if self._received and not self._closed else None

    def interrupt(self) -> None:
        """Wake ``recv``."""
        self._bell.ring()

    def close(self, linger: float = 0.0) -> None:
        """Close the links; what is queued has ``linger`` seconds to leave."""
        if self._closed:
            return
        deadline = time.monotonic() + linger
        with self._changed:
            while any(link.queue for link in self._links.values()) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._closed = True
            self._changed.notify_all()
        if self._courier is not None:
            self._courier.join()
        self._selector.close()
        for link in self._links.values():
            if link.socket is not None:
                link.socket.close()
        self._links.clear()
        if self._listener is not None:
            self._listener.close()
            Path(self._path).unlink(missing_ok=True)
        self._bell.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                made, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # too many files are open: whoever waits must wait longer
                time.sleep(_RETRY_S)
                return
            if not _ours(made):
                made.close()
                continue
            made.setblocking(False)
            link = _Link(b"from:%d" % next(self._numbers), self)
            link.socket = made
            self._links[link.peer] = link
            self._selector.register(made, selectors.EVENT_READ, link)

    def _read(self, link: _Link) -> None:
        """Take what has come over a link."""
        for _ in range(_READS):
            if link.socket is None:
                return
            room = link.incoming.room()
            try:
                count = link.socket.recv_into(room)
                messages = link.incoming.take(count) if count else []
            except BlockingIOError:
                return
            except (OSError, WireError, MemoryError):  # of the last, only an announcement
                count, messages = 0, []
            self._received.extend((link.peer, frames) for frames in messages)
            if not count:
                self._lose(link)
            if count < len(room):
                return

    def _lose(self, link: _Link) -> None:
        """The other side has gone: forget a link that it made, make ours again."""
        with self._changed:
            if link.socket is not None:
                self._selector.unregister(link.socket)
                link.socket.close()
                link.socket = None
            link.queue.clear()
            link.incoming = Incoming(self)
            if link.path:
                self._call_courier()
            else:
                del self._links[link.peer]

    def _connected(self, link: _Link) -> bool:
        """Try to connect a link; return whether it is, and all that waited has left."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.setblocking(False)
        try:
            made.connect(link.path)
        except OSError:  # nobody is there yet, or too many come at once
            made.close()
            return False
        link.socket = made
        self._selector.register(made, selectors.EVENT_READ, link)
        return link.flush()

    def _call_courier(self) -> None:
        if self._courier is None:
            self._courier = threading.Thread(target=self._carry, name="kvstore courier", daemon=True)
            self._courier.start()
        self._changed.notify_all()

    def _carry(self) -> None:
        """Be the courier: connect what is not connected, send what has not left."""
        pause = _RETRY_S
        while True:
            with self._changed:
                while not self._closed and not any(_waits(link) for link in self._links.values()):
                    pause = _RETRY_S
                    self._changed.wait()
                if self._closed:
                    return
                waiting = [link for link in self._links.values() if _waits(link)]
                for link in waiting:
                    if link.socket is None:
                        self._connected(link)
                    else:
                        link.flush()
                self._changed.notify_all()  # somebody may wait for the last of it
                full = [link.socket.fileno() for link in waiting if link.socket is not None and link.queue]
                lonely = any(link.socket is None for link in waiting)
            if full:
                poll = select.poll()
                for number in full:
                    poll.register(number, select.POLLOUT)
                poll.poll(1000 * _RETRY_S)
            elif lonely:
                with self._changed:
                    self._changed.wait(pause)
                pause = min(2 * pause, _RETRY_MAX_S)


def _waits(link: _Link) -> bool:
    return bool(link.queue) or (link.socket is None and bool(link.path))


def _path(endpoint: str) -> str:
    path = endpoint.removeprefix(SCHEME)
    if path == endpoint or not path:
        raise ConfigError(f"{endpoint} is no place of a unix socket: that would be {SCHEME}/directory/name")
    return path


def _ours(made: socket.socket) -> bool:
    """Whether the other side is this user, or root; the directory should have kept out others already."""
    return not hasattr(socket, "SO_PEERCRED") or _user(made) in (os.getuid(), 0)


def _user(made: socket.socket) -> int:
    """Who has made this connection."""
    _, uid, _ = _CREDENTIALS.unpack(made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)
