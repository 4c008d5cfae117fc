"""Versions: which state a table, or an array of a store, was in. A number counts changes; a lineage names the course.

A number alone stands for a history only as long as it grows. To load an older save, or to continue from a checkpoint,
sets it back; then it passes the same numbers again, with other values. So whatever keeps the number of a state (saves,
readers, records, checkpoints) keeps its lineage, too, and compares both.

Each store of a job begins a lineage, which is random. What a table's number does not count (rows that are put, states
of an optimizer that are dropped) begins the next one. That is the same on a server and on its standby.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import NamedTuple

UNKNOWN = 0  # the lineage of what was saved without one: nothing is known to continue it
ROOM = 1 << 60  # lineages are drawn from here up to twice as much: all are nine bytes in a message, and below 2**62


class Version(NamedTuple):
    """A state: the ``number`` of changes so far, in a course that is called ``lineage``."""

    lineage: int
    number: int

    def since(self, earlier: Version) -> int | None:
        """Return how many changes have been made since ``earlier``; None if that is no earlier state of this course."""
        same = self.lineage == earlier.lineage != UNKNOWN
        return self.number - earlier.number if same and earlier.number <= self.number else None


NOWHERE = Version(UNKNOWN, 0)  # no state


def new_lineage() -> int:
    """Return a lineage that nothing else has."""
    return ROOM + secrets.randbelow(ROOM)


def lineage_of(what: str) -> int:
    """Return the lineage that is the same wherever it is made of ``what``, which nothing else is called."""
    return ROOM + int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "big") % ROOM


def next_lineage(lineage: int) -> int:
    """Return the lineage that begins where ``lineage`` ends, because of a change that no number counts.

    It follows from the old one, so that a standby, which makes the same changes, has the same lineages.
    """
    return lineage if lineage == UNKNOWN else lineage + 1
