"""Messages that describe a server's state."""

from __future__ import annotations

from typing import Any

import pytest
from any_message import any_message, with_shorter
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import WireError


@pytest.mark.parametrize(
    ("cls", "field"),
    [
        (wire.ClosedRounds, "versions"),
        (wire.BucketState, "splits"),
        (wire.Updated, "versions"),
        (wire.Updated, "names"),
        (wire.StatesState, "names"),
        (wire.EncoderState, "steps"),
        (wire.EncoderState, "versions"),
    ],
)
@settings(max_examples=5)
@given(st.data())
def test_lists_of_different_lengths_are_refused(cls: Any, field: str, data: st.DataObject) -> None:
    message = data.draw(any_message(cls).filter(lambda m: getattr(m, field)))
    with pytest.raises(WireError, match="one length"):
        wire.decode(with_shorter(message, field))


def test_a_record_carries_another_message() -> None:
    inner = wire.Close(wire.Sender(wire.Node("worker", 0, 1), 7, 3), 2)
    record = wire.decode(wire.encode(wire.Record(4, 9, wire.encode(inner))))
    assert (record.epoch, record.number) == (4, 9)
    assert wire.decode(record.buffers) == inner


def test_what_is_stored_is_a_number() -> None:
    assert wire.decode(wire.encode(wire.Stored(4, 9))) == wire.Stored(4, 9)


@pytest.mark.parametrize("message", [wire.Record(1, 0), wire.Record(-1, 1), wire.Stored(0, -1), wire.Stored(-1, 0)])
def test_values_out_of_range_are_refused(message: Any) -> None:
    with pytest.raises(WireError, match=f"{type(message).__name__}."):
        wire.decode(wire.encode(message))


@pytest.mark.parametrize(
    ("cls", "field"), [(wire.ClosedRowRounds, "versions"), (wire.StripeState, "counts"), (wire.TablePage, "dtypes")]
)
@settings(max_examples=5)
@given(st.data())
def test_lists_of_rows_of_different_lengths_are_refused(cls: Any, field: str, data: st.DataObject) -> None:
    message = data.draw(any_message(cls).filter(lambda m: getattr(m, field)))
    with pytest.raises(WireError, match="one length"):
        wire.decode(with_shorter(message, field))
