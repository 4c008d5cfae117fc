"""A process's presence in /dev/shm: a locked file that says that it lives, and the rules for the files beside it.

An arena is ``name.0``, the control file, and the chunks ``name.1``, ``name.2``, ... Whoever made it holds a lock on the
control file. The kernel lets go of it when the process is gone, however it went, so the lock says who lives where pids
would lie: across containers, and after a pid has been given to another. Pure standard library: the launcher sweeps.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import sys
import weakref
from contextlib import suppress
from pathlib import Path

from kvstore.errors import WireError
from kvstore.transport.system_errors import require_systems

DIRECTORY = Path("/dev/shm")  # noqa: S108 (names are random, files are made with O_EXCL and mode 0600)
MODE = 0o600
NAME = re.compile(r"kvstore-(?P<uid>[0-9]{1,10})-[A-Za-z0-9_.-]{1,40}-[0-9]{1,10}-[0-9a-f]{16}")
_FILE = re.compile(rf"(?P<name>{NAME.pattern})\.[0-9]{{1,5}}")

# The control file: a nonce, then from the second page on a byte for each reference that is out.
NONCE = 16
CELLS_AT = 4096
CELLS = 1 << 16
CONTROL = CELLS_AT + CELLS
FREE, SENT, HELD = 0, 1, 2  # what a cell says; the owner writes SENT, the reader HELD and then FREE


def available() -> bool:
    """Whether processes can share memory here.

    Linux has the locks and the directory. On x86-64 a byte that is stored after data were read or written is seen after
    them by everybody, on which the cells rely: other processors would need fences, which Python does not have.
    """
    return sys.platform == "linux" and os.uname().machine == "x86_64" and os.access(DIRECTORY, os.W_OK | os.X_OK)


def room() -> tuple[float, float]:
    """How large /dev/shm is, and how much of that is free, in bytes; infinite if it has no limit.

    Raises:
        OSError: it is not there.
    """
    status = os.statvfs(DIRECTORY)
    if not status.f_blocks:
        return float("inf"), float("inf")
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


class Presence:
    """This process's control file. Locked until nothing refers to this object any more, also if it is closed before.

    Args:
        job: the job's name, a part of the file's.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, job: str) -> None:
        self.inherited = False  # in a child after fork: all that is here is the parent's
        self.name, self._fd = _locked_file(job)
        self._unlock = weakref.finalize(self, os.close, self._fd)
        self._unlink = weakref.finalize(self, _remove_own, self.name, os.getpid())
        os.posix_fallocate(self._fd, 0, CONTROL)
        # Opened again: a mapping keeps what it was made from open, and with that the lock, even in a forked child.
        fd = os.open(DIRECTORY / f"{self.name}.0", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            control = mmap.mmap(fd, CONTROL)
        finally:
            os.close(fd)
        self.nonce = secrets.token_bytes(NONCE)
        control[:NONCE] = self.nonce
        self.cells = memoryview(control)[CELLS_AT:]
        _presences.add(self)

    def unlink(self) -> None:
        """Remove the files. Whoever has mapped them keeps what they hold."""
        self._unlink()

    def disown(self) -> None:
        """In a child after fork: do not keep the parent's lock alive."""
        self.inherited = True
        if self._unlock.detach() is not None:
            os.close(self._fd)


_presences: weakref.WeakSet[Presence] = weakref.WeakSet()


def _after_fork() -> None:
    for presence in list(_presences):
        presence.disown()
    _presences.clear()


os.register_at_fork(after_in_child=_after_fork)


class Reader:
    """Somebody else's presence, as whoever sends to it sees it.

    Raises:
        WireError: there is no such presence here.
    """

    def __init__(self, name: str, nonce: bytes) -> None:
        fd, _ = open_control(name, nonce)
        self._fd = fd
        self._gone = False
        weakref.finalize(self, os.close, fd)

    def lives(self) -> bool:
        """Whether that process may still hold what was sent to it. Once it may not, it never may again."""
        self._gone = self._gone or not _is_locked(self._fd)
        return not self._gone


def create(name: str, number: int, nbytes: int) -> int:
    """Make a chunk of an own arena, with all its memory; return the descriptor.

    Raises:
        OSError: there is no room. Better now than a SIGBUS when somebody writes to it.
    """
    if nbytes > room()[1]:  # at once: posix_fallocate would fill it up to find out
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    path = DIRECTORY / f"{name}.{number}"
    fd = _make(path)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        path.unlink()
        raise
    return fd


def open_peers(name: str, number: int) -> tuple[int, int]:
    """Open a file of another process's arena, whose name came from the wire; return the descriptor and its size.

    Raises:
        WireError: the name is none of an arena, or the file is not one that a process of this user has made.
    """
    if not NAME.fullmatch(name):
        raise WireError("a name that no shared memory has")
    try:
        fd = os.open(DIRECTORY / f"{name}.{number}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        require_systems(exc)
        raise WireError(f"shared memory {name}.{number} cannot be opened: {exc.strerror}") from None
    info = os.fstat(fd)
    if not _is_own(info) or info.st_blocks * 512 < info.st_size:  # reading a hole in a full directory is a SIGBUS
        os.close(fd)
        raise WireError(f"shared memory {name}.{number} is not a file that this user's processes make")
    return fd, info.st_size


def open_control(name: str, nonce: bytes) -> tuple[int, int]:
    """Open another process's control file, and make sure by its nonce that it is the one that was meant.

    Raises:
        WireError: it is not.
    """
    fd, size = open_peers(name, 0)
    if size != CONTROL or len(nonce) != NONCE or os.pread(fd, NONCE, 0) != nonce:
        os.close(fd)
        raise WireError(f"shared memory {name} is not the one that was announced")
    return fd, size


def exists(name: str) -> bool:
    """Whether the owner of an arena still sends from it."""
    return (DIRECTORY / f"{name}.0").exists()


def sweep() -> list[str]:
    """Remove the arenas of this user whose owner is dead; return the names of those. Takes no link for a file."""
    found = _own_files()
    return [name for name in sorted(found) if _remove_dead(name, found[name])]


def _own_files() -> dict[str, list[str]]:
    """This user's files by the names of their arenas. Looks once: others may have put any number beside them."""
    found: dict[str, list[str]] = {}
    with suppress(OSError), os.scandir(DIRECTORY) as entries:
        for entry in entries:
            match = _FILE.fullmatch(entry.name)
            if match is not None and int(match["uid"]) == os.getuid():
                with suppress(FileNotFoundError):
                    if _is_own(entry.stat(follow_symlinks=False)):
                        found.setdefault(match["name"], []).append(entry.name)
    return found


def _remove_dead(name: str, files: list[str]) -> bool:
    fd = -1
    try:
        # The owner makes the control file first and removes it last: chunks without one are nobody's.
        with suppress(FileNotFoundError):
            fd = os.open(DIRECTORY / f"{name}.0", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            if not _is_own(os.fstat(fd)) or _is_locked(fd, fcntl.LOCK_EX):
                return False
        return _remove(files)
    except OSError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)


def _remove(files: list[str]) -> bool:
    """Remove an arena's files, the control file last; return whether any was there."""
    removed = False
    for file in sorted(files, key=lambda file: -int(file.rpartition(".")[2])):
        with suppress(FileNotFoundError):
            (DIRECTORY / file).unlink()
            removed = True
    return removed


def _remove_own(name: str, pid: int) -> None:
    """Remove the files of this process's arena; a child after fork leaves its parent's alone."""
    if os.getpid() == pid:
        _remove(_own_files().get(name, []))


def _locked_file(job: str) -> tuple[str, int]:
    """Make and lock a control file; return the name and the descriptor that the lock is on."""
    while True:
        name = f"kvstore-{os.getuid()}-{job}-{os.getpid()}-{secrets.token_hex(8)}"
        path = DIRECTORY / f"{name}.0"
        fd = _make(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return name, fd
        except BlockingIOError:
            pass  # somebody sweeps, and came between the making and the locking: the file is theirs
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        path.unlink(missing_ok=True)
        os.close(fd)


def _make(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
    os.fchmod(fd, MODE)  # whatever the umask says
    return fd


def _is_own(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid() and stat.S_IMODE(info.st_mode) == MODE


def _is_locked(fd: int, kind: int = fcntl.LOCK_SH) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    if kind == fcntl.LOCK_SH:
        fcntl.flock(fd, fcntl.LOCK_UN)
    return False
