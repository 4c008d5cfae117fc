"""Messages between members and the scheduler: the checks that no single field can make, and ranges."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from any_message import ME, any_message, with_shorter
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import WireError
from kvstore.spec import MAX_SEGMENTS
from kvstore.wire.frames import MAX_HEADER


@pytest.mark.parametrize(("cls", "field"), [(wire.Declare, "shapes"), (wire.Placed, "starts")])
@settings(max_examples=10)
@given(data=st.data())
def test_lists_of_different_lengths_are_refused(cls: type[Any], field: str, data: st.DataObject) -> None:
    message = data.draw(any_message(cls).filter(lambda m: getattr(m, field)))
    with pytest.raises(WireError, match="different lengths"):
        wire.decode(with_shorter(message, field))


def test_what_lists_refer_to_must_be_there() -> None:
    header = [wire.VERSION, 15, ME, 0, ["a", "b"], [0, 1], [[1], [2]], ["int8"] * 2, 1, 1, []]
    wire.decode([msgpack.packb(header)])
    header[5] = [0, 2]
    with pytest.raises(WireError, match="expected kinds below 2, got 2"):
        wire.decode([msgpack.packb(header)])


@pytest.mark.parametrize("counts", [[1], [2, 1], [1, 1, 1]])
def test_as_many_segments_come_as_are_announced(counts: list[int]) -> None:
    columns = [[0, 1], [0, 0], [0, 0], [1, 1]]
    wire.decode([msgpack.packb([wire.VERSION, 16, 1, [2], *columns])])
    with pytest.raises(WireError, match="segments, as ``counts`` says, got 2"):
        wire.decode([msgpack.packb([wire.VERSION, 16, 1, counts, *columns])])


def test_the_longest_answers_that_are_meant_are_not_too_long() -> None:
    columns = [[number] * MAX_SEGMENTS for number in (2**32 - 1, 4095, 2**48 - 1, 2**48)]
    for counts in ([MAX_SEGMENTS], [1] * MAX_SEGMENTS):
        assert len(wire.encode(wire.Placed(2**62, counts, *columns))[0]) < MAX_HEADER


def test_a_key_of_many_segments_may_be_placed() -> None:
    numbers = list(range(5000))
    starts, stops = [7 * number for number in numbers], [7 * number + 7 for number in numbers]
    placed = wire.Placed(1, [5000], numbers, [number % 3 for number in numbers], starts, stops)
    assert wire.decode(wire.encode(placed)) == placed


@pytest.mark.parametrize(
    "message",
    [
        wire.Declare(ME, 0, [""], [0], [[1]], ["float32"], 1, 1),
        wire.Declare(ME, 0, ["k" * 1025], [0], [[1]], ["float32"], 1, 1),
        wire.Declare(ME, 0, [1.5], [0], [[1]], ["float32"], 1, 1),
        wire.Declare(ME, 0, [True], [0], [[1]], ["float32"], 1, 1),
        wire.Declare(ME, 0, ["k"], [0], [[-1]], ["float32"], 1, 1),
        wire.Declare(ME, 0, ["k"], [0], [[2**48 + 1]], ["float32"], 1, 1),
        wire.Declare(ME, 0, ["k"], [0], [[2**40, 2**40]], ["float32"], 1, 1),
        wire.Declare(ME, 0, ["k"], [0], [[1] * 33], ["float32"], 1, 1),
        wire.Declare(ME, 0, ["k"], [0], [[1]], ["complex64"], 1, 1),
        wire.Declare(ME, 0, ["k"], [0], [[1]], ["float32"], 0, 1),
        wire.Declare(ME, 0, ["k"], [0], [[1]], ["float32"], 1, 0),
        wire.Declare(ME, 0, ["k"], [True], [[1], [1]], ["float32"] * 2, 1, 1),
        wire.Declare(ME, 0, ["k"], [-1], [[1]], ["float32"], 1, 1),
        wire.Placed(1, [True], [0], [0], [0], [1]),
        wire.Placed(1, [0], [], [], [], []),
        wire.Placed(1, [2], [1, 1], [0, 0], [0, 1], [1, 2]),
        wire.Placed(1, [1], [0], [4097], [0], [1]),
        wire.Placed(1, [1], [0], [0], [0.0], [1]),
        wire.Placed(1, [1], [0], [0], [0], [2**48 + 1]),
        wire.Welcome(1, 0, 1, 0, []),
        wire.Welcome(1, 0, 1, 1, [], ["k" * 41]),
        wire.Here(wire.Node("worker", 4097, 1)),
    ],
)
def test_values_out_of_range_are_refused(message: Any) -> None:
    with pytest.raises(WireError, match=f"{type(message).__name__}."):
        wire.decode(wire.encode(message))


def test_a_notice_of_a_member_names_it() -> None:
    node = wire.Node("worker", 3, 1)
    for cls in (wire.Beat, wire.ProcessAlive, wire.Here):
        assert wire.decode(wire.encode(cls(node))).node == node


PRIMARY = wire.Node("server", 1, 1)


@pytest.mark.parametrize(
    "message",
    [
        wire.View(PRIMARY, 1),
        wire.View(PRIMARY, 2, "k" * 40, ["standby", 2], "ipc://standby", "s" * 40, True),
        wire.Moved(1, 2, "ipc://standby"),
        wire.Standing(PRIMARY, 2, 812, True),
    ],
)
def test_round_trip(message: Any) -> None:
    assert wire.decode(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.View(PRIMARY, -1),
        wire.View(PRIMARY, 1, "k" * 41),
        wire.View(PRIMARY, 1, "", ["worker", 1]),
        wire.View(PRIMARY, 1, "", ["standby", 0]),
        wire.View(PRIMARY, 1, "", ["standby"]),
        wire.Moved(4097, 1, ""),
        wire.Moved(1, 1, "x" * 513),
        wire.Standing(PRIMARY, 1, -1, False),
    ],
)
def test_views_out_of_range_are_refused(message: Any) -> None:
    with pytest.raises(WireError, match=f"{type(message).__name__}."):
        wire.decode(wire.encode(message))
