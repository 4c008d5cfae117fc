"""A job's private directory, whose name is the job's mark: sockets, and what else must not outlive it."""

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

    Its maker holds a lock in it. By that and by the pid in its name, a later job recognises it as left behind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def make(cls, parent: Path | None = None) -> JobDir:
        """A new one, in the directory for temporary files or, where that has too long a name, in /tmp.

        Raises:
            LaunchError: there is no place for it.
        """
        root = temporary_root(parent)
        sweep(root)
        try:
            return cls(make_private(root))
        except ConfigError as error:
            raise LaunchError(str(error), exit_code=1) from None

    def shims(self, python: str) -> Path:
        """A directory for PATH, in which `python` and `python3` are the given interpreter."""
        directory = self.path / "bin"
        directory.mkdir(mode=0o700)
        for name in PYTHONS:
            file = directory / name
            file.write_text(shim(python), encoding="utf-8", errors="surrogateescape")
            file.chmod(0o700)
        return directory

    def remove(self) -> None:
        """Remove it with all that is in it, and the memory that the job has shared. Twice is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        remove_shared(self.path.name)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> list[Path]:
    """Remove the directories of this user's jobs whose launcher is dead.

    Returns:
        Those removed.
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
    """Whether a launcher holds it, perhaps one in another container, whose pids are not ours."""
    with suppress(OSError):
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False
