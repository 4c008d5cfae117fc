"""The address by which other hosts reach this one. Standard library only: launchers need it before anything else."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError

SIOCGIFADDR = 0x8915
LINK_LOCAL = 0x20  # a scope in if_inet6
ANYWHERE = ("198.51.100.1", "2001:db8::1")  # reserved for documentation, so routes to them are the default routes
IF_INET6 = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class Address:
    """An address of this host, how it was chosen, in words, and the host's other networks, if a route chose it."""

    ip: str
    why: str
    others: tuple[str, ...] = ()


def choose(*, host: str = "", interface: str = "", toward: str = "") -> Address:
    """Return the address to listen at, which other members are told.

    Raises:
        ConfigError: a name is unknown, or there is no route; the message lists this host's interfaces.
    """
    if host:
        return Address(_own(host), "given as DMLC_NODE_HOST")
    if interface:
        addresses = [ip for name, ip in interfaces() if name == interface]
        if not addresses:
            raise ConfigError(f"DMLC_INTERFACE={interface}: no interface with that name has an address; {_valid()}")
        same_family = [ip for ip in addresses if (":" in ip) == (":" in toward)]
        return Address((same_family or addresses)[0], f"the address of {interface}")
    ip = source(toward)
    why = f"it leads to {toward}" if toward else "it is what other hosts are likely to reach"
    others = _others(ip)
    return Address(ip, why + (f"; there are also {', '.join(others)}" if others else ""), others)


def interfaces() -> list[tuple[str, str]]:
    """Return each network interface's name with its address, once for each; IPv4 first, link-local ones left out."""
    if sys.platform != "linux":
        return []
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.append((name, socket.inet_ntoa(answer[20:24])))
    with contextlib.suppress(OSError):  # no IPv6 here
        for line in IF_INET6.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) != LINK_LOCAL:
                addresses.append((name, str(ipaddress.IPv6Address(int(digits, 16)))))
    return addresses


def resolve(host: str) -> list[str]:
    """Return the addresses of ``host``, the preferred first; ConfigError for none."""
    try:
        infos = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise ConfigError(f"cannot resolve {host!r}, which is neither an address nor a known name: {exc}") from None
    return [str(address[0]) for _, _, _, _, address in infos]


def tcp_endpoint(ip: str, port: int | str) -> str:
    """An IPv6 address stands in brackets."""
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"


def host_and_port(endpoint: str) -> tuple[str, str]:
    """The inverse of ``tcp_endpoint``, for an endpoint without a key; empty where there is nothing."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port


def is_here(ip: str) -> bool:
    try:
        with socket.socket(_family(ip), socket.SOCK_DGRAM) as sock:
            sock.bind((ip, 0))
    except OSError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether ``host``, a name or an address, can be reached from this host only."""
    return host in ("localhost", "::1") or (host.startswith("127.") and not host.strip("0123456789."))


def is_any(ip: str) -> bool:
    """Whether ``ip`` stands for all addresses of a host."""
    return ip in ("0.0.0.0", "::")  # noqa: S104


def _own(host: str) -> str:
    for ip in resolve(host):
        if is_here(ip) and not is_any(ip):
            return ip
    raise ConfigError(
        f"DMLC_NODE_HOST={host} must be the address by which the other hosts reach this one, or its name; {_valid()}"
    )


def source(toward: str) -> str:
    """Return the address of this host that leads to ``toward``; empty for any other host."""
    for ip in resolve(toward) if toward else ANYWHERE:
        # The kernel's own choice of a route. The name of the host is no answer: on Debian it leads to 127.0.1.1.
        with contextlib.suppress(OSError), socket.socket(_family(ip), socket.SOCK_DGRAM) as sock:
            sock.connect((ip, 9))  # of a datagram socket: nothing is sent
            return str(sock.getsockname()[0])
    if not toward:  # a network that leads nowhere else is one all the same
        for _, ip in interfaces():
            if not is_loopback(ip):
                return ip
    raise ConfigError(f"no route from this host to {toward or 'other hosts'}: set DMLC_NODE_HOST; {_valid()}")


def _others(ip: str) -> tuple[str, ...]:
    """The interfaces of this host's other networks, of the same IP version; empty if ``ip`` is on loopback."""
    if is_loopback(ip):
        return ()
    addresses = interfaces()
    same_network = {name for name, address in addresses if address == ip}
    return tuple(
        f"{name} ({address})"
        for name, address in addresses
        if name not in same_network and not is_loopback(address) and (":" in address) == (":" in ip)
    )


def _valid() -> str:
    return "this host has " + (", ".join(f"{name} ({ip})" for name, ip in interfaces()) or "no known interface")


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET
