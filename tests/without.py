"""Tests as on a machine that lacks some programs: they must skip what needs these, and pass the rest. Needs root.

    .venv/bin/python tests/without.py mpirun.openmpi mpirun.mpich -- -q tests/launcher tests/cluster

What is behind ``--`` is for pytest. In a mount namespace of its own each program is covered by a file that cannot be
executed, wherever it lies, so nobody finds it, however they look: not by PATH, nor in /usr/sbin.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from cluster.missing import PLACES, find

# $1: how many of the next words are files to be covered; the others are what to run then.
COVER = 'n=$1; shift; while [ "$n" -gt 0 ]; do mount --bind /dev/null "$1"; shift; n=$((n - 1)); done; exec "$@"'


def files(programs: Iterable[str]) -> list[str]:
    """What is executed under these names; links are followed, so other names of the same file go with them."""
    places = [Path(place) for place in PLACES.split(os.pathsep) if place]
    found = (place / program for program in programs for place in places)
    return sorted({str(path.resolve()) for path in found if path.is_file()})


def without(programs: Iterable[str], argv: Sequence[str]) -> list[str]:
    """The command line that runs ``argv`` where none of these programs is found."""
    covered = files(programs)
    return [find("unshare") or "unshare", "--mount", "sh", "-ec", COVER, "sh", str(len(covered)), *covered, *argv]


def main(words: Sequence[str]) -> None:
    if "--" not in words:
        sys.exit(__doc__)
    at = words.index("--")
    argv = without(words[:at], [sys.executable, "-m", "pytest", *words[at + 1 :]])
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
