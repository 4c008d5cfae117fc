"""The stacks of members, as ``kvstore-status --stacks`` prints them: equal ones once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kvstore import wire
from kvstore.observing.columns import TextLine
from kvstore.observing.quantities import members

_Threads: TypeAlias = "tuple[tuple[str, tuple[str, ...]], ...]"  # names, and frames

OURS = "kvstore "  # begins the names of this package's threads


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
    stacks: wire.Stacks | None


def located_members(role: str, places: Mapping[int, str], answers: Iterable[wire.Stacks]) -> list[LocatedMember]:
    """Return where members of one role are, by rank.

    Args:
        role: theirs.
        places: where each is in words, by rank.
        answers: the stacks of those that have answered.
    """
    by_rank = {stacks.node.rank: stacks for stacks in answers}
    return [LocatedMember(role, rank, place, by_rank.get(rank)) for rank, place in sorted(places.items())]


def stacks_lines(located: Iterable[LocatedMember], all_threads: bool = False) -> list[TextLine]:
    """Return the stacks of members, innermost frames last.

    Args:
        located: the members. Those of one role that are at the same place with the same stacks are shown once.
        all_threads: whether threads of this package are shown, too.
    """
    same: dict[tuple[str, str, _Threads], list[int]] = {}
    for member in located:
        threads = () if member.stacks is None else tuple(_threads(member.stacks, all_threads))
        same.setdefault((member.role, member.place, threads), []).append(member.rank)
    lines: list[TextLine] = []
    for (role, place, threads), ranks in same.items():
        who = members(role, ranks)
        lines += [TextLine(""), TextLine(f"{who}{'' if len(ranks) == 1 else ': each'} {place}", "title")]
        for name, frames in threads:
            lines.append(TextLine(f"  {name}"))
            lines += [TextLine(f"    {frame}", "faint") for frame in frames]
    return lines


def _threads(stacks: wire.Stacks, all_threads: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, frames in stacks.threads:
        if all_threads or not name.startswith(OURS):
            yield name, tuple(frames)
