from __future__ import annotations

import pytest

from kvstore import wire
from kvstore.errors import WireError
from kvstore.wire.reading import ALIGN, NOT_HELD, READS, aligned

ME = wire.Sender(wire.Node("reader", 3, 7), 1, 1)


def test_values_lie_at_whole_steps() -> None:
    assert [aligned(nbytes) for nbytes in (0, 1, ALIGN, ALIGN + 1)] == [0, ALIGN, ALIGN, 2 * ALIGN]


def test_a_reader_may_hold_nothing_of_a_segment() -> None:
    read = wire.ReadValues(ME, 0, [4, 9], 7, [NOT_HELD, 12], 3)
    assert wire.decode(wire.encode(read)) == read
    with pytest.raises(WireError, match="one length"):
        wire.ReadValues(ME, 0, [4, 9], 7, [12], 3)


def test_what_is_found_adds_up() -> None:
    with pytest.raises(WireError, match="expected 2 segments"):
        wire.KeysFound(1, 0, [0], [[3]], ["float32"], [None], [2], [5], [0], [0], [3])


def test_the_requests_of_readers_are_these() -> None:
    assert set(READS) == {wire.Connect, wire.FindKeys, wire.ListKeys, wire.ReadValues, wire.ReadRows}
