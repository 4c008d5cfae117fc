"""The messages of a trace: what is refused of chunks and of the records in them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvstore.errors import WireError
from kvstore.wire import Node, TraceChunk, TraceFetched, decode, encode
from kvstore.wire.tracing import MARK, MAX_CHUNK, MOST_RECORDS, SPAN, numbers_of, packed, read_records

GOOD = [1, SPAN, 0.5, 1.0, 7, "push", "w", 1, 4, 2]


def chunk(*frames: bytes) -> TraceChunk:
    return TraceChunk(Node("worker", 0, 1), [[1, 0.5, 0.25]], [[7, "MainThread"]], False, frames)


def test_records_come_back_as_they_were() -> None:
    assert read_records(decode(encode(chunk(packed([GOOD, [2, MARK, 1.0, "lost"]]))))) == [GOOD, [2, MARK, 1.0, "lost"]]


@pytest.mark.parametrize(
    "record",
    [
        [1, 99, 0.5],
        [1],
        "push",
        [1, True],
        GOOD[:-1],
        [*GOOD, 1],
        [-1, *GOOD[1:]],
        [*GOOD[:2], float("nan"), *GOOD[3:]],
        [*GOOD[:5], "n" * 129, *GOOD[6:]],
        [*GOOD[:6], 1.5, *GOOD[7:]],
    ],
)
def test_records_are_checked(record: Any) -> None:
    with pytest.raises(WireError):
        read_records(chunk(packed([record])))


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x81\x01\x01", b"\xdd\xff\xff\xff\xff", b"\x01"])
def test_what_is_no_list_of_records_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        read_records(chunk(frame))


def test_too_many_records_are_refused() -> None:
    with pytest.raises(WireError, match="list of at most"):
        read_records(chunk(packed([GOOD] * (MOST_RECORDS + 1))))


def test_the_numbers_alone_can_be_read() -> None:
    assert numbers_of(chunk(packed([GOOD, [9, MARK, 1.0, "lost"]]))) == [1, 9]
    for bad in ([["x"]], [[]], ["x"], [[True]], [[-1]]):
        with pytest.raises(WireError):
            numbers_of(chunk(packed(bad)))


@pytest.mark.parametrize("frames", [(), (packed([]), packed([]))])
def test_records_are_in_one_frame(frames: tuple[bytes, ...]) -> None:
    with pytest.raises(WireError, match="one frame"):
        read_records(chunk(*frames))


def test_a_chunk_is_not_too_long() -> None:
    with pytest.raises(WireError, match="at most"):
        decode([encode(chunk(b""))[0], bytes(MAX_CHUNK + 1)])


def test_an_answer_has_chunks() -> None:
    one = chunk(packed([GOOD]))
    frames = [bytes(frame) for frame in encode(one)]
    fetched = decode(encode(TraceFetched(1, 5, 0, False, frames * 2)))
    assert [dataclasses.asdict(made)["node"] for made in fetched.chunks] == [one.node, one.node]


@pytest.mark.parametrize("frames", [[b"x"], [b"x", b"y"], [bytes(encode(TraceFetched(1, 1, 0, False))[0]), b""]])
def test_an_answer_with_anything_else_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        _ = TraceFetched(1, 5, 0, False, frames).chunks
