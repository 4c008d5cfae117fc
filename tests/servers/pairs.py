"""A primary and its standby, without processes: what the one records, the other applies."""

from __future__ import annotations

import dataclasses
from typing import Any

from asking import Desk, sent

from kvstore.wire import BucketState, LedgerPage, Message, encode
from servers.shard import Shard


def state(shard: Shard) -> list[list[bytes]]:
    """All that a shard holds but its ledger, in a form to compare."""
    messages = [message for message in shard.capture() if not isinstance(message, LedgerPage)]
    # The primary has its failures in the ledger, by request. How often segments were split is of no consequence.
    plain = [
        dataclasses.replace(m, failures=[], splits=[0] * len(m.ids)) if isinstance(m, BucketState) else m
        for m in messages
    ]
    return sorted([repr(message).encode(), *(bytes(frame) for frame in encode(message)[1:])] for message in plain)


def copied(shard: Shard, workers: int, **how: Any) -> Shard:
    """A new shard that has been told the whole state of ``shard``."""
    made = Shard(0, workers, **how)
    for message in list(shard.capture()):
        made.apply(sent(message))
    return made


class Pair(Desk):
    """A ``Desk`` whose shard has a standby, which has applied no record before ``catch_up``."""

    def __init__(self, workers: int = 2, *args: Any, **how: Any) -> None:
        self.records: list[Message] = []
        self.applied = 0
        self.standby = Shard(0, workers, aggregated=how.get("aggregated", ()))
        super().__init__(workers, *args, recorder=self.records.append, **how)

    def catch_up(self, number: int | None = None) -> None:
        """Apply records up to ``number``; by default all there are."""
        for record in self.records[self.applied : number]:
            self.standby.apply(sent(record))
            self.applied += 1

    def take_over(self) -> None:
        """From now on the standby serves."""
        self.shard = self.standby
