"""What workers hand over to others that come back, until these have it, or are lost again. No I/O."""

from __future__ import annotations

from kvstore import wire
from kvstore.errors import NodeLost
from servers.requests.replies import Answer, refuse


class KeptStates:
    """One server's pages of it. A standby has none: a worker whose server dies meanwhile begins again."""

    def __init__(self) -> None:
        # The outer key is the newcomer's rank and incarnation, the inner one the hand-over and the part. A sponsor that
        # dies halfway leaves parts here, and the next sponsor's parts are not mixed with them.
        self._pages: dict[tuple[int, int], dict[tuple[int, int], list[bytes]]] = {}

    @property
    def nbytes(self) -> int:
        return sum(len(each) for pages in self._pages.values() for page in pages.values() for each in page)

    def serve(self, peer: bytes, message: wire.KeepState | wire.TakeState | wire.DropState) -> Answer:
        if isinstance(message, wire.KeepState):
            newcomer = (message.rank, message.incarnation)
            # Nobody takes what was kept for an earlier process of that worker.
            self._pages = {
                which: kept for which, kept in self._pages.items() if which[0] != message.rank or which == newcomer
            }
            pages = self._pages.setdefault(newcomer, {})
            # Copies: the sender writes there again.
            pages[message.number, message.part] = [bytes(each) for each in message.buffers]
        elif isinstance(message, wire.DropState):
            self.drop(message.node)
        else:
            page = self._pages.get(message.node[1:], {}).get((message.number, message.part))
            if page is None:
                lost = "what this worker was to take over is not on this server any more: start it again"
                return refuse(peer, message, NodeLost(lost))
            return Answer(peer, message, wire.StatePart(message.seq, page))
        return Answer(peer, message, wire.Ack(message.seq))

    def drop(self, node: wire.Node) -> None:
        """Forget what was kept for a worker, which has it or is lost."""
        self._pages.pop(node[1:], None)
