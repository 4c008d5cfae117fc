"""The caller's arrays into memory that can be sent. Arrays made by ``empty`` are in such memory already."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch

from kvstore import wire
from kvstore.client.plans import NARROW, Parcel, RowPlan, views_of
from kvstore.rows.halves import array_of_rows
from kvstore.rows.ids import Ids, joined, stripes_of
from kvstore.rows.layout import write_rows
from kvstore.rows.sums import Positions, Rows
from kvstore.spec import HALVES, sum_dtype
from kvstore.transport.memory import SMALL, Memory, ScatteredFrame
from kvstore.values import Leaving, collect, from_buffer, to_buffer, without_grad

MOST_VIEWS = 1 << 10  # frames of a message; more of them are cheaper to copy than to send, and a message has a limit
PART = 4 << 10  # bytes; what has smaller parts on average is cheaper to copy than to send from where it lies


class Contents(NamedTuple):
    """What a message carries, and how it is encoded, or is to be; see ``Push``. ``loan``: see ``PushLent``."""

    buffers: list[wire.Buffer]
    codec: wire.CodecDescription = None
    lengths: Sequence[int] = ()
    segment_counts: Sequence[int] = ()
    encode: wire.CodecDescription = None
    in_float32: bool = False
    loan: int | None = None
    runs: Sequence[list[int]] = ()


# Returns what one message of a push carries: the values of a parcel. If the second argument is True, the buffers may be
# ``ScatteredFrame``, of arrays that stay as they are until the message has left.
Load: TypeAlias = Callable[[Parcel, bool], Contents]


class Packer:
    """Makes the payloads of one store's messages."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        # By address, the arrays that own the memory of tensors from ``empty``. Weak, so that the memory is given back
        # with the last tensor over it. Weak references to tensors would end too early: a view is an object of its own.
        self._made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape)
        if not size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        buffer = self._memory.allocate(size * dtype.itemsize)
        if isinstance(buffer.obj, bytearray):  # a small value in plain memory: only an array can be referred to weakly
            buffer = np.frombuffer(buffer, np.uint8).data
        tensor = torch.frombuffer(buffer, dtype=dtype)
        self._made[tensor.data_ptr()] = buffer.obj
        return tensor.view(shape)

    def plain(self, values: Leaving) -> Load:
        """Return what a push carries of values that go as they are. They are read when a message is made."""

        def pack(parcel: Parcel, gather: bool) -> Contents:
            return Contents(self.pack(parcel, values, gather), in_float32=is_sum(parcel, values.tensors))

        return pack

    def pack(self, parcel: Parcel, values: Leaving, gather: bool = False) -> list[wire.Buffer]:
        """Return what ``parcel`` carries of ``values``, as a copy: later changes of the arrays are not seen.

        No copy is made if all of its arrays are from ``empty``, or when ``gather`` is set and the ranges are large.
        """
        if not parcel.nbytes:
            return []
        arrays = values.arrived(parcel.positions)
        if is_sum(parcel, arrays.tensors):
            buffer = self._memory.allocate(parcel.sum_bytes)
            parts = views_of(parcel, arrays.tensors)
            without_grad(torch.cat, parts, out=from_buffer(buffer, sum_dtype(parcel.dtype)))
            return [buffer]
        if parcel.many and (addresses := arrays.at(parcel.positions)) is not None:
            buffer = room(parcel.nbytes, self._memory)
            collect(addresses + parcel.offsets, parcel.lengths, buffer)
            return [buffer]
        parts = views_of(parcel, arrays.tensors)
        if self._made:
            views = self._views(parts)
            if views is not None:
                return views
        if gather and parcel.nbytes >= PART * len(parts):
            return [cast("wire.Buffer", ScatteredFrame(map(to_buffer, parts)))]  # at the other end it is one
        buffer = room(parcel.nbytes, self._memory)
        if len(parts) == 1 and parcel.nbytes < SMALL:
            from_buffer(buffer, parcel.dtype).copy_(parts[0].detach())
        else:
            without_grad(torch.cat, parts, out=from_buffer(buffer, parcel.dtype))
        return [buffer]

    def _views(self, parts: Sequence[torch.Tensor]) -> list[wire.Buffer] | None:
        """Return ``parts`` in place, adjacent ones merged. None: some are not from ``empty``, or they are too many."""
        ranges: list[tuple[int, int, int]] = []  # the address of the memory, start and stop in it
        for part in parts:
            base = part.untyped_storage().data_ptr()
            if base not in self._made:
                return None
            start = part.data_ptr() - base
            stop = start + part.numel() * part.itemsize
            if ranges and ranges[-1][0] == base and ranges[-1][2] == start:
                start = ranges.pop()[1]
            ranges.append((base, start, stop))
        if len(ranges) > MOST_VIEWS:
            return None
        return [self._made[base][start:stop].data for base, start, stop in ranges]


def is_sum(parcel: Parcel, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some of a parcel's arrays are sums over devices, which are not rounded to its half precision yet.

    They go as they are: the servers round what they make of them.
    """
    return parcel.dtype in HALVES and any(
        tensors[position].dtype == torch.float32 for position in parcel.positions.tolist()
    )


class RowBlock(NamedTuple):
    """One array with the rows of several tables."""

    rows: Rows  # the array, of shape (n, width). There may be other rows in it.
    firsts: Positions  # where in it the rows of each table begin


def block_of(parts: Sequence[torch.Tensor], width: int) -> RowBlock | None:
    """Return the array in which the rows of all ``parts`` are; None if they have no memory in common."""
    first = parts[0]
    memory = first.untyped_storage()
    address, firsts = memory.data_ptr(), []
    for part in parts:
        row, rest = divmod(int(part.storage_offset()), width)
        if rest or part.untyped_storage().data_ptr() != address:
            return None
        firsts.append(row)
    count = memory.nbytes() // (first.element_size() * width)
    rows = array_of_rows(first.detach().as_strided((count, width), (width, 1), 0))
    return RowBlock(rows, np.array(firsts, np.int64))


class Striped:
    """Ids of the tables of a plan, by server.

    Args:
        ids: of each table, rising.
        whole: those of all tables, one after the other, if somebody has them.
    """

    def __init__(self, plan: RowPlan, ids: Sequence[Ids], whole: Ids | None = None) -> None:
        servers, tables = plan.servers, len(ids)
        self._plan = plan
        self._all = joined(ids) if whole is None else whole
        sizes = [len(each) for each in ids]
        self._firsts = list(itertools.accumulate(sizes, initial=0))[:-1]  # where in all ids those of each table begin
        self._travelling: dict[int, Ids] = {}
        self._within: dict[int, Positions] = {}  # by server, where those are in the ids of each table
        self._mine: list[Positions]  # by server, where in all ids those are that it has
        if servers == 1:
            self._mine = [np.arange(len(self._all))]
            self.counts = [sizes]  # by server, how many ids of each table it has
            return
        stripes = self._stripes(ids)
        self._mine = [(stripes == server).nonzero()[0] for server in range(servers)]
        if tables == 1:
            self.counts = [[len(mine)] for mine in self._mine]
        else:
            stops = [*self._firsts, len(self._all)]
            self.counts = [np.diff(mine.searchsorted(stops)).tolist() for mine in self._mine]

    def _stripes(self, ids: Sequence[Ids]) -> Positions:
        plan = self._plan
        if not plan.grow:  # the same rule for all of them
            mask = plan.servers - 1
            if not plan.servers & mask:  # a remainder costs ten times as much
                masked: Positions = self._all & mask
                return masked
            return stripes_of(plan.tables[0], self._all, plan.servers)
        parts = [stripes_of(table, each, plan.servers) for table, each in zip(plan.tables, ids, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def positions(self, server: int) -> list[Positions]:
        """Return, for each table, where in its ids those are that ``server`` has."""
        where = self._mine[server]
        if len(self._firsts) == 1:
            return [where]
        counts = self.counts[server]
        if server not in self._within:
            self._within[server] = where - np.repeat(self._firsts, counts)
        where = self._within[server]
        ranges = itertools.pairwise(itertools.accumulate(counts, initial=0))
        return [where[start:stop] for start, stop in ranges]

    def rows_in(self, firsts: Positions, server: int) -> Positions:
        """Return where the rows of all ids that ``server`` has are in an array.

        Args:
            firsts: where in it those of each table begin, one for each of its ids.
        """
        mine = self._mine[server]
        if len(firsts) == 1 and not firsts[0]:  # the array has the rows of one table, and no others
            return mine
        shifts = firsts - np.array(self._firsts)
        return mine + np.repeat(shifts, self.counts[server]) if shifts.any() else mine

    def ids(self, server: int) -> Ids:
        """Return the ids that ``server`` has, table by table, as they travel."""
        known = self._travelling.get(server)
        if known is not None:
            return known
        mine = self._all if self._plan.servers == 1 else self._all.take(self._mine[server])
        travelling: Ids = mine.astype(np.int64 if self._plan.wide else np.int32, copy=False)
        self._travelling[server] = travelling
        return travelling

    def total(self, server: int) -> int:
        return len(self._mine[server])


class OutgoingRows:
    """One push of several tables.

    Args:
        ids: of each table, rising.
        rows: of each table, a row for each id, contiguous. They must stay as they are until the messages are made.
            Those of half precision are as their tables have them, or all are float32.
        block: the array that has all rows, if they lie in one.
        whole: the ids of all tables, one after the other, if somebody has them.

    Attributes:
        in_float32: see ``PushRows``.
    """

    def __init__(
        self,
        plan: RowPlan,
        ids: Sequence[Ids],
        rows: Sequence[Rows],
        block: RowBlock | None = None,
        whole: Ids | None = None,
    ) -> None:
        self._plan = plan
        self._rows = rows
        self._block = block
        self.in_float32 = any(rows[place].dtype == np.float32 for place in plan.halves)
        self.striped = Striped(plan, ids, whole)  # the ids, by server

    def nbytes(self, server: int) -> int:
        counts = self.striped.counts[server]
        return sum(self._plan.lengths(counts, sums=True)) if self.in_float32 else self._plan.nbytes(counts)

    def write(self, server: int, into: memoryview) -> None:
        at = 0
        if not len(into):
            return
        if self._plan.item is not None and not self.in_float32:
            whole = np.frombuffer(into, self._rows[0].dtype).reshape(-1, self._plan.tables[0].width)
            if self._block is not None:
                self._block.rows.take(self.striped.rows_in(self._block.firsts, server), axis=0, out=whole, mode="clip")
                return
            for rows, positions in zip(self._rows, self.striped.positions(server), strict=True):
                if len(positions):
                    stop = at + len(positions)
                    rows.take(positions, 0, whole[at:stop], "clip")  # they are in range: no check of them
                    at = stop
            return
        lengths = self._plan.lengths(self.striped.counts[server], self.in_float32)
        for table, rows, positions, length in zip(
            self._plan.tables, self._rows, self.striped.positions(server), lengths, strict=True
        ):
            part = into[at : at + length]
            at += length
            if not len(positions):
                continue
            if table.codec == "none":
                target = np.frombuffer(part, rows.dtype, len(positions) * table.width).reshape(-1, table.width)
                rows.take(positions, axis=0, out=target, mode="clip")
            else:
                write_rows(rows[positions], table.codec, part)


class RowsOfArrays:
    """One push of some rows of several arrays.

    Args:
        given: of each array of a plan its ids, rising, and a row for each. They must stay as they are until the
            messages are made.
    """

    def __init__(self, given: Sequence[tuple[Ids, Rows]], memory: Memory) -> None:
        self._given = given
        self._memory = memory

    def load(self, parcel: Parcel, _gather: bool) -> Contents:
        """Return what ``parcel`` carries. A row that is on two servers goes to both."""
        ids: list[Ids] = []
        rows: list[Rows] = []
        for (position, start, stop, _), (_, _, width) in zip(parcel.ranges, parcel.runs, strict=True):
            every, values = self._given[position]
            low, high = np.searchsorted(every, (start // width, -(-stop // width))).tolist()
            ids.append(every[low:high])
            rows.append(values[low:high].reshape(-1))
        counts, whole = np.array(list(map(len, ids)), np.int64), joined(ids)
        narrow = np.int32 if not len(whole) or int(whole.max()) < NARROW else np.int64
        buffer = room(sum(part.nbytes for part in rows), self._memory)
        if len(buffer):
            np.concatenate(rows, out=np.frombuffer(buffer, rows[0].dtype))
        buffers = [counts.tobytes(), sendable(whole.astype(narrow, copy=False), self._memory), buffer]
        return Contents(buffers, in_float32=parcel.dtype in HALVES, runs=parcel.runs)


def room(nbytes: int, memory: Memory) -> memoryview:
    return memoryview(bytearray(nbytes)) if nbytes < SMALL else memory.allocate(nbytes)


def sendable(array: Any, memory: Memory) -> wire.Buffer:
    """Return a copy of the bytes of a contiguous array, in memory that messages are built in."""
    if array.nbytes < 2 * SMALL:  # so few are copied into the socket, too
        return bytes(array.data)
    buffer = memory.allocate(array.nbytes)
    buffer[:] = array.reshape(-1).view("u1").data
    return buffer
