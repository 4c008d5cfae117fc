"""The links of readers at one process, and what may come over them: reads, whatever they say who they are. Pure."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.transport.base import Admission
from kvstore.wire import Explain, Here, Leave, Message, Request
from kvstore.wire.reading import READS
from servers.requests.replies import Outbox
from servers.requests.reply_links import AdmitAll, turn_away

READER = "reader"  # the role of those who take no part in training
MAY = (*READS, Explain, Leave)


class ReaderLinks:
    """The links of readers.

    Args:
        most: how many there may be at once. If there are more, the one that has been silent for longest is dropped.
        key: the public key that all readers have proved; empty where links prove no keys.
        admission: admits and refuses links; by default all are admitted.
    """

    def __init__(self, most: int, key: str = "", admission: Admission | None = None) -> None:
        self._most = most
        self._key = key
        self._admission = admission or AdmitAll()
        self._links: OrderedDict[bytes, None] = OrderedDict()  # the longest silent first

    def __len__(self) -> int:
        return len(self._links)

    def concerns(self, peer: bytes, message: Message) -> bool:
        """Return whether ``message`` is a reader's, or has come over a link with the readers' key."""
        node = getattr(message, "node", None)
        if node is not None and node.role == READER:
            return True
        return bool(self._key) and self._admission.identity(peer) == self._key

    def refusal(self, peer: bytes, message: Message) -> Outbox | None:
        """Return what to send instead of handling ``message``, which concerns readers; None if it may be handled."""
        if not isinstance(message, Request) and not isinstance(message, Here):
            return []
        if message.node.role != READER:
            return turn_away(peer, message, "spoke over a link with the readers' key, which is good for reading alone")
        if self._admission.identity(peer) != self._key:
            return turn_away(peer, message, "spoke over a link with another key than readers have")
        if isinstance(message, Request) and not isinstance(message, MAY):
            return turn_away(
                peer,
                message,
                f"sent a {type(message).__name__}; readers change nothing, and send "
                + ", ".join(kind.__name__ for kind in READS),
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
