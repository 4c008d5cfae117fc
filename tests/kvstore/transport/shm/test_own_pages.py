"""Private mappings: what the owner writes is seen, what is written here is nobody else's, and /proc tells it."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.transport.shm import own_pages
from kvstore.transport.shm.own_pages import PAGE, Bytes, OwnBytes, PrivateFile, has_own_pages

PAGES = 8

pytestmark = pytest.mark.skipif(not own_pages.available(), reason="this system does not tell of pages")


@pytest.fixture
def owners() -> tuple[Bytes, PrivateFile]:
    """The owner's memory, and another process's private mapping of it."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, PAGES * PAGE)
    memory = np.frombuffer(mmap.mmap(fd, PAGES * PAGE), np.uint8)
    memory[:] = 1
    return memory, PrivateFile(fd, PAGES * PAGE)


def written(part: OwnBytes) -> bool:
    return has_own_pages(part.ctypes.data, part.nbytes)


@pytest.mark.parametrize("scans", [True, False])
def test_writes_are_nobody_elses_and_are_found(
    owners: tuple[Bytes, PrivateFile], scans: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scans and not own_pages.scans():
        pytest.skip("this system has no PAGEMAP_SCAN")
    monkeypatch.setattr(own_pages, "scans", lambda: scans)
    memory, file = owners
    mine = file.view(0, memory)
    assert (mine == 1).all()
    assert not written(mine)
    memory[:] = 2
    assert (mine == 2).all()  # until it is written to
    mine[3 * PAGE + 5] = 7
    assert [written(mine[at * PAGE : (at + 1) * PAGE]) for at in range(PAGES)] == [at == 3 for at in range(PAGES)]
    assert written(mine[3 * PAGE - 1 : 3 * PAGE + 1])
    assert (memory == 2).all()


def test_what_was_written_to_does_not_hide_later_values(owners: tuple[Bytes, PrivateFile]) -> None:
    memory, file = owners
    old = file.view(PAGE, memory[PAGE : 2 * PAGE])
    old[0] = 9
    memory[:] = 3
    new = file.view(PAGE, memory[PAGE : 2 * PAGE])
    assert (new == 3).all()
    assert old[0] == 9
    assert new.ctypes.data - file.view(0, memory[:PAGE]).ctypes.data == PAGE  # one mapping again


def test_the_owners_memory_is_kept_as_long_as_any_view(owners: tuple[Bytes, PrivateFile]) -> None:
    memory, file = owners
    pristine = memory[:PAGE].view(type("Kept", (np.ndarray,), {}))
    kept = weakref.ref(pristine)
    mine = file.view(0, pristine)
    part = mine[8:16].view(np.float64)
    del pristine, mine
    gc.collect()
    assert kept() is not None
    del part
    gc.collect()
    assert kept() is None


def _in_child(act: Callable[[], bool]) -> Callable[[], bool]:
    """Fork; return what lets the child ``act`` and returns what it has found."""
    (go, gone), (told, tell) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.read(go, 1)
        os.write(tell, b"y" if act() else b"n")
        os._exit(0)

    def result() -> bool:
        os.write(gone, b".")
        answer = os.read(told, 1)
        os.waitpid(pid, 0)
        for fd in (go, gone, told, tell):
            os.close(fd)
        return answer == b"y"

    return result


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_has_what_was_there_at_the_fork(owners: tuple[Bytes, PrivateFile]) -> None:
    memory, file = owners
    mine = file.view(0, memory)
    part = mine[2 * PAGE + 64 : 3 * PAGE]
    result = _in_child(lambda: bool((part == 1).all()))
    memory[:] = 5  # as the owner does, when the parent has given the memory back
    assert result()
    assert (part == 1).all()
