"""The requests of readers on one server, which are answered one by one, and reader by reader, a piece at a time. Pure.

They are in no ledger: a repeat is answered anew. They wait for no round.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvstore import wire
from kvstore.codecs.changes import checksum, encode_ids
from kvstore.errors import KVStoreError, UsageError, WireError
from kvstore.lineage import NOWHERE, UNKNOWN, Version
from kvstore.rows.halves import array_dtype
from kvstore.rows.ids import Ids
from kvstore.rows.slabs import Slots
from kvstore.rows.sums import Rows
from kvstore.transport.memory import Memory
from kvstore.values import to_buffer
from kvstore.wire.guests import NOT_HELD, aligned
from kvstore.wire.versions import NEVER
from servers.activity import Followed
from servers.requests.guest_links import ReaderLinks
from servers.requests.replies import Outbox, refuse
from servers.store.bucket import Bucket
from servers.store.served_store import ServedStore
from servers.store.tables.published_rows import RowVersion

log = logging.getLogger(__name__)

MOST_WAITING = 64  # requests of one reader
SILENT = 64  # reports without a word of a follower; then it counts as gone
MOST_PARKED = 1024  # followers that wait, some of which may have gone

Read: TypeAlias = wire.ReadValues | wire.ReadRows | wire.ReadVersion | wire.ReadTable
FOLLOWS = (wire.ReadVersion, wire.ReadTable)  # what followers ask


MOST_BYTES = 64 << 20  # in one answer, unless it is one segment
MOST_SEGMENTS = 1024  # in one answer: looking at them is not done in pieces
LEAST_BYTES = 4 << 10  # what a segment costs at least, as if it had so many
TRIES = 3  # so often a segment's copy may be overtaken by a round; then it is made at once


class ValueRead:
    """A reader's request for values: they are copied a piece at a time, each segment as one round has left it.

    A message that referred to the values themselves would make the next round move them to other memory, so that
    workers would wait for readers. So readers get a copy, which is made when no worker's message waits. If a round
    changes a segment of which only a part is copied, its copy begins anew.
    """

    def __init__(self, store: ServedStore, message: wire.ReadValues, memory: Memory) -> None:
        if len(message.ids) > MOST_SEGMENTS:
            raise UsageError(f"{len(message.ids)} segments are too many; ask for at most {MOST_SEGMENTS} at once")
        _require_arrays(store, message.ids)
        self._store = store
        self._message = message
        self._numbers = [store.buckets.holding(number).version for number in message.ids]
        comparable = message.lineage == store.lineage != UNKNOWN
        self._positions = [
            position
            for position, (held, now) in enumerate(zip(message.versions, self._numbers, strict=True))
            if not comparable or held == NOT_HELD or not 0 <= now - held <= message.slack
        ]
        sizes = [store.buckets.segment(message.ids[position]).spec.nbytes for position in self._positions]
        self._starts = list(accumulate(map(aligned, sizes), initial=0))
        total = self._starts.pop()
        if total > MOST_BYTES and len(sizes) > 1:
            raise UsageError(f"{total} bytes in one answer are too many; ask for at most {MOST_BYTES} at once")
        self._buffer = memory.allocate(total) if total else None
        self._at = 0  # which of the positions is being copied
        self._source: tuple[Bucket, object] | None = None  # its bucket, and the state of that when its copy began
        self._done = 0  # bytes of it
        self._tries = 0

    def step(self, nbytes: int) -> wire.ValuesRead | None:
        """Copy about so many bytes; return the answer if that was the last piece."""
        self._store.buckets.require_sound(self._message.ids)
        while self._at < len(self._positions) and nbytes > 0:
            nbytes -= max(LEAST_BYTES, self._copy(nbytes))
        if self._at < len(self._positions):
            return None
        buffers = [] if self._buffer is None else [self._buffer]
        return wire.ValuesRead(self._message.seq, self._store.lineage, self._numbers, self._positions, buffers)

    def _copy(self, nbytes: int) -> int:
        """Copy at most so many bytes of a segment, or all of one that was overtaken too often; return how many."""
        number = self._message.ids[self._positions[self._at]]
        bucket, place = self._store.buckets.find(number)
        if self._source is None or self._source[0] is not bucket or self._source[1] is not bucket.state:
            self._tries += 1
            self._source, self._done = (bucket, bucket.state), 0
        start = bucket.starts[place]
        values = to_buffer(bucket.value[start : start + bucket.sizes[place]])
        whole = len(values)
        stop = whole if self._tries > TRIES else min(whole, self._done + nbytes)
        if self._buffer is not None:
            first = self._starts[self._at]
            self._buffer[first + self._done : first + stop] = values[self._done : stop]
        copied, self._done = stop - self._done, stop
        if stop == whole:
            self._numbers[self._positions[self._at]] = bucket.version
            self._at, self._source, self._tries = self._at + 1, None, 0
        return copied


def _require_arrays(store: ServedStore, ids: Sequence[int]) -> None:
    if moved := store.buckets.moved:
        for number in ids:
            if (key := store.buckets.segment(number).key) in moved:
                raise UsageError(f"key {key!r} is a table by now, and its array is not updated any more: ask again")


class _Follower(NamedTuple):
    """What a follower has said last: the version that it has, in which store, and before which report."""

    store: int
    held: int
    report: int


class ReadDesk:
    """The requests of readers that wait at this server, and the one that is being answered.

    ``taken`` is how many messages of readers have come, and ``followed`` how many of these were about versions.
    """

    def __init__(self, stores: Mapping[int, ServedStore], memory: Memory, links: ReaderLinks) -> None:
        self.links = links
        self.taken = self.followed = 0
        self.stores = stores
        self._memory = memory
        # By reader, the one whose turn is next first, and by the number of the request.
        self._waiting: OrderedDict[wire.Node, dict[int, tuple[bytes, Read]]] = OrderedDict()
        # Followers that wait for a newer version, the longest first. ``_made`` is how many versions had been made when
        # they were last looked at.
        self._parked: OrderedDict[wire.Node, tuple[bytes, wire.ReadVersion]] = OrderedDict()
        self._made = 0
        self._followers: OrderedDict[wire.Node, _Follower] = OrderedDict()  # the longest silent first
        self._reports = 0
        self._current: tuple[bytes, Read] | None = None
        self._begun: ValueRead | RowRead | PublishedRead | TableRead | None = None  # what has been done for it

    @property
    def busy(self) -> bool:
        if self._parked:
            self._wake()
        return self._current is not None or bool(self._waiting)

    @property
    def follows(self) -> bool:
        """Whether the next step is for a follower."""
        if self._current is None and self._waiting:
            self._current = self._next()
        return self._current is not None and isinstance(self._current[1], FOLLOWS)

    def handle(self, peer: bytes, message: wire.Message) -> Outbox:
        """Return what to send at once because ``message``, which concerns readers, came from ``peer``."""
        self.taken += 1
        self.followed += isinstance(message, FOLLOWS)
        refusal = self.links.refusal(peer, message)
        if refusal is not None or not isinstance(message, wire.Request):
            return refusal or []
        if isinstance(message, wire.Leave):
            self._waiting.pop(message.node, None)
            self._parked.pop(message.node, None)
            self._followers.pop(message.node, None)
            return [(peer, wire.Ack(message.seq))]
        if isinstance(message, wire.Explain):
            return [(peer, wire.Explanation(message.seq, "answers readers in the time that workers leave it"))]
        if not isinstance(message, Read):
            return _refused(
                peer, message, f"servers do not know where keys are; send a {type(message).__name__} to the scheduler"
            )
        if isinstance(message, wire.ReadVersion) and message.want != NEVER:
            self._note(message)
        if isinstance(message, wire.ReadVersion) and message.newer and not self._is_newer(message):
            self._parked[message.node] = peer, message  # a follower waits for one thing at a time
            while len(self._parked) > MOST_PARKED:
                self._parked.popitem(last=False)  # it asks again
            return []
        waiting = self._waiting.setdefault(message.node, {})
        if len(waiting) >= MOST_WAITING and message.seq not in waiting:
            return _refused(peer, message, f"{MOST_WAITING} requests of {message.node} wait here already")
        waiting[message.seq] = peer, message
        return []

    def step(self, nbytes: int) -> Outbox:
        """Do a piece of about so many bytes of the work; return the answer that is complete, if one is."""
        if self._current is None:
            if not self._waiting:
                return []
            self._current = self._next()
        peer, request = self._current
        try:
            if self._begun is None:
                self._begun = self._begin(request)
            reply: wire.Reply | None = self._begun.step(nbytes)
        except Exception as exc:
            if not isinstance(exc, KVStoreError):
                log.exception("a request of %s failed", request.node)
            reply = refuse(peer, request, exc).reply
        if reply is None:
            return []
        self._current = self._begun = None
        return [(peer, reply)]

    def followed_by(self) -> Followed:
        """Return which version there is, and who follows; called at each report."""
        self._reports += 1
        newest = {number: store.publishing.newest for number, store in self.stores.items()}
        for node, follower in list(self._followers.items()):
            silent = self._reports - follower.report > SILENT and node not in self._parked
            if silent or follower.store not in newest:
                del self._followers[node]
        lags = [max(0, newest[follower.store] - follower.held) for follower in self._followers.values()]
        return Followed(max(newest.values(), default=0), len(lags), max(lags, default=0))

    def _note(self, message: wire.ReadVersion) -> None:
        store = self.stores.get(message.store)
        known = store is not None and store.publishing.lineage == message.lineage
        if store is not None:
            store.publishing.fetches(message.node, message.want if known else 0)
        held = min(message.held, default=0) if known else 0
        self._followers.pop(message.node, None)
        self._followers[message.node] = _Follower(message.store, held, self._reports)
        if len(self._followers) > MOST_PARKED:
            self._followers.popitem(last=False)

    def _is_newer(self, message: wire.ReadVersion) -> bool:
        """Return whether there is another version than the follower has, or nothing to wait for."""
        store = self.stores.get(message.store)
        if store is None:
            return True
        publishing = store.publishing
        has = message.lineage == publishing.lineage and message.held == [publishing.newest]
        return bool(publishing.whole) and not has

    def _wake(self) -> None:
        """Queue the requests of parked followers that have an older version than there is now."""
        made = sum(store.publishing.made for store in self.stores.values())
        if made == self._made:
            return
        self._made = made
        for node in [node for node, (_, message) in self._parked.items() if self._is_newer(message)]:
            peer, message = self._parked.pop(node)
            self._waiting.setdefault(node, {})[message.seq] = peer, message

    def _next(self) -> tuple[bytes, Read]:
        node, waiting = self._waiting.popitem(last=False)
        chosen = waiting.pop(next(iter(waiting)))
        if waiting:
            self._waiting[node] = waiting
        return chosen

    def _begin(self, request: Read) -> ValueRead | RowRead | PublishedRead | TableRead:
        store = self.stores.get(request.store)
        if store is None:
            raise UsageError(f"store {request.store} is not open here")
        if isinstance(request, wire.ReadValues):
            return ValueRead(store, request, self._memory)
        if isinstance(request, wire.ReadVersion):
            return PublishedRead(store, request, self._memory)
        if isinstance(request, wire.ReadTable):
            return TableRead(store, request, self._memory)
        return RowRead(store, request, self._memory)


def _refused(peer: bytes, request: wire.Request, text: str) -> Outbox:
    return [(peer, refuse(peer, request, UsageError(text)).reply)]


MOST_CHANGED = 8 << 20  # bytes of changes in one answer; then the next request goes on
LONG = 1 << 16  # bytes; changes of a piece that are as long have a buffer of their own, and are copied once, not twice


class PublishedRead:
    """A reader's request for what has changed in published arrays since the versions that it has, a piece at a time.

    If the version that the answer is of goes away meanwhile, the answer ends before the first piece that is not there
    any more. The reader asks again, and says which version it has of each piece.
    """

    def __init__(self, store: ServedStore, message: wire.ReadVersion, memory: Memory) -> None:
        publishing = store.publishing
        if publishing.pending:
            publishing.reached()
        _require_arrays(store, message.ids)
        self._store, self._message, self._memory = store, message, memory
        count = len(message.held) if message.ids else 0
        found = publishing.pieces_of(message.ids) if publishing.whole else []
        self._parts = found[message.first : message.first + count]
        self._held = message.held if message.lineage == publishing.lineage else [0] * count
        if len(self._parts) != count and publishing.whole:
            raise WireError(f"{message.node} sent {count} versions of {len(self._parts)} pieces")
        self._number = publishing.newest
        if message.lineage == publishing.lineage and message.want in publishing.whole:
            self._number = message.want
        elif message.want > self._number:
            self._parts = []  # it is not whole here yet
        self._label = publishing.whole.get(self._number, "")
        self._dtypes = publishing.dtypes_of(message.ids) if message.want == NEVER and publishing.whole else []
        self._sums: list[int] = [0] * len(self._dtypes)
        self._counts: list[int] = [0] * len(self._dtypes)
        self._lengths: list[int] = []
        self._short = bytearray()
        self._buffers: list[wire.Buffer] = []
        self._nbytes = 0

    def step(self, nbytes: int) -> wire.VersionRead | None:
        """Look at about so many bytes of pieces; return the answer if that was the last of them."""
        done = len(self._sums)
        while done < len(self._parts) and nbytes > 0 and self._nbytes < MOST_CHANGED and self._take(done):
            values = self._parts[done]
            nbytes -= max(LEAST_BYTES, values.size)  # their marks are looked at, and few of them are copied
            done += 1
        if done < len(self._parts) and nbytes <= 0 and self._nbytes < MOST_CHANGED:
            return None
        self._end_short()
        dtypes = self._dtypes + [values.dtype for values in self._parts[:done]]
        lineage = self._store.publishing.lineage
        return wire.VersionRead(
            self._message.seq,
            lineage,
            self._number,
            self._label,
            dtypes,
            self._sums,
            self._counts,
            self._lengths,
            self._buffers,
        )

    def _take(self, place: int) -> bool:
        """Add a piece's changes to the answer; return False if its version is gone."""
        publishing = self._store.publishing
        found = publishing.changes(self._parts[place], self._held[place], self._number)
        if found is None and not place and self._number != publishing.newest:
            self._number = publishing.newest
            self._label = publishing.whole[self._number]
            found = publishing.changes(self._parts[place], self._held[place], self._number)
        if found is None:
            return False
        total, changes = found
        self._sums.append(total)
        self._counts.append(len(changes))
        lengths = [memoryview(part).nbytes for part in changes]
        self._lengths += lengths
        self._nbytes += sum(lengths)
        if sum(lengths) < LONG:
            for part in changes:
                self._short += part
        else:
            self._end_short()
            self._add(changes, sum(lengths))
        return True

    def _end_short(self) -> None:
        if self._short:
            self._add([self._short], len(self._short))
            self._short = bytearray()

    def _add(self, parts: Sequence[wire.Buffer], nbytes: int) -> None:
        """Copy ``parts``: the next version changes what they refer to."""
        buffer = self._memory.allocate(nbytes)
        start = 0
        for part in parts:
            view = memoryview(part).cast("B")
            buffer[start : start + len(view)] = view
            start += len(view)
        self._buffers.append(buffer)


MOST_ROWS = 1 << 16  # in one answer: looking at their ids is not done in pieces
PIECE_ROWS = 1024  # narrow rows cost more than their bytes


class RowRead:
    """A reader's request for rows: they are gathered a piece at a time, all as one update has left them."""

    def __init__(self, store: ServedStore, message: wire.ReadRows, memory: Memory) -> None:
        self._store = store
        self._message = message
        self._memory = memory
        (target,) = store.buckets.read_tables([message.id])
        self._table = target.table
        description = self._table.table
        nbytes = message.count * description.row_bytes
        if (nbytes > MOST_BYTES and message.count > 1) or message.count > MOST_ROWS:
            raise UsageError(
                f"{message.count} rows of {nbytes} bytes in one answer are too many; ask for at most {MOST_ROWS} rows, "
                f"and {MOST_BYTES} bytes, at once"
            )
        holds = message.lineage is not None
        expected = [message.count * (8 if message.wide else 4), *([message.count * 8] if holds else [])]
        lengths = [memoryview(buffer).nbytes for buffer in message.buffers]
        if lengths != expected:
            raise WireError(f"{message.node} sent {lengths} bytes of ids and versions, not {expected}")
        self._ids: Ids = _integers(message.buffers[0], "i8" if message.wide else "i4").astype(np.int64, copy=False)
        self._table.require(self._ids)
        self._held = _integers(message.buffers[1], "i8") if holds else None
        self._tries = 0
        self._begin()

    def _begin(self) -> None:
        at = self._at = self._table.at
        self._tries += 1
        self._positions: Any = None  # of the rows that are to come; None: of all
        if self._held is not None and self._message.lineage == at.lineage != UNKNOWN:
            gone = at.number - self._held
            fresh = (self._held >= 0) & (gone >= 0) & (gone <= self._message.slack)
            if fresh.any():
                self._positions = np.flatnonzero(~fresh)
        self._chosen = self._ids if self._positions is None else self._ids[self._positions]
        description = self._table.table
        self._buffer = self._memory.allocate(max(1, len(self._chosen) * description.row_bytes))
        shape = len(self._chosen), description.width
        self._rows = np.frombuffer(self._buffer, array_dtype(description.dtype), shape[0] * shape[1]).reshape(shape)
        self._done = 0

    def step(self, nbytes: int) -> wire.RowsRead | None:
        """Gather about so many bytes, as ``ValueRead.step`` copies them."""
        self._store.buckets.require_sound([self._message.id])
        if self._table.at != self._at:  # rows that are put do not move the number
            self._begin()
        count = len(self._chosen)
        stop = min(count, self._done + max(1, min(PIECE_ROWS, nbytes // self._table.table.row_bytes)))
        if self._tries > TRIES:
            stop = count
        self._table.pull(self._chosen[self._done : stop], self._rows[self._done : stop])
        self._done = stop
        if stop < count:
            return None
        buffers: list[wire.Buffer] = [self._buffer[: self._rows.nbytes]]
        if self._positions is not None:
            buffers.append(self._positions.astype(np.int64).tobytes())
        return wire.RowsRead(self._message.seq, self._at, count, buffers)


SLOT_BYTES = 8  # of what is looked at to see whether a row has changed
MOST_ROW_BYTES = 2 << 20  # of rows, or of ids that have gone, in one answer: then the next request goes on


class TableRead:
    """A reader's request for what has changed in a table since the states that it has of its parts, a piece at a time.

    All of the answer is of one version, which is kept for it.
    """

    def __init__(self, store: ServedStore, message: wire.ReadTable, memory: Memory) -> None:
        publishing = store.publishing
        if publishing.pending:
            publishing.reached()
        self._message, self._memory = message, memory
        store.buckets.require_sound([message.id])
        self._rows = publishing.rows_of(message.id)
        want = message.want if message.lineage == publishing.lineage else 0
        self._version = version = self._rows.read(want)
        self._lineage, self._newest = publishing.lineage, publishing.newest
        self._held = message.held or [NOT_HELD]
        self._known, self._more = True, False
        self._parts = 0 if version is None else -(-version.rows.slots // self._rows.part_slots)
        self._part = self._last = 0  # the part that is looked at next, and where the answer ends
        self._gone: list[Ids] = []
        self._found: list[Slots] = []  # of the rows
        self._count = self._gathered = 0
        self._answer: tuple[Slots, Rows] | None = None  # once all rows are found: where they are, and will be
        self._buffers: list[wire.Buffer] = []
        if version is None or version.number < want:
            return
        since, most, same = Version(*message.at), max(self._held), message.layout == self._rows.layout
        gone = self._rows.gone(since, version)
        if gone is None or (most != NOT_HELD and version.at.since(since._replace(number=most)) is None):
            self._known = False
        elif len(self._held) > 1 and not same:
            self._more = True
        else:
            self._take_gone(gone, message.skip if same and want == version.number else 0)
            self._last = 0 if self._more else self._parts

    def _take_gone(self, batches: Iterator[Ids], skip: int) -> None:
        left = MOST_ROW_BYTES // 8
        for batch in batches:
            self._gone.append(batch[skip : skip + left])
            left -= len(self._gone[-1])
            skip = max(0, skip - len(batch))
            if not left:
                self._more = True  # perhaps, which the next request will see
                break

    def step(self, nbytes: int) -> wire.TableRead | None:
        """Look at about so many bytes; return the answer if that was the last of them."""
        version = self._version
        if version is not None:
            row_bytes = self._rows.table.table.row_bytes
            while self._part < self._last and self._count * row_bytes < MOST_ROW_BYTES:
                if nbytes <= 0:
                    return None
                nbytes -= self._find(version)
            if self._answer is None:
                self._answer = self._begin(version)
            slots, rows = self._answer
            while self._gathered < self._count:
                if nbytes <= 0:
                    return None
                stop = self._gathered + max(1, min(PIECE_ROWS, nbytes // row_bytes))
                rows[self._gathered : stop] = version.rows.rows_in(slots[self._gathered : stop])
                nbytes -= (stop - self._gathered) * row_bytes
                self._gathered = stop
        return self._reply()

    def _find(self, version: RowVersion) -> int:
        """Look which rows of the next part have changed; return how many bytes were looked at."""
        count, place = self._rows.part_slots, self._part
        self._part += 1
        since = self._held[0] if len(self._held) == 1 else self._held[place] if place < len(self._held) else NOT_HELD
        if since == version.at.number:
            return 1
        self._found.append(version.rows.changed(place * count, (place + 1) * count, since))
        self._count += len(self._found[-1])
        return count * SLOT_BYTES

    def _begin(self, version: RowVersion) -> tuple[Slots, Rows]:
        """Put ids into the answer, and make room for the rows, which are to be in the order of their ids."""
        slots = np.concatenate([np.empty(0, np.int64), *self._found])
        ids = version.rows.ids_in(slots)
        if bool((ids[1:] < ids[:-1]).any()):
            order = np.argsort(ids)
            slots, ids = slots[order], ids[order]
        table = self._rows.table.table
        parts = [each.view(np.uint8) for each in (*self._gone, encode_ids(ids))]
        nbytes = self._count * table.row_bytes
        buffer = self._memory.allocate(max(1, nbytes + sum(map(len, parts))))
        start = nbytes
        for part in parts:
            buffer[start : start + len(part)] = part.data
            start += len(part)
        self._buffers = [buffer[:start]] if start else []
        rows = np.frombuffer(buffer, array_dtype(table.dtype), self._count * table.width)
        return slots, rows.reshape(self._count, table.width)

    def _reply(self) -> wire.TableRead:
        version = self._version
        number, label, at = (0, "", NOWHERE) if version is None else (version.number, version.label, version.at)
        return wire.TableRead(
            self._message.seq,
            self._lineage,
            self._newest,
            number,
            label,
            at,
            self._rows.layout,
            self._parts,
            done=self._part,
            known=self._known,
            more=self._more,
            evicted=sum(map(len, self._gone)),
            count=self._count,
            sum=checksum(np.frombuffer(self._buffers[0], np.uint8)) if self._buffers else 0,
            buffers=self._buffers,
        )


def _integers(buffer: wire.Buffer, dtype: str) -> Any:
    view = memoryview(buffer)
    return np.frombuffer(view, dtype) if view.nbytes else np.empty(0, dtype)
