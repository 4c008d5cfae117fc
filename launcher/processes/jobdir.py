"""A job's private directory. Its name is the job's mark. It holds sockets, and whatever must not outlive the job."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kvstore.job.directory import launcher_of, lock, make_private, private_directories, temporary_root
from launcher.errors import as_launch_error
from launcher.job.command import PYTHONS, shim
from launcher.processes.keeper import remove_shared


class JobDir:
    """A directory that only this user can enter, and that is removed with the job.

    Its maker holds a lock in it. If the lock is free and the process in its name is dead, a later job removes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = lock(path)

    @classmethod
    def make(cls, parent: Path | None = None) -> JobDir:
        root = temporary_root(parent)
        sweep(root)
        with as_launch_error(exit_code=1):
            return cls(make_private(root))

    @property
    def scheduler_log(self) -> str:
        """The file for what a scheduler that is started again needs of the one before it."""
        return str(self.path / "scheduler.log")

    def shims(self, python: str) -> Path:
        """Make a directory for PATH, in which `python` and `python3` are an interpreter, and return it.

        May be called again, with the same `python`.
        """
        directory = self.path / "bin"
        directory.mkdir(mode=0o700, exist_ok=True)
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
    """Remove the directories of this user's jobs whose launcher is dead. Returns the removed directories."""
    removed = []
    for path in private_directories(parent):
        if not launcher_of(path).lives:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed
