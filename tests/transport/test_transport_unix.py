"""Unix sockets: what the conformance suite does not know of."""

from __future__ import annotations

import contextlib
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import LONG, until

from kvstore.errors import ConfigError
from kvstore.transport import unix
from kvstore.transport.unix import UnixTransport


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "here"


@pytest.fixture
def ends(place: Path) -> Iterator[tuple[UnixTransport, UnixTransport, bytes]]:
    listener, other = UnixTransport(), UnixTransport()
    link = other.connect(listener.bind(f"ipc://{place}"))
    yield listener, other, link
    other.close()
    listener.close()


def test_what_fits_leaves_in_the_call_that_sends_it(ends: tuple[UnixTransport, UnixTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"head", b"x" * 1000])
    assert other._courier is None, "no thread was needed"
    assert listener.recv(LONG) is not None


def test_what_does_not_fit_leaves_although_its_sender_does_nothing_more(
    ends: tuple[UnixTransport, UnixTransport, bytes],
):
    listener, other, link = ends
    large = bytes(range(256)) * (1 << 16)
    for _ in range(3):
        other.send(link, [b"head", large])
    other.send(link, [b"last"])
    for _ in range(3):
        received = listener.recv(LONG)
        assert received is not None
        assert bytes(received[1][1]) == large
    received = listener.recv(LONG)
    assert received is not None
    assert received[1] == [b"last"]


def test_both_may_send_more_than_fits_before_either_receives(ends: tuple[UnixTransport, UnixTransport, bytes]):
    listener, other, link = ends
    other.send(link, [b"hello"])
    received = listener.recv(LONG)
    assert received is not None
    for _ in range(4):
        other.send(link, [b"to", bytes(1 << 22)])
        listener.send(received[0], [b"back", bytes(1 << 22)])
    for end in (listener, other):
        for _ in range(4):
            message = end.recv(LONG)
            assert message is not None
            assert len(message[1][1]) == 1 << 22


def test_a_link_goes_on_with_whoever_listens_next(place: Path):
    first, other = UnixTransport(), UnixTransport()
    link = other.connect(first.bind(f"ipc://{place}"))
    other.send(link, [b"1"])
    assert first.recv(LONG) is not None
    first.close()
    assert not place.exists(), "its socket has gone with it"
    assert other.recv(0.05) is None
    second = UnixTransport()
    second.bind(f"ipc://{place}")

    def comes() -> bool:
        other.send(link, [b"2"])
        return second.recv(0.05) is not None

    until(comes, "the link is made again")
    other.close()
    second.close()


def test_close_waits_for_what_is_queued_as_long_as_it_may(place: Path):
    listener, other = UnixTransport(), UnixTransport()
    link = other.connect(listener.bind(f"ipc://{place}"))
    other.send(link, [b"head", bytes(8 << 20)])
    closing = threading.Thread(target=other.close, args=(LONG,))
    closing.start()
    received = listener.recv(LONG)
    closing.join(LONG)
    assert not closing.is_alive()
    assert received is not None
    assert len(received[1][1]) == 8 << 20
    listener.close()


@pytest.mark.parametrize(
    "said",
    [b"\xff" * 100, struct.pack("<IQ", 1, 1 << 62), struct.pack("<IQ", 1, 1 << 36) + b"x", b"\x01"],
    ids=["noise", "too large", "more than there is memory", "half a number"],
)
def test_who_speaks_otherwise_is_cut_off_and_costs_others_nothing(
    ends: tuple[UnixTransport, UnixTransport, bytes], place: Path, said: bytes
):
    listener, other, link = ends
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(LONG)
        stranger.connect(str(place))
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        assert listener.recv(0.2) is None
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    other.send(link, [b"x"])
    received = listener.recv(LONG)
    assert received is not None
    assert received[1] == [b"x"]


def test_another_user_is_refused(
    ends: tuple[UnixTransport, UnixTransport, bytes], place: Path, monkeypatch: pytest.MonkeyPatch
):
    listener, _, _ = ends
    assert listener.recv(0) is None  # the first link is accepted as it is
    monkeypatch.setattr(unix.os, "getuid", lambda: 12345)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(LONG)
        monkeypatch.setattr(unix, "_user", lambda _: 54321)
        stranger.connect(str(place))
        assert listener.recv(0.2) is None
        assert stranger.recv(1) == b""


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "ipc://", "here"])
def test_an_endpoint_that_is_none(endpoint: str):
    transport = UnixTransport()
    with pytest.raises(ConfigError, match="no place of a unix socket"):
        transport.connect(endpoint)
    with pytest.raises(ConfigError, match="no place of a unix socket"):
        transport.bind(endpoint)
    transport.close()


def test_a_directory_that_others_can_enter(place: Path):
    place.parent.chmod(0o755)
    transport = UnixTransport()
    with pytest.raises(ConfigError, match="mode 0700"):
        transport.bind(f"ipc://{place}")
    transport.close()
