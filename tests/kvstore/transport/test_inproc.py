"""What is the in-process network's alone."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from inproc import InprocNetwork

from kvstore.errors import ConfigError
from kvstore.job.system import own_memory_bytes
from kvstore.transport.memory import ALIGN, ENOUGH, LOOK_S, FreedMemory, Heap, ScatteredFrame, keep_freed, space, whole


def test_networks_do_not_know_each_other():
    one, two = InprocNetwork(), InprocNetwork()
    listener = one.transport()
    listener.bind("inproc://x")
    other = two.transport()
    other.send(other.connect("inproc://x"), [b"lost"])
    assert listener.recv(0) is None
    two.transport().bind("inproc://x")


def test_a_star_becomes_a_number():
    network = InprocNetwork()
    first, second = (network.transport().bind("inproc://server-*") for _ in range(2))
    assert first != second
    assert "*" not in first + second


def test_a_name_is_taken_once():
    network = InprocNetwork()
    network.transport().bind("inproc://x")
    with pytest.raises(ConfigError, match="inproc://x is in use"):
        network.transport().bind("inproc://x")


def test_deliver_may_lose_and_repeat():
    network = InprocNetwork()
    listener, other = network.transport(), network.transport()
    listener.bind("inproc://x")
    link = other.connect("inproc://x")
    network.deliver = lambda put: None
    other.send(link, [b"lost"])
    network.deliver = lambda put: [put(), put()]
    other.send(link, [b"twice"])
    received = [listener.recv(0) for _ in range(3)]
    assert [r and r[1] for r in received] == [[b"twice"], [b"twice"], None]


def test_what_was_sent_before_anyone_listens_is_not_overtaken():
    """A thread that sends while another begins to listen must not get between the messages that waited."""
    network = InprocNetwork()
    other, listener = network.transport(), network.transport()
    link = other.connect("inproc://x")
    for number in range(3):
        other.send(link, [b"%d" % number])
    flushing, sent = threading.Event(), threading.Event()

    def deliver(put):
        put()
        if not flushing.is_set():
            flushing.set()
            sent.wait(0.2)  # the sender either gets through now, which would be wrong, or has to wait

    network.deliver = deliver

    def send() -> None:
        flushing.wait(10)
        other.send(link, [b"3"])
        sent.set()

    thread = threading.Thread(target=send)
    thread.start()
    listener.bind("inproc://x")
    thread.join()
    assert [listener.recv(1)[1] for _ in range(4)] == [[b"0"], [b"1"], [b"2"], [b"3"]]


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 100_001])
def test_allocated_memory_is_aligned_and_writable(nbytes: int) -> None:
    memory = Heap().allocate(nbytes)
    assert (memory.nbytes, memory.readonly, memory.contiguous) == (nbytes, False, True)
    assert np.frombuffer(memory, np.uint8).ctypes.data % ALIGN == 0 or nbytes == 0
    memory[:] = b"x" * nbytes
    assert bytes(memory) == b"x" * nbytes


def test_allocations_do_not_share_memory() -> None:
    heap = Heap()
    first, second = heap.allocate(100), heap.allocate(100)
    first[:], second[:] = b"a" * 100, b"b" * 100
    assert bytes(first) == b"a" * 100


def test_of_plain_memory_nobody_can_tell_who_reads_it() -> None:
    assert Heap().busy(bytearray(3))


def test_space_is_writable() -> None:
    memory = space(1000)
    memory[:] = b"x" * 1000
    assert (len(memory), bytes(memory[-2:])) == (1000, b"xx")


def test_a_frame_in_several_places_becomes_one_and_another_stays_as_it_is() -> None:
    head, tail = bytearray(b"head"), bytearray(b"tail")
    joined = whole(ScatteredFrame([memoryview(head), memoryview(tail)]))
    head[:] = b"____"
    assert bytes(joined) == b"headtail", "it is a copy"
    plain = memoryview(b"plain")
    assert whole(plain) is plain


def test_keeping_freed_memory_may_be_asked_for_again() -> None:
    keep_freed()
    before = keep_freed.cache_info().misses  # more than one where threads of an earlier test asked at the same moment
    keep_freed()
    assert keep_freed.cache_info().misses == before


def test_free_memory_is_given_back_once_in_a_while_where_the_process_has_grown() -> None:
    state, done = {"now": 0.0, "held": 100 << 20}, []

    def what_is_done(now: float, held: int) -> list[str]:
        state.update(now=now, held=held)
        done.clear()
        freed.look()
        return list(done)

    freed = FreedMemory(
        lambda: done.append("trim"), lambda: state["now"], lambda: state["held"], lambda: done.append("give back")
    )
    assert what_is_done(LOOK_S - 1, 900 << 20) == []
    assert what_is_done(LOOK_S, 100 << 20) == ["trim", "give back"]
    assert what_is_done(LOOK_S + 1, 900 << 20) == []
    assert what_is_done(2 * LOOK_S, (100 << 20) + ENOUGH - 1) == ["trim"]
    assert what_is_done(3 * LOOK_S, (100 << 20) + ENOUGH) == ["trim", "give back"]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library does not tell")
def test_pages_between_what_stays_are_given_back() -> None:
    keep_freed()
    given = [bytearray(b"x") * 60_000 for _ in range(1000)]
    kept = given[::20]
    del given
    before = own_memory_bytes()
    now = 0.0
    freed = FreedMemory(lambda: None, lambda: now)
    now = LOOK_S
    freed.look()
    assert before - own_memory_bytes() > 40_000_000
    assert len(kept) == 50
