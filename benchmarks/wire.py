"""What the lines between hosts allow: rates in the words of ``tc``, and the least time of a round. Pure."""

from __future__ import annotations

import re

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def bytes_a_ms(rate: str) -> float:
    """Return how many bytes a line carries in a millisecond.

    Args:
        rate: in bits a second, in the words of ``tc``: ``200mbit``, ``1gbit``, ``2.5gbit``.

    Raises:
        ValueError: it is none, or zero.
    """
    given = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if given is None or not float(given[1]):
        raise ValueError(f"{rate!r} is not a rate; write bits a second, as in 200mbit or 1gbit")
    return float(given[1]) * _UNITS[given[2]] / 8000


def host_bytes(nbytes: int, hosts: int) -> float:
    """Return the bytes that each host has to send in a round if one gradient leaves a host: ``2·M·(n-1)/n``.

    Each of n hosts keeps an n-th of the ``nbytes`` of the parameters, on its server. It sends its gradient for the
    other parts, and then the values of its own part to the other hosts. A ring over the hosts sends as much.
    """
    return 2 * nbytes * (hosts - 1) / hosts


def wire_ms(nbytes: int, hosts: int, rate: str = "1gbit", servers_apart: bool = False) -> float:
    """Return the least time of a round in ms, without the headers of packets, if one gradient leaves a host.

    Args:
        nbytes: of all parameters.
        hosts: how many have workers.
        rate: what each host may send, and receive.
        servers_apart: whether the servers are on as many other hosts. Each host with workers then sends and receives
            all of its ``nbytes``, both at once; else see ``host_bytes``.
    """
    return (nbytes if servers_apart else host_bytes(nbytes, hosts)) / bytes_a_ms(rate)
