"""The CURVE keys of a job's members, and how an address carries one.

Each process has a CURVE key pair (http://curvezmq.org). Keys are texts of 40 characters in Z85. A client must
know the public key of its listener, so a listener's address has it: ``tcp://10.0.0.1:5555?key=...``, percent-quoted.

A keyring has the keys of all members of one job, so that nobody else can join it. All secret keys are secrets.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from kvstore.cached import cached
from kvstore.errors import ConfigError
from kvstore.job.settings import MEMBER_KEYS, OBSERVER_KEY, READER_KEY, ROOT_KEY, SECRET_KEY

VARIABLES = (SECRET_KEY.name, ROOT_KEY.name, MEMBER_KEYS.name)
MARK = "?key="
LENGTH = 40
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


@dataclass(frozen=True)
class CurveKeys:
    """What one process knows of its job's keys.

    Attributes:
        secret: its own secret key; never shown.
        root: the scheduler's public key.
        members: the public keys of the whole job.
        reader: the public key of readers, which may connect, but are no members; empty where there are none.
        observer: the public key of observers; likewise.
        follows: whether this process connects to whatever listener it is told of, of which the scheduler is one.
    """

    secret: str = field(repr=False)
    root: str
    members: frozenset[str] = field(repr=False)
    reader: str = ""
    observer: str = ""
    follows: bool = False

    @classmethod
    def of_reader(cls, secret: str, root: str) -> CurveKeys:
        """``root`` is the scheduler's public key; the scheduler names the servers'."""
        import zmq

        return cls(secret, root, frozenset({root}), zmq.curve_public(secret.encode()).decode(), follows=True)

    @classmethod
    def of_observer(cls, secret: str, root: str) -> CurveKeys:
        """An observer connects to the scheduler alone; ``root`` is its public key."""
        import zmq

        return cls(secret, root, frozenset({root}), observer=zmq.curve_public(secret.encode()).decode())

    @property
    def guests(self) -> frozenset[str]:
        """The public keys of readers and observers, which may connect, but are no members."""
        return frozenset({self.reader, self.observer} - {""})

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> CurveKeys | None:
        """Read ``env``; None without any keys. Errors name variables, and show no values."""
        texts = {name: env.get(name, "").strip() for name in VARIABLES}
        if not any(texts.values()):
            return None
        missing = " and ".join(name for name, text in texts.items() if not text)
        if missing:
            given = " and ".join(name for name, text in texts.items() if text)
            raise ConfigError(f"{given} set without {missing}: set all three, as launch.py does, or none")
        secret, root, listed = texts.values()
        members = frozenset(listed.split(","))
        for name, keys in zip(VARIABLES, ({secret}, {root}, members), strict=True):
            if not all(map(is_key, keys)):
                raise ConfigError(
                    f"{name} is not valid; valid: {LENGTH} characters of Z85, with commas between keys of members"
                )
        if root not in members:
            raise ConfigError("KVSTORE_ROOT_KEY is not among KVSTORE_MEMBER_KEYS: they are of different jobs")
        guests = {name: env.get(name, "").strip() for name in (READER_KEY.name, OBSERVER_KEY.name)}
        for name, key in guests.items():
            if key and not is_key(key):
                raise ConfigError(f"{name} is not valid; valid: {LENGTH} characters of Z85")
        return cls(secret, root, members, guests[READER_KEY.name], guests[OBSERVER_KEY.name])

    @cached
    def public(self) -> str:
        """The public key of ``secret``; ConfigError if it is not the job's."""
        import zmq  # only now: settings are read without ZeroMQ

        public = zmq.curve_public(self.secret.encode()).decode()
        if public not in self.members | self.guests:
            raise ConfigError(
                "KVSTORE_SECRET_KEY belongs to none of KVSTORE_MEMBER_KEYS, so no member would accept this process: "
                "set all three keys as one launch.py has made them"
            )
        return public


def pair() -> tuple[str, str]:
    import zmq

    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def with_key(endpoint: str, key: str) -> str:
    """``key`` is the public key of the listener."""
    return endpoint + MARK + quote(key, safe="")


def split_key(endpoint: str) -> tuple[str, str]:
    """Return an endpoint without its key, and the key, empty for none; ConfigError if it is malformed."""
    bare, mark, quoted = endpoint.partition(MARK)
    key = unquote(quoted)
    if mark and not is_key(key):
        raise ConfigError(
            f"the key of the address {bare} is not valid; valid: {LENGTH} characters of Z85, percent-quoted"
        )
    return bare, key


def no_keys(endpoint: str) -> ConfigError:
    """What to raise where ``endpoint`` has a key and this process has none."""
    return ConfigError(
        f"{endpoint} has a key, and this process has none: set {', '.join(VARIABLES)} in all processes of a job, as "
        "launch.py does, and KVSTORE_ENCRYPTION=0 in all or none"
    )


def is_key(text: str) -> bool:
    """Whether ``text`` is a key: 40 characters of Z85 that stand for 32 bytes."""
    if len(text) != LENGTH or set(text) - set(_DIGITS):
        return False
    groups = (text[i : i + 5] for i in range(0, LENGTH, 5))
    return all(sum(_DIGITS.index(c) * 85**i for i, c in enumerate(reversed(group))) < 1 << 32 for group in groups)


ROOT = ("scheduler", 0)
READ_FROM = ("scheduler", "server", "standby")  # readers connect to these


@dataclass(frozen=True)
class Keyring:
    """A CURVE key pair (http://curvezmq.org), in Z85, for every member of one job.

    Attributes:
        pairs: (role, rank) -> (public key, secret key).
        reader, observer: the public and the secret key that all readers, all observers share; None for none.
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

        A member that readers or observers connect to is told their public keys, too.
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

    # An HMAC's output is as good a secret key as random bytes: Curve25519 takes any 32 bytes.
    own = z85.encode(hmac.digest(secret.encode(), f"kvstore/{job}/{role}/{rank}".encode(), hashlib.sha256))
    return zmq.curve_public(own).decode(), own.decode()
