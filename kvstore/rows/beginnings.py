"""How a row begins: a pure function of the table's seed, the row's id, and the column. The same on every machine.

Each element has a hash h of 64 bits of its own, and all arithmetic on it is exact or rounded once, as IEEE 754 says:
no function of the machine's own library of mathematics is used.

    zeros, constant   0, or ``scale``
    uniform           the top 53 bits of h, as a number u in [0, 1):  scale * (2 u - 1)
    normal            t, the sum of the four 16-bit parts of h, less its mean, divided by its standard deviation;
                      t + (t^3 - 3 t) / 80 is normal but for 0.0008 in its distribution function, and within 3.9
                      standard deviations (Cornish and Fisher, 1938: the sum's excess kurtosis is -0.3)

A change of these would change models that are trained again: do not.
"""

from __future__ import annotations

import math

import numpy as np

from kvstore.rows.ids import Hashes, Ids, mix, mixed
from kvstore.rows.slabs import Array
from kvstore.table import Table

BLOCK = 1 << 15  # elements that are computed at a time: they stay in the processor's cache
_MEAN = 2 * 65535
_DEVIATION = math.sqrt((65536**2 - 1) / 3)


def write_beginnings(table: Table, ids: Ids, out: Array) -> None:
    """Write into ``out``, of shape (n, width), how the rows of ``ids`` begin."""
    if table.init in ("zeros", "constant"):
        out[:] = 0 if table.init == "zeros" else table.scale
        return
    count = max(1, BLOCK // table.width)
    columns = np.arange(1, table.width + 1, dtype=np.uint64)
    columns *= np.uint64(0x9E3779B97F4A7C15)
    for start in range(0, len(ids), count):
        hashes = mixed(ids[start : start + count], table.seed)
        hashes = mix(hashes[:, None] + columns)
        values = _uniform(hashes) if table.init == "uniform" else _normal(hashes)
        values *= table.scale
        out[start : start + count] = values


def _uniform(hashes: Hashes) -> Array:
    hashes >>= np.uint64(11)
    values: Array = hashes.astype(np.float64)
    values *= 2.0**-52
    values -= 1.0
    return values


def _normal(hashes: Hashes) -> Array:
    parts = hashes.view(np.uint16).reshape(*hashes.shape, 4)
    values: Array = parts.sum(axis=-1, dtype=np.int64).astype(np.float64)
    values -= _MEAN
    values /= _DEVIATION
    cubed = values * values
    cubed -= 3.0
    cubed *= values
    cubed /= 80.0
    values += cubed
    return values
