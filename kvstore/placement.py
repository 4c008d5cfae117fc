"""Placement: which server holds which range of which array. Pure.

Arrays of at least ``bound`` elements are cut into near-equal contiguous ranges, one for each server; smaller ones go
whole to the server that holds the fewest bytes. Within one call arrays are placed from large to small and then by key,
so the order in which a caller lists them does not matter. A range that is longer than one message should be is several
segments, so that it can be sent, summed and answered one segment at a time.

Every cut is at a multiple of ``BLOCK`` elements. So an element's bits depend neither on the number of servers nor on
the size of messages.

A table is one segment on each server, its stripe: see ``kvstore.rows.ids`` for which rows those are. Contiguous
ranges of rows would give one server most of the work, since low ids are often the frequent ones.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from kvstore.errors import UsageError
from kvstore.spec import MAX_SEGMENTS, Key, Spec
from kvstore.table import TableSpec

WHOLE = 2**62  # as a bound or a length: never cut

# Elements. torch's fused steps round the elements after an array's last whole vector otherwise than those in vectors,
# so a cut within a vector changes bits. No processor's vectors are longer than 64 elements. 256 have one scale where a
# server or an aggregator encodes its segment as int8.
BLOCK = 256


class ServerRange(NamedTuple):
    """Elements ``start`` to ``stop`` of a flattened array, held by ``server``."""

    server: int
    start: int
    stop: int


def split(size: int, parts: int) -> list[tuple[int, int]]:
    """Cut ``size`` elements into at most ``parts`` contiguous ranges, whose lengths differ by at most one block.

    All are whole blocks but the last, which may end within one.
    """
    blocks = -(-size // BLOCK)
    parts = max(1, min(parts, blocks))
    return _ranges([blocks * (part + 1) // parts - blocks * part // parts for part in range(parts)], size)


def _ranges(blocks: Iterable[int], size: int) -> list[tuple[int, int]]:
    """Return ranges of so many blocks each, one after the other, which together are ``size`` elements."""
    edges = [min(number * BLOCK, size) for number in itertools.accumulate(blocks, initial=0)]
    return list(itertools.pairwise(edges))


def place(
    specs: Mapping[Key, Spec], loads: list[int], bound: int, longest: int = WHOLE
) -> dict[Key, tuple[ServerRange, ...]]:
    """Place new arrays on servers that already hold ``loads`` bytes each, and add theirs to ``loads``.

    Args:
        bound: arrays of at least so many elements are cut across the servers.
        longest: bytes that a segment may have.

    Raises:
        UsageError: there would be more segments than one message can say; nothing has been placed.
    """
    kinds = {id(spec): spec for spec in specs.values()}  # thousands of arrays may have the same one
    counts = {number: _count(spec, len(loads), bound, longest) for number, spec in kinds.items()}
    require_few(specs, [counts[id(spec)] for spec in specs.values()])
    placed: dict[Key, tuple[ServerRange, ...]] = {}
    heap: list[tuple[int, int]] = []  # of the servers, by load
    for spec, keys in itertools.groupby(_ordered(specs), specs.__getitem__):
        if isinstance(spec, TableSpec) or _across(spec, len(loads), bound):
            across: dict[
                tuple[int, ...], tuple[ServerRange, ...]
            ] = {}  # what an array is, by which servers have a block more
            for key in keys:
                longer = () if isinstance(spec, TableSpec) else _longer(spec.size, loads)
                if longer not in across:
                    across[longer] = _over_servers(spec, len(loads), longer, longest)
                placed[key] = across[longer]
                for server, start, stop in placed[key]:
                    loads[server] += (stop - start) * spec.itemsize
            heap = []
            continue
        if not heap:
            heap = [(load, server) for server, load in enumerate(loads)]
            heapq.heapify(heap)
        whole: dict[int, tuple[ServerRange, ...]] = {}  # what an array is on each server
        for key in keys:
            load, server = heap[0]
            if server not in whole:
                whole[server] = _cut(spec, [(server, (0, spec.size))], longest)
            placed[key] = whole[server]
            loads[server] = load + spec.nbytes
            heapq.heapreplace(heap, (loads[server], server))
    return placed


def _ordered(specs: Mapping[Key, Spec]) -> list[Key]:
    """Return the keys, from large arrays to small and then by key, integers before names."""
    numbers = sorted(key for key in specs if not isinstance(key, str))
    names = sorted(key for key in specs if isinstance(key, str))
    return sorted([*numbers, *names], key=lambda key: specs[key].nbytes, reverse=True)


def _stripes(spec: TableSpec, servers: int) -> tuple[ServerRange, ...]:
    """Return a table's segments. Their ranges say how many elements each server has from the start, not which."""
    counts = [spec.table.rows_of(server, servers) * spec.table.width for server in range(servers)]
    edges = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return tuple(ServerRange(server, start, stop) for server, (start, stop) in enumerate(edges))


def _over_servers(spec: Spec, servers: int, longer: Collection[int], longest: int) -> tuple[ServerRange, ...]:
    """Return the segments of a table, or of an array of which the servers ``longer`` get a block more than others."""
    if isinstance(spec, TableSpec):
        return _stripes(spec, servers)
    return _cut(spec, _shares(spec.size, servers, longer), longest)


def _longer(size: int, loads: Sequence[int]) -> tuple[int, ...]:
    """Return the servers that get a block more of an array than others: those that hold the fewest bytes."""
    more = -(-size // BLOCK) % len(loads)
    return tuple(sorted(heapq.nsmallest(more, range(len(loads)), key=loads.__getitem__)))


def _shares(size: int, servers: int, longer: Collection[int]) -> list[tuple[int, tuple[int, int]]]:
    """Return the range of each server; a short array has fewer blocks than there are servers, and only some get one."""
    each = -(-size // BLOCK) // servers
    blocks = {server: each + (server in longer) for server in (range(servers) if each else longer)}
    return list(zip(blocks, _ranges(blocks.values(), size), strict=True))


def _cut(spec: Spec, ranges: Iterable[tuple[int, tuple[int, int]]], longest: int) -> tuple[ServerRange, ...]:
    """Cut ``ranges``, each of a server, into segments of at most ``longest`` bytes, or one block."""
    most = _most(spec, longest)
    return tuple(
        ServerRange(server, first + start, first + stop)
        for server, (first, last) in ranges
        for start, stop in split(last - first, -(-(last - first) // most))
    )


def _most(spec: Spec, longest: int) -> int:
    """Return how many elements a segment of at most ``longest`` bytes may have: whole blocks, and at least one."""
    return max(1, longest // (spec.itemsize * BLOCK)) * BLOCK


def require_few(keys: Iterable[Key], counts: Sequence[int]) -> None:
    total = sum(counts)
    if total > MAX_SEGMENTS:
        most, key = max(zip(counts, keys, strict=True), key=itemgetter(0))
        raise UsageError(
            f"these keys are {total} segments, {most} of them of key {key!r}, and one call of init may have "
            f"{MAX_SEGMENTS}; raise KVSTORE_PIECE_BYTES, or init fewer keys at once"
        )


def _across(spec: Spec, servers: int, bound: int) -> bool:
    return servers > 1 and spec.size >= bound and spec.size > BLOCK


def _count(spec: Spec, servers: int, bound: int, longest: int) -> int:
    """Return how many segments an array will be, at most one too many for each server."""
    if isinstance(spec, TableSpec):
        return servers
    ranges = min(servers, -(-spec.size // BLOCK)) if _across(spec, servers, bound) else 1
    return ranges * max(1, -(-spec.size // (ranges * _most(spec, longest))))
