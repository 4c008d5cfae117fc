"""CIFAR-10's archive: downloaded, checked and unpacked once per host."""

from __future__ import annotations

import fcntl
import hashlib
import queue
import shutil
import sys
import tarfile
import threading
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.request import urlopen

from cifar.cifar10 import FILES
from cifar.images import DataError
from kvstore.job.files import replacing

FOLDER = "cifar-10-batches-bin"  # in the archive, and in the data folder
CONNECT_S = 5.0  # to connect, and for any one read
ANSWER_S = 10.0  # until the server answers, looking up its name included


class UnavailableError(DataError):
    """The data set is missing, and cannot be downloaded."""


@dataclass(frozen=True)
class Source:
    """The URL of the archive, and its MD5 sum."""

    url: str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    md5: str = "c32a1d4ab5d03f1284b67883e8d13530"

    @property
    def file(self) -> str:
        """The archive's name."""
        return self.url.rpartition("/")[2]


def find_or_fetch(data_dir: Path, source: Source | None = None) -> Path:
    """Return the folder with CIFAR-10's files, after downloading or unpacking them if they are missing."""
    source = source or Source()
    for folder in (data_dir, data_dir / FOLDER):
        if _complete(folder):
            return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _fetch_once(data_dir, folder, source)
    except (OSError, HTTPException) as exc:
        raise UnavailableError(f"not in {data_dir}, and {source.url} cannot be had: {exc}") from exc
    return folder


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _fetch_once(data_dir: Path, folder: Path, source: Source) -> None:
    """Fetch under a lock. A worker that had to wait takes the result, or the error, of the one that fetched."""
    with (data_dir / f".{source.file}.lock").open("a+") as lock:
        waited = False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waited = True
        if _complete(folder):
            return
        lock.seek(0)
        if waited and (failure := lock.read()):
            raise OSError(failure)
        lock.truncate(0)
        try:
            _fetch(data_dir / source.file, folder, source)
        except (OSError, HTTPException) as exc:
            lock.write(str(exc))
            raise


def _fetch(archive: Path, folder: Path, source: Source) -> None:
    if not archive.exists():
        with replacing(archive) as part:
            _download(source.url, part)
            _check(part, source)
    else:
        _check(archive, source)
    _unpack(archive, folder)


def _download(url: str, path: Path) -> None:
    with _open(url) as answer, path.open("wb") as file:
        print(f"downloading {url}", file=sys.stderr, flush=True)
        shutil.copyfileobj(answer, file, 1 << 20)


def _open(url: str) -> IO[bytes]:
    """Open a URL like urlopen, with a limit that also covers the look-up of the host: offline that takes a minute."""
    answers: queue.SimpleQueue[IO[bytes] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(urlopen(url, timeout=CONNECT_S))  # noqa: S310
        except Exception as exc:
            answers.put(exc)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=ANSWER_S)
    except queue.Empty:
        raise TimeoutError(f"no answer within {ANSWER_S:g} s") from None
    if isinstance(answer, HTTPError):
        answer.close()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _check(archive: Path, source: Source) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with archive.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != source.md5:
        raise OSError(f"{archive} has the MD5 sum {digest.hexdigest()}, not the published {source.md5}")


def _unpack(archive: Path, folder: Path) -> None:
    """Extract only CIFAR-10's files from the archive, each by its exact name."""
    wanted = {f"{FOLDER}/{name}": folder / name for name in FILES}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.isreg() and (path := wanted.pop(member.name, None)):
                    with tar.extractfile(member) as inside, replacing(path) as part, part.open("wb") as file:
                        shutil.copyfileobj(inside, file)
    except (tarfile.TarError, EOFError) as exc:
        raise OSError(f"{archive} cannot be unpacked: {exc}") from exc
    if wanted:
        raise OSError(f"{archive} lacks {', '.join(wanted)}")
