"""Arguments of commands about running jobs: which job is meant, here or on another host, and how long to wait."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.job.directory import temporary_root
from kvstore.job.files import read_secret
from kvstore.job.place import FILE, ObservingPlace, running_jobs

LONGEST_KEY = 1 << 10  # bytes of a file with a key


class NoSuchJob(ConfigError):
    """No job runs here that is meant."""


def seconds(text: str) -> float:
    """Read a timeout from a command line."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.05 <= number <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0.05 to 86400")
    return number


def roots_here() -> list[Path]:
    """Return where private directories of jobs are: where this process would make its own, and where most do."""
    return [temporary_root(), Path("/tmp")]  # noqa: S108 (only directories of this user alone are trusted)


def jobs_here(roots: Iterable[Path]) -> tuple[list[ObservingPlace], list[str]]:
    """Return this user's jobs on this host, the latest first, and why others cannot be looked at."""
    places, refused = [], []
    for directory, found in running_jobs(roots):
        if isinstance(found, ObservingPlace):
            places.append(found)
        else:
            refused.append(f"{directory}: {found}")
    return sorted(places, key=lambda place: (-place.started, place.job)), refused


def place_named(wanted: str, places: Sequence[ObservingPlace]) -> ObservingPlace:
    """``wanted``: the pid of the process that has started the job, its name, its private directory, or a place file."""
    if os.sep in wanted:
        path = Path(wanted)
        return ObservingPlace.read(path / FILE if path.is_dir() else path)
    named = [place for place in places if wanted in (str(place.pid), place.job)]
    if len(named) != 1:
        kind = "no job" if not named else "more than one job"
        raise NoSuchJob(f"{kind} here is {wanted!r}; running: {listed(places)}")
    return named[0]


def listed(places: Sequence[ObservingPlace]) -> str:
    return ", ".join(f"{place.pid} ({place.job})" for place in places) or "none"


def place_at(address: str, key_file: Path | None) -> ObservingPlace:
    """``address``: ``tcp://host:port``, with ``?key=`` and the scheduler's public key if links are encrypted."""
    return ObservingPlace(address, "" if key_file is None else _key_in(key_file))


def _key_in(path: Path) -> str:
    try:
        return read_secret(path, "a secret key", LONGEST_KEY).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} has no key; valid: 40 characters of Z85") from None
