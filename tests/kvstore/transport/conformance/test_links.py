"""What every transport does alike: links, messages, memory, and processes that are killed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from every_transport import MEMBERS, SIZES, Ends, acquainted, pattern, receive
from waiting import LONG

from kvstore.errors import ConfigError
from kvstore.transport.memory import ScatteredFrame
from kvstore.transport.sockets.socket_transport import SocketTransport

# ---- links of every transport: whose a message is, and what is left of a link that has ended


def test_replies_go_back_over_the_link(ends: Ends):
    listener, other, link = ends.pair()
    for size in SIZES:
        other.send(link, [b"question"])
        peer, _ = receive(listener)
        listener.send(peer, [b"answer", pattern(size)])
        assert receive(other) == (link, [b"answer", pattern(size)])


def test_many_peers_are_told_apart(ends: Ends):
    listener = ends.new()
    endpoint = listener.bind(ends.endpoint)
    others = [ends.new() for _ in range(8)]
    links = [other.connect(endpoint) for other in others]
    for turn in range(3):
        for number, (other, link) in enumerate(zip(others, links, strict=True)):
            other.send(link, [b"%d" % number, b"%d" % turn])
    heard: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for _ in range(24):
        peer, (number, turn) = receive(listener)
        heard.setdefault(peer, []).append((bytes(number), bytes(turn)))
    assert sorted(heard.values()) == [[(b"%d" % n, b"%d" % turn) for turn in range(3)] for n in range(8)]
    for peer, messages in heard.items():
        listener.send(peer, [messages[0][0]])
    for number, (other, link) in enumerate(zip(others, links, strict=True)):
        assert receive(other) == (link, [b"%d" % number])


def test_one_end_may_have_several_links_and_listen_too(ends: Ends):
    one, two, _ = ends.pair()
    three = ends.new()
    link = two.connect(three.bind("tcp://127.0.0.1:0" if ends.endpoint.startswith("tcp") else f"{ends.endpoint}-2"))
    two.send(link, [b"to three"])
    peer, frames = receive(three)
    assert frames == [b"to three"]
    three.send(peer, [b"back"])
    assert receive(two) == (link, [b"back"])
    assert one.recv(0) is None


def test_two_links_to_one_place_are_two_links(ends: Ends):
    listener, other, first = ends.pair()
    other.send(first, [b"1"])
    peer, _ = receive(listener)
    second = other.connect(ends.endpoint)
    other.send(second, [b"2"])
    assert second != first
    assert receive(listener)[0] != peer


def test_what_is_sent_before_anyone_listens_arrives_in_order(ends: Ends):
    if ends.endpoint.startswith("tcp"):
        probe = ends.new()
        ends.endpoint = probe.bind(ends.endpoint)
        probe.close()
    other, _ = ends.new(), ends.new()
    link = other.connect(ends.endpoint)
    for number in range(20):
        other.send(link, [b"%d" % number, pattern(1000)])
    listener = ends.new()  # with keys, the probe's again
    listener.bind(ends.endpoint)
    other.send(link, [b"20", b""])
    assert [bytes(receive(listener)[1][0]) for _ in range(21)] == [b"%d" % number for number in range(21)]


def test_a_message_to_a_peer_that_is_gone_is_dropped(ends: Ends):
    listener, other, link = ends.pair()
    other.send(link, [b"hello"])
    peer, _ = receive(listener)
    other.close()
    for _ in range(3):
        listener.send(peer, [b"anyone there?", pattern(64 << 10)])
    listener.send(b"never known", [b"x"])
    third = ends.new()
    link = third.connect(ends.endpoint)
    third.send(link, [b"next"])
    assert receive(listener)[1] == [b"next"]
    assert listener.recv(0) is None


def test_over_a_link_that_was_dropped_nothing_comes_any_more_and_others_stay(ends: Ends):
    listener, other, kept = ends.pair()
    dropped = other.connect(ends.endpoint)
    other.send(dropped, [b"here"])
    answer_to, _ = receive(listener)
    listener.send(answer_to, [b"late"])
    other.disconnect(dropped)
    other.send(dropped, [b"lost"])
    other.send(kept, [b"asked"])
    peer, frames = receive(listener)
    assert frames == [b"asked"]
    listener.send(answer_to, [b"later"])
    listener.send(peer, [b"answered"])
    assert receive(other) == (kept, [b"answered"])
    other.disconnect(other.connect(ends.endpoint))  # before anything was sent over it


def test_closing_twice_is_closing_once_and_a_closed_end_is_quiet(ends: Ends):
    listener, other, link = ends.pair()
    other.send(link, [b"x"])
    other.close(linger=1.0)
    other.close()
    other.send(link, [b"y"])
    assert other.recv(0) is None
    other.interrupt()
    assert receive(listener)[1] == [b"x"], "what was sent before had the linger to leave"
    assert listener.recv(0.01) is None


def test_a_place_is_free_again_after_closing(ends: Ends):
    first = ends.new()
    endpoint = first.bind(ends.endpoint)
    first.close()
    other, _, second = ends.new(), ends.new(), ends.new()
    assert second.bind(endpoint) == endpoint
    other.send(other.connect(endpoint), [b"x"])
    assert receive(second)[1] == [b"x"]


def test_a_place_can_be_listened_at_once(ends: Ends):
    first, _, _, second = ends.new(), ends.new(), ends.new(), ends.new()
    endpoint = first.bind(ends.endpoint)
    if endpoint.startswith("ipc"):
        return  # a second one takes a unix socket over; its directory is private
    with pytest.raises(ConfigError, match="in use"):
        second.bind(endpoint)


# ---- messages over every transport: whole, in order, and waited for


def test_frames_arrive_whole_and_in_order(ends: Ends):
    listener, other, link = ends.pair()
    messages = [[pattern(size, size)] for size in SIZES]
    messages += [[b"head", *(pattern(size) for size in SIZES)], [b"", b""], [b"x"] * 200]
    for frames in messages:
        other.send(link, frames)
    for frames in messages:
        assert receive(listener)[1] == frames


def test_a_frame_in_several_places_arrives_as_one(ends: Ends):
    listener, other, link = ends.pair()
    places = [pattern(size, size) for size in SIZES[1:]]
    other.send(link, [b"head", ScatteredFrame(map(memoryview, places)), b"tail"])
    assert receive(listener)[1] == [b"head", b"".join(places), b"tail"]


def test_what_has_been_detached_may_change(ends: Ends):
    listener, other, link = ends.pair()
    other.send(link, [b"hello"])
    receive(listener)
    if not other.gathers(link):
        other.detach()
        return
    places = [bytearray(b"x" * (1 << 20)) for _ in range(40)]  # more than fits into any socket
    other.send(link, [b"head", ScatteredFrame(map(memoryview, places)), b"tail"])
    other.detach()
    for place in places:
        place[:] = b"y" * (1 << 20)
    other.send(link, [b"next"])
    assert receive(listener)[1] == [b"head", b"x" * (40 << 20), b"tail"]
    assert receive(listener)[1] == [b"next"]


def test_what_is_urgent_may_overtake_what_waits_and_nothing_else(ends: Ends):
    listener, other, link = ends.pair()
    other.send(link, [b"hello"])
    receive(listener)
    begun = [b"begun", pattern(1) * (40 << 20)]  # more than fits into any socket
    waiting = [(b"first", 1), (b"second", 1), (b"urgent", 2), (b"last", None), (b"after", 9)]
    other.send(link, begun)
    for name, priority in waiting:
        other.send(link, [name], priority)
    came = [bytes(receive(listener)[1][0]) for _ in range(1 + len(waiting))]
    in_order = [name for name, _ in waiting]
    urgent_first = [b"urgent", b"first", b"second", b"last", b"after"]
    assert came in ([b"begun", *in_order], [b"begun", *urgent_first])
    if isinstance(other, SocketTransport):
        assert came == [b"begun", *urgent_first]


def test_an_interrupt_wakes_a_waiting_recv(ends: Ends):
    listener, _, _ = ends.pair()
    woken = threading.Event()

    def wait() -> None:
        assert listener.recv(LONG) is None
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    listener.interrupt()
    assert woken.wait(LONG / 2)
    thread.join()


def test_interrupts_count_for_the_next_recv_and_do_not_pile_up(ends: Ends):
    listener, other, link = ends.pair()
    for _ in range(1000):
        listener.interrupt()
    began = time.monotonic()
    assert listener.recv(LONG) is None
    assert time.monotonic() - began < LONG / 2
    other.send(link, [b"x"])
    received = listener.recv(LONG) or listener.recv(LONG)
    assert received is not None
    assert received[1] == [b"x"]


def test_an_interrupt_loses_no_message(ends: Ends):
    listener, other, link = ends.pair()
    stop = threading.Event()

    def ring() -> None:
        while not stop.is_set():
            listener.interrupt()

    thread = threading.Thread(target=ring)
    thread.start()
    heard = []
    try:
        for number in range(50):
            other.send(link, [b"%d" % number])
            while (received := listener.recv(LONG)) is None:
                pass
            heard.append(int(bytes(received[1][0])))
    finally:
        stop.set()
        thread.join()
    assert heard == list(range(50))


@pytest.mark.parametrize("timeout", [0.0, 0.05])
def test_recv_returns_after_its_timeout(ends: Ends, timeout: float):
    listener, _, _ = ends.pair()
    began = time.monotonic()
    assert listener.recv(timeout) is None
    assert timeout * 0.9 <= time.monotonic() - began < LONG / 2


# ---- every transport's memory: what is received stays, and what may still be read is busy


def test_a_received_buffer_outlives_the_messages_after_it_the_link_and_its_sender(ends: Ends):
    listener, other, link = acquainted(ends)
    held = []
    for number in range(4):
        for size in (100, 1 << 20):
            other.send(link, [b"head", bytearray([number]) * size])
            held.append((number, size, receive(listener)[1][1]))
    other.close()
    listener.close()
    del other, listener
    gc.collect()
    for number, size, view in held:
        assert bytes(view) == bytes([number]) * size


def test_large_buffers_are_read_where_they_are(ends: Ends):
    """A receiver sees a view that torch can use in place, and a sender's tensor goes out as it is."""
    listener, other, link = ends.pair()
    tensor = torch.arange(1 << 18, dtype=torch.float32)
    other.send(link, [tensor.view(torch.uint8).numpy().data])
    (frame,) = receive(listener)[1]
    taken = torch.frombuffer(frame, dtype=torch.float32)
    assert torch.equal(taken, tensor)
    assert taken.data_ptr() == torch.frombuffer(frame, dtype=torch.uint8).data_ptr()
    if ends.endpoint.startswith("inproc"):
        assert taken.data_ptr() == tensor.data_ptr()


def test_allocated_memory_is_sent_whole_or_in_parts(ends: Ends):
    listener, other, link = acquainted(ends)
    for size in (0, 1, 100, 64 << 10, (1 << 20) + 1):
        memory = other.allocate(size)
        assert (len(memory), memory.readonly, memory.format) == (size, False, "B")
        memory[:] = expected = pattern(size)
        if size:
            assert torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 64 == 0
        half = size // 2
        other.send(link, [b"head", memory, memory[:half], memory[half:], memory.toreadonly()])
        frames = receive(listener)[1]
        del memory
        other.allocate(size)[:] = bytes(size)  # somebody else's from now on
        assert frames == [b"head", expected, expected[:half], expected[half:], expected]


def test_what_was_sent_of_allocated_memory_stays_although_more_is_allocated(ends: Ends):
    listener, other, link = acquainted(ends)
    held = []
    for number in range(20):
        memory = other.allocate(100_000)
        memory[:] = bytes([number]) * 100_000
        assert bytes(memory) == bytes([number]) * 100_000
        other.send(link, [b"head", memory])
        del memory
        held.append(receive(listener)[1][1])
        if number % 3 == 0:
            del held[0]
        assert [view[0] for view in held] == [view[-1] for view in held]
    assert [view[0] for view in held] == list(range(7, 20))


def test_memory_that_may_be_read_is_busy(ends: Ends):
    listener, other, link = acquainted(ends)
    memory = other.allocate(100_000)
    other.send(link, [b"head", memory])
    frames = receive(listener)[1]
    assert other.busy(memory)
    assert other.busy(memory[5000:6000])
    assert other.busy(bytearray(100))
    del frames


@pytest.mark.parametrize("ends", ["curve", "curve-ipc"], indirect=True)
def test_a_link_inside_a_private_directory_proves_no_key(ends: Ends):
    listener, other, link = ends.pair()
    other.send(link, [b"x"])
    peer, _ = receive(listener)
    assert bool(listener.identity(peer)) == (ends.kind == "curve")


def test_who_reads_our_memory_is_known_once_we_are_acquainted(ends: Ends):
    _, other, link = acquainted(ends)
    assert other.shares(link) == (ends.kind == "inproc" or ends.kind.startswith("shm"))
    assert not other.shares(b"nobody") or ends.kind == "inproc"


# ---- processes at the other end that are killed, over every transport that there is between processes


CHILD = """
import os, sys
from kvstore.job.curve_keys import CurveKeys
from kvstore.transport.memory import ScatteredFrame
from kvstore.transport.shm.shared_memory import SharedMemoryTransport
from kvstore.transport.sockets.socket_transport import TcpTransport
from kvstore.transport.sockets.socket_transport import UnixTransport
from kvstore.transport.zeromq import ZmqTransport

kind, endpoint = sys.argv[1:]
keys = CurveKeys.from_env(os.environ) if "key=" in endpoint else None
sockets = {"unix": UnixTransport, "tcp": TcpTransport}
inner = sockets.get(kind.removeprefix("shm-"), lambda: ZmqTransport(keys=keys))()
transport = SharedMemoryTransport(inner, "conformance") if kind.startswith("shm-") else inner
link = transport.connect(endpoint)
transport.send(link, [b"hello", bytes(1 << 13)])
held = []
number = 0
while True:
    received = transport.recv(30)
    if received is None:
        sys.exit("nobody there")
    held.append(received)
    if received[1][0] == b"write":
        for _ in range(20):
            memory = transport.allocate(1 << 20)
            memory[:] = bytes([number % 256]) * (1 << 20)
            transport.send(link, [b"%d" % number, memory])
            number += 1
    else:
        transport.send(link, [b"got"])
"""


@pytest.fixture
def child(ends: Ends) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a process that connects to the endpoint, and does what messages say."""
    made: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        env = os.environ | MEMBERS[0]
        made.append(subprocess.Popen([sys.executable, "-c", CHILD, ends.kind, ends.endpoint], env=env))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()
        for path in Path("/dev/shm").glob(f"kvstore-{os.getuid()}-conformance-{process.pid}-*"):
            path.unlink()


# Each carrier, alone and with shared memory. Each test starts two processes.
@pytest.mark.parametrize("ends", ["unix", "tcp", "curve", "shm-unix", "shm-curve"], indirect=True)
def test_a_process_that_is_killed_leaves_its_readers_what_they_have_and_costs_nobody_anything(
    ends: Ends, child: Callable[[], subprocess.Popen[bytes]]
) -> None:
    listener = ends.new()
    ends.endpoint = listener.bind(ends.endpoint)
    dies = child()
    peer, _ = receive(listener)
    child()
    peers = [peer, receive(listener)[0]]
    for _ in range(3):
        for each in peers:
            listener.send(each, [b"keep", pattern(1 << 16)])
        for _ in peers:
            assert receive(listener)[1] == [b"got"]
    held = []
    for _ in range(4):
        listener.send(peer, [b"write"])
        held += [receive(listener)[1] for _ in range(10)]
    os.kill(dies.pid, signal.SIGKILL)
    dies.wait()
    while (received := listener.recv(0.2)) is not None:  # what was on its way is whole, or does not come
        held.append(received[1])
    for number, (head, frame) in enumerate(held):
        assert int(bytes(head)) == number
        assert bytes(frame) == bytes([number % 256]) * (1 << 20)
    answers = 0
    for _ in range(30):
        for each in peers:
            memory = listener.allocate(1 << 20)
            listener.send(each, [b"keep", memory])
        answers += receive(listener)[1] == [b"got"]
    assert answers == 30
    other = ends.new()
    other.send(other.connect(ends.endpoint), [b"hello"])
    assert receive(listener)[1] == [b"hello"]
