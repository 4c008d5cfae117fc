"""Tables that are kept as they were, for workers that read them page by page while training goes on. No I/O.

What a worker does not thaw, because it failed, goes when it freezes more, or leaves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvstore import wire
from kvstore.errors import UsageError
from kvstore.lineage import Version
from kvstore.rows.frozen_rows import FrozenRows
from kvstore.rows.slabs import Array
from kvstore.spec import ITEMSIZE
from servers.store.row_target import RowTarget

MOST = 4  # freezes of one worker; more are a sign that some were forgotten
MAX_PAGE_BYTES = 1 << 28


@dataclass
class _Held:
    target: RowTarget
    frozen: FrozenRows


class RowFreezes:
    """The tables of one store that are frozen, by who asked for it and the number of that request."""

    def __init__(self) -> None:
        self._held: dict[tuple[wire.Node, int], _Held] = {}

    def freeze(self, message: wire.FreezeTable, target: RowTarget) -> wire.Frozen:
        """Keep ``target`` as it is now; if its worker has too many, its oldest goes.

        Where it is not known what has changed since the state that ``message`` names, all rows are kept.
        """
        mine = [which for which in self._held if which[0] == message.node]
        for which in mine[: max(0, len(mine) - MOST + 1)]:
            self._drop(which)
        since = None if message.since is None else Version(*message.since)
        whole = "" if since is None else target.table.unknown(since)
        frozen = target.table.freeze(None if whole else since)
        self._held[message.node, message.seq] = _Held(target, frozen)
        parts = target.table.parts
        return wire.Frozen(
            message.seq,
            message.seq,
            frozen.slots,
            frozen.rows,
            frozen.gone,
            frozen.at,
            frozen.steps,
            list(parts),
            [part.dtype for part in parts.values()],
            [part.columns for part in parts.values()],
            whole,
        )

    def read(self, message: wire.ReadFrozen) -> wire.FrozenPage:
        """Return the rows in the slots that ``message`` asks for, as far as there are any.

        Raises:
            UsageError: nothing is frozen under that number, or it is too much for one message.
        """
        held = self._held.get((message.node, message.number))
        if held is None:
            raise UsageError(
                f"{message.node} has no frozen table {message.number} on this server: it has thawed it, has frozen "
                f"more than {MOST} since, or froze it on a server that is lost; freeze it again"
            )
        frozen = held.frozen
        count = max(0, min(message.count, (frozen.gone if message.gone else frozen.slots) - message.start))
        most = max(1, MAX_PAGE_BYTES // _bytes_of_a_row(held.target, message))
        if count > most:
            raise UsageError(f"a page of {count} rows of {held.target.name!r} is too long: ask for {most} at most")
        if message.gone:
            return wire.FrozenPage(message.seq, count, [_buffer(frozen.gone_page(message.start, count))])
        ids, rows, parts = frozen.page(message.start, count, message.state)
        return wire.FrozenPage(message.seq, len(ids), list(map(_buffer, [ids, rows, *parts.values()])))

    def thaw(self, node: wire.Node, number: int) -> None:
        """Forget what ``node`` has frozen as ``number``, if it is there."""
        if (node, number) in self._held:
            self._drop((node, number))

    def depart(self, workers: Collection[int]) -> None:
        """Forget what ``workers``, which have left, have frozen."""
        for which in [which for which in self._held if which[0].role == "worker" and which[0].rank in workers]:
            self._drop(which)

    def close(self) -> None:
        """Forget everything."""
        for which in list(self._held):
            self._drop(which)

    def _drop(self, which: tuple[wire.Node, int]) -> None:
        self._held.pop(which).frozen.thaw()


def _bytes_of_a_row(target: RowTarget, message: wire.ReadFrozen) -> int:
    parts = target.table.parts.values() if message.state else ()
    return 8 + target.description.row_bytes + sum(max(1, part.columns) * ITEMSIZE[part.dtype] for part in parts)


def _buffer(array: Array) -> wire.Buffer:
    return array.data.cast("B") if array.size else b""
