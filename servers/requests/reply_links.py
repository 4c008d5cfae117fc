"""The links of each member: over which it is heard, and over which it is answered. Pure.

A link belongs to the member that its first message names, if the link has proved the key that this member joined with.
So where there are keys, nobody can speak for another member. A request is answered over the link that it came over, and
over each link that it has been repeated over. So a member whose link was lost is answered over its new one, and an
impostor draws no answer away from it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from kvstore import wire
from kvstore.errors import KVStoreError, UsageError
from kvstore.rare_log import Drops
from kvstore.transport.transport import Admission
from servers.requests.repeats import Ledger
from servers.requests.replies import Answer, Outbox, refuse

log = logging.getLogger(__name__)

FromMember = (
    wire.Request | wire.Here | wire.Beat | wire.ProcessAlive | wire.Stacks | wire.Standing | wire.TraceChunk
)  # what names its sender

NOWHERE = b""  # the link of a request that another server has recorded; its answer leaves over links of repeats only
KEPT = 16  # links of one member, which needs three; when there are more, the oldest is dropped


class ReplyLinks:
    """The links of all members."""

    def __init__(self, admission: Admission | None = None) -> None:
        self._admission = admission or Admission()
        self._links: dict[wire.Node, deque[bytes]] = {}
        self._repeated: dict[tuple[wire.Node, int], deque[bytes]] = {}
        self._drops = Drops(log)

    def key(self, peer: bytes) -> str:
        """Return the public key that link ``peer`` has proved; empty where links prove no keys."""
        return self._admission.identity(peer)

    def has(self, peer: bytes, node: wire.Node) -> bool:
        links = self._links.get(node)
        return links is not None and peer in links

    def admit(self, peer: bytes, message: FromMember, key: str) -> bool:
        """Return whether link ``peer`` may carry ``message``, whose sender joined with ``key``; log it if not."""
        links = self._links.get(message.node)
        if links is not None and peer in links:
            return True
        if self._admission.identity(peer) != key:
            what = f"a {type(message).__name__} in the name of {message.node}"
            self._drops.note(what, "it came over a link with another key than its own")
            return False
        alive = deque(link for link in links or () if not self._admission.gone(link))
        if len(alive) >= KEPT:
            self._admission.refuse(alive.popleft())
        alive.append(peer)
        self._links[message.node] = alive
        self._admission.admit(peer)
        return True

    def forget(self, node: wire.Node) -> None:
        for peer in self._links.pop(node, ()):
            self._admission.refuse(peer)

    def repeat(self, peer: bytes, request: wire.Request) -> None:
        self._repeated.setdefault(_identity(request), deque(maxlen=KEPT)).append(peer)

    def again(self, peer: bytes, request: wire.Request, ledger: Ledger[wire.Reply]) -> Outbox:
        """Return the answer to a repeat that came over link ``peer``; none yet if the request waits."""
        before = ledger.recall(request)
        if before is None:
            self.repeat(peer, request)
            return []
        return [(peer, before)]

    def outbox(self, answers: Sequence[Answer]) -> Outbox:
        outbox: Outbox = [(peer, reply) for peer, _, reply in answers if peer]
        if self._repeated:
            for answer in answers:
                again = self._repeated.pop(_identity(answer.request), ())
                outbox += [(peer, answer.reply) for peer in dict.fromkeys(again) if peer != answer.peer]
        return outbox


def turn_away(peer: bytes, message: FromMember, why: str, kind: type[KVStoreError] = UsageError) -> Outbox:
    """Return the refusal of a message that its sender may not send; nothing if it asks for no answer."""
    if not isinstance(message, wire.Request):
        return []
    return [(peer, refuse(peer, message, kind(f"{message.node} {why}")).reply)]


def _identity(request: wire.Request) -> tuple[wire.Node, int]:
    return request.node, request.seq
