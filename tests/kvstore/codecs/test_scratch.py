"""Memory to work in: one buffer for a thread and a purpose."""

from __future__ import annotations

import threading

import torch

from kvstore.codecs.base import scratch

LIKE = torch.zeros(100)


def test_the_same_name_gets_the_same_memory_and_another_name_other_memory() -> None:
    one = scratch("test one", LIKE)
    assert one.shape == (100,)
    assert scratch("test one", LIKE, 50).data_ptr() == one.data_ptr()
    assert scratch("test one", LIKE, 50).shape == (50,)
    assert scratch("test other", LIKE).data_ptr() != one.data_ptr()


def test_what_has_grown_stays_so() -> None:
    scratch("test grows", LIKE)
    grown = scratch("test grows", LIKE, 1000)
    assert grown.shape == (1000,)
    assert scratch("test grows", LIKE).data_ptr() == grown.data_ptr()


def test_each_thread_has_its_own() -> None:
    mine, theirs = scratch("test threads", LIKE), []
    thread = threading.Thread(target=lambda: theirs.append(scratch("test threads", LIKE)))
    thread.start()
    thread.join()
    assert theirs[0].data_ptr() != mine.data_ptr()


def test_large_buffers_are_not_kept() -> None:
    size = 1 << 20
    one = scratch("test large", LIKE, size)
    assert one.shape == (size,)
    assert scratch("test large", LIKE, size).data_ptr() != one.data_ptr()
