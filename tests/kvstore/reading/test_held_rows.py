from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import WireError
from kvstore.lineage import NOWHERE, Version
from kvstore.reading import held
from kvstore.reading.held import HeldRows, reads_of_rows
from kvstore.rows.ids import Ids
from kvstore.table import Table
from kvstore.wire.guests import NOT_HELD

TABLE = Table(dim=2)
AT = Version(7, 5)


def ids_of(*numbers: int) -> Ids:
    return np.array(numbers, np.int64)


def answer(rows: list[list[float]], positions: list[int] | None = None, count: int | None = None) -> wire.RowsRead:
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
    assert read.take(answer([[1, 2], [3, 4]], [1, 2]), out, held) == [1, 5]
    assert out.tolist() == [[0, 0], [1, 2], [3, 4]]
    assert held.look_up(ids_of(4, 5, 6), out).tolist() == [list(NOWHERE), [7, 5], [7, 5]]
    assert read.take(answer([], []), out, held) == [0, 1]


def test_rows_that_are_held_of_a_tables_past_are_asked_for_as_if_they_were_not_held() -> None:
    (read,) = reads_of_rows(TABLE, ids_of(4, 5, 6), np.array([(7, 3), NOWHERE, (8, 1)]), 1)
    fields = read.fields(wide=True)
    assert fields["lineage"] == 8
    assert np.frombuffer(fields["buffers"][1], np.int64).tolist() == [NOT_HELD, NOT_HELD, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        answer([[1, 2]]),
        answer([[1, 2]], [3]),
        answer([[1, 2]], [-1]),
        answer([[1, 2]], [0, 1]),
        answer([[1, 2], [3, 4], [5, 6]], count=2),
        wire.RowsRead(1, AT, 0, []),
    ],
)
def test_a_wrong_answer_is_refused(wrong: wire.RowsRead) -> None:
    (read,) = reads_of_rows(TABLE, ids_of(4, 5, 6), None, 1)
    out = np.zeros((3, 2), np.float32)
    with pytest.raises(WireError, match="where 3 were asked for"):
        read.take(wrong, out, None)
    assert not out.any()
