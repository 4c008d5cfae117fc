"""The requests of readers on one server, which are answered one by one, and reader by reader, a piece at a time. Pure.

They are in no ledger: a repeat is answered anew. They wait for no round.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeAlias

from kvstore import wire
from kvstore.errors import KVStoreError, UsageError
from kvstore.transport.memory import Memory
from servers.reading.row_read import RowRead
from servers.reading.value_read import PiecewiseRead, ValueRead
from servers.requests.reader_links import ReaderLinks
from servers.requests.replies import Outbox, refuse
from servers.store.served_store import ServedStore

log = logging.getLogger(__name__)

MOST_WAITING = 64  # requests of one reader

Read: TypeAlias = wire.ReadValues | wire.ReadRows


class ReadDesk:
    """See the module.

    Args:
        stores: the open stores, by number.
        memory: for copies of values.
        links: of the readers.

    Attributes:
        links: see above.
        taken: how many messages of readers have come.
    """

    def __init__(self, stores: Mapping[int, ServedStore], memory: Memory, links: ReaderLinks) -> None:
        self.links = links
        self.taken = 0
        self._stores = stores
        self._memory = memory
        # By reader, the one whose turn is next first, and by the number of the request.
        self._waiting: OrderedDict[wire.Node, dict[int, tuple[bytes, Read]]] = OrderedDict()
        self._current: tuple[bytes, Read] | None = None
        self._begun: PiecewiseRead | None = None  # what has been done for it

    @property
    def busy(self) -> bool:
        """Whether ``step`` has something to do."""
        return self._current is not None or bool(self._waiting)

    def handle(self, peer: bytes, message: wire.Message) -> Outbox:
        """Return what to send at once because ``message``, which concerns readers, came from ``peer``."""
        self.taken += 1
        refusal = self.links.refusal(peer, message)
        if refusal is not None or not isinstance(message, wire.Request):
            return refusal or []
        if isinstance(message, wire.Leave):
            self._waiting.pop(message.node, None)
            return [(peer, wire.Ack(message.seq))]
        if isinstance(message, wire.Explain):
            return [(peer, wire.Explanation(message.seq, "answers readers in the time that workers leave it"))]
        if not isinstance(message, wire.ReadValues | wire.ReadRows):
            return _refused(
                peer, message, f"servers do not know where keys are; send a {_name(message)} to the scheduler"
            )
        waiting = self._waiting.setdefault(message.node, {})
        if len(waiting) >= MOST_WAITING and message.seq not in waiting:
            return _refused(peer, message, f"{MOST_WAITING} requests of {message.node} wait here already")
        waiting[message.seq] = peer, message
        return []

    def step(self, nbytes: int) -> Outbox:
        """Do a piece of about so many bytes of what waits; return the answer that is complete, if one is."""
        if self._current is None:
            if not self._waiting:
                return []
            self._current = self._next()
        peer, request = self._current
        try:
            if self._begun is None:
                self._begun = self._begin(request)
            reply = self._begun.step(nbytes)
        except Exception as exc:
            if not isinstance(exc, KVStoreError):
                log.exception("a request of %s failed", request.node)
            reply = refuse(peer, request, exc).reply
        if reply is None:
            return []
        self._current = self._begun = None
        return [(peer, reply)]

    def _next(self) -> tuple[bytes, Read]:
        """Return the next request of the reader whose turn it is."""
        node, waiting = self._waiting.popitem(last=False)
        chosen = waiting.pop(next(iter(waiting)))
        if waiting:
            self._waiting[node] = waiting
        return chosen

    def _begin(self, request: Read) -> PiecewiseRead:
        store = self._stores.get(request.store)
        if store is None:
            raise UsageError(f"store {request.store} is not open here")
        if isinstance(request, wire.ReadValues):
            return ValueRead(store, request, self._memory)
        return RowRead(store, request, self._memory)


def _refused(peer: bytes, request: wire.Request, text: str) -> Outbox:
    return [(peer, refuse(peer, request, UsageError(text)).reply)]


def _name(request: wire.Request) -> str:
    return type(request).__name__
