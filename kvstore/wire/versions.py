"""Publishing: worker 0 has servers make a version of arrays, and readers get what has changed since the one they have.

A version of a store is one cut over its arrays, in the dtype in which they are published. Its bytes never change.
Readers get an array in pieces of ``PIECE`` elements, counted from the start of each segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Annotated

from kvstore.errors import WireError
from kvstore.wire import fields as f
from kvstore.wire.coding import Buffer, message
from kvstore.wire.message import Message, Reply, Request

PIECE = 1 << 19  # elements. A server looks at one piece at a time; workers' messages come in between
NEVER = 1 << 61  # no version has so high a number; who wants it only asks whether arrays are published
WIDE = ("float32", "float64")  # what may be rounded
PUBLISHED = ("float16", "bfloat16")  # what values may be published as, beside their own dtype

Number = Annotated[int, f.integer(0, 2**62)]  # of a version; 0 for none
Numbers = Annotated[list[int], f.integers(0, 2**62)]
Parts = Annotated[int, f.integer(0, f.MAX_ITEMS)]
Label = Annotated[str, f.text(256)]
Rounded = Annotated["str | None", f.optional(f.choice(*PUBLISHED))]


def published_as(source: str, rounded: str | None) -> str:
    """Return the dtype in which values of dtype ``source`` are published, if wider floating point is ``rounded``."""
    return rounded if rounded is not None and source in WIDE else source


def pieces(size: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the stop of each piece of a segment of ``size`` elements."""
    for start in range(0, size, PIECE):
        yield start, min(size, start + PIECE)


@message(55, parallel=("ids", "clocks"))
class Publish(Request):
    """From rank 0: segments ``ids``, each when ``clocks[i]`` of its rounds are over, are version ``number``.

    The answer, ``PublishNoted``, comes at once. Without rounds, and where rounds go on without rank 0, a segment may be
    later already: then it is taken as it is. Segments that were published before, and are not named, stay as they were
    published last.
    """

    store: f.Store
    lineage: f.Lineage  # of the versions: one store of one job
    number: Annotated[int, f.integer(1, 2**62)]
    label: Label
    rounded: Rounded  # what floating point is rounded to, if it is wider; None for its own dtype
    ids: f.Ids
    clocks: f.Clocks


@message(182)
class PublishNoted(Reply):
    """It is noted, or had been before. ``last`` is the highest number that any worker has asked for."""

    last: Number


@message(77)
class VersionMade(Message):
    """From a primary to its standby: segments ``ids`` are, as they are now, what version ``number`` has of them."""

    store: f.Store
    number: Number
    ids: f.Ids


@message(78, parallel=("ids", "clocks"))
class VersionState(Message):
    """To a new standby: there is version ``number``, but for segments ``ids``, which are to be made of it yet."""

    store: f.Store
    lineage: f.Lineage
    number: Number
    label: Label
    ids: f.Ids
    clocks: f.Clocks  # see ``Publish``


@message(79)
class PublishedState(Message):
    """To a new standby: what is published of piece ``place`` of segment ``id``."""

    store: f.Store
    id: f.SegmentId
    place: Number
    dtype: Annotated[str, f.dtype]
    newest: Number  # the version that it is of
    versions: f.Clocks  # by mark, the version that changed the elements with the mark
    buffers: Sequence[Buffer] = field(repr=False, default=())  # the values, and of each a mark, a byte


@message(158)
class ReadVersion(Request):
    """From a reader to a server: how have pieces of segments ``ids`` changed since the versions that I have?

    They are as many as ``held`` has versions, from piece ``first`` of these segments on. Without ``ids``: which version
    is there? If ``newer``: once there is another one than the one I have. Who wants ``NEVER`` is told the dtypes of the
    segments alone.
    """

    store: f.Store
    ids: f.Ids
    lineage: f.Lineage  # of the numbers
    held: Numbers  # the version that I have of each piece, 0 for none; without ``ids``, of everything
    want: Number  # the version that I want; 0 for the newest. If it is not there any more, a later one comes
    newer: Annotated[bool, f.flag] = False  # whether the answer waits for another version than the one that I have
    first: Number = 0


@message(159)
class VersionRead(Reply):
    """The first pieces that were asked about, as version ``number`` has them; the others are for the next request.

    If the version that was wanted is not whole here yet, there are no pieces, and ``number`` is the newest one.
    """

    lineage: f.Lineage
    number: Number  # 0 if there is none
    label: Label
    dtypes: f.Dtypes  # dtypes, sums, counts: of each piece, what it is published as, its checksum, and ...
    sums: Annotated[list[int], f.integers(0, 2**64 - 1)]
    # ... how many buffers its changes are; 0 if it has not changed
    counts: Annotated[list[int], f.integers(0, 16)]
    lengths: f.Lengths  # of all these, which are back to back in ``buffers``; none is in two of them
    buffers: Sequence[Buffer] = field(repr=False, default=())

    def __post_init__(self) -> None:
        f.same_length(self.dtypes, self.sums, self.counts)
        if len(self.lengths) != sum(self.counts):
            raise WireError(f"expected the lengths of {sum(self.counts)} changes, got {len(self.lengths)}")


@message(180)
class ReadTable(Request):
    """From a reader to a server: how have the rows of table segment ``id`` changed since the states that I have?

    A server divides its rows into parts, which stay where they are. Of each part a reader may have another state of the
    table. States are those of the table itself, and count its updates.
    """

    store: f.Store
    id: f.SegmentId
    lineage: f.Lineage  # of the versions
    want: Number  # see ``ReadVersion``
    at: f.At  # the state up to which I know what has gone; its lineage is that of all states
    layout: f.Lineage  # says which parts I mean; another server of this segment has others
    # of each part, the state that I have, -1 for none; one number alone is that of all, and of others it is -1
    held: Annotated[list[int], f.integers(-1, 2**62 - 1)]
    skip: f.Count  # how many of the ids that have gone have come already, of the version that I want


@message(181)
class TableRead(Reply):
    """What has changed in the first parts, as version ``number`` has them, and ids whose rows have gone.

    Nothing is here if the version is not there yet, or if nobody had asked for the rows when it was made (``number`` is
    0). What is not ``known`` must be asked for again, as by a reader that has nothing.
    """

    lineage: f.Lineage
    newest: Number  # the number of the newest version, whatever it has
    number: Number
    label: Label
    at: f.At  # the state that this version has of the table here
    layout: f.Lineage
    parts: Parts  # how many there are
    done: Parts  # how many of them are of this version now, or have been before
    known: Annotated[bool, f.flag]  # whether it is known what has changed since the states that were named
    more: Annotated[bool, f.flag]  # whether more ids have gone, or ``layout`` is another: no part is here then
    evicted: f.Count  # how many ids have gone
    count: f.Count  # how many rows have changed
    sum: Annotated[int, f.integer(0, 2**64 - 1)]  # the checksum of the buffer
    # the rows, by rising ids; int64 for each id that has gone, which go before any row is put; the rows' ids, as
    # ``kvstore.codecs.changes`` encodes them
    buffers: Sequence[Buffer] = field(repr=False, default=())
