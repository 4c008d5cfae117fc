"""The clocks of all members on one time line: that of the scheduler's first process. Pure.

What is known of two clocks is how far apart they are at most. A member's beats say so of its clock and the scheduler's:
half a round trip around the offset. Every message says more: it was not received before it was sent. These are
difference constraints (Cormen et al., Introduction to Algorithms, 22.4), which shortest paths solve. The shortest paths
from the first clock give the greatest offset that each clock can have, those to it the least. The middle of the two is
kept: differences of middles keep all constraints, and no clock is wrong by more than half of what was possible.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

TOLERANCE_S = 1e-6  # clocks that drift contradict each other by no more than that, and are taken as they are


@dataclass(frozen=True)
class Aligned(Generic[C]):
    """The clocks on one time line.

    Attributes:
        shifts: what to add to the times of each clock, in seconds.
        errors: by how much that may be wrong; infinite where nothing is known.
        consistent: whether there are shifts that fit all that is known. If not, messages may seem to go back in time.
    """

    shifts: Mapping[C, float]
    errors: Mapping[C, float]
    consistent: bool


class Bounds(Generic[C]):
    """What is known of clocks: how far each is ahead of each other at most, once they are shifted."""

    def __init__(self) -> None:
        self._measured: dict[tuple[C, C], float] = {}
        self._messages: dict[tuple[C, C], float] = {}
        self._clocks: dict[C, None] = {}

    def add(self, clock: C) -> None:
        """Note that there is a clock."""
        self._clocks[clock] = None

    def measure(self, clock: C, other: C, offset: float, error: float) -> None:
        """Note that ``clock`` plus ``offset`` is ``other``, but for ``error`` at most."""
        self._note(self._measured, clock, other, offset + error)
        self._note(self._measured, other, clock, error - offset)

    def message(self, sender: C, receiver: C, sent: float, received: float) -> None:
        """Note that a message was sent and received at these times, each by the clock of its process."""
        self._note(self._messages, sender, receiver, received - sent)

    def align(self, first: C) -> Aligned[C]:
        """Return the clocks on the time line of ``first``."""
        both = dict(self._measured)
        for pair, bound in self._messages.items():
            both[pair] = min(bound, both.get(pair, math.inf))
        for bounds, consistent in ((both, True), (self._measured, False)):
            most, least = self._paths(bounds, first), self._paths({(b, a): w for (a, b), w in bounds.items()}, first)
            if most is not None and least is not None:
                return self._between(most, {clock: -path for clock, path in least.items()}, consistent)
        return self._between({first: 0.0}, {first: 0.0}, False)

    def _note(self, bounds: dict[tuple[C, C], float], clock: C, other: C, most: float) -> None:
        """Note that the shift of ``clock`` is at most that of ``other`` plus ``most``."""
        self.add(clock)
        self.add(other)
        if most < bounds.get((clock, other), math.inf):
            bounds[clock, other] = most

    def _paths(self, bounds: Mapping[tuple[C, C], float], first: C) -> dict[C, float] | None:
        """Return how far each clock is ahead of ``first`` at most; None if the bounds contradict each other."""
        paths = {first: 0.0}
        for _ in range(len(self._clocks) + 1):
            changed = False
            for (clock, other), most in bounds.items():
                if other in paths and paths[other] + most < paths.get(clock, math.inf) - TOLERANCE_S / 1000:
                    paths[clock] = paths[other] + most
                    changed = True
            if not changed:
                return paths
            if paths[first] < -TOLERANCE_S:
                return None
        return None

    def _between(self, most: Mapping[C, float], least: Mapping[C, float], consistent: bool) -> Aligned[C]:
        shifts: dict[C, float] = {}
        errors: dict[C, float] = {}
        for clock in self._clocks:
            bounds = [side[clock] for side in (most, least) if clock in side]
            shifts[clock] = sum(bounds) / len(bounds) if bounds else 0.0
            errors[clock] = abs(bounds[0] - bounds[1]) / 2 if len(bounds) == 2 else math.inf
        return Aligned(shifts, errors, consistent)
