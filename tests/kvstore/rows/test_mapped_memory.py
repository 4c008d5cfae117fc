"""Memory of slabs: where it begins, and how the system is asked for huge pages of it."""

import mmap

import numpy as np
import pytest

from kvstore.rows import slabs
from kvstore.rows.slabs import ADVICE, COLLAPSE, HUGE, PAGE, STRETCHES, MappedMemory, huge_pages_allowed


@pytest.fixture
def calls(monkeypatch):
    """What the system is asked for, instead of asking it: advice, start from the mapping's, bytes."""
    asked = []

    class Noted(mmap.mmap):
        def madvise(self, option, start, length):
            asked.append((option, start, length))

    monkeypatch.setattr(mmap, "mmap", Noted)
    monkeypatch.setattr(slabs, "ADVICE", 14)
    monkeypatch.setattr(slabs, "COLLAPSE", 25)
    monkeypatch.setattr(slabs, "huge_pages_allowed", lambda: True)
    return asked


@pytest.mark.parametrize("nbytes", [HUGE // 2, HUGE, HUGE + 1, 5 * HUGE])
def test_it_begins_where_a_huge_page_can_and_has_whole_ones(calls, nbytes):
    memory = MappedMemory(nbytes)
    array = memory.array(np.dtype(np.uint8), nbytes)
    assert array.ctypes.data % HUGE == 0
    assert memory.huge_pages == -(-nbytes // HUGE)
    memory.ask(memory.huge_pages - 1)
    (option, start, length), mapped = calls[0], len(memory.array(np.dtype(np.uint8), -1))
    assert (option, length) == (14, HUGE)
    assert start % PAGE == 0
    assert start + length <= start % HUGE + mapped, "no byte behind the mapping"
    array[:] = 1
    assert array.all()


def test_what_is_small_has_no_huge_pages():
    memory = MappedMemory(HUGE // 2 - 1)
    assert memory.huge_pages == 0
    assert not memory.array(np.dtype(np.int64), 10).any()


def test_a_range_is_advised_from_the_size_of_a_huge_page_on(calls):
    memory = MappedMemory(4 * HUGE)
    first = -memory.array(np.dtype(np.uint8), 1).ctypes.data % HUGE
    memory.advise(PAGE, HUGE)
    assert calls == []
    memory.advise(PAGE + 5, 3 * HUGE)
    ((option, start, length),) = calls
    assert (option, length) == (14, 3 * HUGE - PAGE)
    assert (start - PAGE - first) % PAGE == 0


def test_each_page_is_asked_for_once(calls):
    memory = MappedMemory(9 * HUGE)
    assert memory.ask(3)
    assert not memory.ask(3)
    assert memory.asked(3)
    assert not memory.asked(4)
    memory.collapse(3)
    (_, start, length), collapsed = calls
    assert collapsed == (25, start, length)


def test_stretches_are_no_more_than_the_system_has_mappings_for(calls):
    memory = MappedMemory(4 * STRETCHES * HUGE)
    assert all(memory.ask(2 * number) for number in range(STRETCHES))
    assert not memory.ask(2 * STRETCHES + 1)
    assert not memory.asked(2 * STRETCHES + 1), "it may be asked for later"
    assert memory.ask(2 * STRETCHES - 1), "it makes one longer"
    assert memory.ask(1), "it joins two"
    assert memory.ask(2 * STRETCHES + 1)
    assert not memory.ask(2 * STRETCHES + 3)


@pytest.mark.parametrize("error", ["EINVAL", "EAGAIN", "ENOMEM"])
def test_a_system_that_has_none_does_without(monkeypatch, error):
    tried = []

    class Refusing(mmap.mmap):
        def madvise(self, option, start, length):
            tried.append(option)
            raise OSError(error)

    monkeypatch.setattr(mmap, "mmap", Refusing)
    monkeypatch.setattr(slabs, "ADVICE", 14)
    monkeypatch.setattr(slabs, "COLLAPSE", 25)
    monkeypatch.setattr(slabs, "huge_pages_allowed", lambda: True)
    memory = MappedMemory(2 * HUGE)
    memory.advise(0, 2 * HUGE)
    memory.ask(1)
    memory.collapse(1)
    assert tried == [14, 14, 25]
    assert not memory.array(np.dtype(np.int64), 10).any()


def test_a_system_that_does_not_know_them_is_not_asked(calls, monkeypatch):
    monkeypatch.setattr(slabs, "ADVICE", None)
    monkeypatch.setattr(slabs, "COLLAPSE", None)
    memory = MappedMemory(2 * HUGE)
    memory.advise(0, 2 * HUGE)
    memory.ask(1)
    memory.collapse(1)
    assert calls == []


@pytest.mark.parametrize(
    ("mode", "allowed"),
    [("always [madvise] never", True), ("[always] madvise never", True), ("always madvise [never]", False)],
)
def test_where_huge_pages_are_turned_off_nothing_is_collapsed(calls, monkeypatch, tmp_path, mode, allowed):
    monkeypatch.setattr(slabs, "huge_pages_allowed", huge_pages_allowed)
    file = tmp_path / "enabled"
    monkeypatch.setattr(slabs, "MODE", file)
    slabs.huge_pages_allowed.cache_clear()
    assert not slabs.huge_pages_allowed(), "the system does not say"
    file.write_text(mode)
    slabs.huge_pages_allowed.cache_clear()
    memory = MappedMemory(HUGE)
    memory.collapse(0)
    assert bool(calls) is allowed
    slabs.huge_pages_allowed.cache_clear()


@pytest.mark.skipif(None in (ADVICE, COLLAPSE) or not huge_pages_allowed(), reason="the system gives no huge pages")
def test_what_is_there_keeps_its_values_in_a_huge_page():
    memory = MappedMemory(3 * HUGE)
    array = memory.array(np.dtype(np.int64), 3 * HUGE // 8)
    array[:: PAGE // 8] = np.arange(3 * HUGE // PAGE)
    assert memory.ask(1)
    memory.collapse(1)
    assert np.array_equal(array[:: PAGE // 8], np.arange(3 * HUGE // PAGE))
    assert not array[1 :: PAGE // 8].any()
