"""A job's private directory, which holds its unix sockets: where it is made, and when one is trusted."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError

# A unix socket's path has at most 107 bytes, 103 on macOS. Members of the job make theirs in the directory.
MAX_PATH = 103
_FOR_NAMES = 36
_RANDOM = 8  # characters that mkdtemp adds
_NAME = re.compile(r"kvstore-(?P<uid>\d+)-(?P<pid>\d+)-[^/]+")
_LOCK = "lock"


def temporary_root(wanted: Path | None = None) -> Path:
    """Where private directories are made: ``wanted``, by default TMPDIR; /tmp if sockets there had too long a name."""
    root = Path(tempfile.gettempdir()).absolute() if wanted is None else wanted
    length = len(os.fsencode(root / _prefix())) + _RANDOM
    return Path("/tmp") if length + _FOR_NAMES > MAX_PATH else root  # noqa: S108 (mkdtemp makes a private one there)


def make_private(root: Path) -> Path:
    """Make a directory in ``root`` that only this user can enter; ConfigError, with what to set, if that fails."""
    try:
        return Path(tempfile.mkdtemp(prefix=_prefix(), dir=root))
    except OSError as error:
        raise ConfigError(
            f"cannot make the job's private directory in {root}: {error.strerror}; "
            f"set TMPDIR to a writable directory with a name of at most {MAX_PATH - _FOR_NAMES - 40} bytes"
        ) from None


def require_private(directory: Path, *, follow_symlinks: bool = True) -> None:
    """ConfigError for a directory that another user may enter or may have put in the way."""
    try:
        status = directory.stat(follow_symlinks=follow_symlinks)
    except OSError as error:
        raise ConfigError(f"the directory of the job, {directory}, is not on this host: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{directory} must belong to this user alone (mode 0700) to hold the job's sockets")


@dataclass(frozen=True)
class JobLauncher:
    """The process, ``pid``, that has made a job's private directory."""

    directory: Path
    pid: int

    @property
    def lives(self) -> bool:
        """Whether it is alive. It may be in another container, with other pids; then it holds the directory's lock."""
        # Both, because neither is enough: a rank of torchrun holds no lock, and pids say nothing across containers.
        return _alive(self.pid) or self._locked()

    def _locked(self) -> bool:
        with suppress(OSError):
            fd = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(fd)
        return False


def lock(directory: Path) -> int:
    """Take the lock of a private directory that this process has made; return its descriptor, to close at the end."""
    fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def private_directories(root: Path) -> Iterator[Path]:
    """Yield what in ``root`` has the name of a private directory and is a directory of this user, not a link to one."""
    for path in root.glob(f"kvstore-{os.getuid()}-*"):
        if _NAME.fullmatch(path.name) is not None and _is_ours(path):
            yield path


def launcher_of(directory: Path) -> JobLauncher:
    """By the directory's name; ValueError if it is not that of a private directory."""
    match = _NAME.fullmatch(directory.name)
    if match is None:
        raise ValueError(f"expected the name of a job's private directory, got {directory.name!r}")
    return JobLauncher(directory, int(match["pid"]))


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


def _prefix() -> str:
    return f"kvstore-{os.getuid()}-{os.getpid()}-"
