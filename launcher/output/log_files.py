"""The log files of a job: one for each process, in one directory, of bounded size.

Each entry is written at once by a single call, so what has been written is there whoever is killed then. Nothing that
fails here raises: it is said once, and the file says how many lines are missing, when it can be written again.

An entry is a line, in the format of Kubernetes' container logs: the time (UTC, to a microsecond), the stream (`stdout`
or `stderr`), a tag, and what the process has written, byte for byte. The tag is F where a newline ends the text, and P
where the next entry of that stream goes on.

    2026-03-01T09:30:00.123456Z stderr F Epoch[0] Train-accuracy=0.91

Collectors of logs call the format CRI (https://kubernetes.io/docs/concepts/cluster-administration/logging/). Of a text
that is rewritten by carriage returns, as a progress bar is, the last version is kept.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from launcher.errors import LaunchError

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


STREAMS = {1: "stdout", 2: "stderr"}
LONGEST = 64 << 10  # bytes; of a longer line, the beginning is an entry already


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def remark(text: str, at: str) -> bytes:
    """An entry with a line of launch.py itself, which is marked as such."""
    return said(f"launch.py: {' '.join(text.split())}", at)


def said(text: str, at: str) -> bytes:
    """Entries with the lines of a text, as if on standard error."""
    lines = text.encode(errors="surrogateescape").split(b"\n")
    return b"".join(_head("stderr", "F", at) + line + b"\n" for line in lines)


class LogLines:
    """Makes entries of what one stream of a process writes. `stream`: the name of the stream."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._held = b""  # of a line that has not ended
        self._begun = False  # of which a part is an entry already

    @property
    def holds(self) -> bool:
        """Whether the beginning of a line waits for its end, and may be written before."""
        return bool(self._held) and b"\r" not in self._held

    def feed(self, data: bytes, at: str) -> bytes:
        """The entries that `data` completes. `data`: what the stream has written. `at`: the time, from `stamp`."""
        whole, newline, rest = data.rpartition(b"\n")
        if not newline:
            return self._hold(self._held + rest, at)
        whole = self._held + whole
        if b"\r" in whole:
            first, *others = whole.split(b"\n")
            first = first if self._begun else _visible(first)
            whole = b"\n".join([first, *map(_visible, others)])
        head = _head(self._stream, "F", at)
        entries = head + whole.replace(b"\n", b"\n" + head) + b"\n"
        self._begun = False
        return entries + self._hold(rest, at)

    def flush(self, at: str) -> bytes:
        if not self._held:
            return b""
        held, self._held, self._begun = self._held, b"", True
        return _head(self._stream, "P", at) + held + b"\n"

    def finish(self, at: str) -> bytes:
        entry = b"" if b"\r" in self._held and not self._held.strip() else self.flush(at)
        self._held, self._begun = b"", False
        return entry

    def _hold(self, text: bytes, at: str) -> bytes:
        self._held = _visible(text) if b"\r" in text and not self._begun else text
        return self.flush(at) if len(self._held) > LONGEST else b""


def _head(stream: str, tag: str, at: str) -> bytes:
    return f"{at} {stream} {tag} ".encode()


def _visible(line: bytes) -> bytes:
    """A line without what carriage returns have had overwritten."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


class LogFiles:
    """The log files of one job, in a directory that no other job uses meanwhile.

    Args:
        directory: where they are. It is made if it does not exist, for this user alone.
        size: how large a file may be before the next one is begun, in bytes.
        count: how many files of each process are kept.
    """

    def __init__(self, directory: Path, size: int, count: int) -> None:
        self.directory = directory
        self._size, self._count = size, count
        self._files: dict[str, _LogFile] = {}
        self._failed: _LogFile | None = None  # the first of them that could not be written
        self._said = False
        self._lock = _lock(directory)

    def write(self, name: str, entries: bytes, at: str) -> None:
        """Append entries to the file of a process; none if that fails.

        `name`: of the file, without its end. `at`: the time, from `stamp`.
        """
        if not entries:
            return
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = _LogFile(self.directory / f"{name}.log", self._size, self._count)
        file.write(entries, at)
        if file.problem and self._failed is None:
            self._failed = file

    def problem(self) -> str:
        """What has failed first, to be said to the user; empty if nothing has, or if it was said before."""
        if self._failed is None or self._said:
            return ""
        self._said = True
        what = f"cannot write {self._failed.path}: {self._failed.problem}"
        return f"{what}; the job goes on without the lines that cannot be written"

    @property
    def missing(self) -> int:
        return sum(file.missing for file in self._files.values())

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class _LogFile:
    """One file, and those before it: `worker-0.log`, `worker-0.log.1` and so on, the newest first."""

    def __init__(self, path: Path, size: int, count: int) -> None:
        self.path = path
        self.missing = 0
        self.problem = ""  # what has failed first
        self._limit, self._count = size, count
        self._fd = -1
        self._size = 0
        self._torn = False  # the last entry is incomplete
        self._unsaid = 0  # lines that are missing, which the file does not say yet

    def write(self, entries: bytes, at: str) -> None:
        try:
            if self._fd < 0:
                self._open()
            if self._size and self._size + len(entries) > self._limit:
                self._rotate()
            unsaid = remark(f"{self._unsaid} lines are missing here: {self.problem}", at) if self._unsaid else b""
            self._append(unsaid + entries)
            self._unsaid = 0
        except OSError as error:
            lines = entries.count(b"\n")
            self.missing += lines
            self._unsaid += lines
            self.problem = self.problem or error.strerror or str(error)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                os.close(fd)

    def _open(self) -> None:
        fd = os.open(self.path, _FLAGS, 0o600)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a file")
            if status.st_uid != os.getuid():
                raise OSError(errno.EPERM, "it belongs to another user")
            if stat.S_IMODE(status.st_mode) != 0o600:
                os.fchmod(fd, 0o600)
        except OSError:
            os.close(fd)
            raise
        self._fd, self._size = fd, status.st_size
        self._torn = not _ends_whole(self.path)

    def _append(self, data: bytes) -> None:
        rest = memoryview(b"\n" + data if self._torn else data)
        whole = self._size
        try:
            while rest:
                written = os.write(self._fd, rest)
                self._size += written
                rest = rest[written:]
            self._torn = False
        except OSError:
            if self._size > whole:
                self._torn = True
                with suppress(OSError):
                    os.ftruncate(self._fd, whole)
                    self._size, self._torn = whole, False
            raise

    def _rotate(self) -> None:
        self.close()
        try:
            for number in range(self._count - 1, 0, -1):
                with suppress(FileNotFoundError):
                    self._numbered(number - 1).replace(self._numbered(number))
            if self._count == 1:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            self.problem = self.problem or error.strerror or str(error)
        self._open()
        self._size = 0

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path


def _ends_whole(path: Path) -> bool:
    """Whether a file ends with a newline, or is empty. Who has written it may have been killed meanwhile."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read(1) in (b"", b"\n")


def _lock(directory: Path) -> int:
    """Make the directory, and keep other jobs out of it."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise LaunchError(f"--log-dir {directory}: cannot make this directory: {error.strerror}", exit_code=1) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise LaunchError(f"--log-dir {directory}: another job writes there; name another directory") from None
    except OSError:
        pass  # a file system without locks
    if not os.access(directory, os.W_OK | os.X_OK):
        os.close(fd)
        raise LaunchError(f"--log-dir {directory}: you may not write there", exit_code=1)
    return fd
