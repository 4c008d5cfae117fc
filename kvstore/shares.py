"""What a list of keys means to each server: which segments, and which elements of which arrays those are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvstore.spec import Key, Spec


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of the array of ``key``, which its server calls ``id``."""

    id: int
    server: int
    key: Key
    start: int
    stop: int


@dataclass
class Entry:
    """What a worker knows of a key: ``clock`` is how often it has pushed it."""

    spec: Spec
    pieces: list[Piece]
    clock: int = 0

    @property
    def cut(self) -> bool:
        """Whether several servers hold it."""
        return len(self.pieces) > 1


@dataclass
class Share:
    """One server's part of a list of keys: its pieces, and their sizes in bytes."""

    server: int
    pieces: list[Piece] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """The segments, as the server calls them."""
        return [piece.id for piece in self.pieces]


def plan(entries: Mapping[Key, Entry], keys: Iterable[Key]) -> list[Share]:
    """Return the shares of ``keys``, by server."""
    shares: dict[int, Share] = {}
    for key in keys:
        entry = entries[key]
        for piece in entry.pieces:
            share = shares.setdefault(piece.server, Share(piece.server))
            share.pieces.append(piece)
            share.sizes.append((piece.stop - piece.start) * entry.spec.itemsize)
    return [shares[server] for server in sorted(shares)]
