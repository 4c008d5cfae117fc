"""The address of this host: told, of an interface, or where the route begins."""

from __future__ import annotations

import socket
import sys

import pytest

from kvstore.errors import ConfigError
from kvstore.job import address
from kvstore.job.address import Address, choose, interfaces, is_any, is_here, is_loopback, resolve

THERE = [("lo", "127.0.0.1"), ("eth0", "10.0.0.5"), ("eth1", "192.168.1.5"), ("lo", "::1"), ("eth0", "2001:db8::5")]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are listed on Linux only")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two networks, from which everything is reached by the first; ``node-7`` is itself."""
    names = {"node-7": ["10.0.0.5"], "head": ["10.0.0.1"], "here": ["10.9.9.9", "10.0.0.5"]}
    monkeypatch.setattr(address, "interfaces", lambda: THERE)
    monkeypatch.setattr(address, "is_here", lambda ip: ip in dict(map(reversed, THERE)))
    monkeypatch.setattr(address, "resolve", lambda name: names.get(name, [name]))
    monkeypatch.setattr(address, "source", lambda toward: "2001:db8::5" if ":" in toward else "10.0.0.5")


def test_what_the_user_says_goes_before_all_else(host: None) -> None:
    given = Address("10.0.0.5", "given as DMLC_NODE_HOST")
    assert choose(host="10.0.0.5", interface="eth1", toward="head") == given
    assert choose(host="node-7") == given
    assert choose(host="here") == given, "the one of its addresses that is here"


@pytest.mark.parametrize("name", ["10.0.0.1", "head", "0.0.0.0", "::"])
def test_what_is_not_here_is_refused_and_what_is_here_is_listed(host: None, name: str) -> None:
    listed = r"this host has lo \(127.0.0.1\), eth0 \(10.0.0.5\), eth1 \(192.168.1.5\)"
    with pytest.raises(ConfigError, match=f"DMLC_NODE_HOST={name} must be the address .*{listed}"):
        choose(host=name)


def test_an_interface(host: None) -> None:
    assert choose(interface="eth1", toward="head") == Address("192.168.1.5", "the address of eth1")
    assert choose(interface="eth0").ip == "10.0.0.5"
    assert choose(interface="eth0", toward="2001:db8::1").ip == "2001:db8::5"
    assert choose(interface="eth1", toward="2001:db8::1").ip == "192.168.1.5", "it has no other"
    with pytest.raises(ConfigError, match=r"DMLC_INTERFACE=ib0: .*this host has lo .*, eth1 \(192.168.1.5\)"):
        choose(interface="ib0")


def test_where_the_route_begins(host: None) -> None:
    chosen = choose(toward="10.0.0.1")
    assert chosen == Address(
        "10.0.0.5", "it leads to 10.0.0.1; there are also eth1 (192.168.1.5)", ("eth1 (192.168.1.5)",)
    )
    assert choose(toward="2001:db8::1") == Address("2001:db8::5", "it leads to 2001:db8::1")
    assert choose().why.startswith("it is what other hosts are likely to reach; there are also eth1")


@pytest.mark.parametrize(("toward", "ip"), [("127.0.0.1", "127.0.0.1"), ("127.1.2.3", "127.0.0.1")])
def test_a_real_route_on_this_host(toward: str, ip: str) -> None:
    assert choose(toward=toward) == Address(ip, f"it leads to {toward}")


def test_a_real_route_by_name() -> None:
    assert choose(toward="localhost").ip in ("127.0.0.1", "::1")


def test_nothing_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere(socket.socket):
        def connect(self, _address: object) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(address.socket, "socket", Nowhere)
    with pytest.raises(ConfigError, match=r"no route from this host to 10.0.0.1: set DMLC_NODE_HOST; this host has "):
        choose(toward="10.0.0.1")
    monkeypatch.setattr(address, "interfaces", lambda: [("lo", "127.0.0.1")])
    with pytest.raises(ConfigError, match="no route from this host to other hosts"):
        choose()


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_args: object, **_kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for wanted in ({"host": "node-7"}, {"toward": "node-7"}):
        with pytest.raises(ConfigError, match=r"cannot resolve 'node-7', .*not known"):
            choose(**wanted)
    with pytest.raises(ConfigError, match="cannot resolve"):
        resolve("x" * 70)


@LINUX
def test_the_interfaces_of_this_host() -> None:
    found = interfaces()
    assert ("lo", "127.0.0.1") in found
    assert all(is_here(ip) for _, ip in found)
    assert not any(ip.startswith("fe80") for _, ip in found)
    assert choose(interface="lo").ip == "127.0.0.1"


@LINUX
def test_ipv6_addresses_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    listed = tmp_path / "if_inet6"
    listed.write_text(
        "fd000000000000000000000000000002 04 40 00 82     eth0\n"
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    monkeypatch.setattr(address, "IF_INET6", listed)
    assert [ip for _, ip in interfaces() if ":" in ip] == ["fd00::2", "::1"]
    monkeypatch.setattr(address, "IF_INET6", tmp_path / "none")
    assert not [ip for _, ip in interfaces() if ":" in ip]


def test_elsewhere_no_interfaces_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert interfaces() == []
    with pytest.raises(ConfigError, match="this host has no known interface"):
        choose(interface="en0")


def test_what_is_here() -> None:
    assert is_here("127.0.0.1")
    assert is_here("127.8.8.8")
    assert not is_here("203.0.113.77")
    assert not is_here("2001:db8::77")


@pytest.mark.parametrize("host", ["localhost", "::1", "127.0.0.1", "127.1.2.3"])
def test_what_only_this_host_reaches(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["127x.example", "127.0.0.1.example", "10.0.0.1", "head", "fe80::1", "0.0.0.0", "::"])
def test_what_others_reach(host: str) -> None:
    assert not is_loopback(host)
    assert is_any(host) is (host in ("0.0.0.0", "::"))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1", "localhost", "a.cluster.local"])
def test_an_endpoint_gives_back_what_it_was_made_of(host: str) -> None:
    assert address.host_and_port(address.tcp_endpoint(host, 99)) == (host, "99")
