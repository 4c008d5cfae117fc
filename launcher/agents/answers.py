"""What hosts answer before a job begins, and why one of them cannot take part. No I/O."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import kvstore
from kvstore.job.address import Address
from launcher.agents.links import protocol as p
from launcher.agents.remote import RemoteAgent


def version_problem(remote: RemoteAgent) -> str:
    """What is wrong with the version of a host; empty if nothing is."""
    mine, hello = kvstore.__version__, remote.said(p.Hello)
    if hello is None or hello.version == mine:
        return ""
    return f"has torch-kvstore {hello.version} (Python {hello.python}), but this machine has {mine}; install the same"


def surveyed(remote: RemoteAgent) -> p.Surveyed:
    """What a host has answered, when it was asked for its address."""
    answer = remote.said(p.Surveyed)
    assert answer is not None  # noqa: S101 (all have been asked)
    return answer


def unfit(remote: RemoteAgent) -> str:
    """What is wrong with a host. Its address is checked, because other agents will get it."""
    answer = surveyed(remote)
    if answer.problem:
        return answer.problem
    try:
        ipaddress.ip_address(answer.address)
    except ValueError:
        return f"reports the address {answer.address!r}, which is not an IP address"
    return "" if answer.port else "its agent does not listen"


def addresses_chosen(own: Address, remotes: Sequence[RemoteAgent]) -> list[str]:
    """If hosts have several networks: which address was chosen, and why, for this machine and for each of them."""
    by_host = {remote.host: surveyed(remote) for remote in remotes}
    others = {host: answer for host, answer in by_host.items() if answer.address != own.ip}
    lines = [f"this machine is reached at {own.ip}: {own.why}"] if others and own.others else []
    several = ((host, answer) for host, answer in others.items() if answer.several)
    return [*lines, *(f"{host} is reached at {answer.address}: {answer.why}" for host, answer in several)]


def has_servers(remote: RemoteAgent) -> bool:
    """Whether other hosts must reach it, because servers run there."""
    return any(role in ("server", "standby") for role, _ in remote.members)


def unreached(remote: RemoteAgent) -> str:
    """Which hosts it cannot reach; empty if it reaches all."""
    probed = remote.said(p.Probed)
    if probed is None or not probed.failures:
        return ""
    where = ", ".join(f"{name} ({why})" for name, why in probed.failures)
    return f"cannot reach {where}; name the network that all share with --interface, or this machine's --host-ip"
