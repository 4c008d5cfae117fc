from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import KVStoreError, Mismatch, UsageError, WireError
from kvstore.lineage import NOWHERE, Version
from kvstore.reading import held
from kvstore.reading.held import HeldRows, HeldValue, ReadSegment, reads_of, reads_of_rows
from kvstore.reading.reader import RowPull
from kvstore.rows.ids import Ids
from kvstore.spec import Spec
from kvstore.table import Table, TableSpec
from kvstore.values import to_buffer
from kvstore.wire.guests import NOT_HELD, aligned


def cut_value(key: str = "w") -> HeldValue:
    """Five elements, on two servers."""
    return HeldValue(key, Spec((5,), "float32"), 0, [ReadSegment(7, 0, 0, 3), ReadSegment(8, 1, 3, 5)])


def answer(*parts: torch.Tensor, versions: list[int], positions: list[int], lineage: int = 7) -> wire.ValuesRead:
    data = b"".join(bytes(to_buffer(part)).ljust(aligned(4 * part.numel()), b"\0") for part in parts)
    return wire.ValuesRead(1, lineage, versions, positions, [bytearray(data)] if data else [])


def test_each_server_is_asked_for_its_segments() -> None:
    value, other = cut_value(), cut_value("v")
    reads = list(reads_of([value, other]))
    assert [(read.server, read.fields["ids"]) for read in reads] == [(0, [7, 7]), (1, [8, 8])]
    assert reads[0].fields["versions"] == [NOT_HELD, NOT_HELD]


def test_long_values_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MESSAGE_BYTES", 100)
    assert sorted(len(read.parts) for read in reads_of([cut_value(str(i)) for i in range(3)])) == [1] * 6


def test_an_answer_is_taken_segment_by_segment() -> None:
    value = cut_value()
    first, second = reads_of([value])
    first.take(answer(torch.ones(3), versions=[4], positions=[0]))
    assert value.versions == [Version(7, 4), NOWHERE]
    second.take(answer(torch.full((2,), 2.0), versions=[5], positions=[0]))
    assert value.flat.tolist() == [1, 1, 1, 2, 2]
    second.take(answer(versions=[6], positions=[]))  # it has not moved on by more than was allowed
    assert value.versions == [Version(7, 4), Version(7, 5)]


def test_what_is_held_of_a_servers_past_is_asked_for_as_if_it_were_not_held() -> None:
    value, other = cut_value(), cut_value("v")
    for each, lineage, version in ((value, 7, 4), (other, 9, 2)):
        next(reads_of([each])).take(answer(torch.ones(3), versions=[version], positions=[0], lineage=lineage))
    first, second = reads_of([value, other])
    assert (first.fields["lineage"], first.fields["versions"]) == (9, [NOT_HELD, 2])
    assert (second.fields["lineage"], second.fields["versions"]) == (0, [NOT_HELD, NOT_HELD])


@pytest.mark.parametrize(
    "wrong",
    [
        answer(torch.ones(3), versions=[4, 4], positions=[0]),
        answer(torch.ones(3), versions=[4], positions=[1]),
        answer(torch.ones(30), versions=[4], positions=[0]),
        answer(versions=[4], positions=[0]),
        wire.ValuesRead(1, 7, [4], [0], [bytearray(32), bytearray(32)]),
    ],
)
def test_a_wrong_answer_is_refused_and_changes_nothing(wrong: wire.ValuesRead) -> None:
    value = cut_value()
    with pytest.raises(WireError, match="an answer of"):
        next(reads_of([value])).take(wrong)
    assert value.versions == [NOWHERE, NOWHERE]


def test_many_small_values_are_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MESSAGE_SEGMENTS", 2)
    assert sorted(len(read.parts) for read in reads_of([cut_value(str(i)) for i in range(3)])) == [1, 1, 2, 2]


TABLE = Table(dim=2)
AT = Version(7, 5)


def ids_of(*numbers: int) -> Ids:
    return np.array(numbers, np.int64)


def answer_with_rows(
    rows: list[list[float]], positions: list[int] | None = None, count: int | None = None
) -> wire.RowsRead:
    buffers: list[wire.Buffer] = [bytearray(np.array(rows, np.float32).tobytes())]
    if positions is not None:
        buffers.append(bytearray(np.array(positions, np.int64).tobytes()))
    return wire.RowsRead(1, AT, len(rows) if count is None else count, buffers)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.integers(-(2**62), 2**62), st.floats(width=32, allow_nan=False), max_size=9), max_size=5
    )
)
def test_the_latest_rows_are_held(notes: list[dict[int, float]]) -> None:
    held, expected = HeldRows(TABLE), {}
    for version, rows in enumerate(notes):
        ids = np.fromiter(rows, np.int64)
        values = np.repeat(np.fromiter(rows.values(), np.float32)[:, None], 2, axis=1)
        held.note(ids, values, Version(7, version))
        expected.update({number: ([7, version], value) for number, value in rows.items()})
    ids = np.fromiter(expected, np.int64)
    out = np.empty((len(ids), 2), np.float32)
    versions = held.look_up(ids, out)
    assert list(zip(versions.tolist(), out[:, 1].tolist(), strict=True)) == list(expected.values())


def test_what_is_not_held_is_left_as_it_is() -> None:
    held = HeldRows(TABLE)
    held.note(ids_of(3), np.ones((1, 2), np.float32), Version(7, 4))
    out = np.full((2, 2), 9.0, np.float32)
    assert held.look_up(ids_of(7, 3), out).tolist() == [list(NOWHERE), [7, 4]]
    assert out.tolist() == [[9, 9], [1, 1]]


def test_so_many_rows_are_held_and_then_all_are_forgotten() -> None:
    held = HeldRows(TABLE, most_bytes=3 * TABLE.row_bytes)
    held.note(ids_of(1, 2), np.ones((2, 2), np.float32), Version(7, 1))
    held.note(ids_of(3, 4), np.ones((2, 2), np.float32), Version(7, 2))
    assert len(held) == 2
    assert held.look_up(ids_of(1, 3), np.empty((2, 2), np.float32)).tolist() == [list(NOWHERE), [7, 2]]
    held.note(ids_of(5, 6, 7, 8), np.ones((4, 2), np.float32), Version(7, 3))
    assert len(held) == 2


def test_each_server_is_asked_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MESSAGE_BYTES", 2 * TABLE.row_bytes)
    fixed = Table(shape=(10, 2))
    reads = list(reads_of_rows(fixed, ids_of(0, 1, 2, 4, 6), None, 2))
    assert [(read.server, read.ids.tolist()) for read in reads] == [(0, [0, 2]), (0, [4, 6]), (1, [1])]
    assert [len(read.fields(True)["buffers"][0]) for read in reads] == [16, 16, 8]


def test_an_answer_goes_where_its_rows_belong() -> None:
    (read,) = reads_of_rows(TABLE, ids_of(4, 5, 6), np.array([(7, 1), NOWHERE, (7, 1)]), 1)
    held, out = HeldRows(TABLE), np.zeros((3, 2), np.float32)
    assert read.take(answer_with_rows([[1, 2], [3, 4]], [1, 2]), out, held) == [1, 5]
    assert out.tolist() == [[0, 0], [1, 2], [3, 4]]
    assert held.look_up(ids_of(4, 5, 6), out).tolist() == [list(NOWHERE), [7, 5], [7, 5]]
    assert read.take(answer_with_rows([], []), out, held) == [0, 1]


def test_rows_that_are_held_of_a_tables_past_are_asked_for_as_if_they_were_not_held() -> None:
    (read,) = reads_of_rows(TABLE, ids_of(4, 5, 6), np.array([(7, 3), NOWHERE, (8, 1)]), 1)
    fields = read.fields(wide=True)
    assert fields["lineage"] == 8
    assert np.frombuffer(fields["buffers"][1], np.int64).tolist() == [NOT_HELD, NOT_HELD, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        answer_with_rows([[1, 2]]),
        answer_with_rows([[1, 2]], [3]),
        answer_with_rows([[1, 2]], [-1]),
        answer_with_rows([[1, 2]], [0, 1]),
        answer_with_rows([[1, 2], [3, 4], [5, 6]], count=2),
        wire.RowsRead(1, AT, 0, []),
    ],
)
def test_a_wrong_answer_is_refused(wrong: wire.RowsRead) -> None:
    (read,) = reads_of_rows(TABLE, ids_of(4, 5, 6), None, 1)
    out = np.zeros((3, 2), np.float32)
    with pytest.raises(WireError, match="where 3 were asked for"):
        read.take(wrong, out, None)
    assert not out.any()


def table() -> HeldValue:
    """Ten rows of two numbers, on two servers."""
    spec = TableSpec.of(Table(shape=(10, 2)))
    return HeldValue("t", spec, 3, [ReadSegment(7, 0, 0, 10), ReadSegment(8, 1, 10, 20)])


def answered(pull: RowPull, slack: int, version: int) -> list[dict[str, Any]]:
    """The fields of the requests, each of which is answered with rows that are their version."""
    asked = []
    for server, _, fields, take in pull.asks(slack):
        held = np.frombuffer(fields["buffers"][1], np.int64) if fields["lineage"] else np.full(fields["count"], -1)
        positions = np.flatnonzero((held < 0) | (version - held > slack))
        rows = np.full((len(positions), 2), version, np.float32)
        take(wire.RowsRead(1, Version(7, version), len(positions), [rows.tobytes(), positions.tobytes()]))
        asked.append({"server": server, **fields})
    return asked


def test_each_server_is_asked_for_its_rows_once() -> None:
    pull = RowPull(table(), [[3, 2], [2, 3]], None)
    asked = answered(pull, 0, 5)
    assert [(fields["server"], fields["id"], fields["store"], fields["count"]) for fields in asked] == [
        (0, 7, 3, 1),
        (1, 8, 3, 1),
    ]
    assert pull.result().tolist() == [[[5, 5]] * 2] * 2


def test_rows_are_held_if_they_may_be_old() -> None:
    value = table()
    first = RowPull(value, [2, 3], None)
    answered(first, 2, 5)
    first.result()
    assert value.pulled == (5, 5)
    second = RowPull(value, [3, 4], None)
    asked = answered(second, 2, 7)
    assert [fields["lineage"] for fields in asked] == [None, 7]
    assert second.result()[:, 0].tolist() == [5, 7]
    assert value.pulled == (5, 7)
    third = RowPull(value, [3, 4], None)
    assert [fields["lineage"] for fields in answered(third, 0, 9)] == [None, None]
    assert third.result()[:, 0].tolist() == [9, 9]


@pytest.mark.parametrize(
    ("row_ids", "out", "error", "why"),
    [
        (None, None, UsageError, "row_ids is missing"),
        ([10], None, UsageError, "10"),
        ([0.5], None, UsageError, "integer"),
        ([1], torch.zeros(2, 2), Mismatch, "need an out of"),
    ],
)
def test_what_does_not_fit_is_refused(row_ids: Any, out: Any, error: type[KVStoreError], why: str) -> None:
    with pytest.raises(error, match=why):
        RowPull(table(), row_ids, out)


def test_an_array_has_no_rows_by_id() -> None:
    with pytest.raises(UsageError, match="not a table; pull it"):
        RowPull(HeldValue("w", Spec((3,), "float32"), 0, []), [0], None)
