"""Chooses the host of each process of a job. No I/O.

Slots are for workers. Hosts without a number of slots share the remaining workers evenly. Servers go in turn to the
hosts that have workers, and take no slots there. If servers have hosts of their own, they fill these as workers do.
The standby of a server is on the next host on which servers may be, and takes no slot. On one host, it is there, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.job.contract import Member, Role
from launcher.errors import LaunchError
from launcher.hosts.hostfile import Host
from launcher.job.description import Job


def place(job: Job, hosts: Sequence[Host], server_hosts: Sequence[Host] | None = None) -> dict[Host, list[Member]]:
    """Choose a host for each worker, server and standby. The scheduler runs beside launch.py.

    Args:
        job: the numbers of workers and servers, and the placement.
        hosts: the hosts in the hostfile.
        server_hosts: the hosts for servers; None for the hosts that have workers.

    Returns:
        The hosts that have members, in their order, each with its members, servers and standbys first.

    Raises:
        LaunchError: there are more workers, or servers, than slots.
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
