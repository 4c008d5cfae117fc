"""Log files on a real file system: who may read them, how large they become, and what happens if it is full."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import LaunchError
from launcher.output import log_files
from launcher.output.log_files import LogFiles, LogLines, remark, said, stamp

AT = "2026-03-01T09:30:00.123456Z"
LINE = b"x" * 99 + b"\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "logs"


@contextmanager
def opened(folder: Path, size: int = 1 << 20, count: int = 3) -> Iterator[LogFiles]:
    files = LogFiles(folder, size, count)
    try:
        yield files
    finally:
        files.close()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As on a full disk, no file can be larger than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o7777)


def test_nobody_else_can_read_them(folder: Path) -> None:
    with opened(folder) as files:
        files.write("worker-0", LINE, AT)
        files.write("worker-1", b"", AT)
    assert (mode(folder), mode(folder / "worker-0.log")) == ("0o700", "0o600")
    assert [path.name for path in folder.iterdir()] == ["worker-0.log"]
    (folder / "worker-0.log").chmod(0o644)
    with opened(folder) as files:
        files.write("worker-0", LINE, AT)
    assert mode(folder / "worker-0.log") == "0o600"
    assert (folder / "worker-0.log").read_bytes() == LINE * 2, "a later job appends"


def test_files_are_bounded_in_size_and_number(folder: Path) -> None:
    with opened(folder, size=1000, count=3) as files:
        for number in range(95):
            files.write("worker-0", b"%-98d|\n" % number, AT)
    names = ["worker-0.log.2", "worker-0.log.1", "worker-0.log"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    contents = [(folder / name).read_bytes() for name in names]
    assert [len(content) for content in contents] == [1000, 1000, 500]
    assert [int(line.rstrip(b" |")) for content in contents for line in content.splitlines()] == [*range(70, 95)]


def test_one_file_alone(folder: Path) -> None:
    with opened(folder, size=150, count=1) as files:
        for _ in range(3):
            files.write("worker-0", LINE, AT)
    assert [path.read_bytes() for path in folder.iterdir()] == [LINE]


def test_a_full_disk_is_said_once_and_the_file_says_what_is_missing(folder: Path) -> None:
    with opened(folder) as files:
        with largest_file(250):
            files.write("worker-0", LINE, AT)
            files.write("worker-0", LINE * 2, AT)
            files.write("worker-0", LINE, AT)
            assert files.missing == 3
            assert re.fullmatch(
                f"cannot write {folder}/worker-0.log: File too large; the job goes on .*", files.problem()
            )
            files.write("worker-1", LINE * 3, AT)
            assert (files.missing, files.problem()) == (6, "")
        files.write("worker-0", b"again\n", AT)
        assert files.missing == 6
    lines = (folder / "worker-0.log").read_bytes().splitlines(True)
    assert lines[:1] == [LINE]
    assert lines[1:] == [f"{AT} stderr F launch.py: 3 lines are missing here: File too large\n".encode(), b"again\n"]
    assert (folder / "worker-1.log").read_bytes() == b"", "a part of an entry is taken back"


def test_a_line_that_was_cut_off_by_a_kill_is_ended(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "worker-0.log").write_bytes(b"half a li")
    with opened(folder) as files:
        files.write("worker-0", LINE, AT)
    assert (folder / "worker-0.log").read_bytes() == b"half a li\n" + LINE


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_nothing_but_files_is_written_to(kind: str, folder: Path, tmp_path: Path) -> None:
    folder.mkdir(parents=True)
    path = folder / "worker-0.log"
    if kind == "symlink":
        (tmp_path / "precious").write_text("mine")
        path.symlink_to(tmp_path / "precious")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with opened(folder) as files:
        files.write("worker-0", LINE, AT)
        assert f"cannot write {path}: " in files.problem()
    if kind == "symlink":
        assert (tmp_path / "precious").read_text() == "mine"


def test_a_file_that_cannot_be_renamed_is_gone_on_with(folder: Path) -> None:
    (folder / "worker-0.log.1").mkdir(parents=True)
    with opened(folder, size=150, count=2) as files:
        for _ in range(3):
            files.write("worker-0", LINE, AT)
        assert "cannot write" in files.problem()
        assert files.missing == 0
    assert (folder / "worker-0.log").read_bytes() == LINE * 3


def test_two_jobs_do_not_write_into_one_directory(folder: Path) -> None:
    with opened(folder), pytest.raises(LaunchError, match="another job writes there; name another directory"):
        LogFiles(folder, 1000, 3)
    with opened(folder):
        pass


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "logs"):
        with pytest.raises(LaunchError, match=f"--log-dir {path}: cannot make this directory: "):
            LogFiles(path, 1000, 3)


_ENTRY = re.compile(rb"(\S+) (stdout|stderr) ([FP]) (.*)\n", re.DOTALL)


def through(*chunks: bytes) -> bytes:
    lines = LogLines("stdout")
    return b"".join([*(lines.feed(chunk, AT) for chunk in chunks), lines.finish(AT)])


def read_back(entries: bytes) -> bytes:
    """What the process has written, by the entries."""
    text = b""
    for line in entries.split(b"\n")[:-1]:
        match = _ENTRY.fullmatch(line + b"\n")
        assert match is not None, line
        text += match[4] + (b"\n" if match[3] == b"F" else b"")
    return text


@pytest.mark.parametrize(
    ("chunks", "contents"),
    [
        ([], b""),
        ([b"a\nb\n"], b"F a|F b"),
        ([b"a", b"b\nc"], b"F ab|P c"),
        ([b"\n\n"], b"F |F "),
        ([b"\xff\x00\x1b[1m\n"], b"F \xff\x00\x1b[1m"),
        ([b"a\r\nb\r\r\n"], b"F a\r|F b\r\r"),
        ([b"1%\r2%", b"\r3%\ndone\n"], b"F 3%|F done"),
        ([b"1%\r", b"2%\r"], b"P 2%\r"),
        ([b"1%\r", b"  \r"], b""),
        ([b"1%\r", b" \rEpoch 1\n"], b"F Epoch 1"),
    ],
)
def test_entries(chunks: list[bytes], contents: bytes) -> None:
    wanted = b"".join(AT.encode() + b" stdout " + content + b"\n" for content in contents.split(b"|") if content)
    assert through(*chunks) == wanted


@given(st.lists(st.binary(max_size=20).filter(lambda chunk: b"\r" not in chunk), max_size=20))
def test_every_byte_can_be_read_back(chunks: list[bytes]) -> None:
    assert read_back(through(*chunks)) == b"".join(chunks)


@given(st.lists(st.binary(max_size=5) | st.sampled_from([b"\n", b"\r", b"\r\n", b"a\r\n", b" \r"]), max_size=20))
def test_it_does_not_matter_how_the_output_is_cut(chunks: list[bytes]) -> None:
    assert through(*chunks) == through(b"".join(chunks))


def test_a_long_line_is_several_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "LONGEST", 10)
    entries = through(b"x" * 8, b"y" * 8, b"z" * 8 + b"\rw\nnext\n")
    assert [entry[len(AT) + 8 :] for entry in entries.decode().split("\n")[:-1]] == [
        "P " + "x" * 8 + "y" * 8,
        "F " + "z" * 8 + "\rw",
        "F next",
    ]


def test_what_waits_for_its_end_can_be_written_before() -> None:
    lines = LogLines("stderr")
    assert (lines.feed(b"ready\nloading.", AT), lines.holds) == (f"{AT} stderr F ready\n".encode(), True)
    assert (lines.flush(AT), lines.holds) == (f"{AT} stderr P loading.\n".encode(), False)
    assert lines.flush(AT) == b""
    assert lines.feed(b".done\n", AT) == f"{AT} stderr F .done\n".encode()
    lines.feed(b"50%\r", AT)
    assert not lines.holds, "it will be rewritten"


def test_lines_of_launch_py_are_marked() -> None:
    assert (
        remark("exited with code 1\n(a hint)", AT) == f"{AT} stderr F launch.py: exited with code 1 (a hint)\n".encode()
    )
    assert said("Traceback:\n  \udcff", AT) == f"{AT} stderr F Traceback:\n{AT} stderr F   ".encode() + b"\xff\n"


def test_times_are_utc() -> None:
    assert stamp(0.25) == "1970-01-01T00:00:00.250000Z"
