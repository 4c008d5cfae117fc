"""A store's tables as records: applied to a new store, they go on with the same bits. Pure.

Rows go page by page, as they were when this was called, while the tables change. See ``snapshot`` for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import finalize

import numpy as np

from kvstore import wire
from kvstore.errors import WireError, rebuild
from kvstore.rows.frozen_rows import FrozenRows
from kvstore.rows.ids import Ids
from kvstore.rows.layout import part_bytes, write_rows
from kvstore.spec import ITEMSIZE
from kvstore.table import Table
from servers.requests.replies import described_error
from servers.store.rounds import Rounds
from servers.store.row_arrays import array_of, bytes_of, integers
from servers.store.row_target import RowContribution, RowTarget
from servers.store.served_store import ServedStore

PAGE_BYTES = 1 << 20


def table_snapshot(store: int, served: ServedStore) -> Iterator[wire.Message | Iterable[wire.Message]]:
    """Return the records of all tables, some of them as iterables of records. The store has number ``store``.

    Take all that this yields before the next message is handled; what is in the iterables may be taken later.
    """
    for target in served.buckets.tables:
        yield _state(store, target)
        yield FrozenPages(store, target)
        if isinstance(target.rounds, Rounds):
            for _, _, item in target.rounds.kept:
                yield _late(store, target, item)


def restore_table(served: ServedStore, message: wire.StripeState | wire.TablePage | wire.TableRest) -> None:
    """Take a part of another server's table.

    Raises:
        UsageError: there can be no such table.
        WireError: the buffers do not fit.
    """
    if isinstance(message, wire.StripeState):
        _restore_state(served, message)
        return
    target = served.buckets.table(message.id)
    if isinstance(message, wire.TablePage):
        target.table.put(*page_of(target.description, message), None)
    else:
        target.table.restore(dict(zip(message.names, (integers(each) for each in message.buffers), strict=True)))


class FrozenPages(Iterable[wire.Message]):
    """The rows of a table as they were when this was made, and what else decides how it goes on. Can be read once.

    Args:
        store: the number of the store.
        target: the table.
    """

    def __init__(self, store: int, target: RowTarget) -> None:
        self._store, self._target = store, target
        self._parts = dict(target.table.parts)
        self._frozen: FrozenRows = target.table.freeze()
        self._rest = target.table.rest()
        # Whoever reads this may give up, with the standby that it is for.
        self._thaw = finalize(self, self._frozen.thaw)

    def __iter__(self) -> Iterator[wire.Message]:
        number, parts = self._target.number, self._parts
        row_bytes = self._target.description.row_bytes + sum(
            max(1, part.columns) * ITEMSIZE[part.dtype] for part in parts.values()
        )
        count = max(1, PAGE_BYTES // row_bytes)
        dtypes, columns = [part.dtype for part in parts.values()], [part.columns for part in parts.values()]
        for start in range(0, self._frozen.slots, count):
            ids, rows, others = self._frozen.page(start, count)
            if len(ids):
                buffers = [bytes_of(array) for array in (ids, rows, *others.values())]
                yield wire.TablePage(self._store, number, len(ids), list(parts), dtypes, columns, buffers)
        self._thaw()
        yield wire.TableRest(self._store, number, list(self._rest), [bytes_of(array) for array in self._rest.values()])


def page_of(table: Table, message: wire.TablePage) -> tuple[Ids, Any, dict[str, Any]]:
    """Return the ids, rows and what else each row has of a page of ``table``.

    Raises:
        WireError: the buffers do not fit.
    """
    if len(message.buffers) != 2 + len(message.names):
        raise WireError(f"{len(message.buffers)} buffers for ids, rows and {len(message.names)} parts")
    ids, rows, *others = message.buffers
    parts = {
        name: array_of(buffer, message.count, columns, dtype, f"{name} of rows")
        for name, dtype, columns, buffer in zip(message.names, message.dtypes, message.columns, others, strict=True)
    }
    return integers(ids), array_of(rows, message.count, table.width, table.dtype, "rows"), parts


def _state(store: int, target: RowTarget) -> wire.StripeState:
    changed: Mapping[int, Ids] = target.changed
    return wire.StripeState(
        store,
        target.number,
        target.key,
        target.description.described,
        target.stripe,
        target.stripes,
        version=target.rounds.version if isinstance(target.rounds, Rounds) else 0,
        updates=target.table.version,
        pushed=[list(pair) for pair in sorted(target.rounds.clocks.items())],
        failures=[[version, *described_error(error)] for version, error in target.failures.items()],
        changed=list(changed),
        counts=[len(ids) for ids in changed.values()],
        buffers=[bytes_of(ids) for ids in changed.values()],
    )


def _late(store: int, target: RowTarget, item: RowContribution) -> wire.PushRows:
    table = target.description
    rows = memoryview(bytearray(part_bytes(len(item.ids), table.width, table.dtype, "none")))
    write_rows(item.rows, "none", rows)
    return wire.PushRows(
        wire.Sender(wire.Node("worker", item.ranks[0], 1), 0, 0),
        store,
        [target.number],
        [item.clock],
        [len(item.ids)],
        [0],
        wide=True,
        want=False,
        union=False,
        lr=item.hyper.lr,
        rescale=item.hyper.rescale,
        changes=item.hyper.listed(),
        codecs=["none"],
        buffers=[bytes_of(np.ascontiguousarray(item.ids, np.int64)), rows, b""],
    )


def _restore_state(served: ServedStore, message: wire.StripeState) -> None:
    table = Table.of(message.table)
    (target,) = served.tables.add([(message.id, message.key, table)], message.stripe, message.stripes)
    target.rounds.restore(message.version, {pair[0]: pair[1] for pair in message.pushed})
    target.failures = {version: rebuild(kind, text) for version, kind, text in message.failures}
    target.changed = {
        version: integers(buffer) for version, buffer in zip(message.changed, message.buffers, strict=True)
    }
    nobody = np.empty(0, np.int64)
    target.table.put(nobody, np.empty((0, table.width), table.dtype), {}, message.updates)  # pages say what was seen
