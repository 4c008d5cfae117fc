"""Options of failures. No I/O."""

from __future__ import annotations

import argparse

from launcher.job.description import RESTARTS
from launcher.options.values import number


def add(group: argparse._ArgumentGroup) -> None:
    """Add the options."""
    group.add_argument(
        "--replicas",
        type=int,
        choices=(0, 1),
        help="standbys of each server, which take over when it dies (default: 0)",
    )
    group.add_argument(
        "--restarts",
        type=number,
        metavar="N",
        help="start again what dies of the scheduler and, with --replicas 1, of servers and standbys; N times in all "
        f"(default with --replicas 1: {RESTARTS})",
    )
    group.add_argument(
        "--inject",
        metavar="FAULT",
        action="append",
        default=[],
        help="inject a fault, such as kill:server:1@round:100 or stop:standby:0@10s; may be repeated",
    )
