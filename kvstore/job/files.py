"""Files that are replaced whole or not at all, even if the power fails; manifests; secrets; files of others."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import CheckpointError, ConfigError

# Errors of file systems that cannot sync directories. Their own journal, if any, decides when names are on the disk.
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
_OS_ERROR = re.compile(r"\(os error (\d+)\)$")
_MXNET_ARRAYS = 0x112.to_bytes(8, "little")  # then 8 bytes of zeros: NDArray::Save of a list


@contextmanager
def replacing(path: Path, mode: int = 0o666, *, durable: bool = True) -> Iterator[Path]:
    """Replace or create ``path`` with what the block writes to the file that it gets.

    Whenever the process is killed or the power fails, ``path`` holds the old content or the new one, never a part of
    it. When the block has ended, the new content is on the disk.

    Args:
        path: the file; its directory must exist.
        mode: permissions of the new file, less the umask.
        durable: whether to wait until the new content is on the disk.

    Yields:
        An empty file in the same directory. It is removed if anything raises, ``KeyboardInterrupt`` included.

    Raises:
        OSError: the file cannot be created, written to the disk or put in place. It names ``path``, also where a
            library that wrote the file has not.
    """
    draft = path.parent / f".{path.name}.{secrets.token_hex(8)}.part"
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
        yield draft
        if durable:
            _sync_file(draft)  # first, or the new name could reach the disk before the content
        draft.replace(path)
        if durable:
            sync_directory(path.parent)
    except OSError as exc:
        if exc.errno is None or exc.filename not in (None, f"{draft}", draft):
            raise
        raise OSError(exc.errno, exc.strerror, f"{path}") from exc
    except Exception as exc:  # libraries in Rust, such as safetensors, have errors of their own for a full disk
        if (code := _OS_ERROR.search(str(exc))) is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), f"{path}") from exc
    finally:
        draft.unlink(missing_ok=True)


def foreign_format(path: str | os.PathLike[str]) -> str | None:
    """Return what a file of another library is, and what to do with it; None if it is none that is known.

    For files that could not be read: users of MXNet pass its files, which are not damaged.
    """
    try:
        require_plain(Path(path))
        with Path(path).open("rb") as file:
            start = file.read(16)
    except (OSError, CheckpointError):
        return None
    if start[8:9] == b"{":  # safetensors, whose length of header may begin like the others
        return None
    if start == _MXNET_ARRAYS + bytes(8):
        return (
            f"a file of MXNet's arrays (.params), not of safetensors. kv.read_checkpoint({os.fspath(path)!r}) has the "
            "arrays by MXNet's names: give them to model.load_state_dict, by the model's own names"
        )
    if start[:1] == b"\x80" or start.startswith((b"(dp", b"(lp", b"}q")):
        return (
            "a pickle, as MXNet's .states are, and torch.save's files were. Pickles are not read, because they can run "
            "any code. Begin with the weights, and with new states; kv.read_checkpoint has the arrays of MXNet's states"
        )
    if start.startswith(b"PK"):
        return (
            "an archive of torch.save, or of numpy.savez (MXNet 2's arrays), not of safetensors. Load it with "
            "torch.load or numpy.load, and give the weights to model.load_state_dict"
        )
    return None


def require_plain(path: Path) -> None:
    """Refuse what is no plain file: a pipe would be waited for, and a device read for ever.

    Raises:
        CheckpointError: it is something else.
        OSError: it is not there, or cannot be looked at.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path}: damaged: it is no plain file")


def read_secret(path: Path, what: str, most: int) -> bytes:
    """Return at most so many bytes of a file with ``what``, which nobody but its owner may open."""
    with path.open("rb") as file:
        # Of the open file: the name could stand for another file by the time that it is opened.
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise ConfigError(f"{path} has {what}, and others may open it: chmod 600 {path}")
        return file.read(most)


def read_manifest(path: Path, most: int, what: str) -> bytes:
    """Return the bytes of a manifest, without which its folder is no ``what``, at most ``most``."""
    try:
        require_plain(path)
        if path.stat().st_size > most:
            raise CheckpointError(f"{path}: damaged: a manifest has at most {most} bytes")
        return path.read_bytes()
    except OSError as exc:
        raise CheckpointError(f"{path}: missing or unreadable ({exc.strerror}): {path.parent} is no {what}") from None


def _sync_file(path: Path) -> None:
    # Opened only now: the writer may have put another file under this name, as safetensors does.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Have the names in the directory ``path`` on the disk, where the file system can say so."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # the directory may be written to but not read, and only what can be opened can be synced
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in _REFUSED:
            raise
    finally:
        os.close(fd)
