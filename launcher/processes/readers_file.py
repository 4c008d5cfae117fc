"""The file of `--readers`, which tells readers where the job is, and has their key. It is there as long as the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.job.address import tcp_endpoint
from kvstore.job.curve_keys import with_key
from kvstore.job.keyring import ROOT
from kvstore.job.settings import TRANSPORT
from kvstore.reading.place import ReadingPlace
from launcher.errors import LaunchError
from launcher.job.description import Job
from launcher.job.tasks import Rendezvous


def place_of(at: Rendezvous, transport: str) -> ReadingPlace:
    """Return what readers of the job that meets there must know."""
    address = at.uri if at.uri.startswith("ipc://") else tcp_endpoint(at.uri, at.port)
    if at.keyring is None or at.keyring.reader is None:
        return ReadingPlace(address, "", transport)
    return ReadingPlace(with_key(address, at.keyring.pairs[ROOT][0]), at.keyring.reader[1], transport)


@contextmanager
def readers_file(job: Job, at: Rendezvous, environ: Mapping[str, str]) -> Iterator[None]:
    """Have the file of a job with readers there while the block runs.

    Raises:
        LaunchError: it cannot be written.
    """
    if job.cluster.readers is None:
        yield
        return
    path = Path(job.cluster.readers)
    try:
        place_of(at, TRANSPORT.read(environ)).write(path)
    except ConfigError as error:
        raise LaunchError(str(error)) from None
    except OSError as error:
        raise LaunchError(f"--readers: cannot write {path}: {error.strerror}", exit_code=1) from None
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
