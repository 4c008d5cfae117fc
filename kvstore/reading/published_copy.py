"""What a follower has fetched of a published model, piece by piece, each of a version of its own. Pure, but for torch.

Once all pieces are of one version, and each has its checksum, the program's arrays may become that version. So these
are always of one version, whatever is lost on the way. A reader that is slower than the job publishes asks again only
for what has changed since its pieces were fetched; so it catches up, and no server keeps anything for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore import wire
from kvstore.codecs.changes import Array, apply_changes
from kvstore.errors import WireError
from kvstore.reading.held import ReadSegment
from kvstore.spec import Key, shorten
from kvstore.values import as_dtype
from kvstore.wire.versions import PIECE, pieces

ANSWER = 4 * PIECE  # elements in one answer, about
CHANGED_PART = 16  # of so many elements of a piece that was here before, one may have changed


class Published(NamedTuple):
    """An array as it is published: its elements, their dtype, and where they are, in order."""

    size: int
    dtype: str
    segments: Sequence[ReadSegment]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The first element and the last but one of each piece."""
        return [
            (segment.start + start, segment.start + stop)
            for segment in self.segments
            for start, stop in pieces(segment.stop - segment.start)
        ]


HEAD = 8  # numbers, see below
LABEL = 1024  # bytes: 256 characters
LINEAGE, NUMBER, LABEL_LENGTH, BEAT, WRITER, MADE, LOGS = range(7)


class CopyMemory:
    """Where a copy is, for this process alone.

    Attributes:
        flats: the values of each array.
        held: of each piece of each array, the version that it is of; 0 for none.
        changed: of each piece, the version with which its last change was fetched.
        sums: of each piece, the checksum of what it is.
        head: numbers, and the label behind them: of the version of which all pieces are to be.
    """

    def __init__(self, arrays: Mapping[Key, Published]) -> None:
        counts = {key: len(each.ranges) for key, each in arrays.items()}
        self.head: Array = np.zeros(HEAD + LABEL // 8, np.int64)
        self.held: dict[Key, Array] = {key: np.zeros(count, np.int64) for key, count in counts.items()}
        self.changed: dict[Key, Array] = {key: np.zeros(count, np.int64) for key, count in counts.items()}
        self.sums: dict[Key, Array] = {key: np.zeros(count, np.uint64) for key, count in counts.items()}
        self.flats = {
            key: torch.empty(each.size, dtype=as_dtype(each.dtype), device="cpu") for key, each in arrays.items()
        }

    @property
    def lineage(self) -> int:
        return int(self.head[LINEAGE])

    @property
    def number(self) -> int:
        return int(self.head[NUMBER])

    @property
    def label(self) -> str:
        return self.head[HEAD:].view(np.uint8)[: int(self.head[LABEL_LENGTH])].tobytes().decode(errors="replace")

    def note(self, lineage: int, number: int, label: str) -> None:
        """Note the version of which all pieces are to be."""
        self.head[NUMBER] = 0  # if this process ends between two of these lines, no version is there
        data = np.frombuffer(label.encode()[:LABEL], np.uint8)
        self.head[HEAD:].view(np.uint8)[: len(data)] = data
        self.head[LABEL_LENGTH] = len(data)
        self.head[LINEAGE], self.head[NUMBER] = lineage, number

    def fill(self, key: Key, start: int, values: Array) -> None:
        """Write ``values`` from element ``start`` on, where nothing has been written yet."""
        bits_of(self.flats[key][start : start + len(values)])[:] = values

    def log(self, key: Key, place: int, since: int, positions: Array | None, values: Array) -> None:
        """Note for other readers how a piece of version ``since`` has changed; ``positions`` None: maybe everywhere."""

    def logged(self, key: Key, place: int, since: int) -> tuple[Array, Array] | None:
        """Return the positions and values that have changed in a piece since version ``since``, if they are noted."""
        return None  # who fetches knows

    def beat(self) -> None:
        """Show others that this process goes on, though it has not yet done with the copy."""
        self.head[BEAT] += 1

    def reading(self, deadline: float) -> AbstractContextManager[object]:
        """Keep the copy as it is."""
        return nullcontext()

    def writing(self, deadline: float) -> AbstractContextManager[object]:
        """Keep others from it."""
        return nullcontext()

    def close(self) -> None:
        """Use it no more."""


class PublishedArray:
    """A published array as far as it has been fetched, and what of it the program's array lacks.

    Attributes:
        flat, held, changed, sums: see ``CopyMemory``.
    """

    def __init__(self, key: Key, published: Published, memory: CopyMemory) -> None:
        self.key, self.dtype, self.ranges = key, published.dtype, published.ranges
        self._memory = memory
        self.flat, self.sums = memory.flats[key], memory.sums[key]
        self.held, self.changed = memory.held[key], memory.changed[key]
        self._written = np.full(len(self.ranges), -1, np.int64)  # ``changed``, when the program's array was written
        # Of each piece, positions and values of what has changed since; None for the whole piece. ``_reached`` is the
        # version of the last of them. What another process has fetched since then is not among them.
        self._changes: list[list[tuple[Array, Array]] | None] = [None] * len(self.ranges)
        self._reached = self._written.copy()

    def take(self, place: int, number: int, dtype: str, buffers: Sequence[memoryview], told: int) -> None:
        """Take a piece as it is in version ``number``.

        Raises:
            WireError: it is not whole. It is as if it had never been fetched, then.
        """
        start, stop = self.ranges[place]
        if dtype != self.dtype:
            raise WireError(f"a piece of key {self.key!r} is {dtype}, and it was published as {self.dtype}")
        before, self.held[place] = self.held[place], 0  # while it is written
        if buffers:
            piece = bits_of(self.flat[start:stop])
            known = int(self.sums[place]) if before else None
            fill = None if before else partial(self._memory.fill, self.key, start)
            positions, values, total = apply_changes(buffers, piece, known, fill)
            if total != told:
                raise WireError(f"elements {start} to {stop} of key {self.key!r} are not those of version {number}")
            self.sums[place] = total
            self._note(place, positions, values)
            self._memory.log(self.key, place, int(self.changed[place]), positions, values)
            self.changed[place] = self._reached[place] = number
        elif not before:
            raise WireError(f"no values of key {self.key!r}, of which this reader has none")
        self.held[place] = number

    def _note(self, place: int, positions: Array | None, values: Array) -> None:
        """Keep the changes for the program's array, in memory of this process, unless the piece is hardly longer."""
        known = self._changes[place]
        if known is None or positions is None or self._reached[place] != self.changed[place]:
            self._changes[place] = None
            return
        known.append((positions, values.copy()))
        start, stop = self.ranges[place]
        if 4 * sum(where.nbytes + each.nbytes for where, each in known) > (stop - start) * values.itemsize:
            self._changes[place] = None

    def write(self, out: torch.Tensor, whole: bool) -> bool:
        """Write into the program's array what has changed, or all; return whether that is anything."""
        places = np.flatnonzero((self.changed != self._written) | whole).tolist()
        if not out.is_contiguous():
            if places:
                out.copy_(self.flat.view(out.shape))
            return bool(places)
        into = out.view(-1)
        for place in places:
            start, stop = self.ranges[place]
            changes = None if whole else self._known(place)
            if changes is None:
                into[start:stop].copy_(self.flat[start:stop])
                continue
            for positions, values in changes:
                if out.device.type == "cpu" and out.dtype == self.flat.dtype:
                    bits_of(into[start:stop])[positions] = values
                else:
                    _copy_elements(positions, self.flat[start:stop], into[start:stop])
        return bool(places)

    def _known(self, place: int) -> list[tuple[Array, Array]] | None:
        """Return the changes that the program's array lacks; None if they are not known, or hardly shorter than all."""
        if self._reached[place] == self.changed[place]:
            return self._changes[place]
        logged = self._memory.logged(self.key, place, int(self._written[place]))
        return None if logged is None else [logged]

    def written(self) -> None:
        self._changes = [[] for _ in self.ranges]
        self._written[:] = self._reached[:] = self.changed

    def forget(self) -> None:
        self.held[:] = self.changed[:] = 0
        self._written[:] = -1
        self._changes = [None] * len(self.ranges)


def bits_of(values: torch.Tensor) -> Any:
    """Return a view of the bits of ``values``, 1-d on the CPU, as unsigned integers; numpy has no bfloat16."""
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    array = values.view(signed).numpy()
    return array.view(f"u{values.itemsize}")


def _copy_elements(positions: Array, source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy elements of ``source`` to ``out``, of another dtype or on a device."""
    where = torch.from_numpy(positions)
    values = source[where].to(out.dtype)
    if out.is_cuda:  # what is pinned is copied while the next changes are decoded
        where, values = where.pin_memory(), values.pin_memory()
    out.index_copy_(0, where.to(out.device, non_blocking=True), values.to(out.device, non_blocking=True))


class _Piece(NamedTuple):
    """A piece of an array: the one of segment ``id`` after ``before`` others."""

    id: int
    before: int
    array: PublishedArray
    place: int  # among all pieces of the array

    @property
    def held(self) -> int:
        return int(self.array.held[self.place])

    @property
    def size(self) -> int:
        start, stop = self.array.ranges[self.place]
        return stop - start


class VersionAsk(NamedTuple):
    """What one message asks for: some pieces of segments ``ids`` on one server, from the ``first`` on."""

    server: int
    ids: list[int]
    first: int
    pieces: list[_Piece]


class PublishedCopy:
    """See the module.

    Attributes:
        memory: where it is. Its ``number`` is that of the newest version of which anything has come: all pieces are to
            be of it.
    """

    def __init__(self, arrays: Mapping[Key, Published], memory: CopyMemory) -> None:
        self.memory = memory
        self.arrays = {key: PublishedArray(key, published, memory) for key, published in arrays.items()}
        self._of_servers: dict[int, list[_Piece]] = {}
        for key, published in arrays.items():
            place = 0
            for segment in published.segments:
                self._of_servers.setdefault(segment.server, [])  # an empty array has a version, too
                for before, _ in enumerate(pieces(segment.stop - segment.start)):
                    piece = _Piece(segment.id, before, self.arrays[key], place)
                    self._of_servers[segment.server].append(piece)
                    place += 1

    @property
    def servers(self) -> list[int]:
        return list(self._of_servers)

    def has(self, lineage: int, number: int) -> bool:
        """Whether all pieces are of that version, or of a later one."""
        return (self.memory.lineage, True) == (lineage, self.memory.number >= number) and not any(self._lacking())

    def lacking(self) -> str:
        """Say which pieces are of another version, and on which servers."""
        keys = dict.fromkeys(piece.array.key for _, piece in self._lacking())
        servers = dict.fromkeys(f"server {server}" for server, _ in self._lacking())
        return f"{shorten(list(keys))} of {', '.join(servers)} are not there"

    def _lacking(self) -> Iterator[tuple[int, _Piece]]:
        number = self.memory.number
        for server, listed in self._of_servers.items():
            yield from ((server, piece) for piece in listed if piece.held != number)

    def asks(self) -> Iterator[VersionAsk]:
        """Yield what to ask for, of servers in turn: all pieces that are of another version than ``number``.

        A server makes the next answer while this process takes one.
        """
        for asks in zip_longest(*(self._asks(server) for server in self._of_servers)):
            yield from (ask for ask in asks if ask is not None)

    def _asks(self, server: int) -> Iterator[VersionAsk]:
        chosen: list[_Piece] = []
        room = 0
        for piece in self._of_servers[server]:
            if piece.held == self.memory.number:
                if chosen:  # what is asked for together lies side by side
                    yield _ask_for(server, chosen)
                    chosen = []
                continue
            if not chosen:
                room = ANSWER
            elif room <= 0:
                yield _ask_for(server, chosen)
                chosen, room = [], ANSWER
            chosen.append(piece)
            room -= piece.size // (CHANGED_PART if piece.held else 1)
        if chosen:
            yield _ask_for(server, chosen)

    def fields(self, ask: VersionAsk) -> dict[str, Any]:
        held = [piece.held for piece in ask.pieces]
        return {
            "ids": ask.ids,
            "first": ask.first,
            "lineage": self.memory.lineage,
            "held": held,
            "want": self.memory.number,
        }

    def note(self, lineage: int, number: int, label: str) -> None:
        """Note that there is a version: all pieces are to be of it, unless a newer one is known."""
        memory = self.memory
        if not number:
            return
        if lineage != memory.lineage:
            for array in self.arrays.values():
                array.forget()
        if lineage != memory.lineage or number > memory.number:
            memory.note(lineage, number, label)

    def take(self, ask: VersionAsk, reply: wire.VersionRead) -> bool:
        """Take an answer; return whether it brought something.

        Raises:
            WireError: it is not one to this request, or what it brought is not what was published.
        """
        count = len(reply.counts)
        if count > len(ask.pieces):
            raise WireError(f"an answer of {count} pieces where {len(ask.pieces)} were asked for")
        if not reply.number:
            return False
        self.note(reply.lineage, reply.number, reply.label)
        self.memory.beat()
        parts = _cut(reply.buffers, reply.lengths)
        for piece, dtype, told, changes in zip(ask.pieces, reply.dtypes, reply.sums, reply.counts, strict=False):
            piece.array.take(piece.place, reply.number, dtype, list(islice(parts, changes)), told)
        return count > 0


def _ask_for(server: int, chosen: list[_Piece]) -> VersionAsk:
    return VersionAsk(server, list(dict.fromkeys(piece.id for piece in chosen)), chosen[0].before, chosen)


def _cut(buffers: Sequence[wire.Buffer], lengths: Sequence[int]) -> Iterator[memoryview]:
    """Return parts of such lengths, which are back to back in ``buffers``.

    Raises:
        WireError: they are not.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    if sum(map(len, views)) != sum(lengths):
        raise WireError(f"an answer of {sum(map(len, views))} bytes, which says that it has {sum(lengths)}")
    parts = []
    at = start = 0
    for length in lengths:
        if length and start == len(views[at]):
            at, start = at + 1, 0
        if length and start + length > len(views[at]):
            raise WireError("an answer with a part in two buffers")
        parts.append(views[at][start : start + length] if length else memoryview(b""))
        start += length
    return iter(parts)
