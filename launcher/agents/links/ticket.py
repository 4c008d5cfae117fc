"""The ticket by which an agent that a cluster manager has started finds launch.py. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.job import settings

ENLIST = settings.ENLIST.name


@dataclass(frozen=True)
class AgentTicket:
    """What an agent needs to connect to launch.py. It is a secret: any process that has it can be an agent of the job.

    Args:
        endpoint: the endpoint where launch.py listens: `tcp://address:port`.
        server_key: launch.py's public key.
        public, secret: the agents' key pair.
    """

    endpoint: str
    server_key: str
    public: str
    secret: str = field(repr=False)

    @property
    def text(self) -> str:
        """The ticket as the value of an environment variable."""
        return " ".join((self.endpoint, self.server_key, self.public, self.secret))

    @classmethod
    def parse(cls, text: str) -> AgentTicket:
        """Read a ticket.

        Raises:
            ConfigError: the text is not a ticket. The message does not show it.
        """
        words = text.split()
        if len(words) != 4 or not words[0].startswith("tcp://") or any(len(key) != 40 for key in words[1:]):
            raise ConfigError(f"{ENLIST} is not a ticket; only launch.py sets it, for its agents")
        return cls(*words)
