"""Where servers and the scheduler listen, and what they say of it."""

from __future__ import annotations

import logging
import socket

import pytest
from jobkeys import variables

from kvstore.errors import ConfigError
from kvstore.job import address
from kvstore.job.config import Config
from kvstore.job.curve_keys import CurveKeys, with_key
from servers import endpoints as places
from servers.endpoints import scheduler_endpoint, server_endpoint, warn_if_open

KEYS = CurveKeys.from_env(variables(2)[0])
NAMES = {"head": "10.0.0.1", "me": "10.0.0.5", "service": "10.96.0.7", "debian": "127.0.1.1"}
HERE = ("10.0.0.5", "192.168.1.5", "127.0.0.1", "127.0.1.1", "127.1.2.3", "::1", "fd00::5")


@pytest.fixture(autouse=True)
def networks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A host at 10.0.0.5, from which everything beyond it is reached there; a test may give it more networks."""

    def getaddrinfo(host: str, *_args: object, **_kwargs: object) -> object:
        if host.replace(".", "").isalpha() and host not in (*NAMES, "localhost"):
            raise socket.gaierror(-2, "Name or service not known")
        ip = NAMES.get(host, "127.0.0.1" if host == "localhost" else host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0))]

    def source(toward: str) -> str:
        found = NAMES.get(toward, toward)
        return "fd00::5" if found.startswith("fd00") else found if found in HERE else "10.0.0.5"

    there = [("lo", "127.0.0.1"), ("eth0", "10.0.0.5"), ("eth0", "fd00::5")]
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(address, "source", source)
    monkeypatch.setattr(address, "interfaces", lambda: there)
    monkeypatch.setattr(address, "is_here", HERE.__contains__)
    monkeypatch.setattr(places, "is_here", HERE.__contains__)
    return there


def config(root: str, **options: object) -> Config:
    return Config(role="server", root=root, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("root", "node_host", "interface", "expected"),
    [
        ("ipc:///run/job/scheduler", "", "", "ipc:///run/job/server-3"),
        ("ipc:///run/job/scheduler", "10.0.0.5", "eth0", "ipc:///run/job/server-3"),
        ("tcp://127.0.0.1:9000", "", "", "tcp://127.0.0.1:0"),
        ("tcp://127.0.0.1:9000", "", "eth0", "tcp://127.0.0.1:0"),
        ("tcp://127.1.2.3:9000", "", "", "tcp://127.1.2.3:0"),
        ("tcp://[::1]:9000", "", "", "tcp://[::1]:0"),
        ("tcp://10.0.0.1:9000", "", "", "tcp://10.0.0.5:0"),
        ("tcp://head:9000", "", "", "tcp://10.0.0.5:0"),
        ("tcp://[fd00::1]:9000", "", "", "tcp://[fd00::5]:0"),
        ("tcp://[fd00::1]:9000", "", "eth0", "tcp://[fd00::5]:0"),
        ("tcp://10.0.0.1:9000", "192.168.1.5", "", "tcp://192.168.1.5:0"),
        ("tcp://10.0.0.1:9000", "me", "nothing", "tcp://10.0.0.5:0"),
        ("tcp://10.0.0.1:9000", "", "eth0", "tcp://10.0.0.5:0"),
        ("tcp://not.there.yet:9000", "", "", "tcp://10.0.0.5:0"),
        ("tcp://not.there.yet:9000", "me", "", "tcp://10.0.0.5:0"),
    ],
)
def test_where_a_server_listens(root: str, node_host: str, interface: str, expected: str):
    assert server_endpoint(config(root, node_host=node_host, interface=interface), "server-3") == expected
    if root.startswith("tcp://"):
        keyed = config(with_key(root, KEYS.root), node_host=node_host, interface=interface, keys=KEYS)
        assert server_endpoint(keyed, "server-3") == expected


def test_an_address_of_another_host_is_refused():
    with pytest.raises(ConfigError, match=r"DMLC_NODE_HOST=10.0.0.9 must be the address"):
        server_endpoint(config("tcp://head:9000", node_host="10.0.0.9"), "server-0")
    with pytest.raises(ConfigError, match=r"DMLC_INTERFACE=eth7: .*eth0"):
        server_endpoint(config("tcp://head:9000", interface="eth7"), "server-0")


def test_a_choice_among_networks_is_said_aloud(networks: list[tuple[str, str]], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        server_endpoint(config("tcp://head:9000"), "server-0")
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert caplog.messages == ["this host is 10.0.0.5: it leads to head"]
        networks.append(("eth1", "192.168.1.5"))
        server_endpoint(config("tcp://head:9000"), "server-0")
        assert caplog.records[-1].levelname == "WARNING"
        assert caplog.messages[-1] == (
            "this host is 10.0.0.5: it leads to head; there are also eth1 (192.168.1.5). "
            "DMLC_INTERFACE or DMLC_NODE_HOST chooses another"
        )
        for told in ({"interface": "eth1"}, {"node_host": "192.168.1.5"}):
            assert server_endpoint(config("tcp://head:9000", **told), "server-0") == "tcp://192.168.1.5:0"
            assert caplog.records[-1].levelname == "INFO"
        for root in ("tcp://127.0.0.1:9000", "tcp://me:9000"):
            server_endpoint(config(root), "server-0")
            assert caplog.records[-1].levelname == "INFO", "there is no choice"


@pytest.mark.parametrize(
    ("root", "options", "expected"),
    [
        ("ipc:///run/job/scheduler", {}, "ipc:///run/job/scheduler"),
        ("inproc://scheduler", {}, "inproc://scheduler"),
        ("tcp://127.0.0.1:9000", {}, "tcp://127.0.0.1:9000"),
        ("tcp://localhost:9000", {}, "tcp://127.0.0.1:9000"),
        ("tcp://10.0.0.5:9000", {}, "tcp://10.0.0.5:9000"),
        ("tcp://me:9000", {"node_host": "192.168.1.5"}, "tcp://10.0.0.5:9000"),
        ("tcp://[fd00::5]:9000", {}, "tcp://[fd00::5]:9000"),
        ("tcp://service:9000", {}, "tcp://10.0.0.5:9000"),
        ("tcp://service:9000", {"node_host": "192.168.1.5"}, "tcp://192.168.1.5:9000"),
        ("tcp://service:9000", {"interface": "eth0"}, "tcp://10.0.0.5:9000"),
        ("tcp://not.there.yet:9000", {}, "tcp://10.0.0.5:9000"),
        ("tcp://service:9000", {"root_fd": 7}, "tcp://service:9000"),
    ],
)
def test_where_the_scheduler_listens(root: str, options: dict[str, object], expected: str):
    assert scheduler_endpoint(config(root, **options)) == expected
    if root.startswith("tcp://"):
        assert scheduler_endpoint(config(with_key(root, KEYS.root), **options)) == with_key(expected, KEYS.root)


@pytest.mark.parametrize("root", ["tcp://0.0.0.0:9000", "tcp://[::]:9000"])
def test_the_scheduler_does_not_listen_everywhere(root: str):
    with pytest.raises(ConfigError, match="give the address by which all members reach the scheduler"):
        scheduler_endpoint(config(root))


@pytest.mark.parametrize(
    ("root", "warnings"),
    [
        (
            "tcp://10.0.0.9:9",
            ["the scheduler listens at 10.0.0.5: DMLC_PS_ROOT_URI=10.0.0.9 is not an address of this"],
        ),
        ("tcp://service:9", []),
        ("tcp://me:9", []),
        ("tcp://localhost:9", []),
        ("tcp://debian:9", ["DMLC_PS_ROOT_URI=debian is 127.0.1.1 here, where no other host reaches the scheduler"]),
        ("tcp://not.there.yet:9", ["not.there.yet cannot be resolved here yet"]),
    ],
)
def test_what_may_be_a_mistake_is_said(root: str, warnings: list[str], caplog: pytest.LogCaptureFixture):
    scheduler_endpoint(config(root))
    assert len(caplog.messages) == len(warnings)
    assert all(said.startswith(expected) for said, expected in zip(caplog.messages, warnings, strict=True))


@pytest.mark.parametrize(
    ("endpoint", "options", "warned"),
    [
        ("tcp://10.0.0.5:9000", {}, True),
        ("tcp://head:9000", {}, True),
        ("tcp://10.0.0.5:9000", {"encryption": False}, False),
        ("tcp://10.0.0.5:9000", {"keys": KEYS}, False),
        ("tcp://127.0.0.1:9000", {}, False),
        ("tcp://localhost:9000", {}, False),
        ("tcp://[::1]:9000", {}, False),
        ("ipc:///run/job/scheduler", {}, False),
    ],
)
def test_links_that_are_open_to_strangers_are_warned_of(
    endpoint: str, options: dict[str, object], warned: bool, caplog: pytest.LogCaptureFixture
):
    warn_if_open(config(endpoint, **options), endpoint)
    assert len(caplog.messages) == warned
    if warned:
        for words in ("not encrypted", endpoint, "launch.py", "set KVSTORE_SECRET_KEY, ", "KVSTORE_ENCRYPTION=0"):
            assert words in caplog.text
