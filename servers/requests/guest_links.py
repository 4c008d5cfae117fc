"""The links of guests at one process: of processes that are no members, and may ask for some things only. Pure.

All guests of a role have one key, if links prove keys. A message over a link with that key, or in the name of that
role, may be one of the role's requests, and nothing else, whatever sender it names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvstore import wire
from kvstore.transport.transport import Admission
from kvstore.wire.guests import READS
from servers.requests.replies import Outbox
from servers.requests.reply_links import turn_away


class GuestLinks:
    """The links of the guests of one role.

    Args:
        asks: what they may ask, beside ``Explain`` and ``Leave``.
        good_for: what their key is good for, in one word.
        most: how many links there may be at once. If there are more, the one that has been silent for longest is
            dropped.
        key: the public key that all of them have proved; empty where links prove no keys.
    """

    def __init__(
        self,
        role: str,
        asks: Sequence[type[wire.Request]],
        good_for: str,
        most: int,
        key: str = "",
        admission: Admission | None = None,
    ) -> None:
        self._role = role
        self._asks = tuple(asks)
        self._good_for = good_for
        self._most = most
        self._key = key
        self._admission = admission or Admission()
        self._links: OrderedDict[bytes, None] = OrderedDict()  # the longest silent first

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._links)

    def concerns(self, peer: bytes, message: wire.Message) -> bool:
        """Return whether ``message`` is a guest's, or has come over a link with the guests' key."""
        node = getattr(message, "node", None)
        if node is not None and node.role == self._role:
            return True
        return bool(self._key) and self._admission.identity(peer) == self._key

    def refusal(self, peer: bytes, message: wire.Message) -> Outbox | None:
        """Return what to send instead of handling ``message``, which concerns guests; None if it may be handled."""
        who = f"{self._role}s"
        if not isinstance(message, wire.Request) and not isinstance(message, wire.Here):
            return []
        if message.node.role != self._role:
            why = f"spoke over a link with the {who}' key, which is good for {self._good_for} alone"
            return turn_away(peer, message, why)
        if self._admission.identity(peer) != self._key:
            return turn_away(peer, message, f"spoke over a link with another key than {who} have")
        if isinstance(message, wire.Request) and not isinstance(message, (*self._asks, wire.Explain, wire.Leave)):
            return turn_away(
                peer,
                message,
                f"sent a {type(message).__name__}; {who} change nothing, and send "
                + ", ".join(kind.__name__ for kind in self._asks),
            )
        self._admit(peer)
        return None

    def _admit(self, peer: bytes) -> None:
        if peer in self._links:
            self._links.move_to_end(peer)
            return
        if len(self._links) >= self._most:
            for link in [link for link in self._links if self._admission.gone(link)]:
                del self._links[link]
        while len(self._links) >= self._most:
            self._admission.refuse(self._links.popitem(last=False)[0])
        self._links[peer] = None
        self._admission.admit(peer)


READER = "reader"  # the role of processes that only read


class ReaderLinks(GuestLinks):
    """The links of readers."""

    def __init__(self, most: int, key: str = "", admission: Admission | None = None) -> None:
        super().__init__(READER, READS, "reading", most, key, admission)
