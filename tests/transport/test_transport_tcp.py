"""TCP without keys: where it listens, how it finds others, and what it takes over from whoever started it."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from waiting import LONG

from kvstore.errors import ConfigError
from kvstore.transport import Transport, courier
from kvstore.transport.link import Link
from kvstore.transport.tcp import TcpTransport
from kvstore.transport.zeromq import ZmqTransport

T = TypeVar("T", bound=Transport)


@pytest.fixture
def new() -> Iterator[Callable[..., TcpTransport]]:
    yield from _maker(TcpTransport)


@pytest.fixture(params=[TcpTransport, ZmqTransport])
def either(request: pytest.FixtureRequest) -> Iterator[Callable[..., Transport]]:
    """What carries TCP with keys must do these things, too."""
    yield from _maker(request.param)


def _maker(kind: Callable[[int], T]) -> Iterator[Callable[..., T]]:
    made: list[T] = []

    def make(root_fd: int = -1) -> T:
        made.append(kind(root_fd))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


def hear(transport: Transport) -> list[bytes]:
    received = transport.recv(LONG)
    assert received is not None
    return [bytes(frame) for frame in received[1]]


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:port", "nothing", "ipc://here", "http://x:1", "tcp://", "tcp://:1", "tcp://x", "tcp://x:99999"],
)
def test_an_endpoint_that_is_none(new: Callable[..., TcpTransport], endpoint: str):
    with pytest.raises(ConfigError, match="no place of a TCP socket"):
        new().connect(endpoint)
    with pytest.raises(ConfigError, match="no place of a TCP socket"):
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
    listener, other = new(), new()
    port = listener.bind("tcp://127.0.0.1:0").rpartition(":")[2]
    other.send(other.connect(f"tcp://node-7.example:{port}"), [b"hello"])
    assert hear(listener) == [b"hello"]
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
    listener, other = new(), new()
    port = listener.bind("tcp://127.0.0.1:0").rpartition(":")[2]
    other.send(other.connect(f"tcp://two.example:{port}"), [b"hello"])
    assert hear(listener) == [b"hello"]


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
    monkeypatch.setattr(courier, "JOIN_S", 0.05)
    transport = new()
    transport.connect("tcp://node-7.example:1")
    assert asked.wait(LONG)
    transport.close()
    thread = transport._courier._thread
    assert thread is not None
    assert thread.is_alive()
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


def test_a_connection_to_itself_is_none():
    """At a free port of this host a socket may find itself; whoever is to listen there could not any more."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()
        link = Link(b"x", "tcp://{}:{}".format(*address))
        probe.connect(address)  # its own
        assert probe.getsockname() == probe.getpeername()
        link.socket, link._address = probe, address
        assert link.arrive(0.0) is None
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
