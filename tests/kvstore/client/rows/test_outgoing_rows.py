"""The rows that a push carries: as the layout of messages says, whether or not they can be moved as items."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from placed import entries_for

from kvstore import wire
from kvstore.client.pack_rows import OutgoingRows, Striped, block_of
from kvstore.client.plans import RowPlan
from kvstore.client.unpack_rows import IncomingRows
from kvstore.rows.layout import read_rows
from kvstore.spec import Spec
from kvstore.table import Table, TableSpec

KINDS = {
    "alike": [Table(shape=(50, 4)), Table(shape=(90, 4), init="normal")],
    "odd": [Table(shape=(50, 3)), Table(shape=(90, 5))],
    "doubles": [Table(shape=(50, 4)), Table(shape=(90, 3), dtype="float64")],
    "encoded": [Table(shape=(50, 4), codec="fp16"), Table(shape=(90, 7), codec="int8")],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [[[1, 3, 4, 8], [2, 89]], [[], [0, 1, 2]], [[], []], [[1], [1]]])
def test_each_server_gets_its_rows(kind: str, ids: list[list[int]]):
    tables = KINDS[kind]
    specs: dict[str, Spec] = {str(number): TableSpec.of(table) for number, table in enumerate(tables)}
    plan = RowPlan(entries_for(specs, 2, 10), list(specs))
    numbers = [np.array(each, np.int64) for each in ids]
    rows = [
        np.outer(each + 1, np.ones(table.width)).astype(table.dtype)
        for each, table in zip(numbers, tables, strict=True)
    ]
    outgoing = OutgoingRows(plan, numbers, rows)
    for server in range(2):
        lengths = plan.lengths(outgoing.counts(server))
        assert outgoing.nbytes(server) == sum(lengths)
        buffer, at = memoryview(bytearray(sum(lengths))), 0
        outgoing.write(server, buffer)
        travelling = outgoing.ids(server)
        for table, count, length in zip(tables, outgoing.counts(server), lengths, strict=True):
            part = read_rows(buffer[at : at + length], count, table.width, table.dtype, table.codec)
            own, travelling = travelling[:count], travelling[count:]
            assert np.allclose(part, np.outer(own + 1, np.ones(table.width)), rtol=0.01)
            at += length
        assert not len(travelling)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("gap", [0, 1])
def test_rows_of_one_array_go_and_come_in_one_step(servers: int, gap: int) -> None:
    """As they do one table after the other, with other rows between them or none."""
    tables = [Table(shape=(90, 4)), Table(dim=4), Table(shape=(7, 4))]
    specs: dict[str, Spec] = {str(number): TableSpec.of(table) for number, table in enumerate(tables)}
    plan = RowPlan(entries_for(specs, servers, 10), list(specs))
    ids = [np.array(each, np.int64) for each in ([1, 3, 4, 80], [-(2**50), 5, 2**40], [0, 6])]
    sizes = [len(each) for each in ids]
    whole = torch.arange(4.0 * (sum(sizes) + 3 * gap)).view(-1, 4)
    parts = [part[: len(part) - gap] for part in whole.split([size + gap for size in sizes])]
    arrays = [part.numpy() for part in parts]
    outgoing = OutgoingRows(plan, ids, arrays, block_of(parts, 4))
    expected = OutgoingRows(plan, ids, arrays)
    back = torch.zeros_like(whole)
    outs = [part[: len(part) - gap] for part in back.split([size + gap for size in sizes])]
    incoming = IncomingRows(plan, Striped(plan, ids), [out.numpy() for out in outs], block_of(outs, 4))
    for parcel in plan.parcels:
        buffers = [memoryview(bytearray(outgoing.nbytes(parcel.server))) for _ in range(2)]
        for each, buffer in zip((outgoing, expected), buffers, strict=True):
            each.write(parcel.server, buffer)
        assert bytes(buffers[0]) == bytes(buffers[1])
        incoming.take(parcel, wire.Rows(1, incoming.counts(parcel.server), buffers=[buffers[0]]))
    for out, part in zip(outs, parts, strict=True):
        assert torch.equal(out, part)
    if gap:
        assert not back[len(parts[0])].any()
