"""Which server holds which part of which array. Pure.

Arrays of at least ``bound`` elements are cut into near-equal contiguous ranges, one for each server; smaller ones go
whole to the server that holds the fewest bytes. Within one call arrays are placed from large to small and then by key,
so the order in which a caller lists them does not matter. A range that is longer than one message should be is several
segments, so that it can be sent, summed and answered piece by piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.spec import Key, Spec

WHOLE = 2**62  # as a bound or a length: never cut


@dataclass(frozen=True)
class Segment:
    """Elements ``start`` to ``stop`` of a flattened array, held by ``server``."""

    server: int
    start: int
    stop: int


def split(size: int, parts: int) -> list[tuple[int, int]]:
    """Cut ``size`` elements into ``parts`` contiguous ranges whose lengths differ by at most one."""
    edges = [size * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(edges))


def place(
    specs: Mapping[Key, Spec], loads: list[int], bound: int, longest: int = WHOLE
) -> dict[Key, tuple[Segment, ...]]:
    """Place new arrays on servers that already hold ``loads`` bytes each, and add theirs to ``loads``.

    Args:
        specs: the arrays.
        loads: bytes by server, one entry for each; changed in place.
        bound: arrays of at least so many elements are cut across the servers.
        longest: bytes that a segment may have.
    """
    placed: dict[Key, tuple[Segment, ...]] = {}
    for key, spec in sorted(specs.items(), key=lambda item: (-item[1].nbytes, isinstance(item[0], str), item[0])):
        if len(loads) > 1 and spec.size >= max(bound, len(loads)):
            ranges = [(server, *part) for server, part in enumerate(split(spec.size, len(loads)))]
        else:
            ranges = [(loads.index(min(loads)), 0, spec.size)]
        most = max(1, longest // spec.itemsize)
        placed[key] = tuple(
            Segment(server, first + start, first + stop)
            for server, first, last in ranges
            for start, stop in split(last - first, max(1, -(-(last - first) // most)))
        )
        for segment in placed[key]:
            loads[segment.server] += (segment.stop - segment.start) * spec.itemsize
    return placed
