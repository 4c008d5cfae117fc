"""The keys of a job: a pair for each process, so that nobody else can join it. The values are secrets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvstore.job.curve_keys import VARIABLES, pair

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
        return cls({member: pair() for member in members})

    def variables(self, role: str, rank: int) -> dict[str, str]:
        """What that member has to know: its own secret, and everybody's public key."""
        everybody = ",".join(public for public, _ in self.pairs.values())
        return dict(zip(VARIABLES, (self.pairs[role, rank][1], self.pairs[ROOT][0], everybody), strict=True))
