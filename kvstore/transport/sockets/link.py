"""One link over a socket: how it is made and made again, what has not left yet, and what is not whole yet."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Any, TypeAlias

from kvstore.transport.base import Peer
from kvstore.transport.sockets.queue import Outgoing
from kvstore.transport.sockets.stream import GREETING, Incoming
from kvstore.transport.system_errors import ignored, require_systems

Address: TypeAlias = "tuple[socket.AddressFamily, Any]"

RETRY_S, RETRY_MAX_S = 0.02, 1.0
ATTEMPT_S = 10.0  # until the next attempt to connect, if this one is not answered
STALLED_S = 60.0  # whoever takes nothing for so long of what waits for them is disconnected
_PARTS = 256  # buffers in one system call
_THERE = (0, errno.EISCONN)
_UNDER_WAY = (errno.EINPROGRESS, errno.EALREADY)


class Link:
    """A link, which outlives its connection: that is made again if the other side goes and comes back.

    Args:
        peer: its name at this end.
        endpoint: where to connect; empty if the other side did.

    Attributes:
        socket: None as long as there is no connection, nor one under way.
        connected: whether it is there.
        queue: what has not left.
        incoming: takes messages out of what comes.
        lost: whether a connection of this side's has ended, and nobody has been told yet that there is another.
        due: when to try to connect, if there is no connection.
        wakes_at: how many bytes must have come before the system says that there is something to read.
    """

    def __init__(self, peer: Peer, endpoint: str = "") -> None:
        self.peer = peer
        self.endpoint = endpoint
        self.socket: socket.socket | None = None
        self.connected = False
        self.queue = Outgoing()
        self.incoming = Incoming()
        self.lost = False
        self.due = 0.0
        self.wakes_at = 1
        self._sending = False  # whether nobody knows how much of the queue has left: a call to the system is under way
        self._address: Any = None
        self._tries = 0
        self._sent = 0  # bytes
        self._stuck: tuple[int, float] | None = None  # how many had been sent when something first waited, and when

    @property
    def lonely(self) -> bool:
        """Whether it is to be connected, and nothing is under way."""
        return self.socket is None and bool(self.endpoint)

    @property
    def waits(self) -> bool:
        """Whether there is something to do for it, now or soon."""
        return bool(self.queue) or (bool(self.endpoint) and not self.connected)

    def put(self, parts: Sequence[memoryview], priority: int | None = None) -> bool:
        """Queue the parts of a message, and send what can be sent now; return whether nobody has to see to the rest.

        Somebody does already if there was something in the queue before. For ``priority`` see ``Outgoing``.
        """
        before = bool(self.queue)
        self.queue.put(parts, priority)
        return before or self.flush()

    def flush(self) -> bool:
        """Send what can be sent now; return whether that is all. What nobody will read is dropped."""
        if self.socket is None or not self.connected:
            return not self.queue
        if self._sending:  # an exception has cut that short; the next to come is the courier, or whoever has caught it
            self.cut()
            return True
        while self.queue:
            self._sending = True
            try:
                sent = self.socket.sendmsg(self.queue.head(_PARTS), (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._sending = False
                return False
            except OSError as exc:
                require_systems(exc)
                self.cut()
                return True
            self.queue.gone(sent)
            self._sent += sent
            self._sending = False
        return True

    def cut(self) -> None:
        """End the connection, over which nothing more must go; whoever reads finds out."""
        self._sending = False
        self.queue.clear()
        if self.socket is not None:
            with ignored():
                self.socket.shutdown(socket.SHUT_RDWR)

    def stalls_at(self, now: float) -> float | None:
        """Return when the link counts as stalled unless some of its queue leaves first; None if the queue is empty."""
        if not self.queue or not self.connected:
            self._stuck = None
            return None
        if self._stuck is None or self._stuck[0] != self._sent:
            self._stuck = (self._sent, now)
        return self._stuck[1] + STALLED_S

    def detach(self) -> None:
        """Have copies of what is queued."""
        self.queue.detach()

    def known(self) -> None:
        """Take messages of any length from now on: who sends them has been introduced."""
        self.incoming = Incoming(greeted=True)

    def take(self, made: socket.socket) -> None:
        """Have a connection."""
        self.socket, self.connected, self.wakes_at = made, True, 1
        self.queue.first(memoryview(GREETING))

    def dial(self, addresses: Sequence[Address], now: float) -> socket.socket | None:
        """Connect, to each of the addresses in turn; return the connection if it is there."""
        self.due = now + ATTEMPT_S
        if not addresses:
            self._fail(now)
            return None
        family, self._address = addresses[self._tries % len(addresses)]
        try:
            self.socket = socket.socket(family, socket.SOCK_STREAM)
        except OSError as exc:  # too many files are open
            require_systems(exc)
            self._fail(now)
            return None
        self.socket.setblocking(False)
        return self.arrive(now)

    def arrive(self, now: float) -> socket.socket | None:
        """Return the connection under way if it is there; if it will not come, the next attempt is due soon."""
        made = self.socket
        if made is None:
            return None
        code = made.connect_ex(self._address)
        if code in _THERE and not _to_itself(made):
            self.take(made)
            return made
        if code not in _UNDER_WAY or now >= self.due:
            self._fail(now)
        return None

    def _fail(self, now: float) -> None:
        """Give up an attempt to connect; the next is due after a while."""
        self._hang_up()
        self.due = now + min(RETRY_S * 2 ** min(self._tries, 10), RETRY_MAX_S)
        self._tries += 1

    def lose(self, now: float) -> None:
        """Let go of a connection that has ended, of what nobody will read, and of what will never be whole."""
        if self.incoming.greeted:
            self._hang_up()
            self._tries, self.due = 0, now
        else:
            self._fail(now)  # whoever has hung up without a word would do so again
        self.queue.clear()
        self.incoming = Incoming()
        self.lost = True

    def _hang_up(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self.socket, self.connected = None, False


def _to_itself(made: socket.socket) -> bool:
    """Whether it has found nobody but itself, as may happen at a free port of this host."""
    try:
        return bool(made.getsockname() == made.getpeername())
    except OSError as exc:
        require_systems(exc)
        return True  # it has ended already
