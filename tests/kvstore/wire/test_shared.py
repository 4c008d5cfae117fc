"""Fields that many messages have alike: the same bytes are unpacked once, and are checked as all others are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from any_message import ME

from kvstore import wire
from kvstore.errors import WireError
from kvstore.wire.frames import field_names, header_of
from kvstore.wire.shared import SharedGroup

PUSH = wire.Push(ME, 0, [1, 2], [5, 5], True, 0.5, None, priority=-3, buffers=[b"abcd"])
OTHER = replace(PUSH, sender=wire.Sender(wire.Node("worker", 8, 1), 70, 3), clocks=[6, 6], ranks=[8, 9], buffers=[b"x"])


def with_field(name: str, value: Any) -> list[Any]:
    """The frames of a push in which one field has another value."""
    names = field_names(wire.Push)
    values = [value if each == name else getattr(PUSH, each) for each in names]
    return [msgpack.packb(header_of(wire.Push, values)), *PUSH.buffers]


def test_pushes_of_the_same_segments_share_what_they_say_of_them() -> None:
    first, second = wire.decode(wire.encode(PUSH)), wire.decode(wire.encode(OTHER))
    assert (first, second) == (PUSH, OTHER)
    assert first.shared is second.shared is not None
    assert first.ids is second.ids
    assert PUSH.shared is None


@pytest.mark.parametrize("changed", [{"lr": 0.25}, {"lr": None}, {"want": False}, {"priority": -2}, {"ids": [1, 3]}])
def test_other_segments_or_numbers_share_nothing(changed: dict[str, Any]) -> None:
    other = replace(PUSH, **changed)
    assert wire.decode(wire.encode(other)) == other
    assert wire.decode(wire.encode(other)).shared is not wire.decode(wire.encode(PUSH)).shared


def test_a_number_is_not_taken_for_one_of_another_type_that_is_equal() -> None:
    assert type(wire.decode(with_field("lr", 1.0)).lr) is float
    assert type(wire.decode(with_field("lr", 1)).lr) is int
    with pytest.raises(WireError, match=r"Push.lr: expected a finite number, got bool True"):
        wire.decode(with_field("lr", True))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("store", 256, "Push.store: expected an integer from 0 to 255, got int 256"),
        ("ids", [1, 1], "Push.ids: expected distinct segment ids"),
        ("want", 1, "Push.want: expected a bool"),
        ("encode", 7, "Push.encode: expected a list of 2"),
    ],
)
def test_what_is_wrong_is_refused_each_time(name: str, value: Any, words: str) -> None:
    for _ in range(2):
        with pytest.raises(WireError, match=words):
            wire.decode(with_field(name, value))


@pytest.mark.parametrize("packed", [None, "text", [], b"", b"\xc1", b"\x90", b"\x05", b"\x91" * 3000, b"\x80"])
def test_what_is_no_packed_list_is_refused(packed: Any) -> None:
    header = msgpack.unpackb(wire.encode(PUSH)[0])
    with pytest.raises(WireError):
        wire.decode([msgpack.packb([*header[:-1], packed]), *PUSH.buffers])


def test_a_message_is_sent_on_with_the_bytes_that_it_has_brought() -> None:
    header = msgpack.unpackb(wire.encode(PUSH)[0])
    longer = header[-1].replace(b"\x92\x01\x02", b"\xdc\x00\x02\x01\x02")  # the same list, as others may write it
    frames = [msgpack.packb([*header[:-1], longer]), *PUSH.buffers]
    assert wire.decode(frames) == PUSH
    assert wire.encode(wire.decode(frames)) == frames
    assert wire.encode(replace(wire.decode(frames), lr=1.5)) == wire.encode(replace(PUSH, lr=1.5))


def test_a_clock_of_all_segments_travels_once() -> None:
    header = msgpack.unpackb(wire.encode(PUSH)[0])
    assert header[3] == [5]
    assert wire.decode(wire.encode(PUSH)).clocks == [5, 5]
    assert wire.Push(ME, 0, [1, 2, 3], [7], True, None, None).clocks == [7, 7, 7]
    for clocks in ([5, 6], [5], []):
        ids = list(range(len(clocks)))
        other = replace(PUSH, ids=ids, clocks=clocks)
        assert msgpack.unpackb(wire.encode(other)[0])[3] == clocks
        assert wire.decode(wire.encode(other)) == other


@pytest.mark.parametrize(("ids", "clocks"), [([1, 2], []), ([], [1]), ([1, 2, 3], [1, 2]), ([1], [1, 1])])
def test_clocks_that_are_not_those_of_the_segments_are_refused(ids: list[int], clocks: list[int]) -> None:
    with pytest.raises(WireError, match="different lengths"):
        replace(PUSH, ids=ids, clocks=clocks)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.shared, "MOST", 3)
    monkeypatch.setattr(wire.shared, "MOST_BYTES", 40)
    group = SharedGroup(["value"], [wire.fields.integers()], lambda message: [message])
    packed = [msgpack.packb([[number]]) for number in range(4)]
    read = [group.read(each) for each in packed[:3]]
    assert [group.read(each) is before for each, before in zip(packed, read, strict=False)] == [True] * 3
    group.read(packed[3])
    assert [group.read(each) is before for each, before in zip(packed, read, strict=False)] == [False] * 3
    large = msgpack.packb([[1] * 50])
    assert group.read(large).values == {"value": [1] * 50}
    assert group.read(large) is not group.read(large)
    again = [group.read(msgpack.packb([[1] * 20 + [number]])) for number in range(2)]
    assert group.read(again[0].packed) is not again[0]
