"""One link over a socket: how it connects and reconnects, what has not left yet, and what has not come in full.

    state                      socket   connected   queue        what leaves the state
    to be dialed               None     False       may wait     ``dial``, once ``due`` has come
    connecting                 set      False       may wait     ``arrive``: connected, or to be dialed after a pause
    connected                  set      True        may wait     ``cut`` or the peer's end, which ``lose`` follows
    ended                      None     False       empty        nothing: the link was dropped

Only an outgoing link (with an ``endpoint``) is dialed; an incoming one begins connected, and ends when it is lost.
``lost`` is True from ``lose`` until the caller has been told, in whatever state the link is by then: until then nothing
is queued, for the caller resends all requests, in order. ``_sending`` is True only inside ``flush``: if it is True
when ``flush`` begins, an exception (of a signal's handler) came between the system call and the note of how many bytes
have left. No simpler way knows that number, and to send from a wrong byte on would tear the stream: so the link is cut.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from kvstore import wire
from kvstore.transport.sockets.stream import GREETING, Incoming
from kvstore.transport.system_errors import ignored, require_systems
from kvstore.transport.transport import Peer

Address: TypeAlias = "tuple[socket.AddressFamily, Any]"

# Between attempts to connect. On one host they are cheap, and a scheduler that is started again is there soon.
RETRY_S, RETRY_MAX_S, RETRY_MAX_HERE_S = 0.02, 1.0, 0.1
ATTEMPT_S = 10.0  # how long an attempt to connect may take
STALLED_S = 60.0  # a peer that takes nothing of what waits for it for so long is disconnected
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # macOS may lack it; there Python alone ignores SIGPIPE
_PARTS = 256  # buffers in one system call; Linux takes 1024, and fails beyond
_THERE = (0, errno.EISCONN)
_UNDER_WAY = (errno.EINPROGRESS, errno.EALREADY)


class _Waiting(NamedTuple):
    """A message that waits. They sort in the order in which they leave."""

    section: int  # a message without a priority, or those between two such messages
    rank: int
    number: int
    parts: Sequence[wire.Buffer]


# A message with a priority leaves before those of lower priority, so that what is needed next does not wait behind
# all that was produced before it (P3, Jayarajan et al. 2019). A message that has begun to leave is finished first. A
# message without a priority overtakes none, and no later message overtakes it.
class Outgoing:
    """The messages that have not left over one link, in the order in which they leave. Pure."""

    def __init__(self) -> None:
        self._begun: deque[wire.Buffer] = deque()
        self._left = 0  # bytes of these
        self._waiting: list[_Waiting] = []
        self._section = 0
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._begun) or bool(self._waiting)

    def put(self, parts: Sequence[wire.Buffer], priority: int | None = None) -> None:
        """Add a message: its bytes in parts, none of them empty."""
        rank = 0
        if priority is None:
            self._section += 1
        else:
            rank = -priority
        heapq.heappush(self._waiting, _Waiting(self._section, rank, next(self._numbers), parts))
        if priority is None:
            self._section += 1

    def first(self, part: wire.Buffer) -> None:
        """Let ``part`` leave before all else. Nothing may have begun to leave."""
        self._begun.appendleft(part)
        self._left += len(part)

    def head(self, most: int) -> list[wire.Buffer]:
        """Return what leaves next: at most ``most`` parts, all of one message, which counts as begun."""
        if not self._begun:
            self._begun.extend(heapq.heappop(self._waiting).parts)
            self._left = sum(map(len, self._begun))
        return list(itertools.islice(self._begun, most))

    def gone(self, nbytes: int) -> None:
        """The next ``nbytes`` bytes have left."""
        self._left -= nbytes
        if not self._left:  # the usual case
            self._begun.clear()
            return
        while nbytes:
            part = self._begun[0]
            if nbytes < len(part):
                self._begun[0] = memoryview(part)[nbytes:]
                return
            nbytes -= len(part)
            self._begun.popleft()

    def clear(self) -> None:
        self._begun.clear()
        self._left = 0
        self._waiting.clear()

    def detach(self) -> None:
        self._begun = deque(_copies(self._begun))
        self._waiting = [entry._replace(parts=_copies(entry.parts)) for entry in self._waiting]


def _copies(parts: Iterable[wire.Buffer]) -> list[wire.Buffer]:
    return [bytes(part) for part in parts]


class Link:
    """A link, which outlives its connection: it is reconnected when the other side is back.

    ``endpoint`` is empty if the other side connects. ``lost`` says that an outgoing connection was lost, of which the
    caller has not been told yet; ``due`` when to connect next; ``wakes_at`` how many bytes make the socket readable.
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
        self._sending = False  # whether a system call is under way, so that nobody knows how much has left
        self._address: Any = None
        self._tries = 0
        self._sent = 0  # bytes
        self._stuck: tuple[int, float] | None = None  # how many had been sent when something first waited, and when

    @property
    def lonely(self) -> bool:
        return self.socket is None and bool(self.endpoint)

    @property
    def waits(self) -> bool:
        return bool(self.queue) or (bool(self.endpoint) and not self.connected)

    def put(self, parts: Sequence[wire.Buffer], priority: int | None = None) -> bool:
        """Queue a message in parts, and send what can be sent now; return False if the courier has to send the rest.

        If the queue was not empty before, the courier is at it already. For ``priority`` see ``Outgoing``.
        """
        before = bool(self.queue)
        self.queue.put(parts, priority)
        return before or self.flush()

    def flush(self) -> bool:
        """Send what can be sent now; return whether that was all. If the connection has ended, drop the queue."""
        if self.socket is None or not self.connected:
            return not self.queue
        if self._sending:  # an exception has cut a send short: nobody knows how much has left
            self.cut()
            return True
        while self.queue:
            self._sending = True
            try:
                sent = self.socket.sendmsg(self.queue.head(_PARTS), (), _NO_SIGNAL)
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
        """End the connection: nothing more must go over it. The receiving thread notices."""
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
        self.queue.detach()

    def known(self) -> None:
        self.incoming = Incoming(greeted=True)

    def take(self, made: socket.socket) -> None:
        self.socket, self.connected, self.wakes_at = made, True, 1
        self.queue.first(GREETING)

    def dial(self, addresses: Sequence[Address], now: float) -> socket.socket | None:
        """Begin to connect, to the next of the addresses; return the connection if it is established at once."""
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
        """Return the connection if the attempt under way has succeeded. If it has failed, the next one is due soon."""
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
        """Give up an attempt to connect. The next one is due after a pause, which doubles."""
        self.hang_up()
        longest = RETRY_MAX_HERE_S if isinstance(self._address, str) else RETRY_MAX_S
        self.due = now + min(RETRY_S * 2 ** min(self._tries, 10), longest)
        self._tries += 1

    def lose(self, now: float) -> None:
        if self.incoming.greeted:
            self.hang_up()
            self._tries, self.due = 0, now
        else:
            self._fail(now)  # the other side hung up without a greeting, and would do so again
        self.queue.clear()
        self.incoming = Incoming()
        self.lost = True

    def hang_up(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self.socket, self.connected = None, False


def _to_itself(made: socket.socket) -> bool:
    """Whether a socket has connected to itself, as may happen at a free port of this host."""
    try:
        return bool(made.getsockname() == made.getpeername())
    except OSError as exc:
        require_systems(exc)
        return True  # it has ended already
