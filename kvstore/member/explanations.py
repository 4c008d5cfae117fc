"""What peers say a late answer of theirs waits for."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.transport import Peer
from kvstore.wire import Explanation


class Explanations:
    """The explanations of some peers, as they come.

    Args:
        peers: that are asked, in the order in which messages name them.
    """

    def __init__(self, peers: Iterable[Peer]) -> None:
        self._texts: dict[Peer, str | None] = dict.fromkeys(peers)

    def take(self, peer: Peer, reply: Explanation) -> None:
        """Take in what ``peer`` says; an empty text says that it knows nothing of a reason."""
        self._texts[peer] = reply.text or "has not answered yet"

    @property
    def known(self) -> tuple[str, tuple[str, ...]]:
        """What there is so far, in words, and the names of the peers that have said nothing."""
        silent = tuple(peer.decode() for peer, text in self._texts.items() if text is None)
        return "; ".join(f"{peer.decode()} {text or 'does not answer'}" for peer, text in self._texts.items()), silent
