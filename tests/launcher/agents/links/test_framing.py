"""Messages as a stream of bytes: whatever the pieces they come in, and whatever else comes."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import WireError
from launcher.agents.links.framing import MAGIC, MAX_FRAMES, MAX_MESSAGE, MAX_PREAMBLE, Unframer, frame

MESSAGES = st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=MAX_FRAMES), max_size=6)
NOISE = st.binary(max_size=60).filter(lambda noise: MAGIC not in noise + MAGIC[:-1])


def begun() -> Unframer:
    unframer = Unframer()
    unframer.feed(MAGIC)
    return unframer


@given(MESSAGES, NOISE, st.lists(st.integers(0, 400)))
def test_any_messages_in_any_pieces_behind_any_banner(
    messages: list[list[bytes]], noise: bytes, cuts: list[int]
) -> None:
    stream = noise + MAGIC + b"".join(map(frame, messages))
    unframer = Unframer()
    found = []
    edges = [0, *sorted(cuts), len(stream)]
    for start, end in itertools.pairwise(edges):
        found += unframer.feed(stream[start:end])
    assert found == messages
    assert unframer.preamble == ""


@given(st.binary(max_size=200))
def test_whatever_comes_is_messages_or_an_error(data: bytes) -> None:
    unframer = begun()
    try:
        messages = unframer.feed(data)
    except WireError:
        return
    assert all(1 <= len(message) <= MAX_FRAMES for message in messages)


def test_what_is_said_instead_of_a_message_can_be_shown() -> None:
    unframer = Unframer()
    assert unframer.feed(b"Welcome to n\xffde1!\n\0kvstore") == []
    assert unframer.preamble == "Welcome to n\N{REPLACEMENT CHARACTER}de1!\n\0kvstore"
    assert unframer.feed(b" agent 1\n") == []
    assert unframer.preamble == ""


def test_who_talks_without_end_is_no_agent() -> None:
    unframer = Unframer()
    assert unframer.feed(bytes(MAX_PREAMBLE)) == []
    with pytest.raises(WireError, match="expected an agent, got a flood of other output"):
        unframer.feed(b"x")


@pytest.mark.parametrize("count", [0, MAX_FRAMES + 1, 2**32 - 1])
def test_too_many_frames_or_none(count: int) -> None:
    with pytest.raises(WireError, match=f"a message has {count} frames"):
        begun().feed(struct.pack("!I", count))


@pytest.mark.parametrize("lengths", [[MAX_MESSAGE + 1], [MAX_MESSAGE, 1], [2**32 - 1] * 4])
def test_a_message_that_is_too_large_is_refused_before_it_comes(lengths: list[int]) -> None:
    unframer = begun()
    assert unframer.feed(struct.pack(f"!{len(lengths)}I", len(lengths), *lengths[:-1])) == []
    with pytest.raises(WireError, match=f"a message has {sum(lengths)} bytes"):
        unframer.feed(struct.pack("!I", lengths[-1]))


def test_good_messages_before_a_bad_one_are_lost_with_the_stream() -> None:
    with pytest.raises(WireError, match="0 frames"):
        begun().feed(frame([b"a"]) + bytes(4))
