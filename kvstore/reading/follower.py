"""Followers: arrays of the program that become, version by version, what a running job publishes.

``PublishedCopy`` has what has been fetched, piece by piece, each of a version of its own. Once all pieces are of one
version, and each has its checksum, ``Follower`` writes them into the program's arrays. So these are always of one
version, whatever is lost on the way. A reader that is slower than the job publishes asks again only for what has
changed since its pieces were fetched; so it catches up, and no server keeps anything for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from kvstore import wire
from kvstore.codecs.changes import apply_changes, checksum, decode_changes
from kvstore.dynamo import outside_graphs
from kvstore.errors import DeadlineExceeded, KeyNotInitialized, Mismatch, UsageError, WireError
from kvstore.lineage import UNKNOWN
from kvstore.reading.held import HeldValue, ReadSegment
from kvstore.reading.reader_session import Ask, ReaderSession
from kvstore.spec import Key, shorten
from kvstore.table import TableSpec
from kvstore.values import as_dtype, as_output
from kvstore.wire.versions import NEVER, pieces

log = logging.getLogger(__name__)

MOST_DAMAGED = 3  # pieces that are fetched again in one update
LEAST_PAUSE_S, MOST_PAUSE_S = 0.005, 0.1  # between two questions whether there is a newer version


class PublishedArray:
    """A published array as far as it has been fetched: of each of its pieces, the version, and its changes since.

    Attributes:
        flat: the values, as they are published; None before the first piece.
        held: of each piece, its version; 0 for none.
        changes: of each piece, the changes since the program's array was written: None for the whole piece.
    """

    def __init__(self, key: Key, size: int, segments: Sequence[ReadSegment]) -> None:
        self.key, self.size = key, size
        self.ranges = [
            (segment.start + start, segment.start + stop)
            for segment in segments
            for start, stop in pieces(segment.stop - segment.start)
        ]
        self.flat: torch.Tensor | None = None
        self.held = [0] * len(self.ranges)
        self.changes: list[list[list[memoryview]] | None] = [None] * len(self.ranges)

    def take(self, place: int, number: int, dtype: str, buffers: Sequence[memoryview], told: int) -> None:
        """Take a piece as it is in version ``number``.

        Raises:
            WireError: it is not whole. It is as if it had never been fetched, then.
        """
        start, stop = self.ranges[place]
        if self.flat is None:
            self.flat = torch.empty(self.size, dtype=as_dtype(dtype), device="cpu")
        if self.flat.dtype != as_dtype(dtype):
            raise WireError(f"a piece of key {self.key!r} is {dtype}, and another one {self.flat.dtype}")
        before, self.held[place] = self.held[place], 0  # while it is written
        if buffers:
            piece = _bits(self.flat[start:stop])
            apply_changes(buffers, piece)
            if checksum(piece) != told:
                raise WireError(f"elements {start} to {stop} of key {self.key!r} are not those of version {number}")
            self._note(place, buffers, stop - start)
        elif not before:
            raise WireError(f"no values of key {self.key!r}, of which this reader has none")
        self.held[place] = number

    def _note(self, place: int, buffers: Sequence[memoryview], size: int) -> None:
        """Keep the changes for the program's array, in memory of this process, unless the piece is hardly longer."""
        known = self.changes[place]
        if known is None or self.flat is None:
            return
        nbytes = sum(len(part) for change in (*known, buffers) for part in change)
        if 4 * nbytes > size * self.flat.element_size():
            self.changes[place] = None
        else:
            known.append([memoryview(bytes(part)) for part in buffers])

    def write(self, out: torch.Tensor, whole: bool) -> bool:
        """Write into the program's array what has changed, or all; return whether that is anything."""
        if self.flat is None:
            return False
        places = [place for place, changes in enumerate(self.changes) if whole or changes is None or changes]
        if not out.is_contiguous():
            if places:
                out.copy_(self.flat.view(out.shape))
            return bool(places)
        into = out.view(-1)
        for place in places:
            start, stop = self.ranges[place]
            changes = self.changes[place]
            if whole or changes is None:
                into[start:stop].copy_(self.flat[start:stop])
                continue
            for buffers in changes:
                if out.device.type == "cpu" and out.dtype == self.flat.dtype:
                    apply_changes(buffers, _bits(into[start:stop]))
                else:
                    _copy_changes(buffers, self.flat[start:stop], into[start:stop])
        return bool(places)

    def written(self) -> None:
        self.changes = [[] for _ in self.ranges]

    def forget(self) -> None:
        self.flat = None
        self.held = [0] * len(self.held)
        self.changes = [None] * len(self.changes)


def _bits(values: torch.Tensor) -> Any:
    """Return a view of the bits of ``values``, 1-d on the CPU, as unsigned integers; numpy has no bfloat16."""
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    array = values.view(signed).numpy()
    return array.view(f"u{values.itemsize}")


def _copy_changes(buffers: Sequence[memoryview], source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the elements of ``source`` that changes name to ``out``, of another dtype or on a device."""
    positions, _ = decode_changes(buffers, _bits(source).dtype, len(source))
    if positions is None:
        out.copy_(source)
        return
    where = torch.from_numpy(positions)
    values = source[where].to(out.dtype)
    if out.is_cuda:  # what is pinned is copied while the next changes are decoded
        where, values = where.pin_memory(), values.pin_memory()
    out.index_copy_(0, where.to(out.device, non_blocking=True), values.to(out.device, non_blocking=True))


class VersionAsk(NamedTuple):
    """What one message asks for: pieces of arrays on one server, those of ``ids``."""

    server: int
    ids: list[int]
    parts: list[tuple[PublishedArray, int]]


class PublishedCopy:
    """See the module. Pure; ``segments`` are those of each array, in the order of their elements.

    Attributes:
        lineage, number, label: of the newest version of which an answer has come. All pieces are to have it.
    """

    def __init__(self, arrays: Mapping[Key, tuple[int, Sequence[ReadSegment]]]) -> None:
        self.arrays = {key: PublishedArray(key, size, segments) for key, (size, segments) in arrays.items()}
        self.lineage, self.number, self.label = UNKNOWN, 0, ""
        # By server, segments one after the other, since a server answers as far as it comes.
        self._segments: dict[int, list[tuple[int, PublishedArray, list[int]]]] = {}
        for key, (_, segments) in arrays.items():
            place = 0
            for segment in segments:
                count = len(list(pieces(segment.stop - segment.start)))
                entry = segment.id, self.arrays[key], list(range(place, place + count))
                self._segments.setdefault(segment.server, []).append(entry)
                place += count

    @property
    def servers(self) -> list[int]:
        return list(self._segments)

    def lacking(self) -> str:
        """Say which pieces are of another version, and on which servers."""
        keys = [key for key, array in self.arrays.items() if any(held != self.number for held in array.held)]
        servers = ", ".join(f"server {ask.server}" for ask in self.asks(False))
        return f"{shorten(keys)} of {servers} are not there"

    def asks(self, anew: bool) -> list[VersionAsk]:
        """Return what to ask for: of each server all segments with a piece of another version than ``number``.

        ``anew``: of all servers, and for the newest version.
        """
        asks = []
        for server, segments in self._segments.items():
            # From the first that lacks something on: what comes before it has come.
            lacking = [
                entry for entry in segments if anew or any(entry[1].held[place] != self.number for place in entry[2])
            ]
            if lacking:
                parts = [(array, place) for _, array, places in lacking for place in places]
                asks.append(VersionAsk(server, [number for number, _, _ in lacking], parts))
        return asks

    def fields(self, ask: VersionAsk, anew: bool) -> dict[str, Any]:
        held = [array.held[place] for array, place in ask.parts]
        if held and len(set(held)) == 1:
            held = held[:1]
        return {"ids": ask.ids, "lineage": self.lineage, "held": held, "want": 0 if anew else self.number}

    def take(self, ask: VersionAsk, reply: wire.VersionRead) -> bool:
        """Take an answer; return whether it brought something.

        Raises:
            WireError: it is not one to this request, or what it brought is not what was published.
        """
        count = len(reply.counts)
        if count > len(ask.parts):
            raise WireError(f"an answer of {count} pieces where {len(ask.parts)} were asked for")
        if not reply.number:
            return False
        if reply.lineage != self.lineage:
            for array in self.arrays.values():
                array.forget()
            self.lineage, self.number = reply.lineage, 0
        if reply.number > self.number:
            self.number, self.label = reply.number, reply.label
        buffer = memoryview(reply.buffers[0]).cast("B") if reply.buffers else memoryview(b"")
        if len(buffer) != sum(reply.lengths) or len(reply.buffers) > 1:
            raise WireError(f"an answer of {len(buffer)} bytes, which says that it has {sum(reply.lengths)}")
        lengths = iter(reply.lengths)
        start = 0
        columns = zip(ask.parts, reply.dtypes, reply.sums, reply.counts, strict=False)
        for (array, place), dtype, told, changes in columns:
            buffers = []
            for _ in range(changes):
                length = next(lengths)
                buffers.append(buffer[start : start + length])
                start += length
            array.take(place, reply.number, dtype, buffers, told)
        return count > 0 or not ask.parts


class Source(NamedTuple):
    """What a follower has of its reader."""

    find: Callable[[Sequence[Key], float], list[HeldValue]]
    keys: Callable[[float], list[Key]]  # those that have values; with a deadline
    ask: Callable[[str, Sequence[Key], Sequence[Ask], float], None]
    session: ReaderSession
    lock: AbstractContextManager[Any]


@outside_graphs
class Follower:
    """Arrays that become each newer version of what a job publishes, whole; ``Reader.follow`` makes it.

    Read the arrays, and do not write into them: an update writes what has changed, and no more. One thread at a time
    uses a follower.

    Args:
        arrays: what is written, by name.
        names: the key under which each is published.
        strict: see ``Reader.follow``.
        on_update: see ``Reader.follow``.
        source: its reader.

    Attributes:
        version: the number of the version that the arrays are of; 0 before the first.
        label: what was given to ``publish`` with it.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        names: Mapping[str, Key],
        strict: bool,
        on_update: Callable[[list[str]], object] | None,
        source: Source,
    ) -> None:
        self.version, self.label = 0, ""
        # What cannot be written to is refused if it is published, and else left as it is.
        self._refused: dict[str, UsageError] = {}
        self._arrays: dict[str, torch.Tensor] = {}
        for name, array in arrays.items():
            try:
                self._arrays[name] = _target(array)
            except UsageError as exc:
                self._refused[name] = UsageError(f"{name!r} cannot follow: {exc}")
                if strict:
                    raise self._refused[name] from None
        self._names, self._strict, self._on_update = dict(names), strict, on_update
        self._source, self._session = source, source.session
        self._copy: PublishedCopy | None = None
        self._store = 0
        self._lineage = UNKNOWN
        self._missing: list[Key] = []  # what had no value when this was looked at last
        self._torn = False  # whether an exception has come in while the arrays were written

    def update(self, *, timeout: float | None = None) -> bool:
        """Have the newest version; return whether it is another one than before.

        Until all of it is here, the arrays stay as they are.

        Args:
            timeout: in seconds; by default that of ``connect``.

        Raises:
            KeyNotInitialized: an array is not published; see ``strict`` of ``Reader.follow``.
            Mismatch: an array has another shape than what is published.
            DeadlineExceeded: it did not come in time. The next call goes on with what has come.
            NodeLost: the job has failed, or has ended.
        """
        with self._source.lock:
            return self._update(self._session.deadline(timeout))

    def wait_newer(self, timeout: float | None = None) -> int:
        """Return when there is another version, and the arrays are of it: its number.

        Args:
            timeout: in seconds; by default that of ``connect``.

        Raises:
            DeadlineExceeded: there was none in time.
            KVStoreError: see ``update``.
        """
        deadline = self._session.deadline(timeout)
        pause = LEAST_PAUSE_S
        while True:
            try:
                with self._source.lock:
                    if (self._copy is None or self._wait(deadline)) and self._update(deadline):
                        return self.version
            except DeadlineExceeded as exc:
                raise DeadlineExceeded(f"no version after {self.version} has come in time: {exc}", exc.silent) from None
            if self._session.now() + pause >= deadline:
                why = "none was published, or its round is not over"
                if self._missing:
                    why = f"{shorten(self._missing)} has no value yet"
                raise DeadlineExceeded(f"no version after {self.version} has come in time: {why}")
            self._session.pause(pause)  # until the first version
            pause = min(MOST_PAUSE_S, 1.5 * pause)

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each newer version when the arrays are of it. A slow loop skips some. Never ends."""
        while True:
            with suppress(DeadlineExceeded):
                yield self.wait_newer()

    # ---- which arrays

    def _keys(self, deadline: float) -> list[Key]:
        """Return the keys that have values; none before the store is made."""
        try:
            return self._source.keys(deadline)
        except KeyNotInitialized:
            return []

    def _found(self, deadline: float) -> PublishedCopy | None:
        """Return what is fetched, once the arrays are known; None while nothing is published."""
        if self._copy is not None:
            return self._copy
        keys = self._keys(deadline)
        known = set(keys)
        missing = self._missing = [key for key in dict.fromkeys(self._names.values()) if key not in known]
        if not keys:
            return None
        wanted = [key for key in dict.fromkeys(self._names.values()) if key in known]
        some, *found = self._source.find([keys[0], *wanted], deadline)
        if not self._newest(some.segments[0].server, some.store, deadline)[1]:
            return None
        values = {value.key: value for value in found}
        tables = [key for key, value in values.items() if isinstance(value.spec, TableSpec)]
        left_out = {
            *missing,
            *tables,
            *self._unpublished([values[key] for key in values if key not in tables], deadline),
        }
        for name, key in list(self._names.items()):
            if key not in left_out:
                continue
            array = self._arrays.get(name)
            tied = array is not None and any(
                other.data_ptr() == array.data_ptr() and other.shape == array.shape
                for more, other in self._arrays.items()
                if self._names[more] not in left_out
            )
            if self._strict and not tied:
                raise KeyNotInitialized(
                    f"{name!r} is not published: no version has key {key!r}. Leave it out, give names=, or pass "
                    "strict=False, which leaves such arrays as they are"
                )
            del self._names[name]
            self._arrays.pop(name, None)
        for name, key in self._names.items():
            if name in self._refused:
                raise self._refused[name]
            shape = tuple(self._arrays[name].shape)
            if shape != values[key].spec.shape:
                raise Mismatch(f"{name!r} has shape {shape}, and key {key!r} has {values[key].spec.shape}")
        followed = [values[key] for key in dict.fromkeys(self._names.values())]
        self._store = followed[0].store if followed else 0
        self._copy = PublishedCopy({value.key: (value.spec.size, value.segments) for value in followed})
        return self._copy

    def _unpublished(self, values: Sequence[HeldValue], deadline: float) -> list[Key]:
        """Return which of ``values`` are in no version, by asking for one that is not there yet."""
        if not values:
            return []
        ids: dict[int, list[int]] = {}
        for value in values:
            for segment in value.segments[:1]:
                ids.setdefault(segment.server, []).append(segment.id)
        asks = [
            self._question(server, values[0].store, {"ids": listed, "held": [0], "want": NEVER}, _ignore)
            for server, listed in ids.items()
        ]
        try:
            self._source.ask("follow", [value.key for value in values], asks, deadline)
        except KeyNotInitialized:
            if len(values) == 1:
                return [values[0].key]
            middle = len(values) // 2
            return self._unpublished(values[:middle], deadline) + self._unpublished(values[middle:], deadline)
        return []

    # ---- what is fetched

    def _question(self, server: int, store: int, fields: Mapping[str, Any], take: Callable[[Any], None]) -> Ask:
        return server, wire.ReadVersion, {"store": store, "lineage": UNKNOWN, **fields}, take

    def _newest(self, server: int, store: int, deadline: float) -> tuple[int, int]:
        """Return the newest version on a server: its lineage, and its number, which is 0 if there is none."""
        replies: list[wire.VersionRead] = []
        fields = {"ids": [], "held": [], "want": 0}
        self._source.ask("follow", (), [self._question(server, store, fields, replies.append)], deadline)
        return replies[-1].lineage, replies[-1].number

    def _wait(self, deadline: float) -> bool:
        """Wait for another version on one of the servers; return whether there is one. It costs two small messages."""
        if self._copy is None or self._torn or not self._copy.servers:
            return True
        fields = {"ids": [], "lineage": self._lineage, "held": [self.version], "want": 0, "newer": True}
        with suppress(DeadlineExceeded):
            question = self._question(self._copy.servers[0], self._store, fields, _ignore)
            self._source.ask("wait_newer", list(self._copy.arrays), [question], deadline)
            return True
        return False

    def _update(self, deadline: float) -> bool:
        copy = self._found(deadline)
        if copy is None or not self._fetch(copy, deadline):
            return False
        if not self._torn and (copy.lineage, copy.number) == (self._lineage, self.version):
            return False
        self._write(copy)
        return True

    def _fetch(self, copy: PublishedCopy, deadline: float) -> bool:
        """Have all pieces of one version, the newest that there was on any server; return whether there is one."""
        anew, damaged = True, 0
        while asks := copy.asks(anew):
            brought: list[bool] = []
            questions = [
                self._question(ask.server, self._store, copy.fields(ask, anew), partial(_take, copy, ask, brought))
                for ask in asks
            ]
            try:
                self._source.ask("update", list(copy.arrays), questions, deadline)
            except WireError as exc:
                damaged += 1
                if damaged > MOST_DAMAGED:
                    raise
                log.warning("%s: it is fetched again", exc)
            except UsageError:
                self._copy = None  # where keys are may have changed: stores are closed and made
                raise
            if not copy.number:
                return False
            if not any(brought):  # a server does not have the version yet that another one has
                if self._session.now() + LEAST_PAUSE_S >= deadline:
                    raise DeadlineExceeded(f"version {copy.number} is not whole in time: {copy.lacking()}")
                self._session.pause(LEAST_PAUSE_S)
            anew = False
        return True

    def _write(self, copy: PublishedCopy) -> None:
        changed = []
        whole, self._torn = self._torn, True
        for name, key in self._names.items():
            if copy.arrays[key].write(self._arrays[name], whole):
                changed.append(name)
        for array in copy.arrays.values():
            array.written()
        self._lineage, self.version, self.label = copy.lineage, copy.number, copy.label
        self._torn = False
        if self._on_update is not None:
            self._on_update(changed)


def _target(array: Any) -> torch.Tensor:
    tensor = as_output(array)
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UsageError(
            "a tensor that was made in inference mode cannot be written to outside of it: pass its clone()"
        )
    return tensor


def _take(copy: PublishedCopy, ask: VersionAsk, brought: list[bool], reply: wire.VersionRead) -> None:
    brought.append(copy.take(ask, reply))


def _ignore(_reply: wire.VersionRead) -> None:
    pass
