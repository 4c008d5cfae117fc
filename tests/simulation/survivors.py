"""What workers do in jobs that go on without those that die: every sum says who has contributed to it.

``Surviving`` pushes to arrays without an optimizer: each round's sum replaces the value before. Integers are summed as
they are, and a digit of the sum stands for a round and a worker. Floats are scaled as if all had contributed.
``SurvivingRows`` pushes to rows of a table, which an optimizer changes.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from simulation.exactness import Counting
from simulation.programs import Wrong

import kvstore as kv
from kvstore.client import DistStore

SIZES = {"cut": 4000, "whole": 7}  # integers; over the bound, so that both servers have some of it, and under it
SCALED = 3000  # floats, on both servers
KEYS = [*SIZES, "scaled"]
BITS = 8  # of an integer, for each round: two for each worker


class Round(NamedTuple):
    """What a worker has been answered in one round: by key, who is in, for each part of it that differs."""

    number: int
    members: dict[str, frozenset[frozenset[int]]]


class Surviving:
    """One job's workers.

    Args:
        seed: decides how each pushes.
        rounds: that each makes before the end.
        uneven: whether each rank pushes once less often than the next one, and all ``join`` and go on.
        partial: whether a round may lack workers that live: with a quorum.
        barriers: whether there is one between two rounds.
        ahead: whether a worker may push again before it has been answered.
        later: whether an answer may bring the values of a later round: so it is where a standby takes over.

    Attributes:
        seen: by rank, the rounds of which that worker has been answered.
        armed: nobody: calls are not interrupted.
    """

    def __init__(
        self,
        seed: int,
        rounds: int = 3,
        uneven: bool = False,
        partial: bool = False,
        barriers: bool = False,
        ahead: bool = True,
        later: bool = False,
    ) -> None:
        self.seen: defaultdict[int, list[Round]] = defaultdict(list)
        self.armed: set[int] = set()
        self._seed = seed
        self._rounds = rounds
        self._uneven = uneven
        self._partial = partial
        self._barriers = barriers
        self._ahead = ahead
        self._later = later or partial or uneven  # survivors go on where the last worker has died

    def __call__(self, store: DistStore) -> list[Any]:
        dice = random.Random(f"{self._seed} {store.rank}")
        self._begin(store)
        self._push(store, dice, 1, self._last(store.rank, store.num_workers))
        if not self._uneven:
            store.barrier()
            return self._all(store)
        store.join()
        ends = self._all(store)
        self._push(store, dice, self._rounds + 1, self._rounds + 2)
        store.barrier()
        return ends + self._all(store)

    def pauses(self, rank: int, number: int, workers: int) -> bool:
        """Return whether ``rank`` is inside ``join`` while others make round ``number``."""
        return self._last(rank, workers) < number <= self._rounds

    def _last(self, rank: int, workers: int) -> int:
        return self._rounds - (workers - 1 - rank) if self._uneven else self._rounds

    def _push(self, store: DistStore, dice: random.Random, first: int, last: int) -> None:
        """Make rounds ``first`` to ``last``."""
        late: list[tuple[int, Any, Any]] = []
        for number in range(first, last + 1):
            values, outs = self._values(store, number), self._outs()
            way = dice.randrange(4) if self._ahead else 0
            if way == 1:
                for key, value, out in zip(self.keys, values, outs, strict=True):
                    self._one(store, key, value, out)
            else:
                late.append((number, self._pushpull(store, values, outs, wait=way == 0), outs))
            if way != 3:
                for number_, ticket, outs_ in late:
                    ticket.wait()
                    self._note(store, number_, outs_)
                late.clear()
            if way == 1:
                self._note(store, number, outs)
            if self._barriers:
                store.barrier()
        for number, ticket, outs in late:
            ticket.wait()
            self._note(store, number, outs)

    def _note(self, store: DistStore, number: int, outs: list[torch.Tensor]) -> None:
        """Look who is in this round: of those who live all, and nobody twice."""
        found = {}
        for key, out in zip(self.keys, outs, strict=True):
            found[key] = frozenset(self._members(store, key, value, number) for value in set(out.reshape(-1).tolist()))
            for members in found[key]:
                if store.rank not in members and not self._partial:
                    raise Wrong(f"{key!r} of round {number}: worker {store.rank} is not among {sorted(members)}")
        self.seen[store.rank].append(Round(number, found))

    # ---- arrays without an optimizer

    keys: ClassVar = KEYS

    def _begin(self, store: DistStore) -> None:
        store.init(KEYS, [*(torch.zeros(size, dtype=torch.int64) for size in SIZES.values()), torch.zeros(SCALED)])

    def _values(self, store: DistStore, number: int) -> list[Any]:
        own = 4**store.rank
        place = BITS * ((number - 1) % 7)
        return [
            *(torch.full((size,), own << place) for size in SIZES.values()),
            torch.full((SCALED,), weight(store.rank)),
        ]

    def _outs(self) -> list[torch.Tensor]:
        return [*(torch.zeros(size, dtype=torch.int64) for size in SIZES.values()), torch.zeros(SCALED)]

    def _pushpull(self, store: DistStore, values: list[Any], outs: list[torch.Tensor], wait: bool) -> kv.Ticket:
        return store.pushpull(self.keys, values, outs, wait=wait)

    def _one(self, store: DistStore, key: str, value: Any, out: torch.Tensor) -> None:
        store.push(key, value)
        store.pull(key, out)

    def _members(self, store: DistStore, key: str, value: float, number: int) -> frozenset[int]:
        """Return whose contributions make ``value``."""
        workers = range(store.num_workers)
        if key == "scaled":  # late contributions are in the sum of a later round, too
            return frozenset(workers) if self._partial else subset(value, store.num_workers)
        places = {rank: [] for rank in workers}  # type: dict[int, list[int]]
        rest = int(value)
        for place, rank in itertools.product(range(7), workers):
            digit = rest >> (BITS * place + 2 * rank) & 3
            places[rank] += [place] * digit
        twice = any(len(found) > (7 if self._partial else 1) for found in places.values())
        rounds = {place for found in places.values() for place in found}
        elsewhere = rounds != {(number - 1) % 7}
        if (
            elsewhere and self._ahead and len(rounds) == 1
        ):  # a death may end several rounds at once: a later one's value
            elsewhere = (rounds.pop() - number + 1) % 7 > self._rounds - number
        if rest >> BITS * 7 or twice or (elsewhere and not self._later):
            raise Wrong(f"{key!r} of round {number}: {rest:#x}")
        return frozenset(rank for rank in workers if places[rank])

    def _all(self, store: DistStore) -> list[Any]:
        outs = self._outs()
        store.pull(self.keys, outs)
        return [out.tolist() for out in outs]


class SurvivingRows(Surviving):
    """Push to rows, and to an array: an optimizer adds up what is pushed. No worker pushes ahead. See ``Surviving``.

    Args:
        seed, rounds, uneven, barriers: as there.
    """

    keys: ClassVar = ["dense", "fixed", "grows"]

    def __init__(self, seed: int, rounds: int = 3, uneven: bool = False, barriers: bool = False) -> None:
        super().__init__(seed, rounds, uneven, barriers=barriers, ahead=False)
        self._ids = {"fixed": np.arange(12), "grows": np.array([-(2**62), -5, *range(10), 2**40, 2**62])}
        self._before: dict[int, dict[str, torch.Tensor]] = {}  # by rank, what was there before the round

    def _begin(self, store: DistStore) -> None:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init("dense", torch.zeros(SCALED))
        store.init(["fixed", "grows"], [kv.Table(shape=(12, 3)), kv.Table(dim=2)])
        self._before[store.rank] = dict(zip(self.keys, self._outs(), strict=True))

    def _values(self, store: DistStore, number: int) -> list[Any]:
        own = weight(store.rank)
        rows = [
            np.full((len(ids), width), own, np.float32) for ids, width in zip(self._ids.values(), (3, 2), strict=True)
        ]
        tables = [kv.RowSparse(ids, values) for ids, values in zip(self._ids.values(), rows, strict=True)]
        return [torch.full((SCALED,), own), *tables]

    def _outs(self) -> list[torch.Tensor]:
        return [
            torch.zeros(SCALED),
            *(torch.zeros(len(ids), width) for ids, width in zip(self._ids.values(), (3, 2), strict=True)),
        ]

    def _pushpull(self, store: DistStore, values: list[Any], outs: list[torch.Tensor], wait: bool) -> kv.Ticket:
        return store.pushpull(self.keys, values, outs, row_ids=[None, *self._ids.values()], wait=wait)

    def _note(self, store: DistStore, number: int, outs: list[torch.Tensor]) -> None:
        before = self._before[store.rank]
        self._before[store.rank] = dict(zip(self.keys, outs, strict=True))
        super()._note(store, number, [before[key] - out for key, out in zip(self.keys, outs, strict=True)])

    def _members(self, store: DistStore, key: str, value: float, number: int) -> frozenset[int]:
        return subset(value, store.num_workers)

    def _all(self, store: DistStore) -> list[Any]:
        outs = self._outs()
        store.pull("dense", outs[0])
        for key, out in zip(self.keys[1:], outs[1:], strict=True):
            store.row_sparse_pull(key, out, row_ids=self._ids[key])
        self._before[store.rank] = dict(zip(self.keys, outs, strict=True))
        return [out.tolist() for out in outs]


class SurvivingClocks(Counting):
    """Push a power of four each time to a store without rounds; see ``Counting``.

    Attributes:
        seen: by rank, the digits of each key at the end.
        made: by rank, how many pushes have been answered.
    """

    def __init__(self, seed: int, rule: str, uneven: bool = False, rounds: int = 3) -> None:
        super().__init__(seed, rule, uneven, rounds)
        self.seen: dict[int, list[tuple[str, list[int]]]] = {}
        self.made: dict[int, int] = {}

    def _look(self, store: DistStore, values: dict[str, torch.Tensor], made: int, when: str) -> None:
        super()._look(store, values, made, when)
        self.made[store.rank] = made

    def _all(self, store: DistStore, values: dict[str, torch.Tensor], made: int, rounds: int) -> None:
        self.seen[store.rank] = self._digits(values, "at the end")


def subset(value: float, workers: int) -> frozenset[int]:
    """Return the workers whose ``weight`` have the sum ``value``, scaled as if others had contributed, too."""
    return _subsets(workers)[value]


@functools.cache
def _subsets(workers: int) -> dict[float, frozenset[int]]:
    found: dict[float, frozenset[int]] = {}
    for count in range(1, workers + 1):
        for members in itertools.combinations(range(workers), count):
            for share in range(count, workers + 1):
                value = np.float32(sum(map(weight, members))) * np.float32(share / count)
                assert float(value) not in found
                found[float(value)] = frozenset(members)
    return found


def weight(rank: int) -> float:
    """What a worker pushes, if floats are scaled."""
    return 2.0 * 5**rank
