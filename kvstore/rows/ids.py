"""The ids of rows: their hash, and which server has which of them. Pure."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from kvstore.table import Table

Ids: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
Hashes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint64]]"
Stripes: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


def mixed(ids: Ids, seed: int = 0) -> Hashes:
    """Return a hash of each id: splitmix64's last steps, which spread any pattern over all 64 bits.

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (OOPSLA 2014).
    """
    x = ids.astype(np.uint64)  # a copy, which is changed in place
    x += np.uint64((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def stripes_of(table: Table, ids: Ids, stripes: int) -> Stripes:
    """Return which of ``stripes`` servers has each of ``ids``.

    With a shape it is the remainder of the id, so that a server's rows lie back to back: row ``id // stripes``. In a
    table that grows it is taken from the upper half of a hash, since ids may share a remainder. The lower half is for
    the server's own index.
    """
    if not table.grows:
        remainders: Stripes = ids % stripes
        return remainders
    hashed: Stripes = ((mixed(ids) >> np.uint64(32)) % np.uint64(stripes)).astype(np.int64)
    return hashed
