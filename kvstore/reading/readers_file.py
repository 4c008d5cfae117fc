"""Where a job is read: the scheduler's address, the readers' key, and the file that has both.

Whoever can read the file can read all values of the job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvstore.errors import ConfigError
from kvstore.job.curve_keys import CurveKeys
from kvstore.job.place import JobPlace
from kvstore.job.settings import READ_FROM, READ_KEY, TRANSPORT


@dataclass(frozen=True)
class ReadingPlace(JobPlace):
    """Where a job is, and the key to read it."""

    ROLE: ClassVar[str] = "reader"
    VERB: ClassVar[str] = "read"
    MADE_BY: ClassVar[str] = "`launch.py --readers FILE`"

    def curve_keys(self, root_key: str) -> CurveKeys:
        return CurveKeys.of_reader(self.key, root_key)


def find(address: str | os.PathLike[str] | None, key: str | None, env: Mapping[str, str]) -> ReadingPlace:
    """Return where to read, from the arguments of ``connect`` and, where they say nothing, the environment.

    Raises:
        ConfigError: nothing says where; or see ``ReadingPlace``.
    """
    given = os.fspath(address) if address is not None else READ_FROM.read(env)
    if not given:
        raise ConfigError(
            f"connect() does not know which job: give the file of `launch.py --readers FILE`, or set {READ_FROM.name}"
        )
    if "://" not in given:
        return ReadingPlace.read(Path(given))
    return ReadingPlace(given, READ_KEY.read(env) if key is None else key, TRANSPORT.read(env))
