"""Rows into messages and out of replies: each goes where its row is, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placed import entries_for

from kvstore import wire
from kvstore.client.pack import OutgoingRows, Striped, block_of
from kvstore.client.plans import RowPlan
from kvstore.client.unpack import IncomingRows, UnionRows
from kvstore.errors import WireError
from kvstore.rows.ids import stripes_of
from kvstore.rows.layout import read_rows
from kvstore.rows.row_arguments import Wanted
from kvstore.rows.row_sparse import RowSparse
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


ids = st.lists(st.integers(0, 999), unique=True, max_size=30).map(lambda each: np.array(sorted(each), np.int64))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), ids), min_size=1, max_size=4), st.integers(1, 5))
def test_each_id_is_at_the_server_that_has_its_row(listed, servers):
    specs: dict[str, Spec] = {
        str(number): TableSpec.of(Table(dim=2) if grows else Table(shape=(1000, 2)))
        for number, (grows, _) in enumerate(listed)
    }
    plan = RowPlan(entries_for(specs, servers, 10), list(specs))
    given_ids = [each for _, each in listed]
    striped = Striped(plan, given_ids)
    seen: list[set[int]] = [set() for _ in listed]
    for server in range(servers):
        travelling = striped.ids(server)
        assert travelling.dtype == (np.int64 if plan.wide else np.int32)
        assert len(travelling) == striped.total(server) == sum(striped.counts[server])
        parts = np.split(travelling, np.cumsum(striped.counts[server])[:-1])
        of = zip(plan.tables, given_ids, parts, striped.positions(server), seen, strict=True)
        for table, all_ids, part, positions, found in of:
            assert np.array_equal(all_ids[positions], part)
            assert bool((part[1:] > part[:-1]).all())
            assert set(stripes_of(table, part.astype(np.int64), servers).tolist()) <= {server}
            found.update(part.tolist())
    assert seen == [set(each.tolist()) for each in given_ids]


def test_the_array_has_all_memory_of_the_parts() -> None:
    whole = torch.arange(24.0).view(6, 4)
    block = block_of([whole[3:5], whole[1:1], whole[0:2].detach()], 4)
    assert block is not None
    assert block.firsts.tolist() == [3, 1, 0]
    assert block.rows.tolist() == whole.tolist()
    block.rows[0] = 7
    assert whole[0].tolist() == [7, 7, 7, 7]


def test_rows_in_memory_of_their_own_are_no_block() -> None:
    whole = torch.zeros(6, 4)
    assert block_of([whole[1:3], torch.zeros(1, 4)], 4) is None
    assert block_of([whole.view(-1)[2:10].view(2, 4), whole[4:]], 4) is None


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
