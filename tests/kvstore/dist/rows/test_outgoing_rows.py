"""The rows that a push carries: as the layout of messages says, whether or not they can be moved as items."""

from __future__ import annotations

import numpy as np
import pytest
from placed import entries_for

from kvstore.dist.rows.outgoing_rows import OutgoingRows
from kvstore.dist.rows.plan import RowPlan
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
        lengths = outgoing.lengths(server)
        buffer, at = memoryview(bytearray(sum(lengths))), 0
        outgoing.write(server, lengths, buffer)
        travelling = outgoing.ids(server)
        for table, count, length in zip(tables, outgoing.counts(server), lengths, strict=True):
            part = read_rows(buffer[at : at + length], count, table.width, table.dtype, table.codec)
            own, travelling = travelling[:count], travelling[count:]
            assert np.allclose(part, np.outer(own + 1, np.ones(table.width)), rtol=0.01)
            at += length
        assert not len(travelling)
