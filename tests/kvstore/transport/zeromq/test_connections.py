"""Which connection an event of ZeroMQ's is about, and what connections are given."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobkeys import variables
from line import Line
from waiting import LONG

from kvstore.job.curve_keys import CurveKeys, split_key
from kvstore.transport.system_errors import ignored
from kvstore.transport.zeromq import ZmqTransport, give, may_be


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
def ends(request: pytest.FixtureRequest) -> Iterator[list[ZmqTransport]]:
    made = [ZmqTransport(keys=keys, congestion="reno") for keys in request.param]
    yield made
    for one in made:
        one.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system lets nobody choose")
def test_every_connection_has_the_congestion_control_that_was_chosen(ends: list[ZmqTransport]):
    listener, other = ends
    endpoint = listener.bind("tcp://127.0.0.1:0")
    line = Line(endpoint)
    try:
        link = other.connect(line.endpoint)
        for message in (b"first", b"over another connection"):
            other.send(link, [message])
            received = listener.recv(LONG)
            assert received is not None
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
