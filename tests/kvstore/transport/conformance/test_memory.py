"""Every transport's memory: what is received stays, and what may still be read is busy."""

from __future__ import annotations

import gc

import pytest
import torch
from every_transport import Ends, acquaint, pattern, receive


def test_a_received_buffer_outlives_the_messages_after_it_the_link_and_its_sender(ends: Ends):
    listener, other, link = ends.pair()
    acquaint(listener, other, link)
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
        assert (len(view), set(view)) == (size, {number})


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


@pytest.mark.parametrize("size", [0, 1, 100, 64 << 10, (1 << 20) + 1])
def test_allocated_memory_is_sent_whole_or_in_parts(ends: Ends, size: int):
    listener, other, link = ends.pair()
    acquaint(listener, other, link)
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
    listener, other, link = ends.pair()
    acquaint(listener, other, link)
    held = []
    for number in range(20):
        memory = other.allocate(100_000)
        memory[:] = bytes([number]) * 100_000
        assert not set(memory) - {number}
        other.send(link, [b"head", memory])
        del memory
        held.append(receive(listener)[1][1])
        if number % 3 == 0:
            del held[0]
        assert [view[0] for view in held] == [view[-1] for view in held]
    assert [view[0] for view in held] == list(range(7, 20))


def test_memory_that_may_be_read_is_busy(ends: Ends):
    listener, other, link = ends.pair()
    acquaint(listener, other, link)
    memory = other.allocate(100_000)
    other.send(link, [b"head", memory])
    frames = receive(listener)[1]
    assert other.busy(memory)
    assert other.busy(memory[5000:6000])
    assert other.busy(bytearray(100))
    del frames


def test_who_reads_our_memory_is_known_once_we_are_acquainted(ends: Ends):
    listener, other, link = ends.pair()
    acquaint(listener, other, link)
    assert other.shares(link) == (ends.kind == "inproc" or ends.kind.startswith("shm"))
    assert not other.shares(b"nobody") or ends.kind == "inproc"
