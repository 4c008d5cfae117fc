"""Members in messages to people. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection

MOST = 8  # members that a message names, of however many


def name(role: str, ranks: Collection[int]) -> str:
    """Name the members of ``role`` with these ranks: the first few, and how many more there are."""
    more = f" and {len(ranks) - MOST} more" if len(ranks) > MOST else ""
    return ", ".join(f"{role} {rank}" for rank in heapq.nsmallest(MOST, ranks)) + more


def have(ranks: Collection[int]) -> str:
    """The verb that goes with ``name`` of these."""
    return "has" if len(ranks) == 1 else "have"
