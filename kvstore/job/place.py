"""What a process outside of a job must know to talk to its scheduler, and the file that says it.

The file is JSON, and its owner's alone, for it may hold a secret key.
Observers find this user's jobs by that file in the private directory of each job.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from kvstore.errors import ConfigError
from kvstore.job.address import tcp_endpoint
from kvstore.job.config import Config, job_name
from kvstore.job.curve_keys import ROOT, CurveKeys, Keyring, is_key, split_key, with_key
from kvstore.job.directory import launcher_of, private_directories, require_private
from kvstore.job.files import read_secret, replacing
from kvstore.job.settings import TRANSPORTS

VERSION = 1
MODE = 0o600
LONGEST = 1 << 16  # bytes of the file

P = TypeVar("P", bound="JobPlace")


@dataclass(frozen=True)
class JobPlace:
    """The base class; each subclass is for one role outside the membership: readers, observers.

    Attributes:
        address: of the scheduler: ``ipc://path``, or ``tcp://host:port``, with ``?key=`` and its public key if there
            are keys.
        key: the secret key of the role; empty where links have no keys.
        transport: see ``kvstore.job.settings.TRANSPORTS``; empty for that of the environment.
    """

    ROLE: ClassVar[str]  # as members know it
    VERB: ClassVar[str]  # "a job is VERB at"
    MADE_BY: ClassVar[str]  # what writes the file

    address: str
    key: str = field(default="", repr=False)
    transport: str = ""

    def __post_init__(self) -> None:
        bare, root_key = split_key(self.address)
        who = f"{self.ROLE}s"
        if not bare.startswith(("ipc://", "tcp://")):
            raise ConfigError(
                f"a job is {self.VERB} at ipc://path or tcp://host:port, not at {bare!r}; give the file that "
                f"{self.MADE_BY} has written, or the scheduler's address"
            )
        if self.key and not is_key(self.key):
            raise ConfigError(f"the key of {who} is not valid; valid: 40 characters of Z85 (it is not shown)")
        if bool(self.key) != bool(root_key) and bare.startswith("tcp://"):
            has, lacks = ("a key", "the address none") if self.key else ("none", f"the address {bare} one")
            raise ConfigError(
                f"{who} have {has}, and {lacks}: where links are encrypted, both are needed, the scheduler's public "
                f"key in the address (tcp://host:port?key=...), and the {who}' secret key beside it"
            )

    def curve_keys(self, root_key: str) -> CurveKeys:
        raise NotImplementedError

    def config(self, env: Mapping[str, str]) -> Config:
        """The settings of a process of the role; ``env`` gives all that the place does not say."""
        bare, root_key = split_key(self.address)
        inside = bare.startswith("ipc://")
        keys = self.curve_keys(root_key) if self.key and not inside else None
        # A script that looks at a job may run inside another one, whose DMLC_* must not say where to go.
        base = Config.from_env({name: value for name, value in env.items() if not name.startswith("DMLC_")})
        return dataclasses.replace(
            base,
            role=self.ROLE,
            root=bare if inside else self.address,
            transport=self.transport or base.transport,
            job=job_name(f"{self.ROLE}-{base.job}"),
            keys=keys,
            rank_hint=-1,
            root_fd=-1,
        )

    def write(self, path: Path, *, durable: bool = True) -> None:
        """Write the file, readable by its owner alone; ``durable``: to outlive a loss of power."""
        with replacing(path, MODE, durable=durable) as draft:
            draft.write_text(json.dumps(self.described()) + "\n", encoding="utf-8")

    def described(self) -> dict[str, Any]:
        return {"version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def read(cls: type[P], path: Path) -> P:
        """ConfigError if it is not there, others may read or write it, or it is not such a file."""
        try:
            told: Any = json.loads(read_secret(path, "a secret key", LONGEST))
        except OSError as exc:
            raise ConfigError(
                f"{path} cannot be read: {exc.strerror}; does the job run? {cls.MADE_BY} writes it"
            ) from None
        except (ValueError, RecursionError):
            told = None
        kinds = {one.name: _KINDS[str(one.type)] for one in dataclasses.fields(cls)}
        if (
            not isinstance(told, dict)
            or told.get("version") != VERSION
            or not all(type(told.get(name)) in kind for name, kind in kinds.items())
            or told["transport"] not in ("", *TRANSPORTS)
        ):
            raise ConfigError(f"{path} is not a file that this version's {cls.MADE_BY} has written")
        return cls(**{name: told[name] for name in kinds})


_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}


FILE = "observe.json"  # in the private directory
MAX_COMMAND = 1000  # characters of a command that are kept


@dataclass(frozen=True)
class ObservingPlace(JobPlace):
    """What an observer must know of a job, and what is known of it before anybody is asked: ``pid`` of its starter."""

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
        return CurveKeys.of_observer(self.key, root_key)


def address_and_key(uri: str, port: int, keyring: Keyring | None) -> tuple[str, str]:
    """Return the scheduler's address and the observers' secret key; ``ipc://`` and a path, with port 0, on one host."""
    address = uri if uri.startswith("ipc://") else tcp_endpoint(uri, port)
    if keyring is None or keyring.observer is None or uri.startswith("ipc://"):
        return address, ""
    return with_key(address, keyring.pairs[ROOT][0]), keyring.observer[1]


def running_jobs(roots: Iterable[Path]) -> Iterator[tuple[Path, ObservingPlace | ConfigError]]:
    """Yield this user's jobs here: private directories whose launcher is alive, each with its place, or why not."""
    for root in dict.fromkeys(roots):
        for directory in private_directories(root):
            # A killed launcher leaves its directory behind: the file alone does not mean that a job runs.
            if not (directory / FILE).exists() or not launcher_of(directory).lives:
                continue
            try:
                require_private(directory, follow_symlinks=False)
                yield directory, ObservingPlace.read(directory / FILE)
            except ConfigError as error:
                yield directory, error
