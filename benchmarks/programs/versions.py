"""What programs that publish versions to readers have in common, whichever way the bytes take. Needs numpy alone.

The publisher changes some elements, and publishes them when every reader has the version before. Each reader notes when
it has a version in its arrays. The clock is the host's, and the same for all processes.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.programs.stopwatch import parser, report

POLL_S = 0.001
LIMIT_S = 600.0

Version = Callable[[int], Any]  # publishes a version of that number, or returns when this process has it


def options(ways: list[str]) -> argparse.Namespace:
    """Return the options of a program that publishes, or reads, in one of some ways."""
    made = parser()
    made.add_argument("--who", choices=ways, required=True)
    made.add_argument("--net", default="small-decoder")
    made.add_argument("--share", type=float, default=0.01, help="of the elements, that each version changes")
    made.add_argument("--readers", type=int, default=1)
    made.add_argument("--reader", type=int, default=-1, help="which reader this is; by default the publisher")
    made.add_argument("--folder", type=Path, required=True, help="in which processes find each other")
    return made.parse_args()


def take_part(args: argparse.Namespace, bits: Any, version: Version) -> None:
    """Publish and report, or follow. ``bits``: all elements of 16 bits, 1-d int16."""
    if args.reader < 0:
        report(args.report, **published(args, bits, version))
    else:
        follow(args, bits, version)


def published(args: argparse.Namespace, bits: Any, publish: Version) -> dict[str, Any]:
    """Publish all versions; return the times in ms until readers have each: from the call, and from its return."""
    rng = np.random.default_rng(0)
    bits[:] = rng.integers(0x3C00, 0x3F80, len(bits), np.int16)
    whole, after = [], []
    for reader in range(args.readers):
        _noted(args.folder / f"reader{reader}", 0)
    for number in range(1, 2 + args.rounds):
        bits[rng.integers(0, len(bits), int(args.share * len(bits)))] ^= 1
        began = time.monotonic()
        publish(number)
        returned = time.monotonic()
        visible = max(_noted(args.folder / f"reader{reader}", number) for reader in range(args.readers))
        whole.append(1000 * (visible - began))
        after.append(1000 * (visible - returned))
    for reader in range(args.readers):
        if _noted(args.folder / f"reader{reader}", number + 1) != zlib.crc32(bits):
            raise SystemExit(f"reader {reader} does not have what was published")
    return {"first": whole[0], "first_after": after[0], "whole": whole[1:], "after": after[1:]}


def follow(args: argparse.Namespace, bits: Any, wait: Version) -> None:
    """Wait for all versions, and note when each was here."""
    with (args.folder / f"reader{args.reader}").open("a", buffering=1) as notes:
        notes.write("0 0\n")  # it is ready
        for number in range(1, 2 + args.rounds):
            wait(number)
            notes.write(f"{number} {time.monotonic()!r}\n")
        notes.write(f"{number + 1} {zlib.crc32(bits)}\n")


def wait_for(path: Path) -> None:
    """Return when a file is there."""
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path.name} is not there after {LIMIT_S:g} s")
        time.sleep(POLL_S)


def _noted(path: Path, number: int) -> float:
    """Return what a reader has noted of a version, when it has."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
            noted, _, value = line.partition(" ")
            if noted == str(number) and line.endswith("\n"):
                return float(value)
        time.sleep(POLL_S)
    raise SystemExit(f"{path.name} does not have version {number} after {LIMIT_S:g} s")
