"""Bytes: whatever is no message, or no trace, costs a WireError, no more."""

from __future__ import annotations

import dataclasses
import gc
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from any_message import CLASSES, ME, any_message
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import UsageError, WireError
from kvstore.wire.coding import ALIGN, LARGE, MAX_HEADER, SHARED, SharedGroup, field_names, header_of
from kvstore.wire.fields import MAX_ITEMS
from kvstore.wire.tracing import (
    ANSWERED,
    ASKED,
    HANDLED,
    MARK,
    MAX_CHUNK,
    REPLIES,
    REQUEST,
    ROW,
    SENT_FRAME,
    SPAN,
    packed,
    read_records,
)

# ---- bytes: whatever is no message costs a WireError, no more


@settings(max_examples=100)
@given(st.sampled_from(CLASSES).flatmap(any_message), st.data())
def test_a_truncated_header_is_refused(message: Any, data: st.DataObject) -> None:
    header, *buffers = wire.encode(message)
    cut = data.draw(st.integers(0, len(header) - 1))
    with pytest.raises(WireError):
        wire.decode([header[:cut], *buffers])


@settings(max_examples=100)
@given(st.sampled_from(CLASSES).flatmap(any_message), st.binary(min_size=1, max_size=9))
def test_a_header_with_more_behind_it_is_refused(message: Any, more: bytes) -> None:
    header, *buffers = wire.encode(message)
    with pytest.raises(WireError):
        wire.decode([header + more, *buffers])


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=3))
def test_random_bytes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        wire.decode(frames)


any_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=12,
)


@settings(max_examples=150)
@given(st.sampled_from(CLASSES).flatmap(any_message), st.data())
def test_any_value_in_a_field_gives_a_message_or_a_wire_error(message: Any, data: st.DataObject) -> None:
    header = msgpack.unpackb(wire.encode(message)[0])
    where = data.draw(st.integers(0, len(header) - 1))
    header[where] = data.draw(any_value)
    frames = [msgpack.packb(header), *getattr(message, "buffers", [])]
    try:
        decoded = wire.decode(frames)
    except WireError:
        return
    assert wire.decode(wire.encode(decoded)) == decoded


@pytest.mark.parametrize(
    "bad", [[], [b""], [b"\xc1"], [b"\x90"], [b"\x91\x01"], [b"\x80"], [b"\x01"], [b"\xa4abc\xff"]]
)
def test_what_is_no_header_is_refused(bad: list[bytes]) -> None:
    with pytest.raises(WireError):
        wire.decode(bad)


@pytest.mark.parametrize("version", [0, wire.VERSION + 1, -1, True, float(wire.VERSION), "1", None])
def test_another_version_is_named(version: Any) -> None:
    with pytest.raises(WireError, match=f"expected protocol version {wire.VERSION}, got"):
        wire.decode([msgpack.packb([version, 1, 5])])


@pytest.mark.parametrize("code", [0, 99, 9999, -1, True, 1.0, "Ack", [1], None])
def test_an_unknown_code_is_refused(code: Any) -> None:
    with pytest.raises(WireError, match="unknown message code"):
        wire.decode([msgpack.packb([wire.VERSION, code, 5])])


def test_the_number_of_fields_is_checked() -> None:
    with pytest.raises(WireError, match="Ack has 2 fields, got 3"):
        wire.decode([msgpack.packb([wire.VERSION, 1, 5, 6, 7])])


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(WireError, match=r"Ack.seq: expected an integer .*, got bool True"):
        wire.decode([msgpack.packb([wire.VERSION, 1, True, 0])])


def test_frames_that_no_field_takes_are_refused() -> None:
    with pytest.raises(WireError, match="Ack has no buffers, got 2"):
        wire.decode([*wire.encode(wire.Ack(1)), b"", b"x"])


def test_too_many_frames_are_refused() -> None:
    frames = [*wire.encode(wire.Values(1, buffers=[])), *[b""] * (1 << 16)]
    with pytest.raises(WireError, match="got 65537"):
        wire.decode(frames)


def test_a_header_that_is_too_long_is_not_even_read() -> None:
    with pytest.raises(WireError, match="a header of at most"):
        wire.decode([bytes(MAX_HEADER + 1)])


def test_a_container_that_no_field_may_have_is_not_made() -> None:
    with pytest.raises(WireError, match="exceeds max_array_len"):
        wire.decode([b"\x93\x01\x01\xdd" + (MAX_ITEMS + 1).to_bytes(4, "big") + b"\xc0" * (MAX_ITEMS + 1)])
    with pytest.raises(WireError, match="exceeds max_map_len"):
        wire.decode([b"\x93\x01\x01\x81\xa1a\x01"])


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_rests_only_while_a_long_header_is_unpacked(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    unpackb = msgpack.unpackb
    monkeypatch.setattr(
        msgpack, "unpackb", lambda *args, **kwargs: (seen.append(gc.isenabled()), unpackb(*args, **kwargs))[1]
    )
    was = gc.isenabled()
    (gc.enable if before else gc.disable)()
    try:
        wire.decode(wire.encode(wire.Ack(1)))
        wire.decode(wire.encode(wire.Values(1, clocks=[2**40] * 100_000)))
        with pytest.raises(WireError):
            wire.decode([bytes(1 << 20)])
        after = gc.isenabled()
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == [before, False, False]
    assert after is before


def test_what_no_peer_would_take_is_refused_by_the_sender() -> None:
    for message in (wire.Values(1, buffers=[b""] * ((1 << 16) - 1)), wire.Values(1, clocks=[0] * MAX_ITEMS)):
        wire.require_short(message, frames := wire.encode(message))
        wire.decode(frames)
    for message in (
        wire.Values(1, buffers=[b""] * (1 << 16)),
        wire.Values(1, clocks=[0] * (MAX_ITEMS + 1)),
        wire.Ready(ME, 0, ["k" * 1024] * (1 << 14)),
    ):
        with pytest.raises(UsageError, match="use fewer at once"):
            wire.require_short(message, frames := wire.encode(message))
        with pytest.raises(WireError):
            wire.decode(frames)


# A container or text that says it is larger than its frame must not be allocated: array32, map32, str32, bin32, ext32.
@pytest.mark.parametrize("lead", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
@pytest.mark.parametrize("before", [b"", b"\x93\x01\x02", b"\x95\x01\x02\x01\xa1a"])
def test_a_huge_declared_size_is_refused(lead: bytes, before: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode([before + lead + b"\xff\xff\xff\xff" + b"\x00" * 20])


@pytest.mark.parametrize("depth", [10, 500, 1000, 1020, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b"\x92", b"\x01"), (b"\x93\x01", b"\x01"), (b"\x95\x01\x02\x01\xa1a", b"")],
    ids=["all", "version", "code", "field"],
)
def test_deep_nesting_is_refused_wherever_it_is(depth: int, opening: bytes, before: bytes, after: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode([before + opening * depth + b"\xc0" + after])


@pytest.mark.parametrize("code", [-128, -1, 0, 42, 127])
def test_extensions_are_refused(code: int) -> None:
    ext = (
        msgpack.packb(msgpack.ExtType(code, b"1234"))
        if code >= 0
        else b"\xd6" + code.to_bytes(1, "big", signed=True) + b"1234"
    )
    with pytest.raises(WireError):
        wire.decode([b"\x93\x01\x01" + ext])


def test_buffers_are_views_and_not_copies() -> None:
    payload = bytearray(b"abcd")
    decoded = wire.decode([wire.encode(wire.Values(1, buffers=[]))[0], payload])
    payload[:] = b"wxyz"
    assert bytes(decoded.buffers[0]) == b"wxyz"
    assert wire.encode(wire.Values(1, buffers=[payload]))[1] is payload


near = st.sampled_from([0, 1, 15, 16, 17, 4096, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE])
sizes = st.lists(near | st.integers(0, 40), max_size=12)
# Enough of the largest small arrays to fill a shared frame and begin the next.
brim = st.lists(st.sampled_from([LARGE - 1, LARGE - 16, 1, LARGE]), min_size=16, max_size=20)


def arrays(sizes: list[int]) -> list[memoryview]:
    return [memoryview(bytes([i % 251 + 1]) * size) for i, size in enumerate(sizes)]


@settings(max_examples=80)
@given(sizes | brim)
def test_what_is_joined_is_torn_apart_again(sizes: list[int]) -> None:
    parts = arrays(sizes)
    assert wire.unpack_arrays(wire.pack_arrays(parts), sizes) == parts


@settings(max_examples=80)
@given(sizes | brim)
def test_every_array_is_in_one_frame_and_small_ones_fill_no_more_than_allowed(sizes: list[int]) -> None:
    layout = wire.frame_groups(sizes)
    assert sorted(position for frame in layout for position in frame) == list(range(len(sizes)))
    for frame in layout:
        assert len(frame) == 1 or max(sizes[position] for position in frame) < LARGE
        assert len(frame) == 1 or sum(sizes[position] for position in frame) <= SHARED


@settings(max_examples=60)
@given(sizes.filter(bool), st.data())
def test_frames_of_another_length_are_refused(sizes: list[int], data: st.DataObject) -> None:
    frames = [bytes(frame) for frame in wire.pack_arrays(arrays(sizes))]
    at = data.draw(st.integers(0, len(frames) - 1))
    change = data.draw(st.sampled_from([-1, 1, 16]).filter(lambda n: len(frames[at]) + n >= 0))
    frames[at] = bytes(len(frames[at]) + change)
    with pytest.raises(WireError, match=r"expected a frame of \d+ bytes"):
        wire.unpack_arrays(frames, sizes)


@settings(max_examples=40)
@given(sizes)
def test_more_or_fewer_frames_are_refused(sizes: list[int]) -> None:
    frames = wire.pack_arrays(arrays(sizes))
    with pytest.raises(WireError, match=r"expected \d+ frames"):
        wire.unpack_arrays([*frames, b""], sizes)
    if frames:
        with pytest.raises(WireError, match=r"expected \d+ frames"):
            wire.unpack_arrays(frames[:-1], sizes)


def test_a_large_array_is_its_own_frame_and_not_copied() -> None:
    large, small = memoryview(bytearray(LARGE)), memoryview(bytearray(8))
    frames = wire.pack_arrays([small, large, small])
    assert [len(frame) for frame in frames] == [2 * ALIGN, LARGE]
    assert frames[1] is large


def test_torn_parts_are_views_of_the_frames() -> None:
    frames = wire.pack_arrays(arrays([4, 4]))
    parts = wire.unpack_arrays(frames, [4, 4])
    frames[0][ALIGN] = 99  # type: ignore[index]
    assert parts[1][0] == 99


def test_small_arrays_begin_at_aligned_places() -> None:
    assert wire.frame_groups([3, 5, 7]) == [[0, 1, 2]]
    frame = wire.pack_arrays(arrays([3, 5, 7]))[0]
    assert [frame[0], frame[ALIGN], frame[2 * ALIGN]] == [1, 2, 3]


def test_no_arrays_are_no_frames() -> None:
    assert wire.pack_arrays([]) == []
    assert wire.unpack_arrays([], []) == []


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
    monkeypatch.setattr(wire.coding, "MOST", 3)
    monkeypatch.setattr(wire.coding, "MOST_BYTES", 40)
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


def test_with_a_store_go_the_fields_that_its_pushes_had_in_common() -> None:
    frames = wire.encode(PUSH)
    before = wire.decode(frames).shared
    assert wire.decode(frames).shared is before
    wire.forget_shared()
    assert wire.decode(frames).shared is not before


# ---- the messages of a trace: what is refused of chunks and of the records in them


LABELS = [(1, ("push", "w", 1)), (2, ("server 0", None, 0))]
NODES = [(3, wire.Node("worker", 0, 1))]
GOOD = (SPAN, 1, 0, 7, 0, 0.5, 1.0, 0.0, 4, 2, 0)


def chunk(*rows: tuple[Any, ...], words: bytes | None = None, records: int | None = None) -> wire.TraceChunk:
    content = b"".join(ROW.pack(*row) for row in rows)
    frames = packed(LABELS, NODES, content) if words is None else [content + words]
    count = len(rows) if records is None else records
    return wire.TraceChunk(wire.Node("worker", 0, 1), [[1, 0.5, 0.25]], [[7, "MainThread"]], False, 11, count, frames)


def test_rows_come_back_as_records() -> None:
    rows = [
        GOOD,
        (MARK, 2, 0, 0, 0, 1.5, 0.0, 0.0, 0, 0, 0),
        (REQUEST, 1, 2, 7, 8, 2.0, 3.0, 0.0, 4, 2, 9),
        (HANDLED, 1, 3, 7, 0, 1.0, 3.0, 2.0, 4, 2, 9),
        (REPLIES, 3, 3, 0, 2, 0.0, 0.0, 0.0, 8, 9, 0),
        (REPLIES, 77, 0, 0, 1, 0.0, 0.0, 0.0, 10, 0, 0),
    ]
    nobody, worker = ["", -1, 0], ["worker", 0, 1]
    assert read_records(wire.decode(wire.encode(chunk(*rows)))) == [
        [11, SPAN, 0.5, 1.0, 7, "push", "w", 1, 4, 2],
        [12, MARK, 1.5, "server 0"],
        [13, ASKED, 2.0, 9, "push", "w", 1, 4, 2, 7, "server 0"],
        [13, ANSWERED, 3.0, 9, 8, "server 0"],
        [14, HANDLED, 1.0, 2.0, 3.0, 7, "push", worker, 9, 4, 2, [[worker, 8], [worker, 9], [nobody, 10]]],
    ]


def test_what_a_number_stands_for_may_be_missing() -> None:
    (record,) = read_records(chunk((SPAN, 99, *GOOD[2:])))
    assert record[5:8] == ["?", None, 0]
    assert read_records(chunk((REPLIES, 3, 3, 0, 2, 0.0, 0.0, 0.0, 8, 9, 0))) == []


@pytest.mark.parametrize(
    "row",
    [
        (99, *GOOD[1:]),
        (*GOOD[:5], float("nan"), *GOOD[6:]),
        (*GOOD[:6], float("inf"), *GOOD[7:]),
        (*GOOD[:8], -1, *GOOD[9:]),
    ],
)
def test_rows_are_checked(row: tuple[Any, ...]) -> None:
    with pytest.raises(WireError):
        read_records(chunk(row))


@pytest.mark.parametrize(
    "words", [b"", b"\xc1", b"\x81\x01\x01", b"\xdd\xff\xff\xff\xff", b"\x01", b"\x92\x90", b"\x92\x91\x01\x90"]
)
def test_words_are_checked(words: bytes) -> None:
    with pytest.raises(WireError):
        read_records(chunk(GOOD, words=words))


def test_a_chunk_has_as_many_rows_as_it_says() -> None:
    header = wire.encode(chunk(*[GOOD] * 3))[0]
    with pytest.raises(WireError, match="expected 3 rows"):
        wire.decode([header, *wire.encode(chunk(GOOD))[1:]])


def test_long_contents_are_cut_anywhere_and_joined() -> None:
    made = chunk(*[GOOD] * 1000)
    assert len(made.buffers) == 4
    assert max(map(len, made.buffers)) == SENT_FRAME
    assert len(made.whole.buffers) == 1
    assert len(read_records(made.whole)) == 1000


def test_words_that_do_not_fit_are_left_out() -> None:
    labels = [(number, ("n" * 500, None, 0)) for number in range(10_000)]
    frames = packed(labels, NODES, ROW.pack(*GOOD))
    assert sum(map(len, frames)) <= MAX_CHUNK
    (record,) = read_records(wire.TraceChunk(wire.Node("worker", 0, 1), [], [], False, 1, 1, frames))
    assert record[5] == "?"


def test_a_chunk_is_not_too_long() -> None:
    with pytest.raises(WireError, match="at most"):
        wire.decode([wire.encode(chunk())[0], bytes(MAX_CHUNK + 1)])


def test_an_answer_has_chunks() -> None:
    one = chunk(GOOD)
    frames = [bytes(frame) for frame in wire.encode(one)]
    fetched = wire.decode(wire.encode(wire.TraceFetched(1, 5, 0, False, frames * 2)))
    assert [dataclasses.asdict(made)["node"] for made in fetched.chunks] == [one.node, one.node]


@pytest.mark.parametrize(
    "frames", [[b"x"], [b"x", b"y"], [bytes(wire.encode(wire.TraceFetched(1, 1, 0, False))[0]), b""]]
)
def test_an_answer_with_anything_else_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        _ = wire.TraceFetched(1, 5, 0, False, frames).chunks
