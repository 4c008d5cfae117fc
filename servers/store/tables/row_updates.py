"""What contributions do to one store's tables: the optimizer steps with the sum of each row. No I/O."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore import wire
from kvstore.errors import Mismatch, NotFinite, ServerError, WeightsInDoubt, rebuild
from kvstore.optim.updater import RowHyperparameters, RowUpdater
from kvstore.rows.halves import narrowed, widened
from kvstore.rows.ids import Ids
from kvstore.rows.joint_tables import JointTables
from kvstore.rows.row_table import RowTable
from kvstore.rows.sums import Room, RowBatch, Rows, sum_batches, sum_rows
from kvstore.rows.updates import can_step_together, update_parts, update_together
from kvstore.rule import Rule
from kvstore.spec import HALVES, ITEMSIZE, Key, shorten
from kvstore.table import Table
from kvstore.transport.memory import SMALL, Memory
from kvstore.values import all_finite
from servers.store.buckets import Buckets
from servers.store.hyperparameters import UpdateHyperparameters, agreed_by
from servers.store.recording import Recording
from servers.store.rounds import Rounds
from servers.store.row_target import GroupContribution, RequestName, RowContribution, RowTarget, TableGroup


class RowUpdate(NamedTuple):
    """Which table to update, with the sum of which contributions times ``scale``, and with which numbers."""

    target: RowTarget
    items: Sequence[RowContribution]
    hyper: UpdateHyperparameters
    scale: float = 1.0


class RowUpdates:
    """The updates of the tables of one store.

    Attributes:
        answers: the new rows of those requests that want just what they have pushed.
    """

    def __init__(
        self,
        rule: Rule,
        buckets: Buckets,
        numbers: Callable[[UpdateHyperparameters], RowHyperparameters],
        recording: Recording,
        memory: Memory,
    ) -> None:
        self.answers = RowAnswers(memory)
        self._rule = rule
        self._buckets = buckets
        self._numbers = numbers
        self._recording = recording

    def close(self, wave: Sequence[tuple[RowTarget, list[RowContribution]]]) -> dict[RowTarget, Exception]:
        """Sum the contributions of rounds and update; return the errors. A round that fails is over, too."""
        errors: dict[RowTarget, Exception] = {}
        updates: list[RowUpdate] = []
        for target, items in wave:
            if (doubt := self._buckets.doubt_of(target.ids)) is not None:
                errors[target] = doubt
                continue
            try:
                hyper = agreed_by(items, target.segments.keys, self._rule)
            except Mismatch as exc:
                errors[target] = exc
            else:
                updates.append(RowUpdate(target, items, hyper, target.rounds.factor(sum(len(i.ranks) for i in items))))
        if errors and self._recording.on:
            self._recording.row_sums([], [], UpdateHyperparameters(), errors)
        return errors | self.make(updates, self._recording if self._recording.on else None)

    def make(self, updates: Sequence[RowUpdate], recording: Recording | None = None) -> dict[RowTarget, Exception]:
        """Make ``updates``.

        Returns:
            The errors, by table; such a table is unchanged, unless it is ``WeightsInDoubt``.
        """
        if self._buckets.doubts:
            found = {update.target: self._buckets.doubt_of(update.target.ids) for update in updates}
            refused: dict[RowTarget, Exception] = {target: doubt for target, doubt in found.items() if doubt}
            if refused:
                return refused | self.make([update for update in updates if update.target not in refused], recording)
        if len(updates) == 1:
            return self._make(updates[0].hyper, updates, recording)
        by_hyper: dict[UpdateHyperparameters, list[RowUpdate]] = {}
        for update in updates:
            by_hyper.setdefault(update.hyper, []).append(update)
        errors: dict[RowTarget, Exception] = {}
        for hyper, members in by_hyper.items():
            errors |= self._make(hyper, members, recording)
        return errors

    def close_group(self, group: TableGroup, items: Sequence[GroupContribution]) -> Exception | None:
        """Sum the contributions of a round and update; return the error. A round that fails is over, too."""
        try:
            hyper = agreed_by(items, group.segments.keys[:1], self._rule)
        except Mismatch as exc:
            return exc
        return self.make_of_group(group, items, hyper, group.rounds.factor(sum(len(item.ranks) for item in items)))

    def make_of_group(
        self, group: TableGroup, items: Sequence[GroupContribution], hyper: UpdateHyperparameters, scale: float = 1.0
    ) -> Exception | None:
        """Make one update, with the sum times ``scale``; return why it has failed, if it has."""
        if (doubt := self._buckets.doubt_of(group.ids)) is not None:
            return doubt
        versions = [table.version for table in group.tables]
        try:
            self._step_group(group, items, hyper, scale)
        except Exception as exc:
            return self._failed(exc, group.targets, versions)[group.targets[0]]
        return None

    def _step_group(
        self, group: TableGroup, items: Sequence[GroupContribution], hyper: UpdateHyperparameters, scale: float
    ) -> None:
        tables, updater, numbers = group.tables, group.updater, self._numbers(hyper)
        batches = [item.batch for item in items]
        requests = [item.request for item in items]
        # All tables of a group change together, so the version of one tells whether an answer is still right.
        if scale == 1 and self._step_there(tables, batches, updater, numbers, requests, tables[:1], group.joint):
            group.note_changed([(batch.ids, batch.starts) for batch in batches])
            return
        with np.errstate(over="ignore", invalid="ignore"):
            sums = sum_batches(batches)
            if scale != 1:
                np.multiply(sums.rows, scale, out=sums.rows)
        changed = update_together(tables, sums, updater, numbers, joint=group.joint)
        group.renew()
        starts = np.cumsum([0, *map(len, changed)]).tolist()
        group.note_changed([(np.concatenate(changed), starts)])

    def follow(self, message: wire.ClosedRowRounds, targets: Sequence[RowTarget]) -> None:
        """Close rounds of ``targets`` as another server has, which has recorded them.

        Raises:
            ValueError: they are not the next ones of these tables.
            WireError: the buffers do not fit.
        """
        failures = {place: rebuild(kind, text) for place, kind, text in message.failures}
        updated = [target for place, target in enumerate(targets) if place not in failures]
        if len(message.counts) != len(updated):
            raise ValueError(f"{len(message.counts)} sums for {len(targets)} tables, {len(failures)} without")
        sums = _recorded_sums(message, [target.description for target in updated])
        hyper = UpdateHyperparameters.of(message)
        for place, (target, version) in enumerate(zip(targets, message.versions, strict=True)):
            if not isinstance(target.rounds, Rounds):
                raise ValueError("a closed round of a store without rounds")
            target.rounds.follow(version, message.contributors[place] if message.contributors else ())
            if place in failures:
                target.fail(version, failures[place])
        for target, error in self._apply(updated, sums, self._numbers(hyper), keep=True).items():
            target.fail(target.rounds.version, error)

    def _make(
        self, hyper: UpdateHyperparameters, members: Sequence[RowUpdate], recording: Recording | None
    ) -> dict[RowTarget, Exception]:
        """Make updates with the same numbers: the fast way if the sums are not looked at, else with the sums."""
        targets, numbers = [update.target for update in members], self._numbers(hyper)
        # A standby, and a check of finite values, need the sums themselves.
        quick = recording is None and not self._rule.finite and members[0].scale == 1
        if quick and len(members) == 1 and len(members[0].items) == 1:
            errors = self._make_alone(members[0].target, members[0].items[0], numbers)
            if errors is not None:
                return errors
        batches = _batches(members)
        if quick and batches is not None:
            errors = self._make_there(members, batches, numbers)
            if errors is not None:
                return errors
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is looked for afterwards
                room = np.empty if recording is None else recording.room
                together = batches is not None and len(members) > 1
                sums = [_summed(members, room)] if together else [_summed([update], room) for update in members]
            errors = self._not_finite(members, sums)
        except Exception as exc:  # no memory, for one: the rounds are over all the same
            errors = self._failed(exc, targets)
            if recording is not None:
                recording.row_sums([], [], hyper, errors)
            return errors
        if errors:
            left = [(t, part) for t, part in zip(targets, _of_each(sums), strict=True) if t not in errors]
            targets, sums = [target for target, _ in left], [RowBatch(*part, [0, len(part[0])]) for _, part in left]
        if recording is not None:
            whole = sums[0].rows if len(sums) == 1 < len(targets) else None
            recording.row_sums(targets, _of_each(sums), hyper, errors, whole)
        return errors | self._apply(targets, sums, numbers, keep=recording is not None)

    def _make_alone(
        self, target: RowTarget, item: RowContribution, numbers: RowHyperparameters
    ) -> dict[RowTarget, Exception] | None:
        """Do what ``_make_there`` does with what one worker has pushed to one table."""
        updater, table, version = target.updater, target.table, target.table.version
        if updater is None:
            return None
        request = item.request if item.batch is None else None
        try:
            rows = table.update_part(item.ids, item.rows, self.answers.room(request), updater, numbers)
        except Exception as exc:
            return self._failed(exc, [target], [version])
        if rows is None:
            return None
        if request is not None:
            self.answers.keep([request], [rows], [table])
        target.note_changed(item.ids)
        return {}

    def _make_there(
        self, members: Sequence[RowUpdate], batches: Sequence[RowBatch], numbers: RowHyperparameters
    ) -> dict[RowTarget, Exception] | None:
        """Make updates without the sum of all rows, and keep the new rows as answers.

        Return why no row has changed, if it has failed; None if that is not how these updates can be made.
        """
        targets, items = [update.target for update in members], members[0].items
        tables, versions = [target.table for target in targets], [target.table.version for target in targets]
        whole = len(members) > 1  # else a message may be of more tables than this one, and the rows are a part of them
        if whole and not can_step_together(tables, [target.updater for target in targets]):
            return None
        requests = [item.request if whole or item.batch is None else None for item in items]
        joint = None if whole else targets[0].joint
        try:
            if not self._step_there(tables, batches, targets[0].updater, numbers, requests, tables, joint):
                return None
        except Exception as exc:
            return self._failed(exc, targets, versions)
        for update in members:
            update.target.note_changed(*(item.ids for item in update.items))
        return {}

    def _step_there(
        self,
        tables: Sequence[RowTable],
        batches: Sequence[RowBatch],
        updater: RowUpdater | None,
        numbers: RowHyperparameters,
        requests: Sequence[RequestName | None],
        watched: Sequence[RowTable],
        joint: JointTables | None,
    ) -> bool:
        """Do ``update_parts``, and keep the new rows as the answers to ``requests`` while ``watched`` do not change."""
        if len(batches) > 2 or updater is None:
            return False
        made = update_parts(tables, batches, updater, numbers, list(map(self.answers.room, requests)), joint)
        if made is None:
            return False
        self.answers.keep(requests, made, watched)
        return True

    def _apply(
        self, targets: Sequence[RowTarget], sums: Sequence[RowBatch], numbers: RowHyperparameters, keep: bool
    ) -> dict[RowTarget, Exception]:
        """Make one update of each of ``targets``; return why no row of some has changed.

        Args:
            sums: for all of them together, or for each.
            keep: whether the rows of ``sums`` must stay as they are.
        """
        parts = [(list(targets), sums[0])] if len(sums) == 1 else [([t], s) for t, s in zip(targets, sums, strict=True)]
        if len(sums) == 1 < len(targets):
            tables, updaters = [target.table for target in targets], [target.updater for target in targets]
            if not can_step_together(tables, updaters):
                each = zip(targets, sums[0].of_each(), strict=True)
                parts = [([target], RowBatch(ids, rows, [0, len(ids)])) for target, (ids, rows) in each]
        errors: dict[RowTarget, Exception] = {}
        for together, batch in parts:
            errors |= self._step(together, batch, numbers, keep)
        return errors

    def _step(
        self, targets: Sequence[RowTarget], sums: RowBatch, numbers: RowHyperparameters, keep: bool
    ) -> dict[RowTarget, Exception]:
        """Make one update of ``targets`` with one step; return why no row has changed, if it has failed."""
        updater, tables = targets[0].updater, [target.table for target in targets]
        versions = [table.version for table in tables]
        try:
            changed = update_together(tables, sums, updater, numbers, keep)
        except Exception as exc:
            return self._failed(exc, targets, versions, in_place=updater is not None and not updater.lazy)
        for target, ids in zip(targets, changed, strict=True):
            target.note_changed(ids)
        return {}

    def _not_finite(self, members: Sequence[RowUpdate], sums: Sequence[RowBatch]) -> dict[RowTarget, Exception]:
        """Return why updates must not be made whose sums are not finite, if the store checks."""
        if not self._rule.finite:
            return {}
        # Of a table without an updater the sum becomes the value, and half precision may be too narrow for it.
        used = [
            update.target.description.sum_dtype if update.target.updater is not None else update.target.dtype
            for update in members
        ]
        if HALVES.isdisjoint(used) and all(all_finite(torch.from_numpy(batch.rows)) for batch in sums):
            return {}
        return {
            update.target: _not_finite_rows(update.target.name, update.items, dtype)
            for update, dtype, (_, rows) in zip(members, used, _of_each(sums), strict=True)
            if not all_finite(torch.from_numpy(widened(narrowed(rows, dtype))))
        }

    def _failed(
        self, exc: Exception, targets: Sequence[RowTarget], versions: Sequence[int] = (), in_place: bool = False
    ) -> dict[RowTarget, Exception]:
        """Return why an update of ``targets``, whose tables had ``versions``, has failed.

        Either no row of them has changed, or some have perhaps: a table has another version, or rows are changed
        ``in_place``. Then none of them is served from now on.
        """
        keys = shorten(target.name for target in targets)
        if in_place or any(target.table.version != version for target, version in zip(targets, versions, strict=False)):
            text = f"an update of {keys} failed in the middle, and may be half made: {type(exc).__name__}: {exc}"
            doubt = WeightsInDoubt(text)
            doubt.__cause__ = exc
            return dict.fromkeys(targets, self._buckets.doubt([target.number for target in targets], doubt))
        error = ServerError(f"{type(exc).__name__}: {exc}; no row of this update of {keys} has changed")
        error.__cause__ = exc
        return dict.fromkeys(targets, error)


def _of_each(sums: Sequence[RowBatch]) -> list[tuple[Ids, Rows]]:
    return [part for batch in sums for part in batch.of_each()]


def _summed(updates: Sequence[RowUpdate], room: Room) -> RowBatch:
    """Return the sums of ``updates``, whose ``_batches`` there are."""
    if len(updates) == 1:
        ids, rows = sum_rows([(item.ids, item.rows) for item in updates[0].items], room)
        summed = RowBatch(ids, rows, [0, len(ids)])
    else:
        summed = sum_batches(_batches(updates) or [], room)
    if updates[0].scale != 1:
        np.multiply(summed.rows, updates[0].scale, out=summed.rows)
    return summed


def _batches(updates: Sequence[RowUpdate]) -> list[RowBatch] | None:
    """Return what each worker has pushed, if it has pushed just the tables of ``updates`` in one message; else None."""
    if len(updates) == 1:
        return [RowBatch(item.ids, item.rows, [0, len(item.ids)]) for item in updates[0].items]
    batches: list[RowBatch] = []
    for number, item in enumerate(updates[0].items):
        if item.batch is None or len(item.batch[0].starts) != len(updates) + 1:
            return None
        batch = item.batch[0]
        for place, update in enumerate(updates):
            if len(update.items) != len(updates[0].items) or update.scale != updates[0].scale:
                return None
            of = update.items[number].batch
            if of is None or of[0] is not batch or of[1] != place:
                return None
        batches.append(batch)
    return batches


class _Answer(NamedTuple):
    """Rows of ``tables`` as they were made by the updates ``versions``."""

    rows: Rows
    tables: Sequence[RowTable]
    versions: Sequence[int]


class RowAnswers:
    """The new rows of an update, as answers to the pushes that want just these rows: they are not gathered again.

    They are forgotten with the message that has changed them.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: dict[RequestName, _Answer] = {}

    def room(self, request: RequestName | None) -> Room:
        """Return what makes the memory of rows that answer ``request``; None for rows that answer nothing."""
        return np.empty if request is None else self._sendable

    def keep(self, requests: Sequence[RequestName | None], rows: Sequence[Rows], tables: Sequence[RowTable]) -> None:
        """Note that ``rows``, which ``room`` has made, are the rows of ``tables`` that answer ``requests``."""
        versions = [table.version for table in tables]
        for request, of in zip(requests, rows, strict=True):
            if request is not None:
                self._kept[request] = _Answer(of, tables, versions)

    def take(self, request: RequestName) -> wire.Buffer | None:
        """Return the rows that answer ``request``; None if they are not here, or have changed since."""
        answer = self._kept.pop(request, None) if self._kept else None
        if answer is None:
            return None
        # Another update may have come in between: of an async store, or of one table of a message whose rounds close
        # apart.
        for table, version in zip(answer.tables, answer.versions, strict=True):
            if table.version != version:
                return None
        return answer.rows.reshape(-1).view(np.uint8).data

    def forget(self) -> None:
        """Forget all: what comes next may change rows."""
        self._kept.clear()

    def _sendable(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Rows:
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if nbytes < SMALL:  # it is copied into the message: shared memory has a price of its own
            return np.empty(shape, dtype)
        rows: Rows = np.frombuffer(self._memory.allocate(nbytes), dtype).reshape(shape)
        return rows


def _not_finite_rows(key: Key, items: Sequence[RowContribution], dtype: str) -> NotFinite:
    """Return the error, with key, row, worker and push, for a sum of ``items`` that is not finite."""
    for item in items:
        finite = np.isfinite(item.rows).all(axis=1)
        if not finite.all():
            position = int(np.flatnonzero(~finite)[0])
            return NotFinite(
                f"push {item.clock} of {key!r} by {item.who} has NaN or infinite elements in row {item.ids[position]} "
                f"(position {position}); no row of this update has been changed"
            )
    return NotFinite(
        f"push {items[0].clock} of {key!r}: each worker's rows are finite, their sum is not in {dtype}; "
        "no row of this update has been changed"
    )


def _recorded_sums(message: wire.ClosedRowRounds, tables: Sequence[Table]) -> list[RowBatch]:
    """Return the sums in a record for ``tables``: all of them if they are one array, else of each.

    Raises:
        ValueError: rows of different tables in one array.
        WireError: the buffers do not fit.
    """
    sizes = [
        count * table.width * ITEMSIZE[table.sum_dtype] for count, table in zip(message.counts, tables, strict=True)
    ]
    if message.together:
        if len({(table.width, table.dtype) for table in tables}) != 1:
            raise ValueError("rows of tables of several widths or dtypes in one array")
        sizes = [sum(sizes)]
    ids_buffer, *buffers = wire.unpack_arrays(message.buffers, [sum(message.counts) * ITEMSIZE["int64"], *sizes])
    ids = _array(ids_buffer, "int64")
    starts = list(itertools.accumulate(message.counts, initial=0))
    if message.together:
        return [RowBatch(ids, _array(buffers[0], tables[0].sum_dtype).reshape(-1, tables[0].width), starts)]
    parts = zip(itertools.pairwise(starts), buffers, tables, strict=True)
    return [
        RowBatch(ids[start:stop], _array(buffer, table.sum_dtype).reshape(-1, table.width), [0, stop - start])
        for (start, stop), buffer, table in parts
    ]


def _array(buffer: memoryview, dtype: str) -> Rows:
    return np.frombuffer(buffer, dtype) if len(buffer) else np.empty(0, dtype)
