"""The keys of a job: a pair for each process, so that nobody else can join it. The values are secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

ROOT = ("scheduler", 0)


@dataclass(frozen=True)
class Keyring:
    """CURVE keys (http://curvezmq.org) in Z85, of every member of one job.

    Args:
        pairs: (role, rank) -> (public key, secret key).
    """

    pairs: Mapping[tuple[str, int], tuple[str, str]] = field(repr=False)

    @classmethod
    def make(cls, members: Iterable[tuple[str, int]]) -> Keyring:
        """New ones."""
        import zmq  # only now: a job on one machine needs none

        return cls({member: _text(zmq.curve_keypair()) for member in members})

    def variables(self, role: str, rank: int) -> dict[str, str]:
        """What that member has to know: its own secret, and everybody's public key."""
        return {
            "KVSTORE_SECRET_KEY": self.pairs[role, rank][1],
            "KVSTORE_ROOT_KEY": self.pairs[ROOT][0],
            "KVSTORE_MEMBER_KEYS": ",".join(public for public, _ in self.pairs.values()),
        }


def _text(pair: tuple[bytes, bytes]) -> tuple[str, str]:
    return pair[0].decode("ascii"), pair[1].decode("ascii")
