"""The checkpoints in a directory, one folder each: names, the newest, and the removal of old ones."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from kvstore.errors import CheckpointError
from kvstore.job.files import sync_directory
from kvstore.job.valid_values import Interval
from kvstore.sealed_folders import MANIFEST, numbered

_NAME = re.compile(r"checkpoint-(\d{8,18})")


class Folder(NamedTuple):
    """The folder of checkpoint ``number``; it is ``whole`` if it has a manifest."""

    number: int
    path: Path
    whole: bool


def folder_of(directory: Path, number: int) -> Path:
    return directory / f"checkpoint-{number:08d}"


def listed(directory: Path) -> list[Folder]:
    """Return all folders of checkpoints in ``directory``, by number; none if it does not exist."""
    folders = numbered(directory, _NAME, "checkpoints")
    return [Folder(number, path, (path / MANIFEST).exists()) for number, path in folders]


def prepare(directory: Path) -> None:
    """Make ``directory`` if it is not there, and see that folders can be made in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        TemporaryDirectory(dir=directory, prefix=".").cleanup()
    except OSError as exc:
        raise CheckpointError(f"{directory}: no checkpoint can be written there: {exc.strerror}") from None


def begin(directory: Path, number: int) -> Path:
    """Make the folder of a new checkpoint; return it. ``settle`` has its name on the disk.

    Raises:
        FileExistsError: there is one of this number.
    """
    directory.mkdir(parents=True, exist_ok=True)
    folder = folder_of(directory, number)
    folder.mkdir()
    return folder


def part_of(folder: Path, rank: int) -> Path:
    return folder / f"worker-{rank}.safetensors"


def promise_of(folder: Path, rank: int) -> Path:
    """Return the empty file that says that worker ``rank``'s part will come.

    The worker removes it if it cannot write its part. Removing a file needs no room on a full disk, and the worker that
    waits sees it at once. It stays when the part is there: on a file system of another host, a reader may see the
    removal before it sees the part.
    """
    return folder / f"worker-{rank}.part"


def settle(folder: Path) -> None:
    """Have the name of ``folder`` on the disk, before its manifest."""
    sync_directory(folder.parent)


def found(path: Path) -> Path | None:
    """Return the checkpoint that ``path`` names: itself, or the newest whole one in that directory.

    Returns:
        None if ``path`` is a directory without a checkpoint, or is not there yet.

    Raises:
        CheckpointError: ``path`` is the folder of one checkpoint, and that is not whole.
    """
    if (path / MANIFEST).exists():
        return path
    if _NAME.fullmatch(path.name):
        others = [f"{folder.path}" for folder in listed(path.parent) if folder.whole]
        advice = f"; whole ones: {', '.join(others[-3:])}" if others else ""
        raise CheckpointError(f"{path}: no whole checkpoint, for it has no {MANIFEST}{advice}")
    whole = [folder.path for folder in listed(path) if folder.whole]
    return whole[-1] if whole else None


def prune(directory: Path, keep: int, newest: int) -> None:
    """Remove all but the last ``keep`` whole checkpoints up to ``newest``, and what earlier ones have left unfinished.

    A checkpoint loses its manifest first: what is left is no checkpoint, whenever this ends.
    """
    before = [folder for folder in listed(directory) if folder.number <= newest]
    kept = {folder.number for folder in [each for each in before if each.whole][-keep:]}
    for folder in before:
        if folder.number not in kept:
            remove(folder.path)


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first; files that are not its own stay, and the folder with them."""
    manifest = folder / MANIFEST
    if manifest.exists():
        manifest.unlink()
        sync_directory(folder)
    others = False
    for path in folder.iterdir():
        if path.name.endswith((".safetensors", ".part")) and not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            others = True
    if not others:
        folder.rmdir()


# When a job's checkpoints are due. Pure: no clock.
#
# Workers meet at rounds that they all know, and at each meeting worker 0 says whether a checkpoint is due, and at
# which round the next meeting is. For a time, meetings are at half of the rounds that are left, so there are few of
# them.
NEVER = 2**62  # as a round


class CheckpointSchedule:
    """Worker 0's side; see the module."""

    def __init__(self, every: Interval, rounds: int, now: float) -> None:
        self._every = every
        self._last = rounds, now  # checkpoint
        self._met = rounds, now

    def first(self) -> int:
        return self.next(*self._met)

    def due(self, rounds: int, now: float) -> bool:
        """Return whether a checkpoint is due after ``rounds``; it counts as made then."""
        if self._every.rounds:
            due = rounds // self._every.rounds > self._last[0] // self._every.rounds
        else:
            due = 0 < self._every.seconds <= now - self._last[1]
        if due:
            self.made(rounds, now)
        return due

    def made(self, rounds: int, now: float) -> None:
        """Note that there is a checkpoint after ``rounds``."""
        self._last = rounds, now

    def next(self, rounds: int, now: float) -> int:
        """Return the round of the next meeting, after one at ``rounds``."""
        if self._every.rounds:
            return rounds - rounds % self._every.rounds + self._every.rounds
        if not self._every.seconds:
            return NEVER
        left = self._last[1] + self._every.seconds - now
        passed, took = rounds - self._met[0], now - self._met[1]
        self._met = rounds, now
        if passed < 1 or took <= 0 or left <= 0:
            return rounds + 1
        # Not at once as far as half of the time seems to be: rounds may become ten times slower, as while a worker is
        # started again, and then nobody would look for so long.
        return rounds + max(1, min(int(left / took * passed / 2), 2 * passed))
