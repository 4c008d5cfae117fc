"""The messages of a trace: what is refused of chunks and of the records in them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvstore import wire
from kvstore.errors import WireError
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
    "words",
    [b"", b"\xc1", b"\x81\x01\x01", b"\xdd\xff\xff\xff\xff", b"\x01", b"\x92\x90", b"\x92\x91\x01\x90"],
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
