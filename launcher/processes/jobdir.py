"""A job's private directory. Its name is the job's mark. It holds sockets, and whatever must not outlive the job."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.job.directory import make_private, temporary_root
from launcher.errors import LaunchError
from launcher.job.command import PYTHONS, shim
from launcher.processes.keeper import remove_shared

_NAME = re.compile(r"kvstore-(?P<uid>\d+)-(?P<pid>\d+)-[^/]+")
_LOCK = "lock"


class JobDir:
    """A directory that only this user can enter, and that is removed with the job.

    Its maker holds a lock in it. If the lock is free and the process in its name is dead, a later job removes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def make(cls, parent: Path | None = None) -> JobDir:
        """Make a directory, in `parent`, or in /tmp if sockets there would have too long a name.

        Raises:
            LaunchError: it cannot be made.
        """
        root = temporary_root(parent)
        sweep(root)
        try:
            return cls(make_private(root))
        except ConfigError as error:
            raise LaunchError(str(error), exit_code=1) from None

    @property
    def scheduler_log(self) -> str:
        """The file for what a scheduler that is started again needs of the one before it."""
        return str(self.path / "scheduler.log")

    def shims(self, python: str) -> Path:
        """Make a directory for PATH, in which `python` and `python3` are an interpreter, and return it."""
        directory = self.path / "bin"
        directory.mkdir(mode=0o700)
        for name in PYTHONS:
            file = directory / name
            file.write_text(shim(python), encoding="utf-8", errors="surrogateescape")
            file.chmod(0o700)
        return directory

    def remove(self) -> None:
        """Remove the directory, and the shared memory of the job. May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        remove_shared(self.path.name)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> list[Path]:
    """Remove the directories of this user's jobs whose launcher is dead.

    Returns:
        The removed directories.
    """
    removed = []
    for path in parent.glob(f"kvstore-{os.getuid()}-*"):
        match = _NAME.fullmatch(path.name)
        if match is not None and _is_ours(path) and not _alive(int(match["pid"])) and not _locked(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _locked(path: Path) -> bool:
    """Whether a launcher holds the lock. It may be in another container, with other pids."""
    with suppress(OSError):
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False
