"""Messages between a server and its standby."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore import wire
from kvstore.errors import WireError


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
