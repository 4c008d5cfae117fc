"""Options of hosts and of the network between them. No I/O."""

from __future__ import annotations

import argparse

from launcher.job.cluster import PLACEMENTS


def add_hosts(group: argparse._ArgumentGroup) -> None:
    """Add the options of hosts."""
    add = group.add_argument
    add(
        "-H",
        "--hostfile",
        metavar="FILE",
        help="file with the hosts, one on each line: [user@]host[:port] [slots=N], or host:N",
    )
    add(
        "--server-hosts",
        metavar="FILE",
        help="file with the hosts of the servers (default: the hosts that have workers)",
    )
    add(
        "--placement",
        choices=PLACEMENTS,
        default=PLACEMENTS[0],
        help="fill the slots of each host before the next host (default), or take the hosts in turn",
    )
    add("--sync-dst-dir", metavar="DIR", help="copy the working directory to DIR on each host first, and run there")
    add(
        "--sync-exclude",
        metavar="PATTERN",
        action="append",
        default=[],
        help="do not copy files that match; may be repeated",
    )
    add("--sync-gitignore", action="store_true", help="do not copy .git, nor files that a .gitignore names")
    add("--ssh-config", metavar="FILE", help="configuration file for ssh, instead of ~/.ssh/config")
    add("--ssh-option", metavar="K=V", action="append", default=[], help="option for ssh's -o; may be repeated")
    add("--python", default="", metavar="PATH", help="interpreter on the hosts (default: the path of this one)")


def add_network(group: argparse._ArgumentGroup) -> None:
    """Add the options of the network."""
    add = group.add_argument
    add("--host-ip", default="", metavar="IP", help="address by which the hosts reach this machine")
    add("--interface", default="", metavar="NAME", help="network interface to use on every host, such as eth0")
    add(
        "--no-encryption",
        dest="encryption",
        action="store_false",
        help="plain links, for networks that you trust: anyone who reaches a port can read the data and join the job",
    )
    add(
        "--no-host-aggregation",
        dest="host_aggregation",
        action="store_false",
        help="start no aggregators, which sum the gradients of hosts with two workers or more",
    )
