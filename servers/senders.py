"""Over which link each sender is answered: its latest, for what it asked over one that is lost must reach it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvstore.wire import Request
from servers.replies import Answer, Outbox

KEPT = 16  # links of one sender; of older ones nothing comes any more


class Senders:
    """The links of all senders, by who they are."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, int, int], deque[bytes]] = {}

    def note(self, peer: bytes, request: Request) -> None:
        """Note that ``request`` came over ``peer``: a link that has not been seen before is the latest.

        What is left of an older one may well come after the first of the latest.
        """
        sender = (request.role, request.rank, request.incarnation)
        links = self._links.get(sender)
        if links is None:
            links = self._links[sender] = deque(maxlen=KEPT)
        if peer not in links:
            links.append(peer)

    def outbox(self, answers: Sequence[Answer]) -> Outbox:
        """Return what to send, and over which link: where a request came from, if its sender has not been noted."""
        return [(self._latest(answer), answer.reply) for answer in answers]

    def _latest(self, answer: Answer) -> bytes:
        request = answer.request
        links = self._links.get((request.role, request.rank, request.incarnation))
        return links[-1] if links else answer.peer
