"""Which new ids of a growing table get rows. Pure, without a clock or a random state: equal pushes, equal answers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvstore.errors import UsageError
from kvstore.rows.ids import Ids, mix, mixed
from kvstore.rows.index import SlotIndex
from kvstore.rows.slabs import Array, Slab
from kvstore.table import MinCount, Probability, Table

COUNTED = 1 << 20  # ids of each of the two generations whose pushes are counted


class CountedIds:
    """How often each id has been pushed, for a bounded number of ids.

    There are two generations. When the young one has ``COUNTED`` ids it becomes the old one, which is forgotten. So an
    id is forgotten only after at least so many others have been pushed since.
    """

    def __init__(self, most: int = COUNTED) -> None:
        self._most = most
        self._young, self._old = _Generation(), _Generation()

    @property
    def nbytes(self) -> int:
        """Bytes of both generations."""
        return self._young.nbytes + self._old.nbytes

    def add(self, ids: Ids) -> Array:
        """Count one more push of each of ``ids``, which are unique; return how often each has been pushed."""
        counts = np.empty(len(ids), np.int64)
        for start in range(0, len(ids), self._most):
            counts[start : start + self._most] = self._add(ids[start : start + self._most])
        return counts

    def _add(self, ids: Ids) -> Array:
        counts = self._young.take(ids) + self._old.take(ids) + 1
        if len(self._young.index) + len(ids) > self._most:
            self._young, self._old = _Generation(), self._young
        self._young.put(ids, counts)
        return counts

    def forget(self, ids: Ids) -> None:
        """Forget ``ids``: they have rows now."""
        self._young.take(ids)
        self._old.take(ids)

    def parts(self) -> dict[str, Array]:
        """Return all that is counted, for ``restore``."""
        named = {"young": self._young, "old": self._old}
        parts: dict[str, Array] = {}
        for name, generation in named.items():
            slots = generation.index.slots()
            parts[f"{name}.ids"] = generation.index.ids.items[slots]
            parts[f"{name}.counts"] = generation.counts.items[slots]
        return parts

    def restore(self, parts: Mapping[str, Array]) -> None:
        """Count as the table did whose ``parts`` these are."""
        self._young, self._old = _Generation(), _Generation()
        for name, generation in (("young", self._young), ("old", self._old)):
            generation.put(parts[f"{name}.ids"], parts[f"{name}.counts"])


class _Generation:
    def __init__(self) -> None:
        self.index = SlotIndex()
        self.counts = Slab(None, np.int64)

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + 8 * self.index.top

    def take(self, ids: Ids) -> Array:
        """Remove ``ids``; return their counts, 0 for those that are not there."""
        counts = np.zeros(len(ids), np.int64)
        slots = self.index.find(ids)
        there = np.flatnonzero(slots >= 0)
        counts[there] = self.counts.items[slots[there]]
        self.index.remove(slots[there])
        return counts

    def put(self, ids: Ids, counts: Array) -> None:
        slots = self.index.insert(ids)
        self.counts.reserve(self.index.top)
        self.counts.items[slots] = counts


class AdmissionRule:
    """Decides for one stripe of ``table`` which of its ids get rows."""

    def __init__(self, table: Table) -> None:
        self._rule, self._seed = table.admit, table.seed
        self._counted = CountedIds() if isinstance(self._rule, MinCount) and self._rule.count > 1 else None

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered of ids that have no rows."""
        return 0 if self._counted is None else self._counted.nbytes

    def admit(self, ids: Ids, version: int) -> Array:
        """Return for each of ``ids``, which have no rows, whether the push of update ``version`` makes its row."""
        if isinstance(self._rule, Probability):
            # The draw is of (seed, id, update). The top 53 bits, as a number in [0, 1).
            hashes = mixed(ids, self._seed)
            hashes += mixed(np.array([version]), self._seed + 1)
            drawn = (mix(hashes) >> np.uint64(11)).astype(np.float64) * 2.0**-53
            drawn_rows: Array = drawn < self._rule.probability
            return drawn_rows
        if self._counted is None:
            return np.ones(len(ids), bool)
        assert isinstance(self._rule, MinCount)  # noqa: S101 - for mypy
        admitted: Array = self._counted.add(ids) >= self._rule.count
        self._counted.forget(ids[admitted])
        return admitted

    def parts(self) -> dict[str, Array]:
        """Return what is remembered of ids that have no rows, for ``restore``; empty for rules that remember none."""
        return {} if self._counted is None else self._counted.parts()

    def restore(self, parts: Mapping[str, Array]) -> None:
        """Remember what the table did whose ``parts`` these are.

        Raises:
            UsageError: they are of another rule.
        """
        names = set(self.parts())
        if names != set(parts):
            raise UsageError(f"the admission of this table remembers {sorted(names)}, not {sorted(parts)}")
        if self._counted is not None:
            self._counted.restore(parts)
