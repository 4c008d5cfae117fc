"""Requests that came before this process serves its rank: kept in order, each once. Pure.

Workers hear of a new primary from the scheduler, perhaps before that primary does. They repeat over a new link what has
not been answered, so there is never more here than they wait for.
"""

from __future__ import annotations

from kvstore import wire


class HeldRequests:
    """The requests, each with its last link. What its sender has an answer for is forgotten, or never kept."""

    def __init__(self) -> None:
        self._requests: dict[tuple[wire.Node, int], tuple[bytes, wire.Request]] = {}
        self._done: dict[wire.Node, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, peer: bytes, request: wire.Request) -> None:
        """Keep ``request``."""
        node, seq, done = request.sender
        if done > self._done.get(node, 0):
            self._done[node] = done
            for old in [key for key in self._requests if key[0] == node and key[1] < done]:
                if self._requests[old][1].remembered:  # others may have no answer yet
                    del self._requests[old]
        if seq >= self._done.get(node, 0) or not request.remembered:
            self._requests[node, seq] = peer, request  # a repeat keeps its place

    def release(self) -> list[tuple[bytes, wire.Request]]:
        """Return, and forget, all of them, in the order in which they came."""
        requests = list(self._requests.values())
        self._requests.clear()
        return requests
