"""Where a running job is observed, and how this user's jobs are found: by a file in the job's private directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvstore.errors import ConfigError
from kvstore.job.address import tcp_endpoint
from kvstore.job.curve_keys import CurveKeys, with_key
from kvstore.job.directory import launcher_of, private_directories, require_private
from kvstore.job.keyring import ROOT, Keyring
from kvstore.job.place import JobPlace

FILE = "observe.json"  # in the private directory
MAX_COMMAND = 1000  # characters of a command that are kept


@dataclass(frozen=True)
class ObservingPlace(JobPlace):
    """What an observer must know of a job, and what is known of the job before anybody is asked.

    Attributes:
        job: its name.
        command: what its workers run.
        launcher: what has started it: ``local``, ``ssh``, ``torchrun``.
        pid: of the process that has started it.
        started: when, in seconds since 1970.
        workers, servers: how many the job has.
    """

    ROLE: ClassVar[str] = "observer"
    VERB: ClassVar[str] = "observed"
    MADE_BY: ClassVar[str] = "`launch.py`"

    job: str = ""
    command: str = ""
    launcher: str = ""
    pid: int = 0
    started: float = 0.0
    workers: int = 0
    servers: int = 0

    def curve_keys(self, root_key: str) -> CurveKeys:
        """See ``JobPlace``."""
        return CurveKeys.of_observer(self.key, root_key)


def address_and_key(uri: str, port: int, keyring: Keyring | None) -> tuple[str, str]:
    """Return the scheduler's address and the observers' secret key, for ``ObservingPlace``.

    Args:
        uri, port: the scheduler's; ``ipc://`` and a path, with port 0, on one host.
        keyring: of the job; None where links have no keys.
    """
    address = uri if uri.startswith("ipc://") else tcp_endpoint(uri, port)
    if keyring is None or keyring.observer is None or uri.startswith("ipc://"):
        return address, ""
    return with_key(address, keyring.pairs[ROOT][0]), keyring.observer[1]


def running_jobs(roots: Iterable[Path]) -> Iterator[tuple[Path, ObservingPlace | ConfigError]]:
    """Find this user's jobs on this host.

    Only directories that belong to this user alone are trusted, and only those whose launcher is alive.

    Args:
        roots: where private directories are made.

    Yields:
        The private directory of each job, and its place, or why that cannot be read.
    """
    for root in dict.fromkeys(roots):
        for directory in private_directories(root):
            if not (directory / FILE).exists() or not launcher_of(directory).lives:
                continue
            try:
                require_private(directory, follow_symlinks=False)
                yield directory, ObservingPlace.read(directory / FILE)
            except ConfigError as error:
                yield directory, error
