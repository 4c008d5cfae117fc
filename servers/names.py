"""How messages to people name members. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection

MOST = 8  # members that a message names; the rest are counted


def name(role: str, ranks: Collection[int]) -> str:
    """Name the members of ``role`` with these ranks: the first few, and how many more there are."""
    more = f" and {len(ranks) - MOST} more" if len(ranks) > MOST else ""
    return ", ".join(f"{role} {rank}" for rank in heapq.nsmallest(MOST, ranks)) + more


def have(ranks: Collection[int]) -> str:
    """Return "has" or "have", for after ``name`` of these ranks."""
    return "has" if len(ranks) == 1 else "have"
