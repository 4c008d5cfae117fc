"""A stream of clicks as an advertiser sees it: some numbers, 26 fields of ids, and whether there was a click.

No data set is needed: every batch is made on the spot, the same one from the same seed and number. The chance of a
click is that of a factorization machine whose weights are hashes of the ids, so no table of them is kept, and the best
AUC that any model can reach is known. Ids have the field's own number of values, of which a few are frequent and most
are rare (Zipf's law), and are hashed to 64 bits. In the large fields they drift: each value gives way to a new one,
with a new id and new weights, after `period` batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

DENSE = 13  # numbers beside the ids
LARGE = 1000  # fields with more values than that drift
FACTORS = 4  # of the hidden machine
LINEAR_SCALE, FACTOR_SCALE, DENSE_SCALE, BIAS = 0.4, 0.2, 0.15, -1.2


class Batch(NamedTuple):
    """Clicks, and chances of clicks.

    Attributes:
        ids: int64, of shape (clicks, fields); any 64 bits.
        rows: the same ids as small numbers, for tables of a fixed size; see `Clicks.rows`.
        dense: float32, of shape (clicks, DENSE).
        labels: float32; 1 for a click.
        chances: float64; of a click, which no model can know better.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    dense: torch.Tensor
    labels: torch.Tensor
    chances: np.ndarray


class Clicks:
    """The stream.

    Args:
        seed: another seed is another stream.
        fields: how many fields of ids there are.
        smallest, largest: how many values the first field and the last have; the others are between.
        exponent: of Zipf's law.
        period: after how many batches each value of a large field has given way to another; 0: never.
    """

    def __init__(
        self,
        seed: int = 0,
        fields: int = 26,
        smallest: int = 10,
        largest: int = 100_000,
        exponent: float = 1.05,
        period: int = 1000,
    ) -> None:
        self.seed, self.fields, self.period, self._exponent = seed, fields, period, exponent
        self.sizes = np.geomspace(smallest, largest, fields).astype(np.int64)
        self._weights = np.random.default_rng([seed, 0]).normal(scale=DENSE_SCALE, size=DENSE)

    def rows(self, batches: int) -> list[int]:
        """Return for each field how many different ids there are in the first `batches` batches, at most."""
        return [int(size) * (self._generations(int(size), batches) + 1) for size in self.sizes]

    def _generations(self, size: int, batches: int) -> int:
        return -(-batches // self.period) if self.period and size > LARGE else 0

    def batches(self, numbers: range, size: int, part: int = 0, parts: int = 1) -> Iterator[Batch]:
        """Yield the batches `numbers`, or a worker's part of each; see `batch`."""
        return (self.batch(number, size, part, parts) for number in numbers)

    def batch(self, number: int, size: int, part: int = 0, parts: int = 1) -> Batch:
        """Return batch `number` of the stream.

        Args:
            number: from 0.
            size: how many clicks it has.
            part, parts: every `parts`-th of them is returned, from number `part` on.
        """
        random = np.random.default_rng([self.seed, 1, number])
        values = self._values(random.random((size, self.fields)))[part::parts]
        dense = random.standard_normal((size, DENSE), dtype=np.float32)[part::parts]
        drawn = random.random(size)[part::parts]
        rows = values.copy()
        if self.period:
            # Each value has its own moment in the period, at which it is replaced.
            moments = mixed(values.astype(np.uint64)) % np.uint64(self.period)
            generations = (number + moments.astype(np.int64)) // self.period
            rows += np.where(self.sizes > LARGE, generations, 0) * self.sizes
        ids = self.ids(rows)
        chances = 1 / (1 + np.exp(-(self._hidden(ids) + (dense * self._weights).sum(axis=1) + BIAS)))
        labels = torch.from_numpy((drawn < chances).astype(np.float32))
        return Batch(*map(torch.from_numpy, (ids.view(np.int64), rows, dense)), labels, chances)

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Return the ids, as 64 bits without a sign, of small numbers whose last axis is that of the fields."""
        fields = np.arange(self.fields, dtype=np.uint64)
        return mixed(rows.astype(np.uint64) + (fields << np.uint64(48)), self.seed)

    def _values(self, uniform: np.ndarray) -> np.ndarray:
        """Return values from 0, the frequent ones first: the inverse of a power law's distribution function."""
        power = 1 - self._exponent
        values = (((self.sizes + 1.0) ** power - 1) * uniform + 1) ** (1 / power)
        return np.minimum(values.astype(np.int64), self.sizes) - 1

    @staticmethod
    def _hidden(ids: np.ndarray) -> np.ndarray:
        """Return what the hidden factorization machine makes of ids: each has a weight and a vector of factors."""
        logits = _uniform(ids, 0).sum(axis=1) * LINEAR_SCALE
        for number in range(1, FACTORS + 1):
            factors = _uniform(ids, number) * FACTOR_SCALE
            logits += (factors.sum(axis=1) ** 2 - (factors**2).sum(axis=1)) / 2
        return logits


def mixed(numbers: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return a hash of 64 bits of each number: splitmix64's last steps, which spread any pattern."""
    hashed = numbers + np.uint64((seed * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashed ^= hashed >> np.uint64(shift)
        hashed *= np.uint64(factor)
    return hashed ^ (hashed >> np.uint64(31))


def _uniform(ids: np.ndarray, number: int) -> np.ndarray:
    """Return a number from -1 to 1 for each id, its `number`-th."""
    return mixed(ids, 1000 + number).astype(np.float64) * 2.0**-63 - 1
