"""What is shared memory's alone: who is asked, what goes by reference, and when memory is free again."""

from __future__ import annotations

import gc
import logging
import random
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inproc import InprocNetwork
from shm_ends import BIG, Ends, hello
from waiting import LONG

from kvstore.errors import WireError
from kvstore.job.config import Config
from kvstore.transport.shm import arena as arenas
from kvstore.transport.shm import presence
from kvstore.transport.shm.shared_memory import (
    HELLO,
    LARGE,
    MARK,
    NO_REFERENCES,
    REFERENCE,
    REFERENCES,
    SharedMemoryTransport,
    introduced,
    introduction,
    resolved,
    sharing,
)
from kvstore.transport.zeromq import ZmqTransport

pytestmark = [
    pytest.mark.skipif(not presence.available(), reason="memory cannot be shared here"),
    pytest.mark.usefixtures("usual_chunks"),
]


def test_small_messages_need_no_memory_at_all(ends: Ends, directory: Path):
    assert ends.send(b"head", b"x" * (LARGE - 1)) == [b"head", b"x" * (LARGE - 1)]
    assert ends.send(BIG * 2) == [BIG * 2], "a header stays where it is"
    assert len(ends.inner.sent) == 2
    assert list(directory.iterdir()) == []


def test_a_link_that_is_made_anew_begins_anew(ends: Ends):
    ends.acquaint()
    ends.inner.lost.append(ends.link)
    assert ends.other.recv(LONG) == (ends.link, [])
    hello, *_ = ends.inner.sent
    assert hello[0][:2] == b"\xc1\x01"
    assert ends.send(b"head", BIG) == [b"head", BIG]
    assert ends.inner.sent[1] == [b"head", BIG], "nothing goes by reference before the other side has said that it can"
    assert ends.send(b"head", BIG) == [b"head", BIG]
    assert len(ends.inner.sent[2][0]) == 2 + 24


def test_a_link_that_never_carried_anything_large_needs_no_greeting(ends: Ends):
    ends.inner.lost.append(ends.link)
    assert ends.other.recv(LONG) == (ends.link, [])
    assert ends.inner.sent == []


def test_the_first_large_frame_asks_and_goes_as_it_is_the_next_by_reference(ends: Ends):
    assert ends.send(b"head", BIG) == [b"head", BIG]
    hello, first, *_ = ends.inner.sent
    assert hello[0][:2] == b"\xc1\x01"
    assert first == [b"head", BIG]
    assert [frames[0][:2] for frames in ends.back.sent] == [b"\xc1\x02", b"\xc1\x01"], (
        "an answer, and a hello of its own"
    )
    assert ends.send(b"head", b"small", BIG, BIG, b"last") == [b"head", b"small", BIG, BIG, b"last"]
    assert [len(frame) for frame in ends.inner.sent[-1]] == [2 + 2 * 24, 4, 5, 4]
    assert ends.send(b"head", BIG)[1] == BIG
    assert len(ends.inner.sent) == 5, "nobody is asked twice; one answer"


def test_each_direction_is_for_itself(ends: Ends):
    ends.other.send(ends.link, [b"head", BIG])
    peer, _ = ends.listener.recv(LONG)
    assert ends.other.recv(0) is None
    ends.listener.send(peer, [b"head", BIG])
    assert ends.other.recv(0) == (ends.link, [b"head", BIG])
    assert [len(frames) for frames in ends.back.sent] == [1, 1, 2]
    assert ends.listener.recv(0) is None
    ends.listener.send(peer, [b"head", BIG])
    assert len(ends.back.sent[-1][0]) == 2 + 24
    assert ends.other.recv(0) == (ends.link, [b"head", BIG])


def test_a_peer_that_does_not_know_shared_memory_gets_plain_frames(ends: Ends):
    plain = ends.network.transport()
    plain.bind("inproc://plain")
    link = ends.other.connect("inproc://plain")
    for _ in range(3):
        ends.other.send(link, [b"head", ends.other.allocate(LARGE)])
    assert plain.recv(0)[1][0][:2] == b"\xc1\x01", "one message that means nothing to it"
    assert [plain.recv(0)[1] for _ in range(3)] == [[b"head", bytes(LARGE)]] * 3


def test_a_peer_that_cannot_see_the_memory_gets_plain_frames(
    ends: Ends, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is in another container: the name means nothing there."""
    ends.other.allocate(LARGE)
    with tempfile.TemporaryDirectory() as elsewhere:
        monkeypatch.setattr(presence, "DIRECTORY", Path(elsewhere))
        ends.other.send(ends.link, [b"head", BIG])
        assert ends.listener.recv(LONG)[1] == [b"head", BIG]
        ends.listener.close()
    monkeypatch.setattr(presence, "DIRECTORY", directory)
    assert ends.back.sent == [[b"\xc1\x03"]]
    assert ends.other.recv(0) is None
    ends.other.send(ends.link, [b"head", BIG])
    assert ends.inner.sent[-1] == [b"head", BIG]


def test_a_message_that_begins_like_one_of_ours_is_not_taken_for_one(ends: Ends):
    for frames in ([b"\xc1\x01hello"], [b"\xc1", b"x"], [b"", b"\xc1"], [b"\xc1\x00", BIG], [b"\xc1\x00" + BIG, BIG]):
        assert ends.send(*frames) == frames


def test_own_memory_is_sent_as_it_is_and_busy_until_it_was_read(ends: Ends):
    ends.acquaint()
    memory = ends.other.allocate(4 * LARGE)
    memory[:] = BIG * 4
    assert not ends.other.busy(memory)
    received = ends.send(b"head", memory[:LARGE], memory[LARGE:])
    assert ends.other.usage().blocks == 1, "no copy"
    assert received == [b"head", BIG, BIG * 3]
    assert ends.other.busy(memory)
    del received
    assert not ends.other.busy(memory)
    ends.send(b"head", memory[: LARGE - 1])
    assert ends.other.busy(memory), "it went through the socket, which does not say when it is done"


def test_a_hundred_frames_and_few_bytes(ends: Ends):
    ends.acquaint()
    memory = ends.other.allocate(300 * LARGE)
    for index in range(300):
        memory[index * LARGE : (index + 1) * LARGE] = bytes([index % 256]) * LARGE
    received = ends.send(b"head", *(memory[index * LARGE : (index + 1) * LARGE] for index in range(300)))
    assert [view[-1] for view in received[1:]] == [index % 256 for index in range(300)]
    assert sum(map(len, ends.inner.sent[-1])) < 8000


def test_closing_waits_for_what_is_on_its_way_to_be_received(ends: Ends, monkeypatch: pytest.MonkeyPatch):
    ends.acquaint()
    memory = ends.other.allocate(64 << 20)  # in a chunk that the reader has not opened
    memory[-5:] = b"in it"
    ends.other.send(ends.link, [b"head", memory])
    received = []
    monkeypatch.setattr(arenas.time, "sleep", lambda _: received.append(ends.listener.recv(0)))
    ends.other.close(linger=LONG)
    assert [bytes(message[1][1][-5:]) for message in received] == [b"in it"], "and no longer"
    ends.other.close()


def test_a_close_without_linger_does_not_wait_and_the_message_is_dropped(ends: Ends, caplog: pytest.LogCaptureFixture):
    ends.acquaint()
    block = ends.other.allocate(64 << 20)  # in a chunk that the reader has not opened
    ends.other.send(ends.link, [b"head", block])
    ends.other.close()
    assert ends.listener.recv(0) is None
    assert "cannot be opened: No such file" in caplog.text


def test_after_close_there_is_plain_memory(ends: Ends, directory: Path, caplog: pytest.LogCaptureFixture):
    ends.acquaint()
    ends.other.close()
    ends.other.allocate(100)[:] = bytes(100)
    ends.listener.close()
    unused = SharedMemoryTransport(ends.network.transport(), "job")
    unused.close()
    unused.allocate(100)[:] = bytes(100)
    assert unused.busy(b"")
    assert caplog.text == ""
    assert list(directory.iterdir()) == []


ECHO = """
import random, sys, zlib
from collections import deque
from pathlib import Path
from kvstore.transport.shm import presence
from kvstore.transport.shm.shared_memory import SharedMemoryTransport
from kvstore.transport.zeromq import ZmqTransport

presence.DIRECTORY = Path(sys.argv[2])
transport = SharedMemoryTransport(ZmqTransport(), "job")
link = transport.connect(sys.argv[1])
transport.send(link, [b"ready"])
held, choice = deque(), random.Random(2)
while (received := transport.recv(30)) is not None and received[1][0] != b"stop":
    head, *frames = received[1]
    held.append((int(bytes(head)), frames))
    while len(held) > choice.randrange(1, 12):
        number, frames = held.popleft()         # after it was held while others came
        transport.send(link, [b"%d" % number, *frames])
    del frames
transport.close(linger=1.0)
"""


@pytest.mark.parametrize("endpoint", ["ipc", "tcp"])
def test_two_processes_send_each_other_what_does_not_change_on_the_way(directory: Path, endpoint: str):
    choice = random.Random(1)
    pool = choice.randbytes(1 << 20)
    with tempfile.TemporaryDirectory() as private:
        transport = SharedMemoryTransport(ZmqTransport(), "job")
        place = transport.bind(f"ipc://{private}/s" if endpoint == "ipc" else "tcp://127.0.0.1:0")
        process = subprocess.Popen([sys.executable, "-c", ECHO, place, str(directory)])
        try:
            peer, _ = transport.recv(30)
            sums, shared, answered = {}, 0, 0

            def answer(timeout: float) -> bool:
                nonlocal shared, answered
                received = transport.recv(timeout)
                if received is None:
                    return False
                head, *frames = received[1]
                assert sums.pop(int(bytes(head))) == [zlib.crc32(frame) for frame in frames]
                shared += sum(type(frame.obj).__name__ == "ndarray" for frame in frames)
                answered += 1
                return True

            for number in range(300):
                frames = []
                for _ in range(choice.randrange(1, 4)):
                    size = choice.choice([100, LARGE, 50_000, 200_000])
                    start = choice.randrange(len(pool) - size)
                    memory = transport.allocate(size)
                    memory[:] = pool[start : start + size]
                    frames.append(memory)
                sums[number] = [zlib.crc32(frame) for frame in frames]
                transport.send(peer, [b"%d" % number, *frames])
                del memory, frames
                if number - answered > 30:
                    assert answer(30)
                while answer(0):
                    pass
            while number - answered > 12:
                assert answer(30)
            transport.send(peer, [b"stop"])
            assert process.wait(LONG) == 0
            assert shared > 200
            assert len(transport.usage().chunks) <= 2, "what was read is used again"
        finally:
            process.kill()
            process.wait()
            transport.close()
    gc.collect()
    assert list(directory.iterdir()) == []


def test_other_threads_may_allocate_while_one_sends_and_receives(ends: Ends):
    ends.acquaint()
    stop, errors = threading.Event(), []

    def work(seed: int) -> None:
        try:
            while not stop.is_set():
                memory = ends.other.allocate(LARGE)
                memory[:] = bytes([seed]) * LARGE
                assert not ends.other.busy(memory)
                assert set(memory[::1024]) == {seed}
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (101, 102, 103)]
    for thread in threads:
        thread.start()
    held = []
    for number in range(100):
        memory = ends.other.allocate(LARGE)
        memory[:] = bytes([number]) * LARGE
        held.append(ends.send(b"head", memory)[1])
        del memory, held[:-5]
    assert [set(view) for view in held] == [{number} for number in range(95, 100)]
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors


def test_who_shares(monkeypatch: pytest.MonkeyPatch):
    network = InprocNetwork()
    made = sharing(network.transport, Config(job="x"))()
    assert isinstance(made, SharedMemoryTransport)
    made.interrupt()
    assert made.recv(5) is None
    made.close()
    assert sharing(network.transport, Config(shm=False)) == network.transport
    monkeypatch.setattr(sys, "platform", "darwin")
    assert sharing(network.transport, Config()) == network.transport


def test_a_peer_elsewhere_is_no_warning(ends: Ends, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    ends.raw.send(ends.raw_link, [hello("kvstore-0-job-1-0000000000000000", bytes(16))])
    assert ends.listener.recv(0) is None
    assert caplog.text == ""


def test_a_transport_that_nobody_closes_goes_with_its_last_view(directory: Path):
    def use() -> Callable[[], object]:
        ends = Ends()
        ends.acquaint()
        return ends.send(b"head", BIG)[1].__len__

    length = use()
    gc.collect()
    assert length() == len(BIG)
    assert len(list(directory.iterdir())) == 1, "by which the sender sees that its reader lives"
    del length
    assert list(directory.iterdir()) == []


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
