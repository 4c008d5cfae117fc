"""What repeated looks at a straggler and at another worker say of the straggler's time. Pure.

Both do the same work. So what the straggler is found at more often than the other is what takes it longer: the reading
of input, computation, or a line of its program that is neither.
"""

from __future__ import annotations

from collections import Counter

from kvstore import wire

ENOUGH = 20  # looks, before they say anything
MORE = 0.05  # of the looks at the straggler that something must explain beyond those at the other


class PairedLooks:
    """PairedLooks at two workers at the same moments.

    Args:
        rank: of the straggler.
        other: of the worker to compare it with.

    Attributes:
        count: how many looks at both there have been.
    """

    def __init__(self, rank: int, other: int) -> None:
        self.rank = rank
        self.other = other
        self.count = 0
        self._doing: dict[int, Counter[str]] = {rank: Counter(), other: Counter()}
        self._places: dict[int, Counter[str]] = {rank: Counter(), other: Counter()}

    def add(self, seen: wire.Stacks, other: wire.Stacks) -> None:
        """Take a look at the straggler, and one at the other worker."""
        self.count += 1
        for rank, stacks in ((self.rank, seen), (self.other, other)):
            doing = doing_of(stacks)
            self._doing[rank][doing] += 1
            if doing != "waits":
                self._places[rank][stacks.place] += 1

    @property
    def cause(self) -> str:
        """``input`` or ``compute``, if that takes the straggler longer; empty if it is neither, or not known yet."""
        if self.count < ENOUGH:
            return ""
        excess = {doing: self._excess(self._doing, doing) for doing in ("input", "compute", "else")}
        doing = max(excess, key=lambda name: excess[name])
        return doing if doing != "else" and excess[doing] >= MORE * self.count else ""

    @property
    def words(self) -> str:
        """Where the straggler was found more often than the other, with the numbers; empty if that is nowhere."""
        places = self._places[self.rank]
        place = max(places, key=lambda name: self._excess(self._places, name), default="")
        if not place or self.count < ENOUGH or self._excess(self._places, place) < MORE * self.count:
            return ""
        others = self._places[self.other][place]
        beside = f", and {others} found worker {self.other} there" if others else ""
        return f"{places[place]} of {self.count} looks found it at {place}{beside}"

    def _excess(self, counts: dict[int, Counter[str]], name: str) -> int:
        return counts[self.rank][name] - counts[self.other][name]


def doing_of(stacks: wire.Stacks) -> str:
    """Return what the program's own thread does: ``input``, ``compute``, ``waits`` in a store, or ``else``.

    It reads input if it is inside ``torch.utils.data``, whatever is called from there. It computes if its innermost
    frame that is torch's or ours is torch's.
    """
    frames: list[str] = stacks.threads[0][1] if stacks.threads else []
    if any(frame.startswith("torch/utils/data/") for frame in frames):
        return "input"
    for frame in reversed(frames):
        if frame.startswith("kvstore/"):
            return "waits"
        if frame.startswith("torch/"):
            return "compute"
    return "else"
