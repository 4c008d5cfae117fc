"""The keys of all members of one job, so that nobody else can join it. The values are secrets."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvstore.job.curve_keys import VARIABLES, pair
from kvstore.job.settings import OBSERVER_KEY, READER_KEY

ROOT = ("scheduler", 0)
READ_FROM = ("scheduler", "server", "standby")  # whom readers connect to


@dataclass(frozen=True)
class Keyring:
    """A CURVE key pair (http://curvezmq.org), in Z85, for every member of one job.

    Attributes:
        pairs: (role, rank) -> (public key, secret key).
        reader: the public and the secret key that all readers have; None for no readers.
        observer: those that all observers have; None for no observers.
    """

    pairs: Mapping[tuple[str, int], tuple[str, str]] = field(repr=False)
    reader: tuple[str, str] | None = field(default=None, repr=False)
    observer: tuple[str, str] | None = field(default=None, repr=False)

    @classmethod
    def random(cls, members: Iterable[tuple[str, int]], readers: bool = False) -> Keyring:
        """New keys, which only this process knows, observers' among them; with ``readers``, a pair for them, too."""
        return cls({member: pair() for member in members}, pair() if readers else None, pair())

    @classmethod
    def derived(cls, secret: str, job: str, members: Iterable[tuple[str, int]]) -> Keyring:
        """The keys that every process which knows ``secret`` makes for the job of that name."""
        pairs = {(role, rank): pair_of(secret, job, role, rank) for role, rank in members}
        return cls(pairs, observer=pair_of(secret, job, "observer", 0))

    def variables(self, role: str, rank: int) -> dict[str, str]:
        """What that member is told: its own secret key, the scheduler's public key, and everybody's.

        Those whom readers or observers connect to are told the public keys of these, too.
        """
        publics = ",".join(public for public, _ in self.pairs.values())
        own = dict(zip(VARIABLES, (self.pairs[role, rank][1], self.pairs[ROOT][0], publics), strict=True))
        if self.reader is not None and role in READ_FROM:
            own[READER_KEY.name] = self.reader[0]
        if self.observer is not None and (role, rank) == ROOT:
            own[OBSERVER_KEY.name] = self.observer[0]
        return own


def pair_of(secret: str, job: str, role: str, rank: int) -> tuple[str, str]:
    """The public and the secret key of one member: HMAC-SHA256 (RFC 2104) of the job's name, the role and the rank."""
    import zmq
    from zmq.utils import z85

    own = z85.encode(hmac.digest(secret.encode(), f"kvstore/{job}/{role}/{rank}".encode(), hashlib.sha256))
    return zmq.curve_public(own).decode(), own.decode()
