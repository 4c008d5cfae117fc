from __future__ import annotations

import errno
import os
import pty
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import screen

from launcher.output.outlet import ERASE, Outlet, StatusLine, columns, wants_color

DRAWN = b"\x1b[?7l%b\x1b[0m\x1b[?7h"


def test_it_is_drawn_when_it_has_changed() -> None:
    line = StatusLine()
    assert line.draw() == b""
    line.set("a", b"1%")
    assert line.draw() == DRAWN % b"1%"
    assert line.draw() == b""
    line.set("a", b"2%")
    assert line.draw() == ERASE + DRAWN % b"2%"
    line.set("a", b"")
    assert line.draw() == ERASE
    assert line.draw() == b""


def test_it_is_erased_before_other_lines_and_drawn_again_after_them() -> None:
    line = StatusLine()
    assert line.make_room() == b""
    line.set("a", b"1%")
    line.draw()
    assert [line.make_room(), line.make_room(), line.draw()] == [ERASE, b"", DRAWN % b"1%"]


def test_of_several_the_first_is_shown_until_it_ends() -> None:
    line = StatusLine()
    line.set("a", b"a1")
    line.set("b", b"b1")
    line.draw()
    line.set("b", b"b2")
    assert line.draw() == b""
    line.set("a", b"")
    assert line.draw() == ERASE + DRAWN % b"b2"


def test_colors_stay_and_movements_go() -> None:
    line = StatusLine()
    line.set("a", b"\x1b[2K\x1b[1;31mred\x1b[0m\x1b[A\x1b[?25l")
    assert line.draw() == DRAWN % b"\x1b[1;31mred\x1b[0m"


def test_several_lines_are_erased_together() -> None:
    line = StatusLine()
    line.set("a", b"1\n2\n3")
    assert line.draw() == DRAWN % b"1\n2\n3"
    line.set("a", b"4")
    assert line.draw() == b"\r\x1b[2A\x1b[J" + DRAWN % b"4"
    assert line.make_room() == ERASE


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


@pytest.mark.parametrize(
    ("environ", "wanted"), [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colors_are_for_terminals_and_those_who_want_them(environ: dict[str, str], wanted: bool) -> None:
    ours, theirs = pty.openpty()
    try:
        assert wants_color(theirs, environ) is wanted
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_width_of_a_terminal() -> None:
    pipe = os.pipe()
    with screen.terminal() as (_, theirs):
        assert columns(theirs, {}) == screen.COLUMNS
        assert columns(theirs, {"TERM": "dumb"}) == 0
    ours, theirs = pty.openpty()  # has no width
    assert columns(theirs, {}) == 80
    os.close(ours)
    os.close(theirs)
    assert columns(pipe[1], {}) == columns(-1, {}) == 0
    for fd in pipe:
        os.close(fd)
