"""Over which links members are heard and answered, and whether they may speak over them. Pure.

A link is a member's from the first message on that names it, if it has proved the key that this member joined with:
where there are keys, nobody speaks for another. A request is answered over the link that it came over, and over each
that it has been repeated over since. So a member whose link was lost is answered over its new one, and whoever speaks
in its name without being it draws no answer away from it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from kvstore.errors import UsageError
from kvstore.rare_log import Drops
from kvstore.transport.base import Admission
from kvstore.wire import Beat, Here, Node, ProcessAlive, Request
from servers.requests.replies import Answer, Outbox, refuse

log = logging.getLogger(__name__)

Speech = Request | Here | Beat | ProcessAlive  # what names its sender

KEPT = 16  # links of one member, which needs three: beyond that, the one that was admitted first is dropped


class AdmitAll:
    """An ``Admission`` for who has no transport: nobody proves anything, and all may come."""

    def admit(self, peer: bytes) -> None:
        """It is all the same."""

    def refuse(self, peer: bytes) -> None:
        """Nobody is."""

    def identity(self, peer: bytes) -> str:
        """Unknown."""
        return ""

    def gone(self, peer: bytes) -> bool:
        """Unknown, too."""
        return False


class ReplyLinks:
    """The links of all members, by who they are.

    Args:
        admission: decides about links.
    """

    def __init__(self, admission: Admission | None = None) -> None:
        self._admission = admission or AdmitAll()
        self._links: dict[Node, deque[bytes]] = {}
        self._repeated: dict[tuple[Node, int], deque[bytes]] = {}
        self._drops = Drops(log)

    def key(self, peer: bytes) -> str:
        """The public key that ``peer`` has proved; empty where nothing is proved."""
        return self._admission.identity(peer)

    def admit(self, peer: bytes, message: Speech, key: str) -> bool:
        """Whether ``message`` may come over ``peer``: its sender joined with ``key``. It is logged if not."""
        links = self._links.get(message.node)
        if links is not None and peer in links:
            return True
        if self._admission.identity(peer) != key:
            what = f"a {type(message).__name__} in the name of {message.node}"
            self._drops.note(what, "it came over a link with another key than its own")
            return False
        there = deque(link for link in links or () if not self._admission.gone(link))
        if len(there) >= KEPT:
            self._admission.refuse(there.popleft())
        there.append(peer)
        self._links[message.node] = there
        self._admission.admit(peer)
        return True

    def forget(self, node: Node) -> None:
        """Drop the links of whoever is no member any more."""
        for peer in self._links.pop(node, ()):
            self._admission.refuse(peer)

    def repeat(self, peer: bytes, request: Request) -> None:
        """Note that a request that waits has been made again, over ``peer``."""
        self._repeated.setdefault(_name(request), deque(maxlen=KEPT)).append(peer)

    def outbox(self, answers: Sequence[Answer]) -> Outbox:
        """Return what to send, and over which links."""
        outbox: Outbox = [(answer.peer, answer.reply) for answer in answers]
        if self._repeated:
            for answer in answers:
                again = self._repeated.pop(_name(answer.request), ())
                outbox += [(peer, answer.reply) for peer in dict.fromkeys(again) if peer != answer.peer]
        return outbox


def turn_away(peer: bytes, message: Speech, why: str) -> Outbox:
    """Return what to tell whoever sent ``message`` if they may not say it: nothing, if it asks for no answer."""
    if not isinstance(message, Request):
        return []
    return [(peer, refuse(peer, message, UsageError(f"{message.node} {why}")).reply)]


def _name(request: Request) -> tuple[Node, int]:
    return request.node, request.seq
