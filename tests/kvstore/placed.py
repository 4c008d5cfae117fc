"""Keys as a worker knows them, without a scheduler that has placed them."""

from __future__ import annotations

import numpy as np

from kvstore.dist.plans.entries import Entries, SegmentColumns
from kvstore.placement import WHOLE, ServerRange, place
from kvstore.spec import Key, Spec


def entries_for(specs: dict[Key, Spec], servers: int, bound: int, longest: int = WHOLE) -> Entries:
    """Return ``specs`` as they are placed, with ids from 0."""
    placed = place(specs, [0] * servers, bound, longest)
    return entries_of(specs, {key: placed[key] for key in specs})


def entries_of(specs: dict[Key, Spec], placed: dict[Key, tuple[ServerRange, ...]]) -> Entries:
    """Return ``specs`` in these segments, with ids from 0."""
    distinct = list(dict.fromkeys(specs.values()))
    segments = np.array([segment for key in specs for segment in placed[key]], np.int64).reshape(-1, 3)
    counts = np.array([len(placed[key]) for key in specs], np.int64)
    kinds = [distinct.index(spec) for spec in specs.values()]
    return Entries.of(list(specs), kinds, distinct, SegmentColumns(counts, np.arange(len(segments)), *segments.T))
