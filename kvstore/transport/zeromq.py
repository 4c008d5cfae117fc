"""Links over ZeroMQ: ``ipc://`` in a private directory on one host, ``tcp://`` across hosts, with CURVE if it has keys.

Each member has one ROUTER socket, which both listens and connects. This side chooses the names of links that it makes,
and ZeroMQ those of accepted links. Peers that choose their own routing id are ignored, so no peer can pass for another.

Received frames are not copied. Sent frames are. pyzmq keeps the buffers that ZeroMQ has borrowed in a dict, and begins
a new dict when it takes its own thread for dead. ``Thread.is_alive`` is wrong for ever if a signal's handler raises in
the middle of it (CPython 3.11). The memory would then be used for something else while ZeroMQ still reads it.

When a connection is lost, ZeroMQ makes another and sends what it still has over it, although earlier messages may be
lost. So each link begins with one greeting, and what comes over a link without it is dropped. The side that made the
link drops it, with all that ZeroMQ still has, reconnects under another name, and says so (see
``Transport.recv``).

Queues have no bounds (SNDHWM, RCVHWM): a ROUTER silently drops what exceeds them, and the receiver would wait until its
deadline. But the system ends a connection over which nothing leaves for ``STALLED_S`` (TCP_USER_TIMEOUT), and what
waited goes with it. Links with keys are members' only, and are never dropped for what they say. Plain links, which
``KVSTORE_TRANSPORT=zeromq`` makes, are not dropped either, since ZeroMQ can end no single link: only a private
directory or the network keeps strangers out.
"""

from __future__ import annotations

import itertools
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from kvstore import wire
from kvstore.errors import ConfigError
from kvstore.job.address import host_and_port
from kvstore.job.curve_keys import CurveKeys, no_keys, split_key, with_key
from kvstore.rare_log import worth_a_line
from kvstore.transport.memory import ScatteredFrame, keep_freed, whole
from kvstore.transport.sockets.link import RETRY_MAX_HERE_S, RETRY_MAX_S, RETRY_S, STALLED_S
from kvstore.transport.sockets.stream import GREETING
from kvstore.transport.system_errors import ignored
from kvstore.transport.system_sockets import (
    Bell,
    congestion_control,
    listen,
    require_socket_path,
    set_congestion_control,
)
from kvstore.transport.transport import ASK_S, ASKS, BACKLOG, IDLE_S, MAX_FRAME, Frames, Peer, Transport

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

HANDSHAKE_MS = 5000  # peers that have not finished the handshake by then are disconnected
_CHOSEN = b"\0"  # the first byte of names that ZeroMQ has chosen for accepted links
_MONITOR = "inproc://connections"  # of the socket's own context
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_EVENT = struct.Struct("=HI")  # of the first frame: which it is, and a number: of these, that of the system's socket
_V4 = "::ffff:"  # what ZeroMQ puts before IPv4 addresses where IPv6 is on
DOMAIN = "kvstore"

log = logging.getLogger(__name__)


# ZeroMQ copies a socket's options at each ``bind`` and ``connect``. So they are set before each, and one socket can
# listen, connect, and use unix sockets too. None of a peer's frames reaches the socket before the peer has proved
# that it has the secret key of one of the job's public keys, and that it knows ours.
class Curve:
    """The keys of one socket, whose context is of no other socket: an authenticator checks a whole context's keys."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], sock: zmq.Socket[bytes], keys: CurveKeys) -> None:
        self._context = context
        self._socket = sock
        self._keys = keys
        self._admitted = {key.encode() for key in keys.members | keys.guests}
        self._refused = 0
        self._checker: ThreadAuthenticator | None = None

    def plain(self) -> None:
        self._socket.set(zmq.CURVE_SERVER, 0)

    def serve(self) -> None:
        """Let the next ``bind`` accept members only."""
        if self._checker is None:
            from zmq.auth.thread import ThreadAuthenticator  # brings asyncio, which workers do without

            self._socket.set(zmq.ZAP_DOMAIN, DOMAIN.encode())
            self._socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a checker nobody gets in, instead of everybody
            self._checker = ThreadAuthenticator(self._context)
            self._checker.configure_curve_callback(DOMAIN, self)
            self._checker.start()
        self._socket.set(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        self._socket.set(zmq.CURVE_SERVER, 1)

    def link(self, endpoint: str, key: str) -> None:
        """Let the next ``connect``, to ``endpoint``, demand that the listener has the public key ``key``."""
        if not endpoint.startswith("tcp://"):
            self.plain()
            return
        if not key:
            raise ConfigError(
                f"{endpoint} has no key, and this process's links are encrypted: whoever listens there must have "
                "the job's keys too, and KVSTORE_ENCRYPTION=0 must be set in all processes or none"
            )
        if key not in self._keys.members and not self._keys.follows:
            raise ConfigError(
                f"the key of {endpoint} is not among KVSTORE_MEMBER_KEYS: the listener, or the keys, are another job's"
            )
        self._socket.set(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
        self._socket.set(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        self._socket.set(zmq.CURVE_SERVERKEY, key.encode())

    def knows(self, key: str) -> bool:
        return key.encode() in self._admitted

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a peer with the public key ``key`` may connect. The authenticator's thread calls it."""
        known = key in self._admitted
        if not known:
            self._refused += 1
            if worth_a_line(self._refused):
                log.warning("refused a connection with a key that is not of this job (%d so far)", self._refused)
        return known

    def close(self) -> None:
        if self._checker is not None:
            self._checker.stop()
            self._checker = None


class Connections:
    """Watches the connections that a socket makes, and gives each its congestion control.

    A connection without a successful handshake cannot be lost: nothing has left over it. ``context`` must be of no
    other socket. ``monitor`` is readable when there is something to find.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], sock: zmq.Socket[bytes], congestion: bytes = b""
    ) -> None:
        self._congestion = congestion
        self._endpoints: set[str] = set()
        self._begun: set[str] = set()
        self.monitor = context.socket(zmq.PAIR)
        self.monitor.set(zmq.RCVHWM, 0)  # or ZeroMQ's own thread waits for a caller that does not look
        sock.monitor(_MONITOR, _EVENTS)
        self.monitor.connect(_MONITOR)

    def watch(self, endpoint: str) -> None:
        """Watch the connections to ``endpoint``, from one on that begins now."""
        self._endpoints.add(endpoint)
        self._begun.discard(endpoint)

    def forget(self, endpoint: str) -> None:
        self._endpoints.discard(endpoint)
        self._begun.discard(endpoint)

    def find(self) -> set[str]:
        """Return the endpoints to which a connection was lost since the last call, or since they are watched."""
        lost: set[str] = set()
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event, name = self.monitor.recv_multipart()
            kind, number = _EVENT.unpack(event)
            if kind == zmq.EVENT_CONNECTED:
                give(number, self._congestion)
                continue
            endpoints = {endpoint for endpoint in self._endpoints if may_be(endpoint, name.decode(errors="replace"))}
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._begun |= endpoints
            else:
                lost |= endpoints & self._begun
        return lost

    def close(self) -> None:
        self.monitor.close(linger=0)


def give(number: int, congestion: bytes) -> None:
    """Give the connection with a number a congestion control, unless it has ended already, or is none of TCP's.

    If ZeroMQ has closed it, its number may be that of another socket by now: all of this process's are to have the
    same. What is used is a copy, since nobody but ZeroMQ may close the original, whatever exception comes.
    """
    with ignored(), socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as made:
        set_congestion_control(made, congestion)


def may_be(endpoint: str, name: str) -> bool:
    """Whether ZeroMQ may call ``endpoint`` ``name``. That has an address where the endpoint may have a host's name."""
    if endpoint == name:
        return True
    (host, port), (other, number) = host_and_port(endpoint), host_and_port(name)
    is_name = ":" not in host and bool(host.strip("0123456789."))
    return port == number and (is_name or host == other.removeprefix(_V4))


class ZmqTransport(Transport):
    """One member's end of its ZeroMQ links.

    Frames are copied when they are sent, so nothing gathers and nothing is left to detach: what ZeroMQ has been given
    cannot be taken back. ``admit`` and ``refuse`` have no effect: with keys all peers are members, and without them
    ZeroMQ can end no single link.

    Args:
        root_fd: a listening socket to use at the first ``bind`` to TCP, opened by whoever started this process.
        keys: the job's. With keys, links over TCP are encrypted and between members only, and endpoints carry the
            listener's key. Without, links are plain. Links over ``ipc://`` are always plain.
        congestion: see ``congestion_control``.

    Raises:
        ConfigError: the process's own key is not the job's, or it may not use that congestion control.
    """

    def __init__(self, root_fd: int = -1, keys: CurveKeys | None = None, congestion: str = "") -> None:
        public = "" if keys is None else keys.public
        keep_freed()
        self._root_fd = root_fd
        self._public = public
        self._congestion = congestion_control(congestion)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)  # but for `close`
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
        self._socket.set(zmq.IPV6, 1)
        self._socket.set(zmq.RECONNECT_IVL, int(1000 * RETRY_S))
        self._socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.set(zmq.BACKLOG, BACKLOG)
        self._socket.set(zmq.TCP_KEEPALIVE, 1)
        self._socket.set(zmq.TCP_KEEPALIVE_IDLE, IDLE_S)
        self._socket.set(zmq.TCP_KEEPALIVE_INTVL, ASK_S)
        self._socket.set(zmq.TCP_KEEPALIVE_CNT, ASKS)
        self._socket.set(zmq.TCP_MAXRT, int(STALLED_S * 1000))
        self._curve = None if keys is None else Curve(self._context, self._socket, keys)
        self._bell = Bell()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell.fileno(), zmq.POLLIN)  # a number: pyzmq hides what an object's fileno() raises
        self._numbers = itertools.count()
        self._connections: Connections | None = None  # once there are links of this side's
        self._endpoints: dict[Peer, str] = {}  # of those, with keys
        self._routes: dict[Peer, bytes] = {}  # ZeroMQ's names of them, now
        self._peers: dict[bytes, Peer] = {}  # and the other way round
        self._renewed: dict[Peer, None] = {}  # reconnected links of which the caller has not heard yet
        self._received: deque[tuple[Peer, Frames]] = deque()  # before that
        self._greeted: dict[bytes, str] = {}  # accepted links that have begun with a greeting -> the key of their maker
        self._closed = self._flowing = False

    def bind(self, endpoint: str) -> str:
        """Listen at ``ipc://path``, whose directory must be this user's alone, or at ``tcp://address:port``.

        Port 0 takes a free one. Host names are resolved first, which ZeroMQ would not do.

        Raises:
            ConfigError: the endpoint cannot be bound; the message says why.
        """
        endpoint, key = split_key(endpoint)
        if key and key != self._public:
            raise ConfigError(f"cannot listen at {endpoint}: its key is not that of this process's KVSTORE_SECRET_KEY")
        listener = -1
        if endpoint.startswith("ipc://"):
            require_socket_path(Path(endpoint.removeprefix("ipc://")))
        else:
            listener, endpoint = self._listener(endpoint)
        secured = self._curve is not None and listener >= 0
        if self._curve is not None:
            self._curve.serve() if secured else self._curve.plain()
        self._socket.set(zmq.USE_FD, listener)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as exc:
            raise ConfigError(f"cannot listen at {endpoint}: {exc}") from None
        finally:
            self._socket.set(zmq.USE_FD, -1)
        return with_key(endpoint, self._public) if secured else endpoint

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        """ZeroMQ goes on trying until a process listens there.

        Raises:
            ConfigError: the endpoint is not valid; or it has a key and this process has none, or the other way round.
        """
        peer = b"to:%d" % next(self._numbers)
        self._dial(peer, endpoint)
        self._endpoints[peer] = endpoint
        return peer

    def disconnect(self, peer: Peer) -> None:
        """ZeroMQ ends the connection with the last link to its endpoint."""
        bare = split_key(self._endpoints.pop(peer))[0]
        self._take_all()
        self._received = deque(entry for entry in self._received if entry[0] != peer)
        del self._peers[self._routes.pop(peer)]
        self._renewed.pop(peer, None)
        if self._connections is not None and all(split_key(other)[0] != bare for other in self._endpoints.values()):
            self._connections.forget(bare)
            self._socket.disconnect(bare)

    def send(self, peer: Peer, frames: Sequence[wire.Buffer | ScatteredFrame], priority: int | None = None) -> None:
        if self._closed or peer in self._renewed:  # the caller resends, in order, when ``recv`` says so
            return
        self._socket.send(self._routes.get(peer, peer), zmq.SNDMORE)
        last = len(frames) - 1
        for i, frame in enumerate(map(whole, frames)):
            self._socket.send(frame, zmq.SNDMORE if i < last else 0)

    def identity(self, peer: Peer) -> str:
        return self._greeted.get(peer, "")

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
        """Large frames are views of ZeroMQ's own buffers."""
        if self._closed:
            return None
        deadline = time.monotonic() + timeout
        # One message is likely to follow another; else to ask first costs less than the exception.
        asks = timeout > 0 and not self._flowing
        while not self._renewed and not self._received and (not asks or self._wait(deadline)):
            received = self._next()
            if received is not None:
                return received
            if timeout <= 0:
                self._look()
                break
            asks = True
        if self._received:
            return self._received.popleft()
        return (self._renewed.popitem()[0], []) if self._renewed else None

    def fileno(self) -> int:
        """A descriptor for selectors. When it becomes readable, call ``recv(0)`` until it returns None."""
        return int(self._socket.get(zmq.FD))

    def interrupt(self) -> None:
        self._bell.ring()

    def abandon(self) -> None:
        """A message of which only a part has been given to ZeroMQ goes with the links."""
        self._closed = True
        self._context.destroy(linger=0)
        if self._curve is not None:
            self._curve.close()
        self._bell.close()

    def close(self, linger: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        self._socket.close(linger=int(linger * 1000))
        if self._connections is not None:
            self._connections.close()
        if self._curve is not None:
            self._curve.close()
        self._context.term()
        self._bell.close()

    def _listener(self, endpoint: str) -> tuple[int, str]:
        """Return the number of a listening socket, which is ZeroMQ's to close from now on, and its endpoint.

        ZeroMQ would resolve no host names. And what it accepts has the congestion control of what it listens with.
        """
        if self._root_fd >= 0:
            listener, self._root_fd = socket.socket(fileno=self._root_fd), -1
        else:
            listener, endpoint = listen(endpoint)
        set_congestion_control(listener, self._congestion)
        return listener.detach(), endpoint

    def _dial(self, peer: Peer, endpoint: str) -> None:
        """Connect or reconnect, under a name that ZeroMQ has not had yet."""
        bare, key = split_key(endpoint)
        if self._curve is None and key:
            raise no_keys(bare)
        if self._curve is not None:
            self._curve.link(bare, key)
        if self._connections is None:
            self._connections = Connections(self._context, self._socket, self._congestion)
            self._poller.register(self._connections.monitor, zmq.POLLIN)
        route = b"%s/%d" % (peer, next(self._numbers))
        self._socket.set(zmq.CONNECT_ROUTING_ID, route)
        longest = RETRY_MAX_HERE_S if bare.startswith("ipc://") else RETRY_MAX_S
        self._socket.set(zmq.RECONNECT_IVL_MAX, int(1000 * longest))
        try:
            self._socket.connect(bare)
        except zmq.ZMQError as exc:
            raise ConfigError(f"cannot connect to {bare}: {exc}") from None
        self._connections.watch(bare)
        self._peers.pop(self._routes.get(peer, b""), None)
        self._routes[peer], self._peers[route] = route, peer
        self._socket.send_multipart([route, GREETING])

    def _look(self) -> None:
        """Reconnect the outgoing links that are lost."""
        lost_endpoints = self._connections.find() if self._connections is not None else set()
        if lost_endpoints:
            self._take_all()
        for lost in lost_endpoints:
            self._socket.disconnect(lost)  # all links that lead there
            for peer, endpoint in self._endpoints.items():
                if split_key(endpoint)[0] == lost:
                    self._dial(peer, endpoint)
                    self._renewed[peer] = None

    def _take_all(self) -> None:
        """Take all messages before a disconnect: of one that has begun, ZeroMQ aborts when the rest is not there."""
        while (received := self._next()) is not None:
            self._received.append(received)

    def _next(self) -> tuple[Peer, Frames] | None:
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._flowing = False
                return None
            self._flowing = True
            route = parts[0].bytes
            frames: Frames = [part.buffer for part in parts[1:]]
            if route in self._peers:
                return self._peers[route], frames
            if route in self._greeted:
                return route, frames
            if frames == [GREETING] and route.startswith(_CHOSEN):
                self._greeted[route] = self._proved(parts[1])

    def _proved(self, frame: zmq.Frame) -> str:
        if self._curve is None:
            return ""
        try:
            user = frame.get("User-Id")
        except zmq.ZMQError:  # it came over a link without keys
            return ""
        return str(user) if self._curve.knows(str(user)) else ""

    def _wait(self, deadline: float) -> bool:
        """Wait until something has come, or a link was lost; return False if the deadline or the bell was first."""
        while True:
            left = deadline - time.monotonic()
            ready = dict(self._poller.poll(max(1, int(left * 1000))))
            if self._connections is not None and self._connections.monitor in ready:
                self._look()
            if self._socket in ready or self._renewed:
                return True
            if self._bell.fileno() in ready:
                self._bell.silence()
                return False
            if not ready:
                return False
