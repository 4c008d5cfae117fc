"""The tables of one store on one server: the requests for their rows. No I/O, no clock.

``ServedStore`` knows which requests wait for rounds, of tables as of arrays; what differs for rows is here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvstore import wire
from kvstore.checkpoint.tables import NUMBERS
from kvstore.errors import Mismatch, UsageError, WireError
from kvstore.lineage import UNKNOWN, Version
from kvstore.optim.optimizer import Optimizer
from kvstore.optim.updater import RowUpdater, refusals
from kvstore.rows.frozen_rows import FrozenRows
from kvstore.rows.ids import Ids
from kvstore.rows.layout import array_of, integers
from kvstore.rows.slab_space import GrownTables, SlabSpace
from kvstore.rows.slabs import Array
from kvstore.rule import Rule
from kvstore.spec import ITEMSIZE, Key
from kvstore.table import Table
from kvstore.transport.memory import Memory
from servers.store.array_updates import Updates
from servers.store.buckets import Buckets
from servers.store.hyperparameters import asked
from servers.store.recording import Recording
from servers.store.rounds import Rounds, WorkerClocks
from servers.store.row_target import RowContribution, RowTarget
from servers.store.tables.row_requests import gathered, packed, pushed_rows, require_wanted, wanted_ids
from servers.store.tables.row_updates import RowUpdate, RowUpdates


class ServedTables:
    """The tables of one store.

    Attributes:
        updates: sums the contributions, and steps.
        freezes: what workers read while training goes on.
        grown: learns which tables get rows; set it before there are tables.
    """

    def __init__(
        self,
        rule: Rule,
        buckets: Buckets,
        updates: Updates,
        memory: Memory,
        recording: Recording,
        rounds: Callable[[], Rounds[Any] | WorkerClocks[Any]],
        lineage: int = UNKNOWN,
    ) -> None:
        self.updates = RowUpdates(rule, buckets, updates.row_hyperparameters, recording, memory)
        self.freezes = RowFreezes()
        self._rule = rule
        self._buckets = buckets
        self._arrays = updates
        self._memory = memory
        self._recording = recording
        self._rounds = rounds
        self._lineage = lineage
        self._spaces: dict[tuple[int, str], SlabSpace] = {}  # by width and dtype of rows
        self.grown = GrownTables()

    def init(self, message: wire.InitTables) -> None:
        if message.stripe >= message.stripes:
            raise UsageError(f"stripe {message.stripe} of {message.stripes}: stripes count from 0")
        if self._rule.compensation and message.ids:
            raise UsageError(
                f"key {message.keys[0]!r} is a table: delay_compensation would need the rows that each worker has read "
                "last; use a store without it"
            )
        self._buckets.require_new_tables(message.ids)
        tables = map(Table.of, message.tables)
        self.add(list(zip(message.ids, message.keys, tables, strict=True)), message.stripe, message.stripes)

    def add(self, tables: Sequence[tuple[int, Key, Table]], stripe: int, stripes: int) -> list[RowTarget]:
        """Have new tables, each with the number of its segment and its key; return them."""
        targets = [
            RowTarget(number, key, table, stripe, stripes, self._rounds(), self._space(table), self._lineage)
            for number, key, table in tables
        ]
        updaters = _updaters(self._arrays.optimizer, targets)
        for target, updater in zip(targets, updaters, strict=True):
            target.use(updater)
            self._buckets.add_table(target)
        return targets

    def _space(self, table: Table) -> SlabSpace:
        kind = table.width, table.dtype
        if kind not in self._spaces:
            self._spaces[kind] = SlabSpace(table.row_bytes, grown=self.grown)
        return self._spaces[kind]

    def contributions(self, message: wire.PushRows) -> list[RowUpdate]:
        """Return what a push contributes to each of its tables. Nothing has changed yet."""
        targets = self._buckets.tables_of(message.ids)
        if targets:
            self._arrays.require_optimizer()
        if message.union:
            self._require_union(message)
        pushed = pushed_rows(message, targets)
        hyper = asked(message, self._arrays.optimizer)
        ranks = message.workers
        request = message.sender[:2] if pushed.answer else None
        updates: list[RowUpdate] = []
        for target, clock, (ids, rows, batch) in zip(targets, message.clocks, pushed.parts, strict=True):
            target.require_open(ranks, clock)
            whole = batch is not None or len(targets) == 1  # nothing else is between the rows of the answer
            part = RowContribution(ranks, clock, ids, rows, hyper, batch, request if whole else None)
            updates.append(RowUpdate(target, [part], hyper))
        return updates

    def require_wanted(self, message: wire.PullRows) -> None:
        """Raise as ``contributions`` does, unless there can be the rows that ``message`` wants."""
        require_wanted(message, self._buckets.read_tables(message.ids))

    def reply(self, message: wire.PushRows | wire.PullRows, late: int, ahead: int) -> wire.Rows | wire.Ack:
        if isinstance(message, wire.PushRows) and not message.want:
            return wire.Ack(message.seq, late)
        union = isinstance(message, wire.PushRows) and message.union
        counts = message.wanted
        updated = self.updates.answers.take(message.sender[:2])
        buffers: list[wire.Buffer]
        if updated is not None:
            buffers = [updated]
        elif union:
            targets = self._buckets.tables_of(message.ids)
            ids = [_changed(target, clock) for target, clock in zip(targets, message.clocks, strict=True)]
            counts = list(map(len, ids))
            buffers = [gathered(targets, ids, message.codecs, self._memory), packed(ids, message.wide)]
        else:
            targets, group = self._buckets.read_tables(message.ids), self._buckets.groups.find(message.ids)
            joint = None if group is None else group.joint
            buffers = [gathered(targets, wanted_ids(message), message.codecs, self._memory, joint)]
        clocks: list[int] = []
        if self._rule.quorum is not None:
            clocks = [target.rounds.version for target in self._buckets.tables_of(message.ids)]
        return wire.Rows(
            message.seq,
            counts,
            clocks=clocks,
            ahead=ahead,
            missed=late,
            priority=message.priority if isinstance(message, wire.PushRows) else None,
            wide=message.wide,
            buffers=buffers,
        )

    def put(self, message: wire.PutRows) -> None:
        target = self._buckets.table(message.id)
        table = target.table
        for name, dtype, columns in zip(message.names, message.dtypes, message.columns, strict=True):
            known = table.parts.get(name)
            if known is not None and (known.dtype, known.columns) != (dtype, columns):
                raise Mismatch(
                    f"{name!r} of the rows of {target.name!r} is {known.columns or 1} {known.dtype} a row here, "
                    f"not {columns or 1} {dtype}"
                )
        ids, rows, parts = rows_of_page(target.description, message)
        table.require(ids)
        table.put(ids, rows, parts, message.version, message.steps)

    def put_rest(self, message: wire.PutTableRest) -> None:
        table = self._buckets.table(message.id).table
        if len(message.buffers) != len(message.names):
            raise WireError(f"{len(message.buffers)} buffers for {len(message.names)} parts of a table")
        rest = dict(zip(message.names, map(integers, message.buffers), strict=True))
        numbers = len(table.rest()[NUMBERS])
        if len(rest.get(NUMBERS, ())) != numbers:
            raise WireError(f"expected {numbers} numbers of a table, got {len(rest.get(NUMBERS, ()))}")
        table.restore(rest)

    def evict(self, message: wire.EvictRows) -> None:
        self._buckets.table(message.id).table.evict()
        if self._recording.on:
            self._recording.note(message)

    def describe(self, message: wire.DescribeTable) -> wire.TableCounts:
        counts = self._buckets.table(message.id).table.statistics()
        return wire.TableCounts(message.seq, list(counts), list(counts.values()))

    def updaters(self, optimizer: Optimizer) -> Callable[[], None]:
        """Return a function that makes ``optimizer`` that of all tables; raise ``UsageError`` if it cannot be."""
        targets = list(self._buckets.tables)
        updaters = _updaters(optimizer, targets)

        def use() -> None:
            for target, updater in zip(targets, updaters, strict=True):
                target.use(updater)

        return use

    def _require_union(self, message: wire.PushRows) -> None:
        if self._rule.mode != "sync" or self._rule.quorum is not None:
            raise UsageError(
                f"{message.node} asked for all rows of a round, which only a store has whose rounds are of all "
                f"workers: this one is {self._rule}"
            )
        if any(message.wanted):
            raise UsageError(
                f"{message.node} asked for all rows of a round, and for rows by their ids: one or the other"
            )


def _updaters(optimizer: Optimizer | None, targets: Sequence[RowTarget]) -> list[RowUpdater | None]:
    """Return row updaters of ``targets`` for ``optimizer``; raise ``UsageError`` if it has no rule for such rows."""
    if optimizer is None:
        return [None for _ in targets]
    with refusals(optimizer):
        return [
            RowUpdater(optimizer, target.name, target.dtype, target.width, target.description.grows)
            for target in targets
        ]


def rows_of_page(table: Table, message: wire.PutRows | wire.TablePage) -> tuple[Ids, Any, dict[str, Any]]:
    """Return the ids, rows and other parts of each row that ``message`` brings of ``table``."""
    if len(message.buffers) != 2 + len(message.names):
        raise WireError(f"{len(message.buffers)} buffers for ids, rows and {len(message.names)} parts")
    ids, rows, *others = message.buffers
    parts = {
        name: array_of(buffer, message.count, columns, dtype, f"{name} of rows")
        for name, dtype, columns, buffer in zip(message.names, message.dtypes, message.columns, others, strict=True)
    }
    ids = array_of(ids, message.count, 0, "int64", "ids")
    return ids, array_of(rows, message.count, table.width, table.dtype, "rows"), parts


def _changed(target: RowTarget, clock: int) -> Any:
    try:
        return target.changed_in(clock)
    except KeyError:
        raise UsageError(
            f"which rows round {clock} of {target.name!r} has changed is not known any more: "
            f"{target.rounds.version} rounds are over"
        ) from None


MOST = 4  # freezes of one worker; more are a sign that some were forgotten
MAX_PAGE_BYTES = 1 << 28  # in one answer, which is made in memory as a whole


class RowFreezes:
    """The tables of one store that are kept as they were, for workers that read them page by page during training.

    Each is known by the worker that asked for it and the number of that request. If the worker fails and does not thaw
    it, it goes when the worker freezes more, or leaves.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[wire.Node, int], tuple[RowTarget, FrozenRows]] = {}

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
        self._held[message.node, message.seq] = target, frozen
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
        """Return the rows in the slots that ``message`` asks for, as far as there are any."""
        held = self._held.get((message.node, message.number))
        if held is None:
            raise UsageError(
                f"{message.node} has no frozen table {message.number} on this server: it has thawed it, has frozen "
                f"more than {MOST} since, or froze it on a server that is lost; freeze it again"
            )
        target, frozen = held
        count = max(0, min(message.count, (frozen.gone if message.gone else frozen.slots) - message.start))
        most = max(1, MAX_PAGE_BYTES // _bytes_of_a_row(target, message))
        if count > most:
            raise UsageError(f"a page of {count} rows of {target.name!r} is too long: ask for {most} at most")
        if message.gone:
            return wire.FrozenPage(message.seq, count, [_buffer(frozen.gone_page(message.start, count))])
        ids, rows, parts = frozen.page(message.start, count, message.state)
        return wire.FrozenPage(message.seq, len(ids), list(map(_buffer, [ids, rows, *parts.values()])))

    def thaw(self, node: wire.Node, number: int) -> None:
        if (node, number) in self._held:
            self._drop((node, number))

    def depart(self, workers: Collection[int]) -> None:
        for which in [which for which in self._held if which[0].role == "worker" and which[0].rank in workers]:
            self._drop(which)

    def close(self) -> None:
        for which in list(self._held):
            self._drop(which)

    def _drop(self, which: tuple[wire.Node, int]) -> None:
        self._held.pop(which)[1].thaw()


def _bytes_of_a_row(target: RowTarget, message: wire.ReadFrozen) -> int:
    parts = target.table.parts.values() if message.state else ()
    return 8 + target.description.row_bytes + sum(max(1, part.columns) * ITEMSIZE[part.dtype] for part in parts)


def _buffer(array: Array) -> wire.Buffer:
    return array.data.cast("B") if array.size else b""
