"""Reads hostfiles, and chooses the host of each process. No I/O, but for `read`.

A line is `[user@]host[:port] [slots=N]`. Blank lines, and what follows a `#`, are ignored. An IPv6 address with a port
is in brackets. After the colon, a number below 1024 other than 22 is a number of slots, as in SINGA's and MPICH's
`host:4`.

Slots are for workers. Hosts without a number of slots share the remaining workers evenly. Servers go in turn to the
hosts that have workers, and take no slots there. If servers have hosts of their own, they fill these as workers do.
The standby of a server is on the next host on which servers may be, and takes no slot. On one host, it is there, too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.job.contract import Member, Role
from launcher.errors import LaunchError
from launcher.job.description import Job

FIRST_PORT = 1024  # smaller numbers are slots
SSH_PORT = 22
MAX_SLOTS = 1024
_LINE = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?P<name>\[[^\]\s]+\]|[^\s:\[\]]+|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.%\w]*)"
    r"(?::(?P<number>[0-9]{1,9}))?(?P<options>(?:\s+[\w-]+=\S*)*)"
)
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
# As in OpenSSH: ssh may put the name into a command of the user's configuration, which a shell executes.
_USER = re.compile(r"(?!-)[^\s\x00-\x1f\x7f'`\";&<>|(){}]*(?<!\\)")
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Host:
    """A host to run on."""

    name: str  # its name, its address, or its name in ssh's configuration
    user: str = ""  # the user to log in as; empty for ssh's choice
    port: int = 0  # the port of its sshd; 0 for ssh's choice
    slots: int | None = None  # the number of workers that it takes; None if the hostfile does not say

    @property
    def here(self) -> bool:
        """Whether it is this machine, which needs no ssh."""
        return self.name in _HERE and not self.port and not self.user


def read(path: str) -> list[Host]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the hostfile {path}: {getattr(error, 'strerror', None) or error}") from None
    return parse(text.splitlines(), path)


def parse(lines: Iterable[str], path: str = "the hostfile") -> list[Host]:
    """The hosts in these lines, each once. If a host is named again, its slots are added up."""
    hosts: dict[tuple[str, str, int], Host] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            host = _host(text)
        except ValueError as error:
            raise LaunchError(
                f"{path}, line {number}: {error}; a line is [user@]host[:port] [slots=N], such as node1 slots=4"
            ) from None
        key = (host.user, host.name, host.port)
        before = hosts.get(key)
        hosts[key] = host if before is None else replace(host, slots=(before.slots or 1) + (host.slots or 1))
    if not hosts:
        raise LaunchError(f"{path} names no host; write one on each line, such as node1 slots=4")
    return list(hosts.values())


def _host(text: str) -> Host:
    match = _LINE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a host")
    name = match["name"].strip("[]")
    if ":" in name:
        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            raise ValueError(f"{name!r} is not an IPv6 address") from None
        if not _NAME.fullmatch(name.partition("%")[2] or "_"):  # Python does not check the interface
            raise ValueError(f"{name!r} is not an IPv6 address")
    elif not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a host name")
    if not _USER.fullmatch(match["user"] or ""):
        raise ValueError(f"{match['user']!r} is not a user name")
    port, slots = 0, None
    if match["number"]:
        number = int(match["number"])
        if number >= FIRST_PORT or number == SSH_PORT:
            port = number
        else:
            slots = number
        if port > 65535:
            raise ValueError(f"port {port} is out of range: 1 to 65535")
    for option in match["options"].split():
        what, _, value = option.partition("=")
        if what in ("max_slots", "max-slots"):  # Open MPI's, which only mpirun reads
            continue
        if what != "slots":
            raise ValueError(f"{what!r} is not an option of a host; valid: slots")
        if not (value.isascii() and value.isdigit()):
            raise ValueError(f"slots={value} is not a number")
        slots = int(value[:9])
    if slots is not None and not 1 <= slots <= MAX_SLOTS:
        raise ValueError(f"slots={slots} is out of range: 1 to {MAX_SLOTS}")
    return Host(name, match["user"] or "", port, slots)


def place(job: Job, hosts: Sequence[Host], server_hosts: Sequence[Host] | None = None) -> dict[Host, list[Member]]:
    """Choose a host for each worker, server and standby. The scheduler runs beside launch.py.

    `server_hosts`: the hosts for servers; None for the hosts that have workers. Returns the hosts that have members, in
    their order, each with its members, servers and standbys first.
    """
    policy = job.cluster.placement
    workers = _spread(job.num_workers, hosts, policy, "worker")
    if server_hosts is not None:
        able = list(server_hosts)
        servers = _spread(job.num_servers, able, policy, "server")
    else:
        taken = set(workers)
        able = [host for host in hosts if host in taken]
        servers = [able[rank % len(able)] for rank in range(job.num_servers)]
    placed: dict[Host, list[Member]] = {host: [] for host in [*hosts, *(server_hosts or ())]}
    for rank, host in enumerate(servers):
        placed[host].append(("server", rank))
    for rank in range(job.num_standbys):
        placed[able[(able.index(servers[rank]) + 1) % len(able)]].append(("standby", rank))
    for rank, host in enumerate(workers):
        placed[host].append(("worker", rank))
    return {host: members for host, members in placed.items() if members}


def _spread(count: int, hosts: Sequence[Host], policy: str, role: Role) -> list[Host]:
    room = _room(count, hosts)
    if sum(room) < count:
        raise LaunchError(
            f"{count} {role}s do not fit into {sum(room)} slots on {len(hosts)} hosts; add hosts, or raise slots=N"
        )
    if policy == "fill":
        return [host for host, slots in zip(hosts, room, strict=True) for _ in range(slots)][:count]
    turns = [host for turn in range(max(room)) for host, slots in zip(hosts, room, strict=True) if turn < slots]
    return turns[:count]


def _room(count: int, hosts: Sequence[Host]) -> list[int]:
    """The number of processes for each host: its slots or, if not given, an even share of the remaining processes."""
    said = sum(host.slots for host in hosts if host.slots is not None)
    silent = sum(host.slots is None for host in hosts)
    share, more = divmod(max(0, count - said), silent) if silent else (0, 0)
    room = []
    for host in hosts:
        if host.slots is not None:
            room.append(host.slots)
        else:
            room.append(share + (more > 0))
            more -= 1
    return room
