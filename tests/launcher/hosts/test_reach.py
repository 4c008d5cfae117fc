"""Whether addresses answer, with real sockets of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from waiting import LONG

from launcher.hosts.reach import listener, unreachable

SHORT = 0.05


@pytest.fixture
def here() -> Iterator[int]:
    with listener("127.0.0.1") as sock:
        yield sock.getsockname()[1]


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def silent() -> Iterator[int]:
    """A port whose queue is full: the kernel answers to nobody."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        port = int(sock.getsockname()[1])
        waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            waiting.append(one)
        yield port
        for one in waiting:
            one.close()


def test_all_answer(here: int) -> None:
    assert unreachable([("a", "127.0.0.1", here), ("b", "127.0.0.1", here)], LONG) == []
    assert unreachable([], LONG) == []


def test_one_refuses_and_one_is_silent(here: int, silent: int) -> None:
    targets = [("a", "127.0.0.1", here), ("b", "127.0.0.1", closed_port()), ("c", "127.0.0.1", silent)]
    assert sorted(unreachable(targets, SHORT)) == [("b", "connection refused"), ("c", "no answer within 0.05 s")]


@pytest.mark.parametrize("address", ["", "not an address", "1:2:3", "fe80::1%nowhere", "a" * 300, "\0", "256.1.1.1"])
def test_what_is_no_address_is_not_reached(here: int, address: str) -> None:
    """An agent may have said so, and the others must not fall over it."""
    ((name, why),) = unreachable([("bad", address, 1), ("good", "127.0.0.1", here)], LONG)
    assert name == "bad"
    assert why


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6() -> None:
    try:
        sock = listener("::1")
    except OSError:
        pytest.skip("no IPv6 here")
    with sock:
        assert unreachable([("a", "::1", sock.getsockname()[1])], LONG) == []


@pytest.mark.parametrize("address", ["198.51.100.1", "2001:db8::1"])
def test_an_address_that_is_not_ours(address: str) -> None:
    with pytest.raises(OSError, match=r"."):
        listener(address)
