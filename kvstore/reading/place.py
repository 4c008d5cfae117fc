"""Where a job is read: the scheduler's address, the readers' key, and the file that has both.

The file is JSON, and its owner's alone: whoever can read it can read all values of the job.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.job.config import Config, job_name
from kvstore.job.curve_keys import CurveKeys, is_key, split_key
from kvstore.job.files import replacing
from kvstore.job.settings import READ_FROM, READ_KEY, TRANSPORT, TRANSPORTS

VERSION = 1
MODE = 0o600
LONGEST = 1 << 16  # bytes of the file


@dataclass(frozen=True)
class ReadingPlace:
    """What a reader must know of a job.

    Attributes:
        address: of the scheduler: ``ipc://path``, or ``tcp://host:port``, with ``?key=`` and its public key if there
            are keys.
        key: the readers' secret key; empty where links have no keys.
        transport: see ``kvstore.job.settings.TRANSPORTS``; empty for that of the environment.
    """

    address: str
    key: str = field(default="", repr=False)
    transport: str = ""

    def __post_init__(self) -> None:
        bare, root_key = split_key(self.address)
        if not bare.startswith(("ipc://", "tcp://")):
            raise ConfigError(
                f"a job is read at ipc://path or tcp://host:port, not at {bare!r}; give the file that "
                "`launch.py --readers FILE` has written, or the scheduler's address"
            )
        if self.key and not is_key(self.key):
            raise ConfigError("the key of readers is not valid; valid: 40 characters of Z85 (it is not shown)")
        if bool(self.key) != bool(root_key) and bare.startswith("tcp://"):
            has, lacks = ("a key", "the address none") if self.key else ("none", f"the address {bare} one")
            raise ConfigError(
                f"readers have {has}, and {lacks}: where links are encrypted, both are needed, the scheduler's public "
                "key in the address (tcp://host:port?key=...), and the readers' secret key beside it"
            )

    def config(self, env: Mapping[str, str]) -> Config:
        """Return the settings of a reader, beside those of ``env``."""
        bare, root_key = split_key(self.address)
        inside = bare.startswith("ipc://")
        keys = None
        if self.key and not inside:
            keys = CurveKeys.of_reader(self.key, root_key)
        base = Config.from_env({name: value for name, value in env.items() if not name.startswith("DMLC_")})
        return dataclasses.replace(
            base,
            role="reader",
            root=bare if inside else self.address,
            transport=self.transport or base.transport,
            job=job_name(f"reader-{base.job}"),
            keys=keys,
            rank_hint=-1,
            root_fd=-1,
        )

    def write(self, path: Path) -> None:
        """Write the file, readable by its owner alone.

        Raises:
            OSError: it cannot be written.
        """
        with replacing(path, MODE) as draft:
            draft.write_text(json.dumps({"version": VERSION, **dataclasses.asdict(self)}) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ReadingPlace:
        """Read the file.

        Raises:
            ConfigError: it is not there, others may read or write it, or it is not such a file.
        """
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise ConfigError(f"{path} has a secret key, and others may open it: chmod 600 {path}")
                told: Any = json.loads(file.read(LONGEST))
        except OSError as exc:
            raise ConfigError(
                f"{path} cannot be read: {exc.strerror}; does the job run, with --readers {path}?"
            ) from None
        except ValueError:
            told = None
        fields = ("address", "key", "transport")
        if (
            not isinstance(told, dict)
            or told.get("version") != VERSION
            or not all(isinstance(told.get(name), str) for name in fields)
            or told["transport"] not in ("", *TRANSPORTS)
        ):
            raise ConfigError(f"{path} is not a file that this version's `launch.py --readers` has written")
        return cls(*(told[name] for name in fields))


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
