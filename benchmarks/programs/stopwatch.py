"""Times rounds and writes what came of it. Needs nothing installed: the peers' environments have little."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP = 3


def nothing() -> None:
    """What to do before each round, if there is nothing to do."""


def timed(
    one_round: Callable[[], Any], rounds: int, before: Callable[[], Any] = nothing, warm_up: int = WARM_UP
) -> list[float]:
    """What each of so many rounds took, in milliseconds, after a few that are not counted.

    Args:
        one_round: what to time; it returns when the round is complete.
        rounds: how many to count.
        before: called before each round, and not timed.
        warm_up: how many not to count.
    """
    times = []
    for _ in range(warm_up + rounds):
        before()
        start = time.perf_counter()
        one_round()
        times.append(1000 * (time.perf_counter() - start))
    return times[warm_up:]


def parser() -> argparse.ArgumentParser:
    """The options that all programs have."""
    made = argparse.ArgumentParser()
    made.add_argument("--rounds", type=int, default=10)
    made.add_argument("--report", type=Path, required=True, help="the file that rank 0 writes")
    return made


def report(path: Path, **figures: Any) -> None:
    """Leave ``figures`` as JSON where who started this process looks for them."""
    path.write_text(json.dumps(figures))
