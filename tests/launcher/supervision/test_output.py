from __future__ import annotations

import errno
import os
import pty
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import screen
from hypothesis import given
from hypothesis import strategies as st

from launcher.supervision import output
from launcher.supervision.output import Outlet, Prefixer, columns, prefix, wants_color

P = b"[x] "


def through(*chunks: bytes) -> bytes:
    lines = Prefixer(P)
    return b"".join([*(lines.feed(chunk) for chunk in chunks), lines.finish()])


@pytest.mark.parametrize(
    ("chunks", "result"),
    [
        ([], b""),
        ([b"a\nb\n"], b"[x] a\n[x] b\n"),
        ([b"a", b"b\nc"], b"[x] ab\n[x] c\n"),
        ([b"\n\n"], b"[x] \n[x] \n"),
        ([b"\xff\x00\n"], b"[x] \xff\x00\n"),
        ([b"a\r\nb\r\n"], b"[x] a\n[x] b\n"),
        ([b"a\r", b"\nb\n"], b"[x] a\n[x] b\n"),
        ([b"a\r\r\n", b"\n"], b"[x] a\n[x] \n"),
        ([b"\r\n\r\n"], b"[x] \n[x] \n"),
        ([b"\r1%\r2%", b"\r3%\ndone\n"], b"[x] 1%\n[x] 2%\n[x] 3%\n[x] done\n"),
        ([b"1%\r"], b"[x] 1%\n"),
    ],
)
def test_whole_lines_come_out(chunks: list[bytes], result: bytes) -> None:
    assert through(*chunks) == result


LINES = st.lists(st.binary(max_size=5) | st.sampled_from([b"\n", b"\r", b"\r\n", b"a\r\n"]), max_size=20)


@given(LINES)
def test_it_does_not_matter_how_the_output_is_cut(chunks: list[bytes]) -> None:
    assert through(*chunks) == through(b"".join(chunks))


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line and b"\r" not in line)))
def test_nothing_is_lost(lines: list[bytes]) -> None:
    assert through(b"".join(line + b"\n" for line in lines)) == b"".join(P + line + b"\n" for line in lines)


def test_a_line_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_LINE", 10)
    lines = Prefixer(P)
    assert lines.feed(b"x" * 10) == b""
    assert lines.feed(b"y") == P + b"x" * 10 + b"y\n"
    assert lines.feed(b"z\n") == P + b"z\n"


def test_prefixes() -> None:
    assert prefix("worker 0", 3, color=False) == b"[worker 0] "
    assert prefix("worker 0", 0, color=True) == b"\x1b[0;36m[worker 0]\x1b[0m "
    assert len({prefix("x", index, color=True) for index in range(20)}) == 10


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


def test_the_width_of_a_terminal(pipe: tuple[int, int]) -> None:
    with screen.terminal() as (_, theirs):
        assert columns(theirs, {}) == screen.COLUMNS
        assert columns(theirs, {"TERM": "dumb"}) == 0
    ours, theirs = pty.openpty()  # has no width
    assert columns(theirs, {}) == 80
    os.close(ours)
    os.close(theirs)
    assert columns(pipe[1], {}) == columns(-1, {}) == 0


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
