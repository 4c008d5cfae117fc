from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvstore import wire
from kvstore.errors import KVStoreError, Mismatch, UsageError
from kvstore.lineage import Version
from kvstore.reading.held import HeldValue, ReadSegment
from kvstore.reading.reader import RowPull
from kvstore.spec import Spec
from kvstore.table import Table, TableSpec


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
