"""A terminal of our own: what a program writes to it, and what a person sees."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

COLUMNS = 90
_PIECES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|.", re.DOTALL)


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Open a terminal; gives our end, from which to read, and the end of the program."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    try:
        yield ours, theirs
    finally:
        for fd in (ours, theirs):
            with suppress(OSError):
                os.close(fd)


def run(words: Sequence[str], env: Mapping[str, str], cwd: str | os.PathLike[str] | None = None) -> tuple[int, str]:
    """Run a program whose standard output and standard error are a terminal; returns its exit code and output."""
    with terminal() as (ours, theirs):
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env, cwd=cwd)
        os.close(theirs)
        output = b""
        while chunk := _read(ours):
            output += chunk
        return process.wait(), output.decode()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # Linux says EIO when the program has closed its end
        return b""


def seen(output: str) -> list[str]:
    """The lines that are on the terminal in the end. Colors are left out, and there is no other movement than these."""
    lines, row, at = [""], 0, 0
    for piece in _PIECES.findall(output):
        line = lines[row]
        if piece == "\n":
            row += 1
            lines[row:] = lines[row:] or [""]
        elif piece == "\r":
            at = 0
        elif up := re.fullmatch(r"\x1b\[(\d+)A", piece):
            row -= int(up[1])
            assert row >= 0, "above the first line"
        elif piece in ("\x1b[K", "\x1b[J"):
            lines[row] = line[:at]
            if piece == "\x1b[J":
                del lines[row + 1 :]
        elif not piece.startswith("\x1b"):
            lines[row] = line[:at] + piece + line[at + 1 :]
            at += 1
    return lines
