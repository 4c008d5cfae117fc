"""Workers that wait for each other, so that none of their calls ever ends: found, proven, and told. Pure.

A worker that waits says what for (``Stuck``), and takes it back when a wait ends. Workers that wait only for workers of
their group wait for ever, if all of that is true at one moment. But each has said it at another moment: one may have
gone on since then. So the group is prompted, and each looks again. If all say the same, of the same waits, then nobody
has gone on between, and every request that was made before has arrived where it is waited for. So nothing comes any
more that any of them needs.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore import wire
from servers.names import MOST, workers


class Deadlocks:
    """The waits of one job's workers, as they have said them."""

    def __init__(self) -> None:
        self._said: dict[int, wire.Stuck] = {}  # by rank
        self._number = 0  # of the latest prompt
        self._prompted: dict[int, tuple[int, list[int]]] = {}  # by rank: the latest prompt, and the waits then

    def take(self, said: wire.Stuck) -> list[tuple[int, wire.Message]]:
        """Take what a worker says of its waits; return what to tell which workers, by rank."""
        rank = said.node.rank
        if not said.waits:
            self._said.pop(rank, None)
            return []
        self._said[rank] = said
        group = self._group(rank, self._said)
        if not group:
            return []
        if len({self._asked(other) for other in group}) > 1 or not self._asked(rank):
            self._number += 1
            self._prompted.update({other: (self._number, self._said[other].waits) for other in group})
            return [(other, wire.StillStuck(self._number)) for other in group]
        if said.prompt < self._asked(rank):  # the prompt was lost, or this was said before it came
            return [(rank, wire.StillStuck(self._asked(rank)))]
        if any(self._said[other].prompt < self._asked(other) for other in group):
            return []
        text = self._words(rank)
        # One that was started again has most likely lost count, of batches or epochs: the others go on without it.
        again = [other for other in group if self._said[other].node.incarnation > 1]
        told = again if 0 < len(again) < len(group) else group
        return [(other, wire.Deadlock(self._said.pop(other).waits, text)) for other in told]

    def _asked(self, rank: int) -> int:
        """Return the number of the prompt that was about the waits that a worker says it is in; 0 for none."""
        number, waits = self._prompted.get(rank, (0, []))
        return number if waits == self._said[rank].waits else 0

    @staticmethod
    def _group(rank: int, said: Mapping[int, wire.Stuck]) -> list[int]:
        """Return ``rank`` and all that it waits for, and these wait for, if all of them are ``said`` to wait."""
        group, left = {rank: None}, [rank]
        while left:
            of = left.pop()
            if of not in said:
                return []
            new = [other for other in said[of].missing if other not in group]
            group.update(dict.fromkeys(new))
            left += new
        return sorted(group)

    def _words(self, rank: int) -> str:
        """Name workers of which each waits for the next, and the last for the first."""
        way = [rank]
        while (following := self._said[way[-1]].missing[0]) not in way:
            way.append(following)
        circle = sorted(way[way.index(following) :])
        who = f"{workers(circle)} wait for each other" if len(circle) > 1 else f"worker {circle[0]} waits for itself"
        each = "; ".join(f"worker {rank} is in {self._said[rank].text}" for rank in circle[:MOST])
        return f"{who}: {each}. All workers must make the same calls, in the same order"[: wire.MAX_REASON]
