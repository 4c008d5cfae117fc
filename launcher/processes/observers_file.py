"""The file in a job's private directory that tells `kvstore-status`, and other observers, where the job is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.job.address import tcp_endpoint
from kvstore.job.curve_keys import ROOT, with_key
from kvstore.job.place import FILE, MAX_COMMAND, ObservingPlace, address_and_key
from kvstore.job.settings import TRANSPORT
from kvstore.reading.place import ReadingPlace
from launcher.errors import LaunchError
from launcher.job.description import Job
from launcher.job.tasks import Rendezvous


def observing_place(job: Job, at: Rendezvous, environ: Mapping[str, str], started: float) -> ObservingPlace:
    """Return what observers of the job that meets there must know.

    Args:
        started: when, in seconds since 1970.

    Raises:
        LaunchError: `KVSTORE_TRANSPORT` is not valid.
    """
    try:
        transport = TRANSPORT.read(environ)
    except ConfigError as error:
        raise LaunchError(str(error)) from None
    address, key = address_and_key(at.uri, at.port, at.keyring)
    command = " ".join(job.command)[:MAX_COMMAND]
    return ObservingPlace(
        *(address, key, transport),
        job=at.mark,
        command=command,
        launcher=at.cluster,
        pid=os.getpid(),
        started=started,
        workers=job.num_workers,
        servers=job.num_servers,
    )


def write_observers_file(directory: Path, job: Job, at: Rendezvous, environ: Mapping[str, str]) -> None:
    """Write the file into the job's private directory, with which it goes.

    Raises:
        LaunchError: it cannot be written, or a setting is not valid.
    """
    try:
        observing_place(job, at, environ, time.time()).write(directory / FILE, durable=False)
    except OSError as error:
        raise LaunchError(f"cannot write {directory / FILE}: {error.strerror}", exit_code=1) from None


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
