"""The trace of a process that serves: the requests that it has handled, and the replies that left."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import wire
from kvstore.tracer import NOBODY, Tracer
from servers.requests.replies import Outbox

OBSERVER = "observer"
MOST_LINKS = 1 << 14  # whose links are remembered: of all members of a job there are fewer


class RequestTracer:
    """Traces the requests that a process has handled, and the replies that left."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._nodes: dict[bytes, wire.Node] = {}  # the sender over each link

    def note(self, began: float, left: float, outbox: Outbox, peer: bytes, message: wire.Message | None) -> None:
        """Trace ``outbox``, which was sent because ``message`` came from ``peer``, if that is of interest.

        Work on it ``began`` then; the replies ``left`` not before then. ``message`` of None: no message has asked for
        it.
        """
        tracer = self.tracer
        if not isinstance(message, wire.Request):
            if outbox and tracer.open and (replies := self._replies(outbox)):
                tracer.handled(began, left, "", NOBODY, 0, 0, tracer.round, replies)
            return
        node, seq, _ = message.sender
        if self._nodes.get(peer) is not node:
            if node.role == OBSERVER:  # to fetch what is noted must not be something to note
                return
            self._nodes[peer] = node
            if len(self._nodes) > MOST_LINKS:
                self._nodes.clear()
        clocks: Sequence[int] = getattr(message, "clocks", ())
        round_ = clocks[0] if clocks else 0
        if tracer.reached(round_) if round_ else tracer.open:
            buffers: Sequence[wire.Buffer] = getattr(message, "buffers", ())
            nbytes = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
            replies = self._replies(outbox) if outbox else []
            tracer.handled(began, left, type(message).__name__, node, seq, nbytes, round_, replies)

    def _replies(self, outbox: Outbox) -> list[tuple[wire.Node | tuple[str, int, int], int]]:
        """Return whom each reply answers, and the number of the request."""
        return [(self._nodes.get(link, NOBODY), reply.seq) for link, reply in outbox if isinstance(reply, wire.Reply)]
