"""A file of lines, after whatever has ended its writer."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import kvstore as kv
from workers.callbacks.trackers import LineFile


def appended(path: Path, *lines: str) -> str:
    file = LineFile(path, b"{")
    for line in lines:
        file.append(line)
    file.close()
    return path.read_text()


def test_lines_are_appended_and_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.jsonl"
    assert appended(path, "{1}\n", "{2}\n") == "{1}\n{2}\n"
    assert appended(path, "{3}\n") == "{1}\n{2}\n{3}\n"


@pytest.mark.parametrize("length", [2, 70_000, 200_000])  # within one block of what is read, and over several
def test_a_last_line_without_its_end_is_cut_off(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{1}\n{" + "x" * length)
    assert appended(path, "{2}\n") == "{1}\n{2}\n"
    path.write_text("{" + "x" * length)
    assert appended(path, "{2}\n") == "{2}\n"


@pytest.mark.parametrize("content", ["step\n", "[1]", "\n{"])
def test_somebody_elses_file_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(kv.UsageError, match=r"a\.jsonl has other content, .*; choose another name"):
        LineFile(path, b"{")
    assert path.read_text() == content


def test_of_a_line_that_does_not_fit_on_the_disk_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    file = LineFile(path, b"{")
    file.append("{1}\n")
    write, room = os.write, [2]

    def full(fd: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "no space left on device")
        return write(fd, data[: room.pop()])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="no space left"):
            file.append("{22}\n")
    file.append("{3}\n")
    file.close()
    assert path.read_text() == "{1}\n{3}\n"
