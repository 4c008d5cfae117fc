"""How agents that a cluster manager has started find launch.py: a ticket in their environment, and their rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.errors import ConfigError

ENLIST = "KVSTORE_ENLIST"
# How a manager tells a process which one it is: Open MPI, MPICH and its kin, Slurm, and SGE, which counts from 1.
_RANKS = (("OMPI_COMM_WORLD_RANK", 0), ("PMIX_RANK", 0), ("PMI_RANK", 0), ("SLURM_PROCID", 0), ("SGE_TASK_ID", 1))


@dataclass(frozen=True)
class Ticket:
    """What lets an agent in. A secret: whoever has it can be an agent of the job.

    Args:
        endpoint: where launch.py listens, as `tcp://address:port`.
        server_key: launch.py's public key.
        public, secret: the agents' key pair.
    """

    endpoint: str
    server_key: str
    public: str
    secret: str = field(repr=False)

    @property
    def text(self) -> str:
        """As the environment carries it."""
        return " ".join((self.endpoint, self.server_key, self.public, self.secret))

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """Raises: ConfigError: it is no ticket; the message does not show it."""
        words = text.split()
        if len(words) != 4 or not words[0].startswith("tcp://") or any(len(key) != 40 for key in words[1:]):
            raise ConfigError(f"{ENLIST} is not what launch.py has made; agents are started by it alone")
        return cls(*words)


def rank(environ: Mapping[str, str]) -> int:
    """Which of its manager's processes this is, counted from 0; -1 if the manager does not say."""
    for name, first in _RANKS:
        text = environ.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text) - first
    return -1
