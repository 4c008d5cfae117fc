"""Which new ids of a growing table get rows. Pure, without a clock or a random state: equal pushes, equal answers."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping

import numpy as np

from kvstore.errors import UsageError
from kvstore.rows.halves import narrow_into
from kvstore.rows.ids import Hashes, Ids, mix, mixed, seed_of
from kvstore.rows.index import SlotIndex
from kvstore.rows.slabs import Array, Slab
from kvstore.table import Capacity, MinCount, Probability, Table, Unseen

# To forget the one id that was pushed longest ago would need the order of all. Two generations bound the memory at some
# 60 MB a stripe, and need no order: a push moves its id to the young one.
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
        self._young.take(ids)
        self._old.take(ids)

    def parts(self) -> dict[str, Array]:
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
        """Remember what the table did whose ``parts`` these are. Raises ``UsageError`` if they are of another rule."""
        names = set(self.parts())
        if names != set(parts):
            raise UsageError(f"the admission of this table remembers {sorted(names)}, not {sorted(parts)}")
        if self._counted is not None:
            self._counted.restore(parts)


# What is forgotten costs one whole save in place of a delta; 8 MB are little beside that.
KEPT = 1 << 20  # ids at least, however few rows the table has


class GoneIds:
    """Which rows have gone in which update. The oldest are forgotten when there are many more than rows.

    Attributes:
        floor: the earliest version of which all is known that has gone since.
        added: how many batches there have been.
    """

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.added = 0
        self._batches: deque[tuple[int, Ids]] = deque()
        self._count = 0

    @property
    def nbytes(self) -> int:
        return 8 * self._count

    def add(self, ids: Ids, version: int, rows: int) -> None:
        if not len(ids):
            return
        self._batches.append((version, ids))
        self.added += 1
        self._count += len(ids)
        while self._count > max(KEPT, rows) and len(self._batches) > 1:
            self.floor, oldest = self._batches.popleft()
            self._count -= len(oldest)

    def since(self, version: int) -> Ids:
        """Return the ids that went after update ``version``, sorted; some may have come again.

        Raises:
            UsageError: that is not known any more.
        """
        if unknown := self.unknown(version):
            raise UsageError(f"{unknown}; save the whole table")
        return np.unique(np.concatenate([np.empty(0, np.int64), *(ids for at, ids in self._batches if at > version)]))

    def batches(self, version: int, until: int) -> Iterator[Ids]:
        """Yield the ids that went after update ``version``, in batches, from the ``until``-th of all back.

        It is known what has gone since; see ``unknown``.
        """
        for number, (at, ids) in zip(itertools.count(self.added, -1), reversed(self._batches), strict=False):
            if at <= version:
                return
            if number <= until:
                yield ids

    def unknown(self, version: int) -> str:
        """Return why it is not known which rows have gone after update ``version``; nothing if it is known."""
        if version >= self.floor:
            return ""
        return (
            f"what has changed since version {version} is not known: rows that went are remembered since version "
            f"{self.floor} alone"
        )

    def forget(self, version: int) -> None:
        """Know nothing of what was before ``version``, which may be lower than those before."""
        self._batches.clear()
        self._count = 0
        self.floor = version


# Which rows of a growing table go. Pure, and without a clock: only updates are counted, so equal pushes, equal rows.
#
# A row that no push has touched for more than ``Unseen.rounds`` updates counts as gone from that update on; its
# memory is freed when a sweep passes. A table that has grown beyond its ``Capacity`` loses rows until it has a
# sixteenth less, so that the search for them is seldom. Those of equal age or count go by their ids.
# Without slack, every update of a full table would look for the oldest rows among all.
SLACK = 16  # a full table makes room for this part of its rows at once


class EvictionRule:
    """The rules of one stripe of ``table``, number ``stripe`` of ``stripes``.

    Attributes:
        rounds: see ``Unseen``: the least of the table's; None if there is none.
        capacity: how many rows this stripe may have; None if there is no limit.
        by_count: whether those go that were touched least often, not longest ago.
    """

    def __init__(self, table: Table, stripe: int, stripes: int) -> None:
        self.rounds = min((rule.rounds for rule in table.evict if isinstance(rule, Unseen)), default=None)
        capacities = [rule for rule in table.evict if isinstance(rule, Capacity)]
        tightest = min(capacities, key=lambda rule: rule.rows, default=None)
        # The stripes' parts add up to the limit: each rounded up, they would be more than the table may have.
        self.capacity = None if tightest is None else (tightest.rows + stripe) // stripes
        self.by_count = tightest is not None and tightest.by == "count"

    def oldest(self, version: int) -> int:
        """Return the update before which a row must have been touched last to be gone after update ``version``."""
        return -1 if self.rounds is None else version - self.rounds

    def surplus(self, rows: int) -> int:
        """Return how many of ``rows`` rows must go for the table's capacity."""
        if self.capacity is None or rows <= self.capacity:
            return 0
        return rows - self.capacity + self.capacity // SLACK

    def chosen(self, count: int, ids: Ids, seen: Array, counts: Array | None) -> Array:
        """Return the positions of the ``count`` rows that go first.

        Args:
            seen: the update that touched each last, or 1 more for all.
            counts: how often each was touched; None where rows go by age.
        """
        ranks = [seen] if counts is None else [counts, seen]
        among = np.arange(len(ids))
        gone: list[Array] = []
        for rank in [*ranks, None]:
            # A hash: by their ids themselves, rows of large ids would stay for ever.
            keys = mixed(ids[among]) if rank is None else rank[among]
            if count >= len(among):
                gone.append(among)
                break
            last = np.partition(keys, count)[count]
            before = keys < last
            gone.append(among[before])
            count -= int(np.count_nonzero(before))
            among = among[keys == last]
            if not count:
                break
        return np.concatenate(gone)


# How a row begins: a pure function of the table's seed, the row's id, and the column. The same on every machine.
#
# Each element has a hash h of 64 bits of its own, and all arithmetic on it is exact or rounded once, as IEEE 754
# says: no function of the machine's own library of mathematics is used.
#
#     zeros, constant   0, or ``scale``
#     uniform           the top 53 bits of h, as a number u in [0, 1):  scale * (2 u - 1)
#     normal            t, the sum of the four 16-bit parts of h, less its mean, divided by its standard deviation;
#                       t + (t^3 - 3 t) / 80 is normal but for 0.0008 in its distribution function, and within 3.9
#                       standard deviations (Cornish and Fisher, 1938: the sum's excess kurtosis is -0.3)
#
# A change of these would change models that are trained again: do not.
BLOCK = 1 << 15  # elements that are computed at a time: they stay in the processor's cache
_MEAN = 2 * 65535
_DEVIATION = math.sqrt((65536**2 - 1) / 3)


def write_beginnings(table: Table, ids: Ids, out: Array, seeds: Hashes | None = None) -> None:
    """Write into ``out``, of shape (n, width), how the rows of ``ids`` begin.

    ``seeds`` has for each id the ``seed_of`` its table; None for the same one.
    """
    if table.sum_dtype != table.dtype:
        wide = np.empty(out.shape, table.sum_dtype)
        _write(table, ids, wide, seeds)
        narrow_into(wide, out)
    else:
        _write(table, ids, out, seeds)


def _write(table: Table, ids: Ids, out: Array, seeds: Hashes | None) -> None:
    if table.init in ("zeros", "constant"):
        out[:] = 0 if table.init == "zeros" else table.scale
        return
    count = max(1, BLOCK // table.width)
    columns = np.arange(1, table.width + 1, dtype=np.uint64)
    columns *= np.uint64(0x9E3779B97F4A7C15)
    for start in range(0, len(ids), count):
        hashes = ids[start : start + count].astype(np.uint64)
        hashes += seed_of(table.seed) if seeds is None else seeds[start : start + count]
        hashes = mix(mix(hashes)[:, None] + columns)
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
