"""Answers with rows: what does not fit what was asked is refused, and nothing is written before all is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from placed import entries_for

from kvstore import wire
from kvstore.client.plans import RowPlan
from kvstore.client.unpack_rows import IncomingRows, UnionRows
from kvstore.errors import WireError
from kvstore.rows.row_sparse import RowSparse
from kvstore.rows.wanted import Wanted
from kvstore.table import Table, TableSpec


def asked(width: int, ids: Any, out: Any) -> tuple[RowPlan, Wanted]:
    table = Table(shape=(20, width))
    wanted = Wanted("a pull", table)
    wanted.add(ids, out)
    return RowPlan(entries_for({"t": TableSpec.of(table)}, 2, 10), ["t"]), wanted


def reply(ids: list[int], width: int) -> wire.Rows:
    rows = np.outer(ids, np.ones(width, np.float32)).astype(np.float32)
    return wire.Rows(1, [len(ids)], buffers=[rows.tobytes() + bytes(-rows.nbytes % 16)])


@pytest.mark.parametrize("width", [4, 3])
def test_rows_of_all_servers_come_together(width: int):
    out = torch.zeros(4, width)
    plan, wanted = asked(width, [9, 4, 9, 2], out)
    incoming = IncomingRows.of(plan, [wanted])
    assert [incoming.counts(server) for server in incoming.servers] == [[2], [1]]
    for _ in range(2):  # an answer may be taken twice
        incoming.take(plan.parcels[0], reply([2, 4], width))
        assert not out.any()
    incoming.take(plan.parcels[1], reply([9], width))
    assert out[:, 0].tolist() == [9, 4, 9, 2]


@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda width: reply([2], width),
        lambda width: wire.Rows(1, [2], buffers=[bytes(16)]),
        lambda width: wire.Rows(1, [2], buffers=[]),
        lambda width: wire.Rows(1, [2, 0], buffers=reply([2, 4], width).buffers),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(width: int, wrong: Any):
    out = torch.zeros(2, width)
    plan, wanted = asked(width, [2, 4], out)
    with pytest.raises(WireError, match="expected"):
        IncomingRows.of(plan, [wanted]).take(plan.parcels[0], wrong(width))
    assert not out.any()


def test_where_no_rows_are_wanted_one_server_is_asked_all_the_same():
    plan, wanted = asked(4, [], torch.zeros(0, 4))
    incoming = IncomingRows.of(plan, [wanted])
    assert incoming.servers == [0]
    incoming.take(plan.parcels[0], wire.Rows(1, [0], buffers=[b""]))


def test_the_rows_of_a_round_are_united():
    out = RowSparse.zeros((20, 4))
    plan, wanted = asked(4, None, out)
    union = UnionRows(plan, [wanted])
    for server, ids in ((1, [3, 5]), (0, [4])):
        of_server = reply(ids, 4)
        numbers = np.array(ids, np.int32).tobytes()
        with pytest.raises(WireError, match="expected"):
            union.take(
                plan.parcels[server], wire.Rows(1, of_server.counts, wide=False, buffers=[*of_server.buffers, b"x"])
            )
        union.take(
            plan.parcels[server], wire.Rows(1, of_server.counts, wide=False, buffers=[*of_server.buffers, numbers])
        )
    assert out.ids.tolist() == [3, 4, 5]
    assert out.rows[:, 0].tolist() == [3, 4, 5]
