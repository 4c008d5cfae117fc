"""TCP without keys: where it listens, how it finds others, and what it takes over from whoever started it."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from cutting import connections
from waiting import LONG, came, until

from kvstore.errors import ConfigError
from kvstore.transport import Transport
from kvstore.transport.sockets import socket_transport
from kvstore.transport.sockets.link import Link
from kvstore.transport.sockets.places import TcpPlaces
from kvstore.transport.sockets.socket_transport import TcpTransport, UnixTransport
from kvstore.transport.sockets.stream import GREETING, packed
from kvstore.transport.transport import ASK_S, ASKS, IDLE_S
from kvstore.transport.zeromq import ZmqTransport

T = TypeVar("T", bound=Transport)


@pytest.fixture
def new() -> Iterator[Callable[..., TcpTransport]]:
    yield from _maker(TcpTransport)


@pytest.fixture(params=[TcpTransport, ZmqTransport])
def either(request: pytest.FixtureRequest) -> Iterator[Callable[..., Transport]]:
    """What carries TCP with keys must do these things, too."""
    yield from _maker(request.param)


def _maker(kind: Callable[..., T]) -> Iterator[Callable[..., T]]:
    made: list[T] = []

    def make(*args: Any, **kwargs: Any) -> T:
        made.append(kind(*args, **kwargs))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


def hear(transport: Transport) -> list[bytes]:
    received = came(transport)
    return [bytes(frame) for frame in received[1]]


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="this system has no such settings")
def test_idle_connections_are_kept_known_at_both_ends(either: Callable[..., Transport]):
    listener, other = either(), either()
    endpoint = listener.bind("tcp://127.0.0.1:0")
    other.send(other.connect(endpoint), [b"hello"])
    assert hear(listener) == [b"hello"]
    found = []
    for made in connections(os.getpid()):
        with made:
            if str(made.getsockname()[1]) in endpoint or str(made.getpeername()[1]) in endpoint:
                assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
                found.append([made.getsockopt(socket.IPPROTO_TCP, option) for option in options])
    assert found == [[IDLE_S, ASK_S, ASKS]] * 2


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:port", "nothing", "ipc://here", "http://x:1", "tcp://", "tcp://:1", "tcp://x", "tcp://x:99999"],
)
def test_an_endpoint_that_is_none(new: Callable[..., TcpTransport], endpoint: str):
    with pytest.raises(ConfigError, match=r"the endpoint .* is not valid; valid: tcp:"):
        new().connect(endpoint)
    with pytest.raises(ConfigError, match=r"the endpoint .* is not valid; valid: tcp:"):
        new().bind(endpoint)


def test_an_endpoint_with_a_key_is_for_those_who_have_one(new: Callable[..., TcpTransport]):
    with pytest.raises(ConfigError, match="has a key, and this process has none: set KVSTORE_"):
        new().connect(f"tcp://127.0.0.1:9000?key={'x' * 40}")


@pytest.mark.parametrize("endpoint", ["tcp://no.such.host.invalid:0", "tcp://*:0"])
def test_a_place_that_cannot_be_resolved(
    new: Callable[..., TcpTransport], endpoint: str, monkeypatch: pytest.MonkeyPatch
):
    def unknown(host: str, *_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"cannot listen at tcp:.*not known"):
        new().bind(endpoint)


def require_reached(name: str, listener: TcpTransport, other: TcpTransport) -> None:
    port = listener.bind("tcp://127.0.0.1:0").rpartition(":")[2]
    other.send(other.connect(f"tcp://{name}:{port}"), [b"hello"])
    assert hear(listener) == [b"hello"]


def test_a_name_that_is_not_known_yet_is_looked_up_again(
    new: Callable[..., TcpTransport], monkeypatch: pytest.MonkeyPatch
):
    real, tries = socket.getaddrinfo, []

    def resolve(host: str, *args: object, flags: int = 0, **kwargs: object) -> object:
        if host != "node-7.example":
            return real(host, *args, flags=flags, **kwargs)
        if not flags & socket.AI_NUMERICHOST:
            tries.append(host)
        if len(tries) < 3:
            raise socket.gaierror(-2, "Name or service not known")
        return real("127.0.0.1", *args, flags=flags, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    require_reached("node-7.example", new(), new())
    assert len(tries) == 3


def test_each_address_of_a_name_is_tried(new: Callable[..., TcpTransport], monkeypatch: pytest.MonkeyPatch):
    real = socket.getaddrinfo

    def resolve(host: str, port: int, *args: object, flags: int = 0, **kwargs: object) -> object:
        if host != "two.example":
            return real(host, port, *args, flags=flags, **kwargs)
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("127.0.0.9", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    require_reached("two.example", new(), new())


def test_closing_does_not_wait_for_a_name_to_be_resolved(
    new: Callable[..., TcpTransport], monkeypatch: pytest.MonkeyPatch
):
    asked, go_on = threading.Event(), threading.Event()

    def resolve(*_args: object, flags: int = 0, **_kwargs: object) -> object:
        if not flags & socket.AI_NUMERICHOST:
            asked.set()
            go_on.wait(LONG)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket_transport, "JOIN_S", 0.05)
    before = set(threading.enumerate())
    transport = new()
    transport.connect("tcp://node-7.example:1")
    assert asked.wait(LONG)
    transport.close()
    (thread,) = set(threading.enumerate()) - before
    go_on.set()
    thread.join(LONG)
    assert not thread.is_alive()


def test_localhost_is_loopback(either: Callable[..., Transport]):
    host = either().bind("tcp://localhost:0").removeprefix("tcp://").rpartition(":")[0]
    assert host in ("127.0.0.1", "[::1]")


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6(new: Callable[..., TcpTransport]):
    listener, other = new(), new()
    try:
        endpoint = listener.bind("tcp://[::1]:0")
    except ConfigError as error:
        pytest.skip(str(error))
    assert endpoint.startswith("tcp://[::1]:")
    other.send(other.connect(endpoint), [b"hello"])
    assert hear(listener) == [b"hello"]


def test_a_socket_from_the_parent_is_used_for_the_first_bind(either: Callable[..., Transport]):
    sock = socket.create_server(("127.0.0.1", 0))
    endpoint = "tcp://{}:{}".format(*sock.getsockname())
    listener, other = either(sock.detach()), either()
    assert listener.bind(endpoint) == endpoint
    other.send(other.connect(endpoint), [b"hello"])
    assert hear(listener) == [b"hello"]
    assert listener.bind("tcp://127.0.0.1:0") != endpoint, "and only for that"


def test_a_connection_made_before_the_process_listens_is_served(either: Callable[..., Transport]):
    """The parent opened the port, so a worker may come before the scheduler has started."""
    sock = socket.create_server(("127.0.0.1", 0))
    endpoint = "tcp://{}:{}".format(*sock.getsockname())
    other = either()
    other.send(other.connect(endpoint), [b"early"])
    listener = either(sock.detach())
    listener.bind(endpoint)
    assert hear(listener) == [b"early"]


def test_a_real_connection_has_what_was_chosen(new: Callable[..., TcpTransport]):
    listener, other = new(congestion="reno"), new(congestion="reno")
    other.send(other.connect(listener.bind("tcp://127.0.0.1:0")), [b"hello"])
    assert hear(listener) == [b"hello"]
    (ours,), (theirs,) = other.links.values(), listener.strangers.links.values()
    for link in (ours, theirs.link):
        assert link.socket is not None
        name = link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert name.rstrip(b"\0") == b"reno"


def half_of_a_large_message(listener: TcpTransport, endpoint: str) -> tuple[socket.socket, socket.socket, memoryview]:
    """Send the first half; return the socket of who does, that of the listener, and the other half."""
    sender = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])))
    sender.sendall(b"".join([GREETING, *map(bytes, packed([b"hello"]))]))
    received = came(listener)
    listener.admit(received[0])
    whole = memoryview(b"".join(map(bytes, packed([b"head", b"x" * (1 << 20)]))))
    sender.sendall(whole[: 1 << 19])
    rest = whole[1 << 19 :]

    def read() -> bool:
        assert listener.recv(0.01) is None
        return any(len(link.incoming.room()) == len(rest) for link in listener.links.values())

    until(read, "the listener to have read the first half")
    (link,) = listener.links.values()
    assert link.wakes_at > 1
    assert link.socket is not None
    return sender, link.socket, rest


def test_a_little_of_a_large_frame_wakes_nobody(new: Callable[..., TcpTransport]):
    listener = new()
    sender, there, rest = half_of_a_large_message(listener, listener.bind("tcp://127.0.0.1:0"))
    with sender:
        assert there.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 256 << 10
        sender.sendall(rest[:1000])
        assert select.select([there], [], [], 0.1)[0] == []
        sender.sendall(rest[1000:])
        assert hear(listener) == [b"head", b"x" * (1 << 20)]
        assert there.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        sender.sendall(b"".join(map(bytes, packed([b"small"]))))
        assert hear(listener) == [b"small"]


def test_the_end_of_a_connection_wakes_in_the_middle_of_a_large_frame(new: Callable[..., TcpTransport]):
    listener = new()
    sender, there, _ = half_of_a_large_message(listener, listener.bind("tcp://127.0.0.1:0"))
    sender.close()
    assert select.select([there], [], [], LONG)[0] == [there]
    assert listener.recv(0) is None
    assert listener.links == {}


def test_a_large_frame_arrives_although_the_system_forgets_to_wake(
    new: Callable[..., TcpTransport], monkeypatch: pytest.MonkeyPatch
):
    """As Linux before 5.8 might if small packets filled the memory of a connection before enough had come."""
    woken: list[int] = []

    def forget(_: object, made: socket.socket, count: int) -> None:
        woken.append(count)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 if count == 1 else 1 << 30)

    monkeypatch.setattr(TcpPlaces, "wake_at", forget)
    listener = new()
    sender, _, rest = half_of_a_large_message(listener, listener.bind("tcp://127.0.0.1:0"))
    with sender:
        sender.sendall(rest)
        received = None

        def arrived() -> bool:
            nonlocal received
            received = received or listener.recv(0.01)
            return received is not None

        until(arrived, "the large frame")
    assert woken[0] > 1
    assert received is not None
    assert bytes(received[1][1]) == b"x" * (1 << 20)


def test_a_connection_to_itself_is_none(monkeypatch: pytest.MonkeyPatch):
    """At a free port of this host a socket may find itself; whoever is to listen there could not any more."""

    def to_itself(made: socket.socket, _address: object) -> int:
        made.setblocking(True)
        made.bind(("127.0.0.1", 0))
        made.connect(made.getsockname())
        assert made.getsockname() == made.getpeername()
        return 0

    monkeypatch.setattr(socket.socket, "connect_ex", to_itself)
    link = Link(b"x", "tcp://127.0.0.1:9")
    assert link.dial([(socket.AF_INET, ("127.0.0.1", 9))], 0.0) is None
    assert link.socket is None
    assert link.lonely


def test_who_does_not_answer_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    link = Link(b"x", "tcp://192.0.2.1:9")
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: errno.EINPROGRESS)
    assert link.dial([(socket.AF_INET, ("192.0.2.1", 9))], 100.0) is None
    assert link.arrive(105.0) is None
    assert link.socket is not None, "it may still come"
    assert link.arrive(111.0) is None
    assert link.lonely
    assert link.due > 111.0


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "here"


@pytest.fixture
def transport() -> Iterator[UnixTransport]:
    made = UnixTransport()
    yield made
    made.close()


def test_its_sockets_go_with_it(place: Path, transport: UnixTransport):
    places = [place.with_name("one"), place.with_name("two")]
    for one in places:
        transport.bind(f"ipc://{one}")
        assert one.is_socket()
    transport.close()
    assert not any(one.exists() for one in places)


def test_another_user_is_refused(place: Path, transport: UnixTransport, monkeypatch: pytest.MonkeyPatch):
    transport.bind(f"ipc://{place}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as friend:
        friend.settimeout(LONG)
        friend.connect(str(place))
        assert transport.recv(0.2) is None
        assert friend.recv(100) == GREETING
    really = socket.socket.getsockopt

    def another(made: socket.socket, level: int, option: int, *size: int) -> int | bytes:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED):
            return struct.pack("3i", 1, 54321, 54321)
        return really(made, level, option, *size)

    monkeypatch.setattr(socket.socket, "getsockopt", another)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(LONG)
        stranger.connect(str(place))
        assert transport.recv(0.2) is None
        assert stranger.recv(100) == b""


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "ipc://", "here"])
def test_an_endpoint_that_is_no_path(endpoint: str, transport: UnixTransport):
    with pytest.raises(ConfigError, match=r"the endpoint .* is not valid; valid: ipc:"):
        transport.connect(endpoint)
    with pytest.raises(ConfigError, match=r"the endpoint .* is not valid; valid: ipc:"):
        transport.bind(endpoint)


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o755, 0o777])
def test_a_directory_that_others_can_enter(place: Path, transport: UnixTransport, mode: int):
    place.parent.chmod(mode)
    with pytest.raises(ConfigError, match="mode 0700"):
        transport.bind(f"ipc://{place}")
