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

from kvstore.errors import UsageError
from kvstore.spec import MAX_SEGMENTS, Key, Spec

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

    Raises:
        UsageError: there would be more segments than one message can say; nothing has been placed.
    """
    require_few({key: _count(spec, len(loads), bound, longest) for key, spec in specs.items()})
    placed: dict[Key, tuple[Segment, ...]] = {}
    for key, spec in sorted(specs.items(), key=lambda item: (-item[1].nbytes, isinstance(item[0], str), item[0])):
        if _across(spec, len(loads), bound):
            ranges = [(server, *part) for server, part in enumerate(split(spec.size, len(loads)))]
        else:
            ranges = [(loads.index(min(loads)), 0, spec.size)]
        most = _most(spec, longest)
        placed[key] = tuple(
            Segment(server, first + start, first + stop)
            for server, first, last in ranges
            for start, stop in split(last - first, max(1, -(-(last - first) // most)))
        )
        for segment in placed[key]:
            loads[segment.server] += (segment.stop - segment.start) * spec.itemsize
    return placed


def require_few(counts: Mapping[Key, int]) -> None:
    """Raise ``UsageError`` if keys of so many segments each are more than one call may have."""
    total = sum(counts.values())
    if total > MAX_SEGMENTS:
        most = max(counts, key=counts.__getitem__)
        raise UsageError(
            f"these keys are {total} segments, {counts[most]} of them of key {most!r}, and one call of init may have "
            f"{MAX_SEGMENTS}; raise KVSTORE_PIECE_BYTES, or init fewer keys at once"
        )


def _across(spec: Spec, servers: int, bound: int) -> bool:
    """Whether an array is cut into one range for each server."""
    return servers > 1 and spec.size >= max(bound, servers)


def _most(spec: Spec, longest: int) -> int:
    """How many elements a segment may have."""
    return max(1, longest // spec.itemsize)


def _count(spec: Spec, servers: int, bound: int, longest: int) -> int:
    """How many segments an array will be, or one more for each server."""
    ranges = servers if _across(spec, servers, bound) else 1
    return ranges * max(1, -(-spec.size // (ranges * _most(spec, longest))))
