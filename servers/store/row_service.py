"""Requests about tables, each to what does it. Pure."""

from __future__ import annotations

from typing import TypeAlias

from kvstore import wire
from kvstore.errors import UsageError
from servers.requests.replies import Answer
from servers.store.served_store import ServedStore

OfWorkerZero: TypeAlias = wire.InitTables | wire.PutRows | wire.PutTableRest | wire.EvictRows
RowRequest: TypeAlias = (
    wire.PushRows | wire.PullRows | wire.FreezeTable | wire.ReadFrozen | wire.Thaw | wire.DescribeTable | OfWorkerZero
)


def serve_rows(served: ServedStore, peer: bytes, message: RowRequest) -> list[Answer]:
    """Do what ``message`` asks of the tables of ``served``; return the answers that need not wait any more.

    Raises:
        UsageError, WireError: it cannot be done. Nothing has changed.
    """
    if isinstance(message, wire.PushRows):
        return served.push_rows(peer, message)
    if isinstance(message, wire.PullRows):
        return served.pull_rows(peer, message)
    if isinstance(message, OfWorkerZero) and message.node.rank != 0:
        raise UsageError(f"only worker 0 may send {type(message).__name__}, and {message.node} did")
    if isinstance(message, wire.FreezeTable | wire.EvictRows):
        return served.when_due(peer, message)
    tables = served.tables
    if isinstance(message, wire.ReadFrozen):
        return [Answer(peer, message, tables.freezes.read(message))]
    if isinstance(message, wire.DescribeTable):
        return [Answer(peer, message, tables.describe(message))]
    if isinstance(message, wire.Thaw):
        tables.freezes.thaw(message.node, message.number)
    elif isinstance(message, wire.InitTables):
        tables.init(message)
    elif isinstance(message, wire.PutRows):
        tables.put(message)
    else:
        tables.put_rest(message)
    return [Answer(peer, message, wire.Ack(message.seq))]
