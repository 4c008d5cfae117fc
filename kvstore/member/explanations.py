"""What peers say a late answer of theirs waits for, and where those are that it waits for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from kvstore import wire
from kvstore.transport import Peer

MOST_PLACES = 4  # that one message names; members elsewhere are counted
MOST_RANGES = 8  # of ranks, before a place
_SILENT = "does not answer"
_PLURALS = {"is": "are", "has": "have", "does": "do"}


class Explanations:
    """The explanations of some peers, as they come.

    Args:
        peers: that are asked, in the order in which messages name them.
    """

    def __init__(self, peers: Iterable[Peer]) -> None:
        self._texts: dict[Peer, str | None] = dict.fromkeys(peers)
        self._missing: set[int] = set()
        self._places: list[str] = []
        self._silent_too: set[Peer] = set()  # of whom the scheduler says so, and more

    def take(self, peer: Peer, reply: wire.Explanation) -> None:
        """Take in what ``peer`` says; an empty text says that it knows nothing of a reason."""
        self._texts[peer] = reply.text or "has not answered yet"
        self._missing.update(reply.missing)

    def take_places(self, role: str, reply: wire.Located) -> None:
        """Take in where members of ``role`` are. What is said of a peer that says nothing replaces that."""
        for rank, place in zip(reply.ranks, reply.places, strict=True):
            peer = f"{role} {rank}".encode()
            if peer in self._texts and place.startswith(_SILENT):
                self._silent_too.add(peer)
        self._places += grouped(role, reply.ranks, reply.places)

    @property
    def silent(self) -> tuple[str, ...]:
        """The names of the peers that have said nothing."""
        return tuple(peer.decode() for peer, text in self._texts.items() if text is None)

    def awaited(self, me: wire.Node) -> dict[str, list[int]]:
        """Return the members that are waited for, but for ``me``, by role: workers, and peers that say nothing."""
        ranks: dict[str, set[int]] = {"worker": set(self._missing)}
        for name in self.silent:
            role, _, rank = name.partition(" ")
            if rank.isdecimal():
                ranks.setdefault(role, set()).add(int(rank))
        if me.role == "worker":
            ranks["worker"].discard(me.rank)
        return {role: sorted(of_role) for role, of_role in ranks.items() if of_role}

    @property
    def known(self) -> str:
        """What there is so far, in words."""
        said = [
            f"{peer.decode()} {text or _SILENT}" for peer, text in self._texts.items() if peer not in self._silent_too
        ]
        return "; ".join(said + self._places)


def grouped(role: str, ranks: Sequence[int], places: Sequence[str]) -> list[str]:
    """Return sentences that say which members are where, those at one place together."""
    at: dict[str, list[int]] = {}
    for rank, place in zip(ranks, places, strict=True):
        at.setdefault(place, []).append(rank)
    said = [f"{_named(role, group)} {_plural(place) if len(group) > 1 else place}" for place, group in at.items()]
    rest = sum(map(len, list(at.values())[MOST_PLACES:]))
    return [*said[:MOST_PLACES], f"{rest} more {role}s are elsewhere"] if rest else said


def _named(role: str, ranks: Sequence[int]) -> str:
    """Return "worker 3", or "workers 1-7, 9"; ``ranks`` rise."""
    if len(ranks) == 1:
        return f"{role} {ranks[0]}"
    runs = [
        [rank for _, rank in run] for _, run in itertools.groupby(enumerate(ranks), lambda entry: entry[1] - entry[0])
    ]
    named = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:MOST_RANGES])
    more = sum(map(len, runs[MOST_RANGES:]))
    return f"{role}s {named}" + (f" and {more} more" if more else "")


def _plural(place: str) -> str:
    verb, _, rest = place.partition(" ")
    return f"{_PLURALS.get(verb, verb)} {rest}"
