"""Requests about tables, each to what does it. Pure."""

from __future__ import annotations

from typing import TypeAlias

from kvstore.errors import UsageError
from kvstore.wire import (
    Ack,
    DescribeTable,
    EvictRows,
    FreezeTable,
    InitTables,
    PullRows,
    PushRows,
    PutRows,
    PutTableRest,
    ReadFrozen,
    Thaw,
)
from servers.requests.replies import Answer
from servers.store.served_store import ServedStore

OfWorkerZero: TypeAlias = InitTables | PutRows | PutTableRest | EvictRows
RowRequest: TypeAlias = PushRows | PullRows | FreezeTable | ReadFrozen | Thaw | DescribeTable | OfWorkerZero


def serve_rows(served: ServedStore, peer: bytes, message: RowRequest) -> list[Answer]:
    """Do what ``message`` asks of the tables of ``served``; return the answers that need not wait any more.

    Raises:
        UsageError, WireError: it cannot be done. Nothing has changed.
    """
    if isinstance(message, PushRows):
        return served.push_rows(peer, message)
    if isinstance(message, PullRows):
        return served.pull_rows(peer, message)
    if isinstance(message, OfWorkerZero) and message.node.rank != 0:
        raise UsageError(f"only worker 0 may send {type(message).__name__}, and {message.node} did")
    if isinstance(message, FreezeTable | EvictRows):
        return served.when_due(peer, message)
    tables = served.tables
    if isinstance(message, ReadFrozen):
        return [Answer(peer, message, tables.freezes.read(message))]
    if isinstance(message, DescribeTable):
        return [Answer(peer, message, tables.describe(message))]
    if isinstance(message, Thaw):
        tables.freezes.thaw(message.node, message.number)
    elif isinstance(message, InitTables):
        tables.init(message)
    elif isinstance(message, PutRows):
        tables.put(message)
    else:
        tables.put_rest(message)
    return [Answer(peer, message, Ack(message.seq))]
