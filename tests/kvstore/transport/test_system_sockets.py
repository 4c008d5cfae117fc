"""TCP sockets of the system: where they listen, and which congestion control connections are given."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jobkeys
import pytest

from kvstore.errors import ConfigError
from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys
from kvstore.transport import Transport
from kvstore.transport.choose import links
from kvstore.transport.sockets.socket_transport import TcpTransport, UnixTransport
from kvstore.transport.system_errors import ignored, require_systems
from kvstore.transport.system_sockets import (
    MAX_PATH,
    Bell,
    congestion_control,
    listen,
    listening,
    require_socket_path,
    resolved,
    set_congestion_control,
)
from kvstore.transport.zeromq import ZmqTransport


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


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    made.close()


def rings(bell: Bell) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_it_is_readable_from_ring_until_silence(bell: Bell) -> None:
    assert not rings(bell)
    bell.ring()
    assert rings(bell)
    assert rings(bell), "to look does not silence it"
    bell.silence()
    assert not rings(bell)


def test_silence_where_nobody_has_rung_does_not_block(bell: Bell) -> None:
    bell.silence()
    assert not rings(bell)


def test_however_often_it_is_rung_nobody_waits_and_one_silence_is_enough(bell: Bell) -> None:
    for _ in range(4000):  # more than fits: a wake-up is there, so what does not fit need not be
        bell.ring()
    assert rings(bell)
    bell.silence()
    assert not rings(bell)


def test_after_close_ringing_does_nothing(bell: Bell) -> None:
    bell.close()
    bell.ring()


def test_a_directory_of_this_user_alone_will_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    require_socket_path(tmp_path / "here")


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o750, 0o755, 0o777])
def test_one_that_others_can_enter_or_read_will_not(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        require_socket_path(tmp_path / "here")


def test_the_path_has_the_length_that_the_system_allows(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    room = MAX_PATH - len(os.fsencode(tmp_path)) - 1
    require_socket_path(tmp_path / ("x" * room))
    with pytest.raises(ConfigError, match=f"longer than the {MAX_PATH} bytes"):
        require_socket_path(tmp_path / ("x" * (room + 1)))


def test_who_listens_on_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        endpoint = f"tcp://127.0.0.1:{there.getsockname()[1]}"
        assert listening(endpoint) is True
    assert listening(endpoint) is False


def test_who_listens_on_a_unix_socket(tmp_path: Path) -> None:
    assert listening(f"ipc://{tmp_path}/none") is False
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(f"{tmp_path}/there")
        there.listen(1)
        assert listening(f"ipc://{tmp_path}/there") is True
    assert listening(f"ipc://{tmp_path}/there") is False  # the file stays


SYSTEMS = [ConnectionResetError(errno.ECONNRESET, "reset"), TimeoutError(errno.ETIMEDOUT, "timed out")]
OTHERS = [TimeoutError("the alarm"), OSError("made by hand")]


@pytest.mark.parametrize("error", SYSTEMS)
def test_errors_with_a_number_are_ignored(error: OSError) -> None:
    with ignored():
        raise error
    require_systems(error)


@pytest.mark.parametrize("error", OTHERS)
def test_errors_without_one_are_raised(error: OSError) -> None:
    with pytest.raises(type(error)) as caught, ignored():
        raise error
    assert caught.value is error
    with pytest.raises(type(error)):
        require_systems(error)


def test_other_classes_are_ignored_if_they_are_named() -> None:
    with ignored(ValueError):
        raise ValueError
    with pytest.raises(KeyError), ignored(ValueError):
        raise KeyError
    with pytest.raises(KeyboardInterrupt), ignored(ValueError):
        raise KeyboardInterrupt


def test_what_is_no_error_of_the_system_is_not_this_modules_to_judge() -> None:
    require_systems(ValueError("another class"))


KEYS = CurveKeys.from_env(jobkeys.variables(1)[0])
IPC, TCP = "ipc:///run/job/scheduler", "tcp://10.0.0.1:9"


@contextmanager
def end(config: Config) -> Iterator[Transport]:
    transport = links(config)()
    try:
        yield transport
    finally:
        transport.close()


@pytest.mark.parametrize("setting", ["sockets", "tcp", "zeromq"])
@pytest.mark.parametrize(
    ("root", "keys", "usual"),
    [(IPC, None, UnixTransport), (IPC, KEYS, UnixTransport), (TCP, None, TcpTransport), (TCP, KEYS, ZmqTransport)],
)
def test_links_are_sockets_but_with_keys_or_where_zeromq_is_wanted(
    setting: str, root: str, keys: CurveKeys | None, usual: type
) -> None:
    with end(Config(root=root, keys=keys, transport=setting)) as transport:
        assert type(transport) is (ZmqTransport if setting == "zeromq" else usual)


def test_the_setting_is_read_from_the_environment() -> None:
    with end(Config.from_env({"DMLC_PS_ROOT_URI": IPC, "KVSTORE_TRANSPORT": "ZeroMQ"})) as transport:
        assert isinstance(transport, ZmqTransport)


@pytest.mark.parametrize("ways", [{}, {"keys": KEYS}, {"transport": "zeromq"}])
def test_all_links_over_tcp_are_given_the_congestion_control(ways: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="KVSTORE_CONGESTION='nonsense' is not valid"):
        links(Config(root=TCP, congestion="nonsense", **ways))()


@pytest.mark.parametrize("setting", ["sockets", "zeromq"])
def test_on_one_host_a_congestion_control_does_not_matter(setting: str) -> None:
    with end(Config(root=IPC, transport=setting, congestion="nonsense")):
        pass
