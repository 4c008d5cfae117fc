"""How messages to people name members. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

MOST = 8  # members that a message names; the rest are counted


def name(role: str, ranks: Collection[int]) -> str:
    """Name the members of ``role`` with these ranks: the first few, and how many more there are."""
    more = f" and {len(ranks) - MOST} more" if len(ranks) > MOST else ""
    called = "standby of server" if role == "standby" else role
    return ", ".join(f"{called} {rank}" for rank in heapq.nsmallest(MOST, ranks)) + more


def workers(ranks: Sequence[int]) -> str:
    """Name the workers with these ranks, which rise: "worker 3", "workers 4 to 7", or "workers 0, 2, 5"."""
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"workers {ranks[0]} to {ranks[-1]}"
    more = f" and {len(ranks) - MOST} more" if len(ranks) > MOST else ""
    return f"workers {', '.join(map(str, ranks[:MOST]))}{more}"


def wait(ranks: Collection[int]) -> str:
    """Return "waits" or "wait", for after ``workers`` of these ranks."""
    return "waits" if len(ranks) == 1 else "wait"


def have(ranks: Collection[int]) -> str:
    """Return "has" or "have", for after ``name`` of these ranks."""
    return "has" if len(ranks) == 1 else "have"
