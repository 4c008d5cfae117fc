"""The last lines of an example: what was reached, what it has cost, and what to try next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore import Statistics
from kvstore.job.config import Config

WORKERS, SERVERS = 2, 2  # of the job that is suggested to a program that runs alone


def cost(seconds: float, rounds: int, statistics: Statistics, unit: str = "rounds") -> str:
    """Return a line about time and bytes; bytes only where a store has sent any.

    Args:
        seconds: how long the training took.
        rounds: how many updates of the weights this worker took part in.
        statistics: this worker's, of a store that was new when the training began.
        unit: what these updates are called; stores that do not wait have no rounds.
    """
    line = f"{seconds:.1f} s for {rounds} {unit}, {rounds / seconds:.1f} a second"
    if statistics.bytes_pushed or statistics.bytes_pulled:
        line += f"; each worker sent {size(statistics.bytes_pushed)} and received {size(statistics.bytes_pulled)}"
    return line


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number of things: `1 epoch`, `8 epochs`."""
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"


def size(nbytes: int) -> str:
    """Return a number of bytes in a unit that suits it: `13.8 MB`."""
    value, unit = float(nbytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"


def command(*options: str, num_workers: int = 0) -> str:
    """Return the command line that runs this program again as a job on this machine, with further options.

    Args:
        options: words to add to those of this process; for argparse the last of several values of an option counts.
        num_workers: how many workers; 0 for as many as now.
    """
    config = Config.from_env()
    workers, servers = config.num_workers or WORKERS, config.num_servers or SERVERS
    sizes = ("-n", str(num_workers or workers), "-s", str(servers))
    return shlex.join([*_launch(), *sizes, "python", *sys.argv, *options])


def _launch() -> Sequence[str]:
    """The words that start launch.py from here."""
    if shutil.which("launch.py"):
        return ["launch.py"]
    beside = Path(sys.executable).with_name("launch.py")
    if not beside.exists():
        return [sys.executable, "-m", "launcher"]
    below = os.path.relpath(beside)
    return [str(beside) if below.startswith(os.pardir) else below]


def try_next(suggestions: Sequence[tuple[str, str]]) -> str:
    """Return the lines that suggest commands. A suggestion is what it is for, and the command."""
    return "\n".join(["To try next:", *(f"  {purpose}:\n    {line}" for purpose, line in suggestions)])
