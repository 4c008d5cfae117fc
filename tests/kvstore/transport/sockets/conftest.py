"""Both kinds of sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from socket_kinds import Kind, hear

from kvstore.transport.sockets.socket_transport import SocketTransport


@pytest.fixture(params=["unix", "tcp"])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    with tempfile.TemporaryDirectory() as directory:
        made = Kind(request.param, Path(directory))
        yield made
        made.close()


@pytest.fixture
def ends(kind: Kind) -> tuple[SocketTransport, SocketTransport, bytes]:
    """A listener, another that has a link to it and is known, and that link."""
    listener, other = kind.listening(), kind.new()
    link = other.connect(kind.endpoint)
    other.send(link, [b"here"])
    hear(listener)
    return listener, other, link
