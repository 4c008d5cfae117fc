"""What is ZeroMQ's alone: which places may be listened at, and what a stranger can do."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from waiting import LONG

from kvstore import memory
from kvstore.errors import ConfigError
from kvstore.memory import SMALL
from kvstore.transport.zeromq import ZmqTransport


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


def test_a_directory_of_another_user_is_refused(
    transport: ZmqTransport, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        transport.bind(f"ipc://{directory}/s")


def test_a_directory_that_is_not_there_is_named(transport: ZmqTransport, directory: Path):
    with pytest.raises(ConfigError, match=r"cannot listen at .*/nothing/s: No such file"):
        transport.bind(f"ipc://{directory}/nothing/s")


def test_a_path_that_is_too_long_is_refused_and_the_longest_works(transport: ZmqTransport, directory: Path):
    longest = directory / ("x" * (107 - len(str(directory)) - 1))
    with pytest.raises(ConfigError, match="longer than the 107 bytes"):
        transport.bind(f"ipc://{longest}x")
    transport.bind(f"ipc://{longest}")
    assert longest.is_socket()


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
    with pytest.raises(ConfigError, match="cannot listen at tcp://"):
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


def test_large_frames_are_handed_over_and_small_ones_copied(monkeypatch: pytest.MonkeyPatch, directory: Path):
    sent = []

    class Spy(zmq.Socket):
        def send(self, data, flags=0, copy=True, **kwargs):  # type: ignore[no-untyped-def]
            sent.append((len(data), copy))
            return super().send(data, flags, copy=copy, **kwargs)

        def recv_multipart(self, flags=0, copy=True, **kwargs):  # type: ignore[no-untyped-def]
            assert not copy
            return super().recv_multipart(flags, copy=copy, **kwargs)

    monkeypatch.setattr(zmq.Context, "_socket_class", Spy)
    listener, other = ZmqTransport(), ZmqTransport()
    try:
        link = other.connect(listener.bind(f"ipc://{directory}/s"))
        sent.clear()
        other.send(link, [bytes(SMALL - 1), bytes(SMALL)])
        assert sent[1:] == [(SMALL - 1, True), (SMALL, False)]
        assert listener.recv(LONG) is not None
    finally:
        listener.close()
        other.close()


def test_a_peer_cannot_take_the_name_of_another(directory: Path):
    listener, honest = ZmqTransport(), ZmqTransport()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    try:
        endpoint = listener.bind(f"ipc://{directory}/s")
        link = honest.connect(endpoint)
        honest.send(link, [b"me"])
        received = listener.recv(LONG)
        assert received is not None
        name = received[0]
        stranger.set(zmq.LINGER, 0)
        stranger.set(zmq.ROUTING_ID, b"to:0")
        stranger.connect(endpoint)
        stranger.send(b"me too")
        other = listener.recv(LONG)
        assert other is not None
        assert other[0] != name
        listener.send(name, [b"for the honest"])
        assert honest.recv(10) == (link, [b"for the honest"])
        assert not stranger.poll(50)
    finally:
        stranger.close()
        context.term()
        listener.close()
        honest.close()


def test_memory_settings_are_made_once_and_do_without_glibc(monkeypatch: pytest.MonkeyPatch):
    def missing(_name: object) -> None:
        raise OSError("no libc here")

    memory.keep_freed.cache_clear()
    monkeypatch.setattr(memory.ctypes, "CDLL", missing)
    ZmqTransport().close()
    assert memory.keep_freed.cache_info().currsize == 1
    memory.keep_freed.cache_clear()
