"""Bytes: whatever is no message costs a WireError, no more."""

from __future__ import annotations

import gc
from typing import Any

import msgpack
import pytest
from any_message import CLASSES, ME, any_message
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import UsageError, WireError
from kvstore.wire.fields import MAX_ITEMS
from kvstore.wire.frames import MAX_HEADER


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


@settings(max_examples=300)
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


@pytest.mark.parametrize("version", [0, wire.VERSION + 1, -1, True, 1.0, "1", None])
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
    for message in (
        wire.Values(1, buffers=[b""] * ((1 << 16) - 1)),
        wire.Values(1, clocks=[0] * MAX_ITEMS),
    ):
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
