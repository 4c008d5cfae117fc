"""Unix sockets: where they may be, and who may come."""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import LONG

from kvstore.errors import ConfigError
from kvstore.transport.sockets.stream import GREETING
from kvstore.transport.sockets.unix import UnixTransport


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
def test_an_endpoint_that_is_none(endpoint: str, transport: UnixTransport):
    with pytest.raises(ConfigError, match=r"the endpoint .* is not valid; valid: ipc:"):
        transport.connect(endpoint)
    with pytest.raises(ConfigError, match=r"the endpoint .* is not valid; valid: ipc:"):
        transport.bind(endpoint)


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o755, 0o777])
def test_a_directory_that_others_can_enter(place: Path, transport: UnixTransport, mode: int):
    place.parent.chmod(mode)
    with pytest.raises(ConfigError, match="mode 0700"):
        transport.bind(f"ipc://{place}")


def test_a_directory_that_is_not_there_and_a_path_that_is_too_long(place: Path, transport: UnixTransport):
    with pytest.raises(ConfigError, match="No such file"):
        transport.bind(f"ipc://{place.parent}/nowhere/here")
    with pytest.raises(ConfigError, match="longer than the 107 bytes"):
        transport.bind(f"ipc://{place.parent}/{'x' * 107}")
