"""A table of a running job that is followed: its rows become, version by version, what the job publishes.

``FetchedRows`` has what has been fetched of newer versions, part by part of each server. When all parts of all servers
are of one version, ``FollowedTable`` takes it over. So its rows are always of one version. Parts that were fetched of a
version that is gone are not fetched again: what has changed in them since is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore import wire
from kvstore.codecs.changes import checksum, decode_ids
from kvstore.dynamo import outside_graphs
from kvstore.errors import DeadlineExceeded, UsageError, WireError
from kvstore.lineage import NOWHERE, UNKNOWN, Version
from kvstore.reading.follower import LEAST_PAUSE_S, MOST_DAMAGED, Source
from kvstore.reading.held import ReadSegment
from kvstore.reading.reader_session import Ask
from kvstore.rows.halves import array_dtype
from kvstore.rows.ids import Ids, require_ids
from kvstore.rows.index import SlotIndex
from kvstore.rows.open_table import ReadableRows
from kvstore.rows.slabs import Array, Slab, Slots, gather, scatter
from kvstore.spec import Key
from kvstore.table import Table, TableSpec
from kvstore.wire.guests import NOT_HELD

log = logging.getLogger(__name__)


class RowsById:
    """Rows by their ids, in memory that grows without being copied."""

    def __init__(self, table: Table) -> None:
        self._index = SlotIndex()
        self._rows = Slab(table.width, array_dtype(table.dtype))

    def __len__(self) -> int:
        return len(self._index)

    def find(self, ids: Ids) -> Slots:
        """Return the slot of each id, below 0 for none."""
        return self._index.find(ids)

    def read(self, slots: Slots) -> Array:
        return gather(self._rows.items, slots)

    def put(self, ids: Ids, rows: Array) -> None:
        """Replace or add rows; no id is there twice."""
        slots = self._index.find(ids)
        new = np.flatnonzero(slots < 0)
        slots[new] = self._index.insert(ids[new])
        self._rows.reserve(self._index.top)
        scatter(self._rows.items, slots, rows)

    def remove(self, ids: Ids) -> None:
        slots = self._index.find(np.unique(ids))
        self._index.remove(slots[slots >= 0])

    def all(self) -> tuple[Ids, Array]:
        """Return all ids, and their rows, which are copies."""
        slots = self._index.slots()
        return self._index.ids_of(slots), self.read(slots)


class Stripe:
    """What has been fetched from one server.

    Attributes:
        there: whether it has a version of these rows.
        newest: the number of its newest version, whatever that has.
        number: of the version that all parts have; 0 for none.
        at: the state up to which it is known what has gone.
        layout: says which rows each part has.
        held: of each part, its state.
        skip: how many of the ids that have gone by version ``skip_of`` have come.
    """

    def __init__(self, segment: ReadSegment) -> None:
        self.id, self.server = segment.id, segment.server
        self.there, self.newest = False, 0
        self.forget()

    def forget(self) -> None:
        self.number, self.at, self.layout = 0, NOWHERE, UNKNOWN
        self.held: list[int] = []
        self.skip = self.skip_of = 0


class RowsAsk(NamedTuple):
    """What one message asks for: version ``want``, 0 for the newest; ``skip`` ids that have gone have come."""

    stripe: Stripe
    want: int
    skip: int
    course: int  # how often all had been forgotten


class FetchedRows:
    """See the module. Pure.

    Attributes:
        lineage, number, label: of the newest version of which an answer has come. All servers are to have it.
        rows, gone: what has changed since ``taken``: ids go, and then rows are put.
        whole: whether ``rows`` will be all there are.
        torn: whether an exception (Ctrl-C) has come in while something was written. Then all is to be forgotten.
    """

    def __init__(self, table: Table, segments: Sequence[ReadSegment]) -> None:
        self._table, self._course = table, 0
        self.stripes = [Stripe(segment) for segment in segments]
        self.lineage, self.number, self.label = UNKNOWN, 0, ""
        self.forget()

    def forget(self) -> None:
        """Ask for all rows from here on."""
        self.torn = True
        self._course += 1
        for stripe in self.stripes:
            stripe.forget()
        self.taken(whole=True)

    def taken(self, whole: bool = False) -> None:
        """Collect from here on what changes, or all rows."""
        self.rows, self.gone, self.whole = RowsById(self._table), list[Ids](), whole
        self.torn = False  # last: see there

    def merged(self, before: RowsById) -> tuple[RowsById, torch.Tensor | None]:
        """Return the rows of version ``number``, given those of the last; and the ids that have changed, if known.

        Those ``before`` are changed. It is ``torn`` until it is said that what came is ``taken``.
        """
        self.torn = True
        if self.whole:
            return self.rows, None
        ids, rows = self.rows.all()
        gone = np.concatenate([ids[:0], *self.gone])
        before.remove(gone)
        before.put(ids, rows)
        return before, torch.from_numpy(np.concatenate([ids, gone]))

    def asks(self, anew: bool) -> list[RowsAsk]:
        """Return what to ask for: of each server that has not given ``number``; if ``anew`` of all, for the newest."""
        if anew:
            return [RowsAsk(stripe, 0, 0, self._course) for stripe in self.stripes]
        return [
            RowsAsk(stripe, self.number, stripe.skip if stripe.skip_of == self.number else 0, self._course)
            for stripe in self.stripes
            if stripe.number != self.number
        ]

    def last(self) -> Stripe:
        """Return what is fetched from the server that is to make the next version last, as far as is known."""
        # Not from any server: one that has the version which the others are about to make has no newer one to tell of.
        return min(self.stripes, key=lambda stripe: stripe.newest)

    def fields(self, ask: RowsAsk) -> dict[str, Any]:
        stripe, want, skip, _ = ask
        held = stripe.held[:1] if len(set(stripe.held)) == 1 else stripe.held
        named = {"at": stripe.at, "layout": stripe.layout, "held": held}
        return {"id": stripe.id, "lineage": self.lineage, "want": want, "skip": skip, **named}

    def take(self, ask: RowsAsk, reply: wire.TableRead) -> bool:
        """Take an answer; return whether it brought something.

        Raises:
            WireError: it is not one to this request, or not what the server has sent. Nothing of it has been taken.
        """
        gone, ids, rows = self._decoded(reply)
        stripe = ask.stripe
        if ask.course != self._course:  # it has changes of what has been forgotten since, for another server's sake
            return True
        if reply.lineage not in (UNKNOWN, self.lineage):  # unknown: the server has no version yet
            self.lineage, self.number = reply.lineage, 0
            for each in self.stripes:
                each.number = each.skip_of = each.newest = 0
        stripe.newest, stripe.there = reply.newest, reply.number > 0
        if reply.number > self.number:
            self.number, self.label = reply.number, reply.label
        if reply.number < max(1, ask.want):
            return False
        if not reply.known:
            self.forget()
            return True
        skip = ask.skip if reply.number == ask.want else 0
        if reply.layout != stripe.layout:  # what is known of some parts of another layout holds for all as the least
            stripe.held, stripe.layout, skip = [min(stripe.held, default=NOT_HELD)] * reply.parts, reply.layout, 0
        stripe.held += [NOT_HELD] * (reply.parts - len(stripe.held))
        self.torn = True
        self.rows.remove(gone)
        self.gone.append(gone)
        self.rows.put(ids, rows)
        stripe.skip, stripe.skip_of, stripe.number = skip + len(gone), reply.number, 0
        if not reply.more:
            stripe.at = Version(*reply.at)
            stripe.held[: reply.done] = [stripe.at.number] * reply.done
            if all(held == stripe.at.number for held in stripe.held):
                stripe.number = reply.number
        self.torn = False
        return True

    def _decoded(self, reply: wire.TableRead) -> tuple[Ids, Ids, Array]:
        data = np.frombuffer(reply.buffers[0], np.uint8) if reply.buffers else np.empty(0, np.uint8)
        table = self._table
        rows_end = reply.count * table.row_bytes
        end = rows_end + 8 * reply.evicted
        if len(reply.buffers) > 1 or len(data) < end or reply.done > reply.parts or (reply.more and reply.count):
            raise WireError(
                f"an answer of {len(data)} bytes with {reply.count} rows and {reply.evicted} ids that have gone"
            )
        if len(data) and checksum(data) != reply.sum:
            raise WireError(f"rows of version {reply.number} are not as the server has sent them")
        gone = data[rows_end:end].copy().view(np.int64)
        ids = decode_ids(data[end:], reply.count)
        if table.rows is not None and len(ids) and not 0 <= ids[0] <= ids[-1] < table.rows:
            raise WireError(f"rows {ids[0]} to {ids[-1]} of a table of {table.rows}")
        return gone, ids, data[:rows_end].view(array_dtype(table.dtype)).reshape(reply.count, table.width)


@outside_graphs
class FollowedTable(ReadableRows):
    """A table of a running job whose rows are here, all of one version; ``Reader.open_table`` makes it.

    Any thread may look rows up. The reader's thread updates.

    Args:
        key: of the table.
        table: what it is.
        source: its reader.

    Attributes:
        key: of the table.
        table: what it is.
        label: what was given to ``publish`` with the version.
        changed: the ids of the rows that the last ``update`` has changed, or that have gone with it, as an int64 tensor
            without order, where some may be twice. None: it may be any, as after opening.
    """

    def __init__(self, key: Key, table: Table, source: Source) -> None:
        super().__init__(key, table)
        self.label = ""
        self._version = 0
        self._lineage = UNKNOWN
        self._source, self._session = source, source.session
        self._rows = RowsById(table)
        self._fetched: FetchedRows | None = None
        self._store = 0
        self._lock = threading.Lock()  # of what is looked up

    @property
    def version(self) -> int:
        """The number of the version that the rows are of; 0 before the first."""
        return self._version

    def update(self, *, timeout: float | None = None) -> bool:
        """Have the rows of the newest version; return whether it is another one than before.

        What comes is what has changed. Until all of it is here, the rows stay as they are.

        Args:
            timeout: in seconds; by default that of ``connect``.

        Raises:
            DeadlineExceeded: it did not come in time. The next call goes on with what has come.
            NodeLost: the job has failed, or has ended.
        """
        with self._source.lock:
            return self._update(self._session.deadline(timeout))

    def wait_newer(self, timeout: float | None = None) -> int:
        """Return when there is another version, and the rows are of it: its number.

        Args:
            timeout: in seconds; by default that of ``connect``.

        Raises:
            DeadlineExceeded: there was none in time.
            KVStoreError: see ``update``.
        """
        deadline = self._session.deadline(timeout)
        try:
            while True:
                with self._source.lock:
                    if self._update(deadline):
                        return self._version
                    self._wait(deadline)
        except DeadlineExceeded as exc:
            made = (
                max((each.newest for each in self._fetched.stripes if not each.there), default=0)
                if self._fetched
                else 0
            )
            why = f"servers keep the rows from the next version on, and the last was {made}" if made else f"{exc}"
            raise DeadlineExceeded(
                f"no version of table {self.key!r} after {self._version} has come in time: {why}", exc.silent
            ) from None

    def has(self, ids: Any) -> torch.Tensor:
        """Return for each of ``ids`` whether it has a row, as a tensor of bool of the same shape."""
        wanted = require_ids(f"ids of table {self.key!r}", ids, self.table)
        with self._lock:
            return torch.from_numpy((self._rows.find(wanted.reshape(-1)) >= 0).reshape(wanted.shape))

    def __len__(self) -> int:
        """How many rows the version has, without those of a table with a shape that nobody has changed."""
        return len(self._rows)

    def _read(self, ids: Ids, out: Array) -> Slots:
        with self._lock:
            slots = self._rows.find(ids)
            there = np.flatnonzero(slots >= 0)
            scatter(out, there, self._rows.read(slots[there]))
        return np.flatnonzero(slots < 0)

    def _update(self, deadline: float) -> bool:
        fetched = self._fetched
        if fetched is None:
            (value,) = self._source.find([self.key], deadline)
            if not isinstance(value.spec, TableSpec) or value.spec.table != self.table:
                raise UsageError(f"key {self.key!r} is {value.spec} by now: open it again")
            self._store = value.store
            fetched = self._fetched = FetchedRows(self.table, value.segments)
        if fetched.torn:
            fetched.forget()
        if not self._fetch(fetched, deadline) or (fetched.lineage, fetched.number) == (self._lineage, self._version):
            return False
        with self._lock:
            self._rows, self.changed = fetched.merged(self._rows)
            self._lineage, self._version, self.label = fetched.lineage, fetched.number, fetched.label
            fetched.taken()
        return True

    def _fetch(self, fetched: FetchedRows, deadline: float) -> bool:
        """Have all parts of one version, the newest that there was on any server; return whether there is one."""
        anew, damaged = True, 0
        while asks := fetched.asks(anew):
            brought: list[bool] = []
            questions: list[Ask] = [
                (
                    ask.stripe.server,
                    wire.ReadTable,
                    {"store": self._store, **fetched.fields(ask)},
                    partial(_take, fetched, ask, brought),
                )
                for ask in asks
            ]
            try:
                self._source.ask("update", [self.key], questions, deadline)
            except WireError as exc:
                damaged += 1
                if damaged > MOST_DAMAGED:
                    raise
                log.warning("%s: it is fetched again", exc)
            except UsageError:
                self._fetched = None  # where keys are may have changed: stores are closed and made
                raise
            if not all(stripe.there for stripe in fetched.stripes):
                return False
            if not any(brought):  # a server does not have the version yet that another one has
                if self._session.now() + LEAST_PAUSE_S >= deadline:
                    raise DeadlineExceeded(f"version {fetched.number} of table {self.key!r} is not whole in time")
                self._session.pause(LEAST_PAUSE_S)
            anew = False
        return True

    def _wait(self, deadline: float) -> None:
        """Return when the server that is behind has another version, of whatever."""
        fetched = self._fetched
        if fetched is None:
            return
        last = fetched.last()
        fields = {"ids": [], "lineage": fetched.lineage, "held": [last.newest], "want": 0, "newer": True}
        question: Ask = (last.server, wire.ReadVersion, {"store": self._store, **fields}, _ignore)
        self._source.ask("wait_newer", [self.key], [question], deadline)


def _take(fetched: FetchedRows, ask: RowsAsk, brought: list[bool], reply: wire.TableRead) -> None:
    brought.append(fetched.take(ask, reply))


def _ignore(_reply: wire.VersionRead) -> None:
    pass
