"""From the wire into the caller's arrays, of any device and strides: writes the values of segments as they come."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from kvstore import wire
from kvstore.client.pack import RowBlock, Striped
from kvstore.client.plans import ArrayRange, Parcel, Plan, RowParcel, RowPlan, views_of
from kvstore.errors import UsageError, WireError
from kvstore.rows import slabs
from kvstore.rows.ids import Ids
from kvstore.rows.layout import read_rows
from kvstore.rows.row_arguments import Wanted
from kvstore.rows.sums import Rows
from kvstore.values import (
    Arrays,
    TensorRange,
    crossed,
    cut,
    from_host,
    ranges_of,
    scatter,
    spread,
    to_buffer,
    without_grad,
)
from kvstore.values.any_arrays import Column

Decode: TypeAlias = Callable[[wire.Values, Sequence[torch.Tensor]], None]  # into flat float32, one after the other


class Writer:
    """Writes arrays from the replies of the servers that hold their values.

    Args:
        outs: what to write into, for each key an array; or a list of them, of any device and strides.
        copy: if False, let the caller's own tensors become the values themselves where these came in one range of
            memory.
    """

    def __init__(self, plan: Plan, outs: Arrays | Sequence[Sequence[torch.Tensor]], copy: bool) -> None:
        self._layout = plan.layout
        self._replies = len(plan.parcels)
        self._plain = outs if isinstance(outs, Arrays) else None
        self._outs = () if isinstance(outs, Arrays) else outs
        self._copy = copy or self._plain is None or not self._plain.given
        self._staged: dict[int, torch.Tensor] = {}  # by position: arrays that are written once they are complete
        self._arrived: dict[int, dict[int, int]] = {}  # by position: how many elements have come, by where they begin
        self._moving: set[torch.cuda.Stream] = set()
        self._taken: set[int] = set()  # replies

    def disturbs(self, values: Sequence[torch.Tensor]) -> bool:
        """Whether writing one key's reply can change another key's ``values`` before these are sent."""
        if self._plain is None:
            owners = [position for position, outs in enumerate(self._outs) for _ in outs]
            return crossed(values, [out for outs in self._outs for out in outs], owners)
        outs, lengths = self._plain.tensors, self._layout.lengths
        if len(values) == 1:
            return bool(0 < abs(values[0].data_ptr() - outs[0].data_ptr()) < lengths[0])
        return crossed(values, outs, lengths=lengths)

    def take(self, parcel: Parcel, reply: wire.Values, decode: Decode | None = None) -> None:
        """Write the values of ``parcel`` that a reply brings. May be called again with the same reply.

        ``decode`` is for encoded values; an aggregator decodes them for its host, and sends them plain.
        """
        without_grad(self._take, parcel, reply, decode if reply.lengths else None)
        self._taken.add(reply.seq)  # a set, no count: the same reply may be taken twice
        if len(self._taken) == self._replies:  # copies to devices go on while other replies come
            for stream in self._moving:
                stream.synchronize()

    def _take(self, parcel: Parcel, reply: wire.Values, decode: Decode | None) -> None:
        if self._plain is None:
            self._write(parcel, _payload_of(parcel, reply, decode))
        elif decode is not None and self._copy and parcel.dtype == "float32":
            decode(reply, views_of(parcel, self._plain.tensors))
        else:
            self._write_plain(parcel, self._plain, _payload_of(parcel, reply, decode))

    def _write_plain(self, parcel: Parcel, outs: Arrays, payload: Sequence[TensorRange]) -> None:
        if payload and parcel.many and self._copy:
            flat = payload[0].values if len(payload) == 1 else torch.cat([part.values for part in payload])
            addresses = self._where(parcel, outs)
            outs.written(parcel.positions)
            scatter(to_buffer(flat), addresses + parcel.offsets, parcel.lengths)
            return
        sizes = [each.stop - each.start for each in parcel.ranges]
        parts = views_of(parcel, outs.tensors)
        if len(payload) != 1:
            at = 0
            for out, size in zip(parts, sizes, strict=True):
                for part in cut(payload, at, at + size):
                    out[part.start : part.stop] = part.values
                at += size
        elif self._copy:
            spread(payload[0].values, sizes, parts)
        else:
            self._share(parcel.ranges, outs, torch.split_with_sizes(payload[0].values, sizes))

    def _where(self, parcel: Parcel, outs: Arrays) -> Column:
        """Return the addresses of the arrays of ``parcel``, which may have been given other memory since the call."""
        addresses = outs.at(parcel.positions)
        if addresses is not None:
            return addresses
        now = outs.again(self._layout)
        addresses = None if now is None else now.at(parcel.positions)
        if addresses is None:
            raise UsageError(
                "an array in out has another shape or dtype since the call that writes it, or has become read-only; "
                "change arrays in out only after the ticket is done"
            )
        return addresses

    def _share(self, ranges: Sequence[ArrayRange], outs: Arrays, parts: Sequence[torch.Tensor]) -> None:
        for (position, start, stop, whole), part in zip(ranges, parts, strict=True):
            out = outs.tensors[position]
            if whole:
                out.data = part.view(out.shape)
            else:
                out.view(-1)[start:stop] = part

    def _write(self, parcel: Parcel, payload: Sequence[TensorRange]) -> None:
        at = 0
        for position, start, stop, _ in parcel.ranges:
            for part in cut(payload, at, at + stop - start):
                self._write_part(position, start + part.start, part.values)
            at += stop - start

    def _write_part(self, position: int, start: int, part: torch.Tensor) -> None:
        size, outs = math.prod(self._layout.shapes[position]), self._outs[position]
        stop = start + part.numel()
        if stop - start == size:
            self._moving |= from_host(part, list(outs))
            return
        plain = [out.view(-1)[start:stop] for out in outs if out.is_contiguous()]
        self._moving |= from_host(part, plain)
        if len(plain) < len(outs):  # strides have no flat view: collect the parts first
            staged = self._staged.get(position)
            if staged is None:
                staged = self._staged[position] = torch.empty(size, dtype=part.dtype, device="cpu")
            staged[start:stop] = part
            arrived = self._arrived.setdefault(position, {})
            arrived[start] = part.numel()
            if sum(arrived.values()) == size:
                strided = [out for out in outs if not out.is_contiguous()]
                self._moving |= from_host(staged, strided)


def _payload_of(parcel: Parcel, reply: wire.Values, decode: Decode | None) -> Sequence[TensorRange]:
    if decode is None:
        return ranges_of(reply.buffers, parcel.dtype, parcel.size)
    flat = torch.empty(parcel.size, dtype=torch.float32, device="cpu")
    decode(reply, [flat])
    return [TensorRange(0, flat.to(getattr(torch, parcel.dtype)))]


class IncomingRows:
    """Takes rows by their ids.

    Args:
        striped: the ids.
        rows: of each table the memory that they are written into, of shape (n, width).
        block: the array that has all of it, if it lies in one.
        wanted: what is written when all are there; of each table, or empty.
    """

    union = False

    def __init__(
        self,
        plan: RowPlan,
        striped: Striped,
        rows: Sequence[Rows],
        block: RowBlock | None = None,
        wanted: Sequence[Wanted] = (),
    ) -> None:
        self._plan = plan
        self._striped = striped
        self._rows = rows
        self._block = block
        self._wanted = wanted
        self._items: list[slabs.Array] | None = None  # the rows as single items
        self._missing = set(self.servers)

    @classmethod
    def of(cls, plan: RowPlan, wanted: Sequence[Wanted]) -> IncomingRows:
        striped = Striped(plan, [each.ids for each in wanted])
        return cls(plan, striped, [each.destination() for each in wanted], wanted=wanted)

    @property
    def servers(self) -> list[int]:
        """The servers that have rows of these; one of them, if no rows are wanted."""
        return [server for server in range(self._plan.servers) if self._striped.total(server)] or [0]

    def counts(self, server: int) -> list[int]:
        return self._striped.counts[server]

    def ids(self, server: int) -> Ids:
        return self._striped.ids(server)

    def nbytes(self, server: int) -> int:
        return self._plan.nbytes(self.counts(server))

    def take(self, parcel: RowParcel, reply: wire.Rows) -> None:
        """Take what a server has answered. May be called again with the same answer."""
        if reply.counts != self.counts(parcel.server):
            raise WireError(f"expected {self.counts(parcel.server)} rows of the tables, got {reply.counts}")
        self._collect(parcel.server, reply)
        self._missing.discard(parcel.server)
        if self._wanted and not self._missing:
            for wanted, rows in zip(self._wanted, self._rows, strict=True):
                wanted.write(rows)

    def _collect(self, server: int, reply: wire.Rows) -> None:
        """Put the rows of a reply where they belong among all."""
        item = self._plan.item
        if item is None:
            parts = row_parts(self._plan, reply)
            for rows, where, part in zip(self._rows, self._striped.positions(server), parts, strict=True):
                if len(where):
                    slabs.scatter(rows, where, part)
            return
        count = sum(reply.counts)
        if len(reply.buffers) != 1 or len(reply.buffers[0]) != count * item.itemsize:
            raise WireError(f"expected {count} rows of {item.itemsize} bytes, got {sum(map(len, reply.buffers))} bytes")
        if not count:
            return
        came = np.frombuffer(reply.buffers[0], item)
        if self._items is None:
            arrays = self._rows if self._block is None else [self._block.rows]
            self._items = [rows.view(item)[:, 0] for rows in arrays]
        if self._block is None:
            places = self._striped.positions(server)
        else:
            places = [self._striped.rows_in(self._block.firsts, server)]
        at = 0
        for items, where in zip(self._items, places, strict=True):
            if len(where):
                slabs.scatter_whole(items, where, came[at : at + len(where)])
                at += len(where)


class UnionRows:
    """Takes all rows that the updates of a round have changed, and their ids."""

    union = True

    def __init__(self, plan: RowPlan, wanted: Sequence[Wanted]) -> None:
        self._plan = plan
        self._wanted = wanted
        self._parts: dict[int, list[tuple[Ids, Rows]]] = {}  # by server, of each table

    @property
    def servers(self) -> list[int]:
        return list(range(self._plan.servers))

    def counts(self, server: int) -> list[int]:
        return [0] * len(self._plan.tables)

    def ids(self, server: int) -> Ids:
        return np.zeros(0, np.int64 if self._plan.wide else np.int32)

    def nbytes(self, server: int) -> int:
        return 0

    def take(self, parcel: RowParcel, reply: wire.Rows) -> None:
        """Take what a server has answered. May be called again with the same answer."""
        if len(reply.counts) != len(self._plan.tables) or len(reply.buffers) != 2:
            raise WireError(f"expected rows and ids of {len(self._plan.tables)} tables, got others")
        dtype = np.dtype(np.int64 if reply.wide else np.int32)
        if len(reply.buffers[1]) != sum(reply.counts) * dtype.itemsize:
            raise WireError(f"expected {sum(reply.counts)} ids, got {len(reply.buffers[1])} bytes")
        ids = np.frombuffer(reply.buffers[1], dtype).astype(np.int64)
        at, taken = 0, []
        for count, part in zip(reply.counts, row_parts(self._plan, reply), strict=True):
            taken.append((ids[at : at + count], part.copy()))  # the reply's memory is the server's
            at += count
        self._parts[parcel.server] = taken
        if len(self._parts) == self._plan.servers:
            for number, wanted in enumerate(self._wanted):
                wanted.write_changed(*self._united(number))

    def _united(self, number: int) -> tuple[Ids, Rows]:
        """Return the rows of the table at ``number``, by rising ids."""
        parts = [self._parts[server][number] for server in sorted(self._parts)]
        ids = np.concatenate([ids for ids, _ in parts])
        order = np.argsort(ids)
        return ids[order], np.concatenate([rows for _, rows in parts])[order]


RowReader: TypeAlias = IncomingRows | UnionRows


def row_parts(plan: RowPlan, reply: wire.Rows) -> list[Rows]:
    """Return the rows of each table that a reply brings."""
    lengths = plan.lengths(reply.counts)
    buffer: wire.Buffer = reply.buffers[0] if reply.buffers else b""
    if len(buffer) != sum(lengths):
        raise WireError(f"expected {sum(lengths)} bytes of rows, got {len(buffer)}")
    view, at, parts = memoryview(buffer), 0, []
    for table, count, length in zip(plan.tables, reply.counts, lengths, strict=True):
        parts.append(read_rows(view[at : at + length], count, table.width, table.dtype, table.codec))
        at += length
    return parts
