"""The frames of the transport itself: what is packed is found again, and a message is whole or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import WireError
from kvstore.transport.shm.shared_memory import (
    HELLO,
    MARK,
    NO_REFERENCES,
    REFERENCE,
    REFERENCES,
    introduced,
    introduction,
    resolved,
)

CELL = 7


def view(chunk: int, cell: int, offset: int, length: int) -> memoryview:
    """The memory that the tests refer to: its bytes say where it is."""
    assert cell == CELL
    return memoryview(bytes([chunk, offset]) * length)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=4), st.booleans()), min_size=1, max_size=12))
def test_frames_come_back_in_their_order_whichever_are_left_out(given_frames: list[tuple[bytes, bool]]) -> None:
    references, left, expected = [NO_REFERENCES], [], []
    for position, (frame, by_reference) in enumerate(given_frames):
        if by_reference:
            references.append(REFERENCE.pack(position, 3, CELL, position, 2))
            expected.append(bytes([3, position]) * 2)
        else:
            left.append(frame)
            expected.append(frame)
    assert list(map(bytes, resolved([b"".join(references), *left], view))) == expected


@given(st.text(max_size=40), st.binary(max_size=16))
def test_an_introduction_brings_name_and_nonce(name: str, nonce: bytes) -> None:
    own = introduction(HELLO, name, nonce)
    assert own[0] == MARK
    assert introduced(own) == (name, nonce)


@given(st.binary(max_size=80), st.lists(st.binary(max_size=3), max_size=3))
def test_whatever_comes_is_a_message_or_refused(rest: bytes, frames: list[bytes]) -> None:
    def none(*_reference: int) -> memoryview:
        raise WireError("no such memory")

    try:
        assert resolved([bytes((MARK, REFERENCES)) + rest, *frames], none) == frames
    except WireError:
        assert rest or not frames
    with pytest.raises(WireError):
        introduced(bytes((MARK, HELLO)) + b"\xc1" + rest)


def test_references_need_an_arena_that_was_introduced() -> None:
    assert resolved([NO_REFERENCES, b"head"], None) == [b"head"]
    with pytest.raises(WireError, match="not introduced"):
        resolved([NO_REFERENCES + REFERENCE.pack(0, 0, CELL, 0, 1)], None)
