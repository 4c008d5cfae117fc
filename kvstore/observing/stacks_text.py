"""The stacks of members, as ``kvstore-status --stacks`` prints them: equal ones once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvstore.observing.columns import TextLine
from kvstore.observing.quantities import members
from kvstore.wire import Stacks


@dataclass(frozen=True)
class LocatedMember:
    """Where a member is.

    Attributes:
        role, rank: which.
        place: in words that follow its name: ``is at train.py:41 in load_batch``.
        stacks: what it has answered; None if it has not.
    """

    role: str
    rank: int
    place: str
    stacks: Stacks | None


def located_members(role: str, places: Mapping[int, str], answers: Iterable[Stacks]) -> list[LocatedMember]:
    """Return where members of one role are, by rank.

    Args:
        role: theirs.
        places: where each is in words, by rank.
        answers: the stacks of those that have answered.
    """
    by_rank = {stacks.node.rank: stacks for stacks in answers}
    return [LocatedMember(role, rank, place, by_rank.get(rank)) for rank, place in sorted(places.items())]


def stacks_lines(located: Iterable[LocatedMember]) -> list[TextLine]:
    """Return the stacks of members, innermost frames last."""
    same: dict[tuple[object, ...], list[LocatedMember]] = {}
    for member in located:
        threads = (
            () if member.stacks is None else tuple((name, tuple(frames)) for name, frames in member.stacks.threads)
        )
        same.setdefault((member.role, member.place, threads), []).append(member)
    lines: list[TextLine] = []
    for alike in same.values():
        first = alike[0]
        who = members(first.role, (member.rank for member in alike))
        lines += [
            TextLine(""),
            TextLine(f"{who} {first.place}" if len(alike) == 1 else f"{who}: each {first.place}", "title"),
        ]
        for name, frames in () if first.stacks is None else first.stacks.threads:
            lines.append(TextLine(f"  {name}"))
            lines += [TextLine(f"    {frame}", "faint") for frame in frames]
    return lines
