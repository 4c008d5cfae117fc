"""What a server has done in all its stores, and who waits in them, for its reports. Pure.

The cost does not grow with the requests that wait, but for the names of who waits; see ``Waiting.waits``.
"""

from __future__ import annotations

from collections.abc import Collection

from servers.activity import Lateness, ServedActivity, together
from servers.store.served_store import ServedStore


def activity(stores: Collection[ServedStore], lateness: Lateness, now: float) -> ServedActivity:
    """Return the activity of ``stores``, which are those of one server."""
    rounds = max(map(_rounds, stores), default=0)
    held = sum(map(_held, stores))
    return ServedActivity(rounds, held, lateness, together(served.waits(now) for served in stores))


def _rounds(served: ServedStore) -> int:
    """Return the highest number of rounds that are over of any segment; where each push is an update, of updates."""
    of_arrays = [bucket.version for bucket in served.buckets.all()]
    return max(of_arrays + [target.table.version for target in served.buckets.read_tables()], default=0)


def _held(served: ServedStore) -> int:
    """Return the bytes of values and of tables."""
    of_tables = sum(target.table.nbytes for target in served.buckets.read_tables())
    return sum(bucket.value.nbytes for bucket in served.buckets.all()) + of_tables
