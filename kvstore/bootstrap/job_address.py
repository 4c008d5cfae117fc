"""What the ranks of a job have to know of it: its address, and the keys of its members. No I/O.

Rank 0 tells all others the address in the clear; nothing in it is secret. The keys are not told. Each process derives
them from a secret that all have been given (``KVSTORE_JOB_SECRET``) and from the job's name. So a process without the
secret can neither read along nor join, whatever network the address was told over.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from kvstore.errors import ConfigError
from kvstore.job.config import Config, job_name
from kvstore.job.contract import Contract, members
from kvstore.job.curve_keys import Keyring
from kvstore.job.settings import MAX_NODES

LEAST_SECRET = 32  # characters; there is nothing else between the network and the job
MOST_SERVERS = 2  # by default: they all are on rank 0's host
MAX_URI = 255  # characters; no name of a host is longer, nor is the path of a unix socket


@dataclass(frozen=True)
class JobAddress:
    """Where a job is, and, for each aggregator, the ranks of its host's workers. The first of them starts it."""

    uri: str
    port: int
    servers: int
    job: str
    aggregated: list[list[int]] = field(default_factory=list)

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> JobAddress:
        """Return the address in ``text``, which may come from anyone; ConfigError for a text that is none."""
        try:
            address = cls(**json.loads(text))
        except (TypeError, ValueError, RecursionError):
            raise ConfigError(f"expected the address of the job from rank 0, got {text[:200]!r}") from None
        if not address._possible():
            raise ConfigError(f"the address of the job that rank 0 told has impossible fields: {text[:200]!r}")
        return address

    def _possible(self) -> bool:
        """Whether a job could have this address. Nothing else may cost memory, or be passed to the system."""
        kinds = ((self.uri, str), (self.port, int), (self.servers, int), (self.job, str))
        return (
            all(type(value) is kind for value, kind in kinds)
            and 0 < len(self.uri) <= MAX_URI
            and "\0" not in self.uri
            and 0 <= self.port < 65536
            and 0 < self.servers <= MAX_NODES
            and self.job == job_name(self.job) != ""
            and type(self.aggregated) is list
            and all(map(_rising, self.aggregated))
        )

    def aggregator_beside(self, rank: int) -> int:
        """Return which aggregator the process of worker ``rank`` starts; -1 for none."""
        return next((aggregator for aggregator, ranks in enumerate(self.aggregated) if ranks[0] == rank), -1)

    def contract(self, workers: int, secret: str = "", root_fd: int = -1) -> Contract:
        """What the members of the job are told of it."""
        everyone = members(workers, self.servers, len(self.aggregated))
        keyring = Keyring.derived(secret, self.job, everyone) if secret else None
        return Contract(
            workers,
            self.servers,
            self.uri,
            self.port,
            self.job,
            root_fd=root_fd,
            keyring=keyring,
            aggregated=self.aggregated,
        )


def _rising(ranks: object) -> bool:
    """Whether these are ranks of several workers, in order."""
    return (
        type(ranks) is list
        and len(ranks) > 1
        and all(type(rank) is int and 0 <= rank < MAX_NODES for rank in ranks)
        and ranks == sorted(set(ranks))
    )


def require_safe(config: Config, one_host: bool) -> str:
    """The secret that keys are made from; empty where links need none. ConfigError: it is missing or too short."""
    if one_host or not config.encryption:
        return ""
    if len(config.job_secret) >= LEAST_SECRET:
        return config.job_secret
    what = "is too short" if config.job_secret else "is not set"
    raise ConfigError(
        f"the processes may be on several hosts, and KVSTORE_JOB_SECRET {what}: set it to the same text of at least "
        f"{LEAST_SECRET} characters for all of them (openssl rand -hex 32), so that links are encrypted and nobody "
        "else can join. KVSTORE_ENCRYPTION=0 does without, on a network that you trust; launch.py makes keys by itself"
    )
