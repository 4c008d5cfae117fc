from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.output.outlet import Outlet


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    for fd in (read, write):
        with suppress(OSError):
            os.close(fd)


def read_all(fd: int) -> bytes:
    data = b""
    while True:
        try:
            data += os.read(fd, 1 << 20)
        except BlockingIOError:
            return data


def test_a_full_pipe_does_not_block_and_nothing_is_lost(pipe: tuple[int, int], tmp_path: Path) -> None:
    read, write = pipe
    with (tmp_path / "err").open("wb") as err:
        outlet = Outlet(write, err.fileno())
        lines = [b"%d\n" % i * 1000 for i in range(200)]
        for line in lines:
            outlet.put(write, line)
        outlet.put(err.fileno(), b"after\n")
        outlet.pump()
        assert outlet.waits_for == write
        assert 0 < outlet.pending < sum(map(len, lines)) + 6
        # In order even between the two: both may be one terminal.
        assert (tmp_path / "err").read_bytes() == b""
        received = b""
        while outlet.waits_for is not None:
            received += read_all(read)
            outlet.pump()
        assert received + read_all(read) == b"".join(lines)
        assert (tmp_path / "err").read_bytes() == b"after\n"
        assert outlet.pending == 0


def test_a_pipe_that_was_made_nonblocking_by_others(pipe: tuple[int, int]) -> None:
    read, write = pipe
    os.set_blocking(write, False)
    outlet = Outlet(write, write)
    outlet.put(write, b"x" * 200_000)
    outlet.pump()
    assert outlet.waits_for == write
    assert len(read_all(read)) + outlet.pending == 200_000


def test_a_closed_pipe_loses_only_its_own_lines(pipe: tuple[int, int], tmp_path: Path) -> None:
    read, write = pipe
    os.close(read)
    with (tmp_path / "err").open("wb") as err:
        outlet = Outlet(write, err.fileno())
        for fd in (write, err.fileno(), write):
            outlet.put(fd, b"x\n")
        outlet.pump()
        assert isinstance(outlet.broken[write], BrokenPipeError)
        assert outlet.waits_for is None
        outlet.put(write, b"y\n")
        assert outlet.pending == 0
        assert (tmp_path / "err").read_bytes() == b"x\n"


def test_a_descriptor_that_was_never_there() -> None:
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    outlet = Outlet(write, write)
    outlet.put(write, b"x\n")
    outlet.pump()
    assert outlet.broken[write].errno == errno.EBADF
