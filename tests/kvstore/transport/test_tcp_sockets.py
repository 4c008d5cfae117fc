"""TCP sockets of the system: where they listen, and which congestion control connections are given."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from kvstore.errors import ConfigError
from kvstore.transport.tcp_sockets import congestion_control, listen, resolved, set_congestion_control


class Kernel:
    """Sockets of a system that has a congestion control of its own, and lets this process choose some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, own: str, *allowed: str) -> None:
        self.own, self.allowed = own, allowed
        really_set, really_get = socket.socket.setsockopt, socket.socket.getsockopt

        def setsockopt(sock: socket.socket, level: int, option: int, value: int | bytes) -> None:
            if (level, option) != (socket.IPPROTO_TCP, socket.TCP_CONGESTION):
                really_set(sock, level, option, value)
                return
            assert isinstance(value, bytes)
            if value.decode() not in self.allowed:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        def getsockopt(sock: socket.socket, level: int, option: int, size: int = 0) -> int | bytes:
            if (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION):
                return self.own.encode().ljust(size, b"\0")
            return really_get(sock, level, option, size)

        monkeypatch.setattr(socket.socket, "setsockopt", setsockopt)
        monkeypatch.setattr(socket.socket, "getsockopt", getsockopt)


@pytest.mark.parametrize(
    ("own", "allowed", "wanted", "chosen"),
    [
        ("cubic", ("reno", "cubic", "bbr"), "", ""),
        ("dctcp", ("reno", "cubic"), "", ""),
        ("bbr", ("reno", "cubic", "bbr"), "", "cubic"),
        ("bbr", ("reno", "bbr"), "", "reno"),
        ("bbr", (), "", ""),
        ("bbr", ("reno", "cubic", "bbr"), "bbr", "bbr"),
        ("cubic", ("reno", "cubic"), "reno", "reno"),
    ],
)
def test_connections_have_the_systems_congestion_control_but_not_bbr(
    monkeypatch: pytest.MonkeyPatch, own: str, allowed: tuple[str, ...], wanted: str, chosen: str
):
    Kernel(monkeypatch, own, *allowed)
    assert congestion_control(wanted) == chosen.encode()


def test_a_congestion_control_that_there_is_not():
    with pytest.raises(ConfigError, match=r"KVSTORE_CONGESTION=.nonsense. is not valid; valid: nothing, or one that"):
        congestion_control("nonsense")


def of(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system lets nobody choose")
@pytest.mark.parametrize("name", [b"reno", b""])
def test_what_is_accepted_has_the_congestion_control_of_the_listening_socket(name: bytes):
    listener, endpoint = listen("tcp://localhost:0")
    assert endpoint == f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    before = of(listener)
    set_congestion_control(listener, name)
    with listener, socket.create_connection(listener.getsockname()):
        made, _ = listener.accept()
        with made:
            assert of(made) == (name or before)


def test_a_port_that_is_taken_is_named():
    listener, endpoint = listen("tcp://127.0.0.1:0")
    with listener, pytest.raises(ConfigError, match=rf"cannot listen at {endpoint}: Address already in use"):
        listen(endpoint)


def test_a_host_without_an_address_is_said_in_words(monkeypatch: pytest.MonkeyPatch):
    def unknown(*_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert resolved("no.such.host", 1) == "[Errno -2] Name or service not known"
