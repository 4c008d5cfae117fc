"""Keys as a worker knows them, without a scheduler that has placed them."""

from __future__ import annotations

import itertools

import numpy as np

from kvstore.client.entries import Entries, SegmentColumns
from kvstore.placement import WHOLE, ServerRange, place
from kvstore.spec import Key, Spec
from kvstore.table import TableSpec


def cut_anywhere(
    specs: dict[Key, Spec], servers: int, bound: int, longest: int = WHOLE
) -> dict[Key, tuple[ServerRange, ...]]:
    """Place arrays that may have only a few elements, cut at any of them, as older versions did.

    An array of ``bound`` elements or more is on all servers, another one on the server that holds the least. Segments
    have at most ``longest`` bytes. Tables are where they always are.
    """
    placed: dict[Key, tuple[ServerRange, ...]] = {}
    loads = [0] * servers
    for key, spec in specs.items():
        if isinstance(spec, TableSpec):
            placed |= place({key: spec}, loads, bound)
            continue
        across = servers > 1 and spec.size >= max(bound, servers)
        shares = enumerate(_split(0, spec.size, servers)) if across else [(loads.index(min(loads)), (0, spec.size))]
        most = max(1, longest // spec.itemsize)
        placed[key] = tuple(
            ServerRange(server, *part)
            for server, (start, stop) in shares
            for part in _split(start, stop, max(1, -(-(stop - start) // most)))
        )
        for server, start, stop in placed[key]:
            loads[server] += (stop - start) * spec.itemsize
    return placed


def _split(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise(start + (stop - start) * part // parts for part in range(parts + 1)))


def entries_for(specs: dict[Key, Spec], servers: int, bound: int, longest: int = WHOLE) -> Entries:
    """Return ``specs`` as ``cut_anywhere`` places them, with ids from 0."""
    return entries_of(specs, cut_anywhere(specs, servers, bound, longest))


def entries_of(specs: dict[Key, Spec], placed: dict[Key, tuple[ServerRange, ...]]) -> Entries:
    """Return ``specs`` in these segments, with ids from 0."""
    distinct = list(dict.fromkeys(specs.values()))
    segments = np.array([segment for key in specs for segment in placed[key]], np.int64).reshape(-1, 3)
    counts = np.array([len(placed[key]) for key in specs], np.int64)
    kinds = [distinct.index(spec) for spec in specs.values()]
    return Entries.of(list(specs), kinds, distinct, SegmentColumns(counts, np.arange(len(segments)), *segments.T))
