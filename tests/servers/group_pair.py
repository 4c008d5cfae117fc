"""Two servers that get the same pushes of rows, one of them without groups of tables; what they answer is compared."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from asking import Desk, Worker, sent
from asking_rows import init_tables, push_rows

from kvstore import wire
from kvstore.table import MinCount, Table, Unseen
from servers.store.row_target import TableGroups
from servers.store.served_store import ServedStore

WIDTH = 4
KINDS = {
    "fixed": {number: Table(shape=(20 + number, WIDTH), init="normal") for number in (7, 8, 9)},
    "growing": {number: Table(dim=WIDTH, init="normal") for number in (7, 8, 9)},
    "admitting": {number: Table(dim=WIDTH, admit=MinCount(2)) for number in (7, 8, 9)},
    "evicting": {number: Table(dim=WIDTH, evict=Unseen(2)) for number in (7, 8, 9)},
    "mixed": {7: Table(dim=WIDTH), 8: Table(shape=(28, WIDTH)), 9: Table(shape=(29, WIDTH), codec="fp16")},
}


class Pair:
    """Two servers that get the same messages; one of them has no groups.

    Attributes:
        taken: how many pushes the other has taken as groups.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, kind: str = "fixed", mode: str = "sync", workers: int = 2, **rule: Any
    ) -> None:
        self.shards = [Desk(workers, mode, **rule).shard for _ in range(2)]
        self.workers = [Worker(rank) for rank in range(workers)]
        self.taken, self._plain = 0, False
        take, learn = ServedStore.push_to_group, TableGroups.learn

        def counted(served: ServedStore, peer: bytes, message: wire.PushRows) -> Any:
            answers = None if self._plain else take(served, peer, message)
            self.taken += answers is not None
            return answers

        def learned(groups: TableGroups, targets: Any) -> None:
            if not self._plain:
                learn(groups, targets)

        monkeypatch.setattr(ServedStore, "push_to_group", counted)
        monkeypatch.setattr(TableGroups, "learn", learned)
        for worker in self.workers:
            worker.seq = 10
        stripes = 2 if kind == "fixed" else 1
        self.say(self.workers[0], init_tables(self.workers[0], KINDS[kind], 0, stripes))

    def say(self, worker: Worker, message: wire.Message) -> Any:
        """Give ``message`` to both, and compare what they answer and hold; return the answers of the second."""
        outs = []
        for shard in self.shards:
            self._plain = shard is self.shards[1]
            outs.append(shard.handle(worker.peer, sent(message)))
        first, second = ([(peer, list(map(bytes, wire.encode(reply)))) for peer, reply in out] for out in outs)
        assert first == second
        one, other = (shard.stores[0] for shard in self.shards)
        assert [request.sender for request in one.parked] == [request.sender for request in other.parked]
        assert _rows(one) == _rows(other)
        return dict(outs[1])

    def depart(self, ranks: list[int]) -> None:
        first, second = (shard.depart(ranks) for shard in self.shards)
        assert first == second

    def compare(self) -> None:
        """Compare all that the two hold. It takes tables out of their groups."""
        one, other = (shard.stores[0] for shard in self.shards)
        assert _held(one) == _held(other)


def _rows(served: ServedStore) -> list[Any]:
    found: list[Any] = []
    for target in served.buckets.read_tables():
        frozen = target.table.freeze()
        ids, rows, parts = frozen.page(0, frozen.slots)
        frozen.thaw()
        arrays = [ids, rows, *parts.values(), *target.table.rest().values()]
        found += [(target.key, target.table.version, target.table.steps, [array.tobytes() for array in arrays])]
    return found


def _held(served: ServedStore) -> list[Any]:
    return [
        (
            target.key,
            target.rounds.state,
            target.rounds.version,
            [
                (clock, ranks, item.clock, item.ids.tolist(), item.rows.tobytes(), item.hyper, item.request)
                for clock, ranks, item in target.rounds.open()
            ],
            [(clock, parked.request.sender, parked.left, parked.late) for clock, parked in target.parked],
            {version: ids.tolist() for version, ids in target.changed.items()},
            (target.judged, target.last_at),
        )
        for target in served.buckets.tables
    ]


def spoiled(message: wire.PushRows, how: int) -> wire.PushRows:
    ids, rows, wanted = (bytearray(buffer) for buffer in message.buffers)
    changed: dict[str, Any] = {}
    if how == 0:
        ids[:4] = (1).to_bytes(4, "little")  # of another stripe
    elif how == 1:
        ids[-4:] = (10_000).to_bytes(4, "little")
    elif how == 2:
        ids[:8] = bytes(ids[4:8] + ids[:4])
    elif how == 3:
        rows[-4:] = np.float32(np.nan).tobytes()
    elif how == 4:
        rows += bytes(16)
    elif how == 5:
        wanted[:4] = (-2).to_bytes(4, "little", signed=True)
    elif how == 6:
        changed["codecs"] = ["fp16"] * len(message.ids)
    elif how == 7:
        changed["clocks"] = [*message.clocks[:-1], message.clocks[-1] + 1]
    elif how == 8:
        changed["changes"] = [[0, "momentum", 0.5]]
    elif how == 9:
        changed["union"] = True
    elif how == 10:
        changed["counts"] = message.counts[::-1]
    else:
        changed["want"] = False
    return wire.PushRows(**{**vars(message), "buffers": [ids, rows, wanted], **changed})


def push_rounds(pair: Pair, clocks: range, listed: tuple[int, ...] = (7, 8, 9)) -> None:
    for clock, worker in itertools.product(clocks, pair.workers):
        grads = {number: {2: (1, 0, 0, 0), 4 + 2 * worker.rank: (0, 1, 0, 0)} for number in listed}
        pair.say(worker, push_rows(worker, grads, clock, {number: list(rows) for number, rows in grads.items()}))
