"""``python -m benchmarks WHAT``: measure, print tables, and write the figures and a plot of them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from benchmarks.options import parse
from benchmarks.session import Session
from benchmarks.suites.cluster import cluster
from benchmarks.suites.compression import compression
from benchmarks.suites.deaths import deaths
from benchmarks.suites.devices import devices
from benchmarks.suites.encryption import encryption
from benchmarks.suites.everything import everything
from benchmarks.suites.exchange import asynchronous, pushpull, small
from benchmarks.suites.following import followers
from benchmarks.suites.memory import memory, soak
from benchmarks.suites.network import network
from benchmarks.suites.publishing import publish
from benchmarks.suites.row_tables import tables
from benchmarks.suites.rows import rows
from benchmarks.suites.scaling import scale
from benchmarks.suites.straggler import straggler
from benchmarks.suites.training import train

MEASUREMENTS: dict[str, Callable[[Session], None]] = {
    "pushpull": pushpull,
    "small": small,
    "async": asynchronous,
    "rows": rows,
    "train": train,
    "network": network,
    "encryption": encryption,
    "compression": compression,
    "scale": scale,
    "memory": memory,
    "soak": soak,
    "tables": tables,
    "cluster": cluster,
    "publish": publish,
    "followers": followers,
    "straggler": straggler,
    "deaths": deaths,
    "devices": devices,
    "all": everything,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement of the command line; return 1 if a contender failed."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, _end)  # so that processes and hosts are cleared away
    session = Session(options)
    MEASUREMENTS[options.what](session)
    session.finish()
    return int(bool(session.failures))


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
