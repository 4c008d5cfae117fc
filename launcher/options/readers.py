"""Options of readers. No I/O."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.options.values import count


def add(group: argparse._ArgumentGroup) -> None:
    """Add the options."""
    group.add_argument(
        "--readers",
        metavar="FILE",
        type=lambda text: str(Path(text).absolute()),
        help="let other processes read the values while the job runs: kvstore.connect(FILE). FILE is made, for you "
        "alone to read, and removed at the end; it may have a key",
    )
    group.add_argument("--max-readers", metavar="N", type=count, default=64, help="readers at once (default: 64)")
