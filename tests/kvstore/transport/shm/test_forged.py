"""What a liar can do to a transport that shares memory: nothing."""

from __future__ import annotations

import gc
import struct
from pathlib import Path

import pytest
from shm_ends import BIG, Ends, Make, Pair, files, hello
from waiting import LONG

from kvstore.errors import WireError
from kvstore.transport.shm import presence
from kvstore.transport.shm.arena import Arena
from kvstore.transport.shm.presence import CELLS, FREE, HELD, SENT, PeerPresence, Presence
from kvstore.transport.shm.shared_memory import MAX_OWN, Mapped

pytestmark = pytest.mark.skipif(not presence.available(), reason="memory cannot be shared here")
ENTRY = struct.Struct("<HHIQQ")


def refs(*entries: tuple[int, int, int, int, int]) -> bytes:
    return b"\xc1\x00" + b"".join(ENTRY.pack(*entry) for entry in entries)


BAD = {
    "nothing": [b"\xc1"],
    "kind": [b"\xc1\x04"],
    "two frames": [b"\xc1\x03", b""],
    "half a reference": [refs((0, 0, 0, 0, 1))[:-1]],
    "not introduced": [refs((0, 0, 0, 0, 1))],
    "an answer": [b"\xc1\x03"],
    "another answer": [hello("kvstore-0-job-1-0000000000000000", bytes(16), kind=2)],
    "an empty hello": [b"\xc1\x01"],
    "no list": [b"\xc1\x01\x05"],
    "one field": [hello("x")],
    "wrong types": [hello(b"x", "y")],
    "a long one": [hello("x" * 1000, bytes(16))],
    "not msgpack": [b"\xc1\x01\xc1"],
    "deep": [b"\xc1\x01" + b"\x91" * 400],
}


@pytest.mark.parametrize("frames", BAD.values(), ids=BAD.keys())
def test_a_frame_that_means_nothing_is_dropped(ends: Ends, frames: list[bytes], caplog: pytest.LogCaptureFixture):
    ends.raw.send(ends.raw_link, frames)
    assert ends.send(b"head", b"next") == [b"head", b"next"]
    assert caplog.text.count("dropped a bad message (1 so far)") == 1


@pytest.mark.parametrize(
    "name", ["kvstore-0-job-1-0000000000000000", "../../etc/passwd", "x", "", "kvstore-0-job-1-000000000000000\0"]
)
def test_an_arena_that_is_not_there_cannot_be_mapped(ends: Ends, name: str):
    ends.raw.send(ends.raw_link, [hello(name, bytes(16))])
    assert ends.listener.recv(0) is None
    assert ends.raw.recv(0)[1] == [b"\xc1\x03"]


def introduce(ends: Ends) -> Arena:
    """A stranger that has an arena and says so."""
    arena = Arena("stranger")
    arena.allocate(1)
    ends.raw.send(ends.raw_link, [hello(arena.presence.name, arena.presence.nonce)])
    assert ends.listener.recv(0) is None
    assert b"\xc1\x02" in said(ends)
    return arena


def said(ends: Ends) -> list[bytes]:
    """How what the listener has told the stranger begins: an answer, and the first time a hello of its own."""
    kinds = []
    while (received := ends.raw.recv(0)) is not None:
        kinds.append(bytes(received[1][0][:2]))
    return kinds


FORGED = {
    "beyond the chunk": [refs((0, 0, 0, 1 << 40, 64))],
    "longer than the chunk": [refs((0, 0, 0, 0, 1 << 60))],
    "empty": [refs((0, 0, 0, 0, 0))],
    "no such chunk": [refs((0, 9, 0, 0, 64))],
    "no such cell": [refs((0, 0, 1 << 20, 0, 64))],
    "not sent": [refs((0, 0, 77, 0, 64))],
    "twice": [refs((0, 0, 0, 0, 64), (1, 0, 0, 0, 64))],
    "out of order": [refs((1, 0, 0, 0, 64), (0, 0, 1, 0, 64)), b"x"],
    "behind the end": [refs((2, 0, 0, 0, 64)), b"x"],
}


@pytest.mark.parametrize("frames", FORGED.values(), ids=FORGED.keys())
def test_a_forged_reference_is_dropped(ends: Ends, frames: list[bytes], caplog: pytest.LogCaptureFixture):
    arena = introduce(ends)
    arena.presence.cells[0] = arena.presence.cells[1] = presence.SENT
    ends.raw.send(ends.raw_link, frames)
    ends.raw.send(ends.raw_link, [refs((1, 0, 1, 0, 64)), b"head", b"tail"])
    received = ends.listener.recv(LONG)
    if "out of order" not in caplog.text:
        assert received[1] == [b"head", bytes(64), b"tail"], "an honest one is taken"
    assert caplog.text.count("dropped a bad message") == 1
    arena.close()


def test_whoever_takes_the_place_of_a_peer_is_asked_anew(ends: Ends):
    """A link that was made is made again when another listens there, and that one has mapped nothing."""
    ends.acquaint()
    ends.listener.close()
    ends.other.send(ends.link, [b"head", BIG])
    assert [frames[0][:2] for frames in ends.inner.sent] == [b"\xc1\x01", b"he"]


def test_a_second_hello_takes_the_place_of_the_first(ends: Ends):
    first, second = introduce(ends), introduce(ends)
    ends.raw.send(ends.raw_link, [refs((1, 0, 0, 0, 64)), b"head"])
    first.presence.cells[0] = second.presence.cells[0] = presence.SENT
    assert ends.listener.recv(LONG)[1] == [b"head", bytes(64)]
    assert (first.presence.cells[0], second.presence.cells[0]) == (presence.SENT, presence.FREE)
    first.close()
    second.close()


def test_a_flood_costs_few_lines_and_does_not_hold_recv(ends: Ends, caplog: pytest.LogCaptureFixture):
    for _ in range(3 * MAX_OWN):
        ends.raw.send(ends.raw_link, [b"\xc1\xff"])
    ends.raw.send(ends.raw_link, [b"head"])
    assert [ends.listener.recv(20) for _ in range(3)] == [None] * 3
    assert ends.listener.recv(0)[1] == [b"head"]
    assert caplog.text.count("dropped a bad message") == 3


def test_a_peer_that_ends_before_its_answer_is_read_has_done_nothing_wrong(
    ends: Ends, caplog: pytest.LogCaptureFixture
):
    arena = introduce(ends)
    name, nonce = arena.presence.name, arena.presence.nonce
    arena.close()
    ends.raw.send(ends.raw_link, [hello(name, nonce, kind=2)])
    assert ends.send(b"head", b"next") == [b"head", b"next"]
    assert "dropped" not in caplog.text


def test_cells_say_where_a_reference_is(pair: Pair):
    reference = pair.owner.refer(pair.owner.allocate(100), pair.reader)
    cells, cell = pair.owner.presence.cells, reference[1]
    assert cells[cell] == SENT
    view = pair.mapped.view(*reference)
    assert cells[cell] == HELD
    with pytest.raises(WireError, match="received before"):
        pair.mapped.view(*reference)
    del view
    assert cells[cell] == FREE


@pytest.mark.parametrize(
    ("number", "cell", "offset", "length", "error"),
    [
        (0, 0, 0, 0, "a reference to 0 bytes"),
        (0, 0, 0, (1 << 16) + 1, "a reference to 65537 bytes"),
        (0, 0, 1 << 16, 1, "at 65536 of"),
        (0, 0, 2**64 - 1, 2**64 - 1, "a reference to"),
        (0, 1, 0, 64, "not sent"),
        (0, CELLS, 0, 64, "not sent"),
        (0, 2**32 - 1, 0, 64, "not sent"),
        (1, 0, 0, 64, "cannot be opened"),
        (2**16 - 1, 0, 0, 64, "cannot be opened"),
    ],
)
def test_a_forged_reference_is_refused(pair: Pair, number: int, cell: int, offset: int, length: int, error: str):
    assert pair.owner.refer(pair.owner.allocate(64), pair.reader) == (0, 0, 0, 64)
    with pytest.raises(WireError, match=error):
        pair.mapped.view(number, cell, offset, length)
    assert len(pair.mapped.view(0, 0, 0, 64)) == 64


def test_a_reader_counts_as_alive_while_it_holds_a_view(make: Make, directory: Path):
    owner, mine = make(), Presence("job")
    reader = PeerPresence(mine.name, mine.nonce)
    mapped = Mapped(owner.presence.name, owner.presence.nonce, mine)
    view = mapped.view(*owner.refer(owner.allocate(100), reader))
    mine.unlink()
    del mine, mapped
    gc.collect()
    assert reader.lives(), "although its transport is closed and its file is gone"
    assert files(directory) == [f"{owner.presence.name}.{number}" for number in range(2)]
    del view
    assert not reader.lives()


def test_an_empty_chunk_cannot_be_mapped(pair: Pair, directory: Path):
    (directory / f"{pair.owner.presence.name}.1").touch(0o600)
    (directory / f"{pair.owner.presence.name}.1").chmod(0o600)
    with pytest.raises(WireError, match="cannot be mapped"):
        pair.mapped.view(0, 0, 0, 1)
