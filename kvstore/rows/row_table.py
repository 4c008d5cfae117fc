"""A table of rows in memory: one server's stripe of it, or a whole one. No I/O, no clock: equal calls, equal bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.errors import UsageError
from kvstore.lineage import Version, next_lineage
from kvstore.optim.updater import OWN, RowHyperparameters, RowUpdater
from kvstore.rows.admission import write_beginnings
from kvstore.rows.frozen_rows import SEEN, FrozenRows, Page
from kvstore.rows.halves import narrowed, tensor_of
from kvstore.rows.ids import Hashes, Ids
from kvstore.rows.index import SlotIndex
from kvstore.rows.slabs import Array, Slab, Slots, gather, scatter
from kvstore.rows.stripe import COUNT, DENSE, STATE, PartSpec, TableStripe, beginning
from kvstore.rows.sums import Room, RowBatch, Rows
from kvstore.spec import Key

_NO_SLOTS: Slots = np.empty(0, np.int64)
_NUMBERS, _LINEAGE = "numbers", "lineage"  # parts of ``RowTable.rest``


class PendingUpdate(NamedTuple):
    """An update that has begun; see ``RowTable.begin``."""

    ids: Ids  # of the rows that change
    slots: Slots  # where they are; below 0 for those that are to be made
    new: Slots = _NO_SLOTS  # the positions of these
    kept: Array | None = None  # which of the ids that were given are among ``ids``; None for all


class RowTable(TableStripe):
    """Stripe ``stripe`` of ``stripes`` of ``table``.

    Args:
        stripe, stripes: which ids are here; see ``stripes_of``.
        states: what an optimizer keeps of each row, by name; see ``use``.
        space: for the slabs of this table and of others, if rows of all of them are often used together.
        lineage: in which it begins; see ``kvstore.lineage``. Without one, nothing is known of what has changed since.

    Attributes:
        slabs: the rows, under the name ``""``, and what else each row has.
        version: how many updates it has had, in its ``lineage``.
        steps: how many of them the optimizer that is used now has made.
    """

    # --- what is asked

    def pull(self, ids: Ids, out: Array, found: Slots | None = None) -> None:
        """Write the rows of ``ids`` to ``out``, of shape (n, width), contiguous. Makes no rows.

        An id without a row gives its initial value; zeros in a table with an admission rule. The ids must be of this
        stripe; they may repeat and have any order. ``found`` are their slots, if they are known.
        """
        slots = self._live(ids, found)
        there = slots >= 0
        if there.all():
            gather(self._rows.items, slots, out)
            return
        if there.any():
            gather(self._rows.items, np.maximum(slots, 0), out)
        missing = np.flatnonzero(~there)
        self.write_missing(ids[missing], out, missing)

    def write_missing(self, ids: Ids, out: Array, positions: Slots) -> None:
        """Write to ``out``, at ``positions``, what is pulled of ``ids``, which have no rows."""
        if self.table.admit is not None:
            out[positions] = 0
        else:
            self.write_new(ids, out, positions)

    def read(self, slots: Slots, rows: Array, states: Mapping[str, Array]) -> None:
        """Write copies of the rows in ``slots``, and of their states, to these arrays, which are contiguous."""
        if len(slots) and len(self):
            gather(self._rows.items, slots, rows)
            for name, value in states.items():
                gather(self._states[name].items, slots, value)

    # --- what changes it

    def update(
        self,
        ids: Ids,
        sums: Array,
        updater: RowUpdater | None,
        hyper: RowHyperparameters = OWN,
        keep: bool = False,
    ) -> Ids:
        """Make one update of the rows of ``ids``; return the ids whose rows are there now and have changed.

        New ids get rows as the table admits them; what it does not is dropped. Then rows go as its rules say. If
        ``updater`` fails, no row has changed, unless it updates all rows.

        Args:
            ids: unique, of this stripe.
            sums: of the dtype of the table's sums, or, without an updater, of its rows.
            updater: the optimizer; None assigns ``sums`` to the rows.
            keep: whether ``sums`` must stay as it is.
        """
        if updater is not None and not updater.lazy:
            return self._update_all(ids, sums, updater, hyper)
        return update_each([self], RowBatch(ids, sums, [0, len(ids)]), updater, hyper, keep)[0]

    def update_part(
        self, ids: Ids, grads: Array, room: Room, updater: RowUpdater, hyper: RowHyperparameters
    ) -> Array | None:
        """Do what ``kvstore.rows.updates.update_parts`` does with what one worker has pushed to one table.

        The other way takes 25 us more, a seventh of what a server does for a push of 64 rows.
        """
        if self.table.evict or not updater.lazy:
            return None
        slots = self._slots.find(ids)
        new = np.flatnonzero(slots < 0) if len(slots) and slots.min() < 0 else _NO_SLOTS
        if len(new) and self.table.admit is not None:
            return None
        rows = room(grads.shape, self._rows.dtype)
        states = updater.empty_states(len(rows)) if updater.states else {}
        self.gather(PendingUpdate(ids, slots, new), rows, states)
        tensors = {name: torch.from_numpy(value) for name, value in states.items()}
        updater.step(self.steps + 1, torch.from_numpy(rows), tensor_of(grads), tensors, hyper, keep=True)
        self.stepped()
        self.write(self._claim(ids, slots, new), rows, states)
        return rows

    def begin(self, ids: Ids, found: Slots | None = None) -> PendingUpdate:
        """Begin an update: find out which rows of ``ids`` it is of. No row changes. ``found`` may be their slots.

        It is followed by ``gather`` and ``finish``: one step of the optimizer in between can be for several tables.
        """
        slots = self._slots.find(ids) if found is None else found
        self._release_stale(slots)
        missing = slots < 0
        if not missing.any():
            return PendingUpdate(ids, slots)
        refused = np.zeros(len(ids), bool)
        refused[missing] = ~self._admission.admit(ids[missing], self.version + 1)
        kept = None
        if refused.any():
            kept = ~refused
            ids, slots, missing = ids[kept], slots[kept], missing[kept]
            self._refused += int(np.count_nonzero(refused))
        return PendingUpdate(ids, slots, np.flatnonzero(missing), kept)

    def gather(self, pending: PendingUpdate, rows: Array, states: Mapping[str, Array]) -> None:
        """Write copies of the rows of an update, and of their states, to ``rows`` and ``states``, which are contiguous.

        Rows that are to be made are as they begin.
        """
        slots, new = pending.slots, pending.new
        if len(new) < len(slots):
            self.read(np.maximum(slots, 0) if len(new) else slots, rows, states)
        if len(new):
            self.write_new(pending.ids[new], rows, new)
            for name, columns in self._columns.items():
                states[name][new] = beginning(columns, rows[new])

    def write_new(self, ids: Ids, out: Array, positions: Slots, seeds: Hashes | None = None) -> None:
        """Write to ``out``, at ``positions``, which rise, how the rows of ``ids`` begin; see ``write_beginnings``."""
        if len(positions) == len(out):
            write_beginnings(self.table, ids, out, seeds)
        elif len(positions):
            begun = np.empty((len(positions), self.table.width), self._rows.dtype)
            write_beginnings(self.table, ids, begun, seeds)
            scatter(out, positions, begun)

    def finish(self, pending: PendingUpdate, rows: Array, states: Mapping[str, Array], stepped: bool = False) -> Ids:
        """End an update: take the new rows and states; return what ``update`` does.

        Args:
            stepped: whether an optimizer has made them.
        """
        self.steps += stepped
        self.version += 1  # before rows change; see ``stepped``
        slots = self._claim(pending.ids, pending.slots, pending.new)
        self.write(slots, rows, states)
        self._count(slots, pending.new)
        return self._evict_after(pending.ids)

    def stepped(self) -> None:
        """Begin to end an update made by an optimizer, of a table whose rows do not go.

        New ids get slots, the table may ``keep`` the slots of all rows, and ``write`` follows.
        """
        self.steps += 1
        # first: a failure from here on leaves another version, which tells that rows may have changed
        self.version += 1

    def write(self, slots: Slots, rows: Array, states: Mapping[str, Array]) -> None:
        """Replace rows, and their states; see ``stepped``."""
        scatter(self._rows.items, slots, rows)
        for name, value in states.items():
            scatter(self._states[name].items, slots, value)
        self._seen.items[slots] = self.version + 1

    def put(
        self, ids: Ids, rows: Array, parts: Mapping[str, Array], version: int | None, steps: int | None = None
    ) -> None:
        """Replace or make rows, for loading. It is no update: nothing is counted, and nothing goes before the next one.

        So the version does not tell the table from what it was: its next lineage begins, with each call. A load has
        many, and what somebody reads between two of them is no state that is to be continued.

        Args:
            ids: of this stripe, unique.
            parts: what else each row has, as ``FrozenRows.page`` gives it. What is missing begins anew; ``seen`` and
                ``count`` are ignored where the table does not need them.
            version, steps: of the table from now on; None for as they are.

        Raises:
            UsageError: there is a state that this table's optimizer does not keep, or an id comes twice.
            Mismatch: a part has another shape.
        """
        self._require_parts(ids, rows, parts)
        self.lineage = next_lineage(self.lineage)
        self.version = self.version if version is None else version
        self.steps = self.steps if steps is None else steps
        slots = self._slots.find(ids)
        slots = self._claim(ids, slots, np.flatnonzero(slots < 0))
        rows = narrowed(rows, self.table.dtype)
        scatter(self._rows.items, slots, rows)
        for name, columns in self._columns.items():
            value = parts.get(STATE + name)
            self._states[name].items[slots] = beginning(columns, rows) if value is None else value
        seen = parts.get(SEEN)
        self._seen.items[slots] = self.version + 1 if seen is None else seen
        if self._counts is not None:
            self._counts.items[slots] = parts.get(COUNT, 1)
        self._gone.forget(self.version)

    def use(self, updater: RowUpdater | None) -> None:
        """Keep the states of ``updater`` with each row. Those of another rule are dropped, and steps are counted anew.

        An updater of the same rule may have other states: those of the same name stay. Rows that are there get the
        initial values of new ones. If it changes what rows have, the next lineage begins: states of an older save may
        have the same names, and must not come back with the rows that have not changed since.
        """
        rule, states = (None, {}) if updater is None else (updater.rule, dict(updater.states))
        if (rule, states) != (self._rule, self._columns):
            self.lineage = next_lineage(self.lineage)
        if rule != self._rule:
            self._keep_states(rule, states)
        elif states != self._columns:
            self._keep_states(rule, states, self._states)

    def evict(self) -> int:
        """Let rows go as the table's rules say, now; return how many."""
        before = len(self._slots)
        self._remove(self._stale_slots(0, self._slots.top), self.version + 1)
        if self._remove_surplus(self.version + 1):  # rows that were pulled until now, and no update has removed them
            self.lineage = next_lineage(self.lineage)
        return before - len(self._slots)

    # --- reading it whole

    def unknown(self, since: Version) -> str:
        """Return why it is not known what has changed since ``since``; nothing if it is known."""
        if self.at.since(since) is None:
            return (
                f"what has changed since version {since.number} is not known: the table is at {self.version} now, but "
                "it does not continue that one: since then rows were loaded or put, states dropped or a job begun "
                "anew, or the save is of an older version of this program"
            )
        return self._gone.unknown(since.number)

    def freeze(self, since: Version | None = None) -> FrozenRows:
        """Return the table as it is now, to be read page by page while it changes. ``thaw`` must follow.

        Args:
            since: only rows that have changed, and the ids of those that have gone, since this version.

        Raises:
            UsageError: what has changed since then is not known; see ``unknown``.
        """
        gone = np.empty(0, np.int64)
        changed = max(1, self._eviction.oldest(self.version) + 1)
        if since is not None:
            if unknown := self.unknown(since):
                raise UsageError(f"{unknown}; save the whole table")
            self._remove(self._stale_slots(0, self._slots.top), self.version)
            gone = self._gone.since(since.number)
            gone = gone[self._slots.find(gone) < 0]
            changed = max(changed, since.number + 2)
        return self._freeze(changed, gone, self.slabs)

    def freeze_values(self) -> FrozenRows:
        """Return the rows as they are now, without states. ``gone_since`` has which others somebody may still have."""
        self._remove(self._stale_slots(0, self._slots.top), self.version)
        return self._freeze(1, np.empty(0, np.int64), {name: self.slabs[name] for name in ("", SEEN)})

    def _freeze(self, changed: int, gone: Ids, slabs: Mapping[str, Slab]) -> FrozenRows:
        counts = len(self._slots), self._slots.top, self.at, self.steps
        for slab in slabs.values():  # a table that has no rows yet
            slab.reserve(self._slots.top)
        frozen = FrozenRows(counts, self._slots.ids_of, slabs, changed, gone, self._thaw)
        with self._freezing:
            self._frozen = (*self._frozen, frozen)
        return frozen

    @property
    def batches_gone(self) -> int:
        """How many batches of rows have gone so far; see ``gone_since``."""
        return self._gone.added

    def gone_since(self, since: Version, batches: int) -> Iterator[Ids]:
        """Yield the ids of rows that have gone after ``since``, up to the ``batches``-th time, the last first.

        An id can be there twice, or have come again. Of ``since`` it must be known; see ``unknown``.
        """
        return self._gone.batches(since.number, batches)

    def rest(self) -> dict[str, Array]:
        """Return all that decides how the table goes on beside its rows, for ``restore`` of a copy that has these."""
        numbers = np.array([self.version, self.steps, self._made, self._evicted, self._refused])
        return {_NUMBERS: numbers, _LINEAGE: np.array([self.lineage]), **self._admission.parts()}

    def restore(self, rest: Mapping[str, Array]) -> None:
        """Go on as the table does whose ``rest`` this is, and whose rows have been ``put``.

        With its lineage this is the same table, on another server. Without, it is one that begins where that one was,
        which may go on elsewhere: its next lineage begins.

        Raises:
            UsageError: it is of a table with another admission rule.
        """
        others = {name: part for name, part in rest.items() if name not in (_NUMBERS, _LINEAGE)}
        lineage = int(*rest[_LINEAGE]) if _LINEAGE in rest else next_lineage(self.lineage)
        self._admission.restore(others)
        self.version, self.steps, self._made, self._evicted, self._refused = map(int, rest[_NUMBERS])
        self._evicted = self._made - len(self._slots)  # pages left out the rows that count as gone
        self.lineage = lineage
        self._gone.forget(self.version)

    # --- updates of all rows

    def _update_all(self, ids: Ids, sums: Array, updater: RowUpdater, hyper: RowHyperparameters) -> Ids:
        """Update all rows of a table that has a shape; those that are not in ``ids`` have zero gradients."""
        if isinstance(self._slots, SlotIndex):
            raise UsageError(f"{self.table} grows: only rows that are pushed can be updated (lazy_update=True)")
        self._make_all(self._slots)
        at = self._slots.find(ids)
        order = np.argsort(at)
        at = at[order]
        count = max(1, DENSE // self.table.width)
        top = self._slots.top
        for start in range(0, top, count):
            stop = min(top, start + count)
            part = slice(*np.searchsorted(at, [start, stop]))
            grads = np.zeros((stop - start, self.table.width), sums.dtype)
            scatter(grads, at[part] - start, sums[order[part]])
            for frozen in self._frozen:
                frozen.keep(np.arange(start, stop))
            states = {name: torch.from_numpy(slab.items[start:stop]) for name, slab in self._states.items()}
            rows = torch.from_numpy(self._rows.items[start:stop])
            updater.step(self.steps + 1, rows, torch.from_numpy(grads), states, hyper)
        self.version += 1
        self.steps += 1
        self._seen.items[:top] = self.version + 1
        return np.arange(self.stripe, self.table.rows, self.stripes)


def update_each(
    tables: Sequence[RowTable], sums: RowBatch, updater: RowUpdater | None, hyper: RowHyperparameters, keep: bool
) -> list[Ids]:
    """Make one update of each of ``tables``, where rows may be made, or go: table by table, but for the step.

    See ``RowTable.update`` for arguments, and what is returned of each table.
    """
    ids = sums.ids_of_each()
    each_found = zip(tables, ids, RowTable.found(tables, ids), strict=True)
    pending = [table.begin(own, found) for table, own, found in each_found]
    grads, starts = sums.rows, sums.starts
    if any(each.kept is not None for each in pending):
        kept = [
            np.ones(stop - start, bool) if each.kept is None else each.kept
            for each, (start, stop) in zip(pending, itertools.pairwise(sums.starts), strict=True)
        ]
        grads = grads[np.concatenate(kept)]
        starts = list(itertools.accumulate((len(each.ids) for each in pending), initial=0))
    parts = [slice(start, stop) for start, stop in itertools.pairwise(starts)]
    if updater is None:
        grads = narrowed(grads, tables[0].table.dtype)
        each_table = zip(tables, pending, parts, strict=True)
        return [table.finish(each, grads[part], {}) for table, each, part in each_table]
    rows = np.empty((len(grads), tables[0].table.width), tables[0].slabs[""].dtype)
    kept_of_each = tables[0]._states.items()
    states = {name: np.empty((len(grads), *slab.items.shape[1:]), slab.dtype) for name, slab in kept_of_each}
    own = [{name: value[part] for name, value in states.items()} for part in parts]
    for table, each, part, values in zip(tables, pending, parts, own, strict=True):
        table.gather(each, rows[part], values)
    tensors = {name: torch.from_numpy(value) for name, value in states.items()}
    updater.step(tables[0].steps + 1, torch.from_numpy(rows), tensor_of(grads), tensors, hyper, keep)
    return [
        table.finish(each, rows[part], values, stepped=True)
        for table, each, part, values in zip(tables, pending, parts, own, strict=True)
    ]


_PREFIX = "rows."  # no name of an array's state begins so: those begin with the optimizer's own names
_IDS, _STEPS = f"{_PREFIX}ids", f"{_PREFIX}steps"

Part = np.ndarray[Any, np.dtype[Any]]


class RowStates(NamedTuple):
    """States by row."""

    ids: Ids
    parts: dict[str, Part]  # by the names that ``Page.parts`` has for states, for each id its state
    steps: int

    @classmethod
    def of(cls, pages: Iterable[Page], steps: int) -> RowStates:
        """Join what ``pages``, of all servers, have of states."""
        listed = list(pages)
        ids = np.concatenate([np.empty(0, np.int64), *(page.ids for page in listed)])
        order = np.argsort(ids)
        names = [name for name in (listed[0].parts if listed else ()) if name.startswith(STATE)]
        parts = {name: np.concatenate([page.parts[name] for page in listed])[order] for name in names}
        return cls(ids[order], parts, steps)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return them as a file has them; see ``split``."""
        named = {_IDS: self.ids, **{f"{_PREFIX}{name}": part for name, part in self.parts.items()}}
        return {_STEPS: torch.tensor(self.steps, dtype=torch.int64, device="cpu")} | {
            name: torch.from_numpy(part) for name, part in named.items()
        }

    def require(self, parts: Mapping[str, PartSpec], key: Key, where: object) -> None:
        """Raise ``UsageError`` unless rows that have ``parts`` can take these states."""
        given = {
            name: PartSpec(part.dtype.name, part.shape[1] if part.ndim > 1 else 0) for name, part in self.parts.items()
        }
        for name, part in given.items():
            if parts.get(name) != part:
                known = [each.removeprefix(STATE) for each in parts if each.startswith(STATE)]
                raise UsageError(
                    f"{where} holds {name.removeprefix(STATE)} of {part.columns} {part.dtype} for each row of table "
                    f"{key!r}, but its optimizer keeps {', '.join(known) or 'nothing'} there"
                )

    def replaced(self, there: Iterable[Page], grows: bool, pull: Callable[[Ids], Rows]) -> Iterator[Page]:
        """Yield the rows of a table whose pages are ``there`` with these states; other rows unless the table ``grows``.

        The last page has these others, as ``pull`` returns their values, perhaps none.
        """
        missing = np.ones(len(self.ids), bool)
        for page in there:
            with_states, places = self.replacing(page)
            missing[places] = False
            yield with_states
        others = missing & (not grows)
        ids = self.ids[others]
        yield Page(ids, pull(ids), {name: part[others] for name, part in self.parts.items()})

    def replacing(self, page: Page) -> tuple[Page, Ids]:
        """Return those rows of ``page`` that have states here, with these, and where these are in ``ids``."""
        if not len(self.ids):
            places = np.zeros(len(page.ids), np.int64)
            found = np.zeros(len(page.ids), bool)
        else:
            places = np.minimum(np.searchsorted(self.ids, page.ids), len(self.ids) - 1)
            found = self.ids[places] == page.ids
        places = places[found]
        parts = {name: part[found] for name, part in page.parts.items() if not name.startswith(STATE)}
        parts |= {name: part[places] for name, part in self.parts.items()}
        return Page(page.ids[found], page.rows[found], parts), places


def split(
    states: Mapping[tuple[Key, str], torch.Tensor], where: object
) -> tuple[dict[tuple[Key, str], torch.Tensor], dict[Key, RowStates]]:
    """Return the states of arrays, and the states of tables by key.

    Raises:
        UsageError: ids and states of a table do not match.
    """
    arrays = {which: value for which, value in states.items() if not which[1].startswith(_PREFIX)}
    by_key: dict[Key, dict[str, torch.Tensor]] = {}
    for (key, name), value in states.items():
        if name.startswith(_PREFIX):
            by_key.setdefault(key, {})[name] = value
    tables = {}
    for key, named in by_key.items():
        ids, steps = named.pop(_IDS, None), named.pop(_STEPS, None)
        if (
            ids is None
            or steps is None
            or ids.dtype != torch.int64
            or ids.dim() != 1
            or steps.numel() != 1
            or any(not value.dim() or len(value) != len(ids) for value in named.values())
            or not bool((ids[1:] > ids[:-1]).all())
        ):
            raise UsageError(f"{where} is damaged: the states of table {key!r} do not belong to rising ids")
        parts = {name.removeprefix(_PREFIX): value.numpy() for name, value in named.items()}
        tables[key] = RowStates(ids.numpy(), parts, int(steps))
    return arrays, tables
