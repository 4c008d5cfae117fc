"""A primary and its standby, without processes: what the one records, the other applies."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from asking import Desk, sent

from kvstore import wire
from kvstore.rows.row_table import RowTable
from servers.shard import Shard


def state(shard: Shard) -> list[list[bytes]]:
    """All that a shard holds but its ledger, in a form to compare."""
    messages = [
        message
        for message in shard.capture()
        if not isinstance(message, wire.LedgerPage | wire.TablePage | wire.TableRest)
    ]
    # The primary has its failures in the ledger, by request. How often segments were split is of no consequence.
    plain = [
        dataclasses.replace(m, failures=[], splits=[0] * len(m.ids))
        if isinstance(m, wire.BucketState)
        else dataclasses.replace(m, failures=[])
        if isinstance(m, wire.StripeState)
        else m
        for m in messages
    ]
    plain_rows = [rows_of(target.table) for served in shard.stores.values() for target in served.buckets.tables]
    return plain_rows + sorted(
        [repr(message).encode(), *(bytes(frame) for frame in wire.encode(message)[1:])] for message in plain
    )


def rows_of(table: RowTable) -> list[bytes]:
    """All that a table holds, whatever the slots of its rows, in a form to compare: counts, ids, rows, and the rest."""
    rest = table.rest()
    counted = [rest.pop(name) for name in ("young.ids", "young.counts", "old.ids", "old.counts") if name in rest]
    orders = [np.argsort(counted[place]) for place in (0, 0, 2, 2)] if counted else []
    numbers = [part[order].tobytes() for part, order in zip(counted, orders, strict=True)]
    statistics = {name: value for name, value in table.statistics().items() if name != "bytes"}
    frozen = table.freeze()
    ids, rows, parts = frozen.page(0, frozen.slots)
    frozen.thaw()
    order = np.argsort(ids)
    own = [part[order].tobytes() for part in (ids, rows, *parts.values())]
    return [repr(statistics).encode(), *own, *numbers]


def copied(shard: Shard, workers: int, **how: Any) -> Shard:
    made = Shard(0, workers, **how)
    for message in list(shard.capture()):
        made.apply(sent(message))
    return made


class Records(list[wire.Message]):
    """A recorder that keeps what it is given.

    Args:
        shares: see ``Recorder``.
    """

    def __init__(self, shares: bool = False) -> None:
        super().__init__()
        self.shares = shares

    def note(self, message: wire.Message) -> None:
        self.append(message)


class Pair(Desk):
    """A ``Desk`` whose shard has a standby, which has applied no record before ``catch_up``."""

    def __init__(self, workers: int = 2, *args: Any, shares: bool = False, **how: Any) -> None:
        self.records = Records(shares)
        self.applied = 0
        self.standby = Shard(0, workers, aggregated=how.get("aggregated", ()), min_workers=how.get("min_workers", 0))
        super().__init__(workers, *args, recorder=self.records, **how)

    def catch_up(self, number: int | None = None) -> None:
        """Apply records up to ``number``; by default all there are."""
        for record in self.records[self.applied : number]:
            self.standby.apply(sent(record))
            self.applied += 1

    def require_same(self) -> None:
        self.catch_up()
        assert state(self.standby) == state(self.shard)

    def take_over(self) -> None:
        self.shard = self.standby
