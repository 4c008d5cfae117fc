"""Times rounds and writes the report. Needs the standard library only: the peers' environments have little else."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP = 3
# What a host of ``benchmarks.hosts`` counts of what it sends; elsewhere the number means nothing.
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def nothing() -> None:
    """Do nothing before a round."""


def timed(
    one_round: Callable[[], Any], rounds: int, before: Callable[[], Any] = nothing, warm_up: int = WARM_UP
) -> list[float]:
    """Return the time of each round in milliseconds, after some rounds of warm-up.

    Args:
        one_round: the function to time; it returns when the round is complete.
        rounds: the number of rounds to return.
        before: called before each round, not timed.
        warm_up: the number of rounds before them.
    """
    times = []
    for _ in range(warm_up + rounds):
        before()
        start = time.perf_counter()
        one_round()
        times.append(1000 * (time.perf_counter() - start))
    return times[warm_up:]


def measured(one_round: Callable[[], Any], rounds: int, before: Callable[[], Any] = nothing) -> dict[str, Any]:
    """Return what a report says of rounds: ``times`` as of ``timed``, and ``sent``, what this host sends in one."""
    timed(one_round, 0, before)
    first = _sent()
    times = timed(one_round, rounds, before, warm_up=0)
    return {"times": times, "sent": (_sent() - first) / rounds}


def parser() -> argparse.ArgumentParser:
    """Return a parser with the options of all programs."""
    made = argparse.ArgumentParser()
    made.add_argument("--rounds", type=int, default=10)
    made.add_argument("--report", type=Path, required=True, help="the file that rank 0 writes")
    return made


def report(path: Path, **figures: Any) -> None:
    """Write ``figures`` as JSON to ``path``, for the process that started this one."""
    path.write_text(json.dumps(figures))


def _sent() -> int:
    return int(SENT.read_text()) if SENT.exists() else 0
