"""Messages about memory of devices; test_frames has what all messages have in common."""

from __future__ import annotations

from typing import Any

import pytest
from any_message import ME, any_message, with_shorter
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.errors import WireError

GOOD = {"store": 0, "loan": 1, "device": bytes(16), "opaque": bytes(64), "offset": 0, "nbytes": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", bytes(15)),
        ("device", "0123456789abcdef"),
        ("opaque", bytes(66)),
        ("offset", -1),
        ("offset", (1 << 40) + 1),
        ("nbytes", 0),
        ("nbytes", 1 << 41),
        ("loan", 0),
    ],
)
def test_handles_have_fixed_lengths_and_numbers_have_limits(field: str, value: Any):
    assert wire.decode(wire.encode(wire.Lend(ME, **GOOD))) == wire.Lend(ME, **GOOD)
    with pytest.raises(WireError, match=f"Lend.{field}"):
        wire.decode(wire.encode(wire.Lend(ME, **{**GOOD, field: value})))


@given(any_message(wire.PushLent).filter(lambda message: message.clocks))
def test_a_push_has_a_clock_for_each_segment(message: wire.PushLent):
    with pytest.raises(WireError, match="one length"):
        wire.decode(with_shorter(message, "clocks"))


@given(any_message(wire.PushLent), st.binary(max_size=9))
def test_the_plain_push_differs_in_where_its_values_are(message: wire.PushLent, values: bytes):
    plain = message.plain([values])
    assert plain.buffers == [values]
    same = ("sender", "store", "ids", "clocks", "want", "lr", "rescale", "changes", "priority")
    assert [getattr(plain, name) for name in same] == [getattr(message, name) for name in same]
    assert (plain.codec, plain.encode, plain.back) == (None, None, None)
