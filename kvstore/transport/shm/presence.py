"""A process's presence in /dev/shm: a locked file that shows that it lives, and the rules for the files beside it.

An arena is ``name.0``, the control file, and the chunks ``name.1``, ``name.2``, ... Its owner holds a lock on the
control file. The kernel releases the lock when the process is gone, however it ended. So the lock shows who lives where
pids
cannot: across containers, and after a pid is used again. Pure standard library, because the launcher sweeps.
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
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.errors import WireError
from kvstore.transport.system_errors import require_systems

DIRECTORY = Path("/dev/shm")  # noqa: S108 (names are random, files are made with O_EXCL and mode 0600)
MODE = 0o600
REMOVING_S = 1.0  # so long the removal of a few files may take
NAME = re.compile(r"kvstore-(?P<uid>[0-9]{1,10})-[A-Za-z0-9_.-]{1,40}-[0-9]{1,10}-[0-9a-f]{16}")
_FILE = re.compile(rf"(?P<name>{NAME.pattern})\.[0-9]{{1,5}}")

# The control file: a nonce, then from the second page on a byte for each reference that is out.
NONCE = 16
CELLS_AT = 4096
CELLS = 1 << 16  # references out at once; with none left, frames go through the socket, as without shared memory
CONTROL = CELLS_AT + CELLS
# What a cell says, its only writer, and what follows:
#
#     FREE   the reader   the owner may use cell and block again
#     SENT   the owner    the reference is on its way, or the reader has not looked yet; ``drain`` waits for these
#     HELD   the reader   the reader has a view; it outlives the link, and the owner if need be
#
# Each state has one writer, so no two processes ever write a cell at once. If the reader is killed in SENT or HELD,
# nobody writes FREE: the owner finds its lock released (``PeerPresence.lives``), and writes it in its place.
FREE, SENT, HELD = 0, 1, 2


def available() -> bool:
    """Whether processes can share memory here.

    Linux has the locks and the directory. On x86-64 a byte that is stored after data were read or written is seen after
    them by everybody, on which the cells rely: other processors would need fences, which Python does not have.
    """
    return sys.platform == "linux" and os.uname().machine == "x86_64" and os.access(DIRECTORY, os.W_OK | os.X_OK)


def room() -> tuple[float, float]:
    """Return how large /dev/shm is, and how much of that is free, in bytes; infinite if it has no limit."""
    status = os.statvfs(DIRECTORY)
    if not status.f_blocks:
        return float("inf"), float("inf")
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


class Presence:
    """This process's control file. It stays locked until nothing refers to this object, even if it is closed before."""

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
        disown_in_children(self)

    def unlink(self) -> None:
        """Remove the files. Processes that have mapped them keep their views."""
        self._unlink()

    def disown(self) -> None:
        """In a child after fork: do not keep the parent's lock alive."""
        self.inherited = True
        if self._unlock.detach() is not None:
            os.close(self._fd)


_of_the_parent: weakref.WeakSet[Any] = weakref.WeakSet()


def disown_in_children(thing: Any) -> None:
    """Have ``thing.disown()`` called in a child after fork, as long as ``thing`` exists."""
    _of_the_parent.add(thing)


def _after_fork() -> None:
    for thing in list(_of_the_parent):
        thing.disown()
    _of_the_parent.clear()


os.register_at_fork(after_in_child=_after_fork)


class OwnerGoneError(WireError):
    """The arena of a peer is not there: the peer has ended since, as readers do at any time. Nothing is wrong."""


class PeerPresence:
    """Another process's presence, as its sender sees it; ``WireError`` says that it is not on this host."""

    def __init__(self, name: str, nonce: bytes) -> None:
        self._fd = open_control(name, nonce)
        self._gone = False
        weakref.finalize(self, os.close, self._fd)

    def lives(self) -> bool:
        """Whether that process may still hold what was sent to it. Once False, it stays False."""
        self._gone = self._gone or not _is_locked(self._fd)
        return not self._gone


def create(name: str, number: int, nbytes: int) -> int:
    """Make a chunk of an own arena, with all its memory; return the descriptor.

    Raises:
        OSError: /dev/shm is full. That is better than a SIGBUS when somebody writes.
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


def remove_chunk(name: str, number: int, memory: mmap.mmap) -> None:
    """Remove a chunk of an own arena, to which there are no references, and its pages: readers have mapped it, too."""
    memory.madvise(mmap.MADV_REMOVE)
    (DIRECTORY / f"{name}.{number}").unlink(missing_ok=True)


def open_peers(name: str, number: int) -> tuple[int, int]:
    """Open a file of another process's arena, whose name came from the wire; return the descriptor and its size.

    Raises:
        OwnerGoneError: it is the control file, and not there any more.
        WireError: the name is not an arena's, or no process of this user has made the file.
    """
    if not NAME.fullmatch(name):
        raise WireError(f"{name[:80]!r} is not the name of an arena")
    try:
        fd = os.open(DIRECTORY / f"{name}.{number}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        require_systems(exc)
        if isinstance(exc, FileNotFoundError) and not number:  # the owner removes it last
            raise OwnerGoneError(f"shared memory {name} is gone, with the process that has announced it") from None
        raise WireError(f"shared memory {name}.{number} cannot be opened: {exc.strerror}") from None
    info = os.fstat(fd)
    if not _is_own(info) or info.st_blocks * 512 < info.st_size:  # reading a hole in a full directory is a SIGBUS
        os.close(fd)
        raise WireError(f"shared memory {name}.{number} is not a file that this user's processes make")
    return fd, info.st_size


def open_control(name: str, nonce: bytes) -> int:
    """Open another process's control file, and check by its nonce that it is the announced one."""
    fd, size = open_peers(name, 0)
    if size != CONTROL or len(nonce) != NONCE or os.pread(fd, NONCE, 0) != nonce:
        os.close(fd)
        raise WireError(f"shared memory {name} is not the one that was announced")
    return fd


def make_shared(name: str) -> int:
    """Use files ``name.0``, ``name.1``, ... together with other processes; return what ``remove_shared`` takes.

    They are there as long as one of these processes has not removed them and lives.

    Raises:
        OSError: there is no room, they are somebody else's, or a process that removes them is stopped.
    """
    until = time.monotonic() + REMOVING_S
    while True:
        fd = own_file(f"{name}.0")
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return fd
        except BlockingIOError:  # somebody is removing it
            if time.monotonic() >= until:
                os.close(fd)
                raise
            time.sleep(0.001)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def remove_shared(name: str, fd: int) -> None:
    """Stop to use files; remove them if nobody else uses them."""
    try:
        if not _is_locked(fd, fcntl.LOCK_EX) and os.fstat(fd).st_nlink:
            _remove(_own_files().get(name, []))
    finally:
        os.close(fd)


def own_file(file: str) -> int:
    """Open a file of this user's in the directory, or make it; OSError if somebody else has made it."""
    path = DIRECTORY / file
    while True:
        with suppress(FileExistsError):
            return _make(path)
        with suppress(FileNotFoundError):  # it has been removed between the two
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            break
    if not _is_own(os.fstat(fd)):
        os.close(fd)
        raise PermissionError(errno.EACCES, f"{path} is not a file that this user's processes make")
    return fd


def exists(name: str, number: int = 0) -> bool:
    return (DIRECTORY / f"{name}.{number}").exists()


def sweep() -> list[str]:
    """Remove this user's arenas whose owners are dead; return their names. Symbolic links are left alone."""
    files = _own_files()
    return [name for name in sorted(files) if _remove_dead(name, files[name])]


def _own_files() -> dict[str, list[str]]:
    """This user's files, by arena. Scans the directory once: it may hold any number of other files."""
    files: dict[str, list[str]] = {}
    with suppress(OSError), os.scandir(DIRECTORY) as entries:
        for entry in entries:
            match = _FILE.fullmatch(entry.name)
            if match is not None and int(match["uid"]) == os.getuid():
                with suppress(FileNotFoundError):
                    if _is_own(entry.stat(follow_symlinks=False)):
                        files.setdefault(match["name"], []).append(entry.name)
    return files


def _remove_dead(name: str, files: list[str]) -> bool:
    control = f"{name}.0"
    fd = -1
    try:
        # The owner makes the control file first and removes it last: chunks without one are nobody's. It is made, for
        # files that processes share have the same names each time: without the lock these might be new ones.
        if control in files:
            fd = os.open(DIRECTORY / control, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        else:
            fd = own_file(control)
        if not _is_own(os.fstat(fd)) or _is_locked(fd, fcntl.LOCK_EX) or not os.fstat(fd).st_nlink:
            return False
        return _remove([*files, control])
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
    if os.getpid() == pid:
        _remove(_own_files().get(name, []))


def _locked_file(job: str) -> tuple[str, int]:
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
