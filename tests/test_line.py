"""The line of ``line.py``: what it passes on, and what it does when it is cut or its server has gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from line import Line
from strangers import place
from waiting import LONG, until


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(LONG)
        yield listening


@pytest.fixture
def line(server: socket.socket) -> Iterator[Line]:
    made = Line(f"tcp://127.0.0.1:{server.getsockname()[1]}")
    yield made
    made.close()
    assert made.alive == 0


def connect(line: Line) -> socket.socket:
    return socket.create_connection(place(line.endpoint), timeout=LONG)


def test_what_comes_is_passed_on_both_ways_until_it_is_cut(line: Line, server: socket.socket) -> None:
    with connect(line) as client:
        with server.accept()[0] as there:
            client.sendall(b"ask")
            assert there.recv(16) == b"ask"
            there.sendall(b"answer")
            assert client.recv(16) == b"answer"
            line.cut()
            assert client.recv(16) == there.recv(16) == b""
        until(lambda: line.passed == [3], "what was passed to be counted")  # that comes after it was passed
    with connect(line) as client, server.accept()[0] as there:
        client.sendall(b"again")
        assert there.recv(16) == b"again"


def test_what_a_stopped_line_has_not_passed_on_is_lost_when_it_is_cut(line: Line, server: socket.socket) -> None:
    with connect(line) as client, server.accept()[0] as there:
        client.sendall(b"before")
        assert there.recv(16) == b"before"
        line.stop()
        client.sendall(b"held")
        line.cut()
        assert there.recv(16) == b""


def test_a_client_whose_server_has_gone_is_told_so_as_by_the_server_itself(line: Line, server: socket.socket) -> None:
    """ZeroMQ makes a connection anew at any time: a test may end just then."""
    server.close()
    for _ in range(2):
        with connect(line) as client:
            assert client.recv(16) == b""
