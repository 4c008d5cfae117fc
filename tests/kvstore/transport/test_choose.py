"""Which transport a job's links go over, by its settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jobkeys
import pytest

from kvstore.errors import ConfigError
from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys
from kvstore.transport import Transport
from kvstore.transport.choose import links
from kvstore.transport.sockets.socket_transport import TcpTransport, UnixTransport
from kvstore.transport.zeromq import ZmqTransport

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
