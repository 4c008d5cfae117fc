"""What a push of rows usually is, and that everything else is left to the other checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asking_rows import push_rows, with_tables

from kvstore.table import Table
from servers.store.rounds import Rounds
from servers.store.row_target import RowTarget
from servers.store.usual_push import all_in_stripe, usual_push

FIXED, GROWING = Table(shape=(99, 4)), Table(dim=4)


def the_target(table: Table = FIXED, stripe: int = 0, stripes: int = 1) -> RowTarget:
    return RowTarget(7, "t", table, stripe, stripes, Rounds([0]))


def a_push(ids: tuple[int, ...] = (1, 5, 9), wanted: tuple[int, ...] | None = None, **changed: Any) -> Any:
    worker = with_tables(1).workers[0]
    message = push_rows(worker, {7: dict.fromkeys(ids, (1.0, 2.0, 3.0, 4.0))}, wanted={7: list(wanted or ids)})
    return type(message)(**{**vars(message), **changed})


@pytest.mark.parametrize("table", [FIXED, GROWING])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_ids_and_rows_of_a_usual_push_are_views_of_the_message(table: Table, kind: Any):
    message = a_push()
    message = type(message)(**{**vars(message), "buffers": [kind(bytes(buffer)) for buffer in message.buffers]})
    usual = usual_push(message, the_target(table))
    assert usual is not None
    ids, rows = usual
    assert ids.dtype == np.int64
    assert ids.tolist() == [1, 5, 9]
    assert rows.tolist() == [[1, 2, 3, 4]] * 3
    assert rows.base is not None


NAN = np.full((3, 4), np.nan, np.float32).tobytes()


@pytest.mark.parametrize(
    "message",
    [
        a_push((9, 5)),
        a_push((5, 5)),
        a_push((5, 99)),
        a_push((-2, 5)),
        a_push((1, 3, 4)),
        a_push((1, 5), (1, 3)),
        a_push(want=False),
        a_push(union=True),
        a_push(codecs=["fp16"]),
        a_push(wide=True),
        a_push(counts=[2], wanted=[2]),
        a_push(buffers=[b"", b""]),
        a_push(buffers=[a_push().buffers[0], NAN, a_push().buffers[2]]),
        a_push(buffers=[a_push().buffers[0], NAN[:-16], a_push().buffers[2]]),
    ],
)
def test_what_is_unusual_or_wrong_is_left_to_the_other_checks(message: Any):
    assert usual_push(a_push((1, 5, 9)), the_target(stripe=1, stripes=2)) is not None
    assert usual_push(message, the_target(stripe=1, stripes=2)) is None


@pytest.mark.parametrize("stripes", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_ids_of_a_stripe_are_told_from_others(stripes: int, dtype: Any):
    for stripe in range(stripes):
        target = the_target(stripe=stripe, stripes=stripes)
        own = np.arange(stripe, 99, stripes, dtype=dtype)
        assert all_in_stripe(target, own)
        others = [each for each in range(99) if each % stripes != stripe]
        assert not any(all_in_stripe(target, np.append(own, dtype(each))) for each in others)
