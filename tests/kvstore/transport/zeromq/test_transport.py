"""What is ZeroMQ's alone: which places may be listened at, and what a stranger can do."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path

import pytest
import zmq
from jobkeys import variables
from line import Line
from waiting import LONG, came, until
from zeromq_sockets import Sockets

from kvstore.errors import ConfigError
from kvstore.job.curve_keys import CurveKeys, split_key
from kvstore.transport import memory
from kvstore.transport.sockets.stream import GREETING
from kvstore.transport.system_errors import ignored
from kvstore.transport.zeromq import ZmqTransport, give, may_be


@pytest.fixture
def transport() -> Iterator[ZmqTransport]:
    made = ZmqTransport()
    yield made
    made.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o770, 0o777, 0o1777, 0o701])
def test_a_directory_that_others_can_enter_is_refused(transport: ZmqTransport, directory: Path, mode: int):
    directory.chmod(mode)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        transport.bind(f"ipc://{directory}/s")
    directory.chmod(0o700)
    assert transport.bind(f"ipc://{directory}/s") == f"ipc://{directory}/s"


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:port", "nothing", "ipc://", "http://x:1", "tcp://"])
def test_an_endpoint_that_is_none_is_an_error_with_its_name(transport: ZmqTransport, endpoint: str):
    with pytest.raises(ConfigError, match="cannot connect to"):
        transport.connect(endpoint if endpoint != "ipc://" else "ipc://" + "x" * 200)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:port", "tcp://no.such.host.invalid:0", "tcp://*:0"])
def test_a_place_that_cannot_be_resolved_is_refused(
    transport: ZmqTransport, endpoint: str, monkeypatch: pytest.MonkeyPatch
):
    def unknown(host: str, *_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"cannot listen at tcp://|the endpoint 'tcp://127.0.0.1:port' is not valid"):
        transport.bind(endpoint)


def test_a_host_name_is_resolved_before_binding(transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch):
    real = socket.getaddrinfo

    def resolve(host: str, *args: object, **kwargs: object) -> object:
        return real("127.0.0.1" if host == "node-7.example" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    endpoint = transport.bind("tcp://node-7.example:0")
    assert endpoint.startswith("tcp://127.0.0.1:")
    with socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), timeout=LONG):
        pass


def test_what_is_sent_is_copied_and_what_comes_is_not(monkeypatch: pytest.MonkeyPatch, directory: Path):
    sent = []

    class Spy(zmq.Socket):
        def send(self, data, flags=0, copy=True, **kwargs):  # type: ignore[no-untyped-def]
            sent.append((len(data), copy))
            return super().send(data, flags, copy=copy, **kwargs)

        def recv_multipart(self, flags=0, copy=True, **kwargs):  # type: ignore[no-untyped-def]
            assert not copy
            return super().recv_multipart(flags, copy=copy, **kwargs)

    monkeypatch.setattr(zmq.Context, "socket", partialmethod(zmq.Context.socket, socket_class=Spy))
    listener, other = ZmqTransport(), ZmqTransport()
    try:
        link = other.connect(listener.bind(f"ipc://{directory}/s"))
        sent.clear()
        other.send(link, [bytes(10), bytes(1 << 20)])
        assert sent[1:] == [(10, True), (1 << 20, True)]
        assert listener.recv(LONG) is not None
    finally:
        listener.close()
        other.close()


def test_a_peer_that_takes_a_name_is_not_heard(directory: Path):
    listener, honest = ZmqTransport(), ZmqTransport()
    context = zmq.Context()
    strangers = [context.socket(zmq.DEALER) for _ in range(2)]
    try:
        endpoint = listener.bind(f"ipc://{directory}/s")
        strangers[0].set(zmq.ROUTING_ID, b"to:0")
        for stranger in strangers:
            stranger.set(zmq.LINGER, 0)
            stranger.connect(endpoint)
            stranger.send(GREETING)
            stranger.send(b"me too")
        other = came(listener)
        link = honest.connect(endpoint)
        honest.send(link, [b"me"])
        received = came(listener)
        assert received[1] == [b"me"]
        assert received[0] != other[0]
        listener.send(received[0], [b"for the honest"])
        assert honest.recv(LONG) == (link, [b"for the honest"])
        assert listener.recv(0) is None
        assert not any(stranger.poll(50) for stranger in strangers)
    finally:
        for stranger in strangers:
            stranger.close()
        context.term()
        listener.close()
        honest.close()


def test_who_does_not_greet_is_not_heard(directory: Path):
    listener = ZmqTransport()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    try:
        stranger.connect(listener.bind(f"ipc://{directory}/s"))
        for message in ([b"hello"], [GREETING, b"more"], [b""], [GREETING], [b"heard"]):
            stranger.send_multipart(message)
        received = came(listener)
        assert received[1] == [b"heard"]
    finally:
        stranger.close()
        context.term()
        listener.close()


# ---- connections that break


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Sockets:
    return Sockets(monkeypatch)


@pytest.fixture(params=["plain", "keys"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[ZmqTransport, ZmqTransport, bytes, Line]]:
    """A listener, another that has a link to it, that link, and the line in between."""
    keys = [CurveKeys.from_env(env) for env in variables(2)] if request.param == "keys" else [None, None]
    listener, other = (ZmqTransport(keys=one) for one in keys)
    line = Line(listener.bind("tcp://127.0.0.1:0"))
    yield listener, other, other.connect(line.endpoint), line
    other.close()
    listener.close()
    line.close()


def hear(transport: ZmqTransport) -> tuple[bytes, bytes]:
    received = came(transport)
    return received[0], b" ".join(map(bytes, received[1]))


def test_a_link_that_is_lost_is_made_anew_and_says_so(ends: tuple[ZmqTransport, ZmqTransport, bytes, Line]):
    listener, other, link, line = ends
    names = set()
    for number in range(4):
        other.send(link, [b"%d" % number])
        name, said = hear(listener)
        assert said == b"%d" % number
        names.add(name)
        listener.send(name, [b"answer"])
        assert hear(other) == (link, b"answer")
        line.cut()
        assert other.recv(LONG) == (link, [])
    assert len(names) == 4
    until(lambda: line.alive == 1, "the end of those that ZeroMQ has made")


def test_what_came_before_a_link_was_lost_is_taken_first(
    sockets: Sockets, ends: tuple[ZmqTransport, ZmqTransport, bytes, Line]
):
    listener, other, link, line = ends
    other.send(link, [b"first"])
    name, _ = hear(listener)
    assert other.recv(0) is None, "news of the connection has been taken"
    listener.send(name, [b"answer", b"in two frames"])
    assert sockets.last(zmq.ROUTER).poll(LONG * 1000), "of which ZeroMQ has taken the first by now"
    line.cut()
    assert sockets.last(zmq.PAIR).poll(LONG * 1000)
    assert hear(other) == (link, b"answer in two frames")
    assert other.recv(LONG) == (link, [])
    assert other.recv(0) is None


def test_what_waits_to_leave_when_a_link_is_lost_does_not_overtake_what_is_asked_again(
    ends: tuple[ZmqTransport, ZmqTransport, bytes, Line],
):
    """ZeroMQ makes the connection again by itself, and sends what it still has, before anybody looks at the monitor."""
    listener, other, link, line = ends
    other.send(link, [b"first"])
    assert hear(listener)[1] == b"first"
    line.stop()
    for _ in range(64):
        other.send(link, [bytes(1 << 20)])
    line.cut()
    until(lambda: len(line.passed) == 2 and line.passed[1] > 16 << 20, "what was left of it has come by itself")
    other.send(link, [b"nor this"])
    assert other.recv(LONG) == (link, [])
    other.send(link, [b"again"])
    assert hear(listener)[1] == b"again"


def test_what_is_sent_before_somebody_has_been_told_of_all_losses_is_dropped(
    ends: tuple[ZmqTransport, ZmqTransport, bytes, Line],
):
    listener, other, link, line = ends
    second = other.connect(line.endpoint)
    for one in (link, second):
        other.send(one, [b"first"])
        assert hear(listener)[1] == b"first"
    line.cut()
    told = [other.recv(LONG)]
    left = second if told == [(link, [])] else link
    other.send(left, [b"too early"])
    told.append(other.recv(LONG))
    assert sorted(filter(None, told)) == [(link, []), (second, [])]
    other.send(left, [b"again"])
    assert hear(listener)[1] == b"again"


def test_who_only_looks_now_and_then_is_told_too(ends: tuple[ZmqTransport, ZmqTransport, bytes, Line]):
    listener, other, link, line = ends
    other.send(link, [b"first"])
    assert hear(listener)[1] == b"first"
    line.cut()
    assert until(lambda: other.recv(0), "news of the loss") == (link, [])


def test_memory_settings_are_made_once_and_do_without_glibc(monkeypatch: pytest.MonkeyPatch):
    def missing(_name: object) -> None:
        raise OSError("no libc here")

    memory.keep_freed.cache_clear()
    monkeypatch.setattr(memory.ctypes, "CDLL", missing)
    ZmqTransport().close()
    assert memory.keep_freed.cache_info().currsize == 1
    memory.keep_freed.cache_clear()


@pytest.mark.parametrize(
    ("endpoint", "there"),
    [
        ("tcp://10.0.0.1:5000", "tcp://10.0.0.1:5000"),
        ("tcp://10.0.0.1:5000", "tcp://[::ffff:10.0.0.1]:5000"),
        ("tcp://[fd00::1]:5000", "tcp://[fd00::1]:5000"),
        ("tcp://node-7:5000", "tcp://[::ffff:10.0.0.1]:5000"),
        ("tcp://node-7:5000", "tcp://node-7:5000"),
        ("ipc:///tmp/x", "ipc:///tmp/x"),
    ],
)
def test_an_endpoint_is_recognized(endpoint: str, there: str):
    assert may_be(endpoint, there)


@pytest.mark.parametrize(
    ("endpoint", "there"),
    [
        ("tcp://10.0.0.1:5000", "tcp://10.0.0.2:5000"),
        ("tcp://10.0.0.1:5000", "tcp://10.0.0.1:5001"),
        ("tcp://10.0.0.1:5000", "tcp://[::ffff:10.0.0.2]:5000"),
        ("tcp://[fd00::1]:5000", "tcp://[fd00::2]:5000"),
        ("tcp://node-7:5000", "tcp://10.0.0.1:5001"),
        ("ipc:///tmp/x", "ipc:///tmp/y"),
    ],
)
def test_another_is_not(endpoint: str, there: str):
    assert not may_be(endpoint, there)


def congestion_controls(port: int) -> tuple[set[bytes], set[bytes]]:
    """Return those of this process's connections to ``port``, and of the accepted ones there."""
    made, accepted = set(), set()
    for path in Path("/proc/self/fd").iterdir():
        if not path.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(path.name))) as sock, ignored():  # it is not connected
            here, there = sock.getsockname(), sock.getpeername()
            if sock.family != socket.AF_UNIX and port in (here[1], there[1]):
                name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                (accepted if here[1] == port else made).add(name.rstrip(b"\0"))
    return made, accepted


KEYS = [CurveKeys.from_env(env) for env in variables(2)]


@pytest.fixture(params=[(None, None), KEYS], ids=["plain", "keys"])
def reno_ends(request: pytest.FixtureRequest) -> Iterator[list[ZmqTransport]]:
    made = [ZmqTransport(keys=keys, congestion="reno") for keys in request.param]
    yield made
    for one in made:
        one.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system lets nobody choose")
def test_every_connection_has_the_congestion_control_that_was_chosen(reno_ends: list[ZmqTransport]):
    listener, other = reno_ends
    endpoint = listener.bind("tcp://127.0.0.1:0")
    line = Line(endpoint)
    try:
        link = other.connect(line.endpoint)
        for message in (b"first", b"over another connection"):
            other.send(link, [message])
            received = came(listener)
            listener.send(received[0], [b"answer"])
            assert other.recv(LONG) == (link, [b"answer"])
            there, here = (int(split_key(one)[0].rpartition(":")[2]) for one in (endpoint, line.endpoint))
            assert congestion_controls(there)[1] == {b"reno"}
            assert congestion_controls(here)[0] == {b"reno"}
            line.cut()
            assert other.recv(LONG) == (link, [])
    finally:
        line.close()


def test_a_socket_that_is_there_no_longer_or_is_no_tcp_socket_is_left_alone():
    with socket.socket() as gone:
        number = gone.fileno()
    give(number, b"reno")
    one, two = socket.socketpair()
    with one, two:
        give(one.fileno(), b"reno")
        one.sendall(b"still open")
        assert two.recv(10) == b"still open"
