"""What is unpacked: lists of plain values, and nothing that could do harm."""

from __future__ import annotations

import gc

import msgpack
import pytest

from kvstore.errors import WireError
from kvstore.wire.packing import unpacked


@pytest.mark.parametrize("value", [[1, "two", [3.0, None, True], b"four"], [], [[]], list(range(1000))])
def test_a_list_comes_back(value: list[object]) -> None:
    assert unpacked(bytearray(msgpack.packb(value))) == value


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        b"\x92\x01",  # a list that ends too soon
        b"\x91\x01\x02",  # more behind it
        b"\xdd\xff\xff\xff\xff",  # a list of four thousand million
        b"\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
        b"\x91" * 3000 + b"\xc0",  # deep nesting
        msgpack.packb({"a": 1}),
        msgpack.packb([msgpack.ExtType(5, b"x")]),
        msgpack.packb([msgpack.Timestamp(1)]),
    ],
)
def test_anything_else_is_refused(packed: bytes) -> None:
    with pytest.raises(WireError):
        unpacked(packed)


def test_the_garbage_collector_goes_on_after_a_large_list() -> None:
    assert gc.isenabled()
    assert len(unpacked(msgpack.packb([["x"]] * 200_000))) == 200_000
    assert gc.isenabled()
