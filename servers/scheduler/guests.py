"""The guests of a job, in the scheduler: readers, and what observers have in common with them. Pure.

Guests are no members. They ask, and change nothing: nobody waits for them, and nothing is lost with them. So they are
in no log. A scheduler that has been started again does not know them, and answers them all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvstore import wire
from kvstore.errors import KeyNotInitialized, KVStoreError, UsageError, nearest
from kvstore.spec import Key
from kvstore.table import TableSpec
from kvstore.transport.transport import Admission
from servers.requests.guest_links import GuestLinks, ReaderLinks
from servers.requests.replies import Outbox, refuse
from servers.scheduler.stores import Stores

READERS_SILENT_S = 60.0  # readers ask for the servers' places more often; a silent one is not counted any more
PAGE = 4096  # keys in one answer


class _Seat(NamedTuple):
    rank: int
    heard: float


class Guests:
    """The guests of one role. A subclass answers what they ask. ``full`` is what the job has too many of."""

    def __init__(self, links: GuestLinks, most: int, full: str, silent_s: float) -> None:
        self.links = links
        self._most = most
        self._full = full
        self._silent_s = silent_s
        self._seats: OrderedDict[int, _Seat] = OrderedDict()  # by the guest's random number, the longest silent first

    def handle(self, peer: bytes, message: wire.Message, now: float) -> Outbox:
        """Return what to send because ``message``, which concerns these guests, came from ``peer``."""
        refusal = self.links.refusal(peer, message)
        if refusal is not None or not isinstance(message, wire.Request):
            return refusal or []
        if isinstance(message, wire.Leave):
            self._leave(message.node.incarnation)
            return [(peer, wire.Ack(message.seq))]
        if isinstance(message, wire.Explain):
            return [(peer, wire.Explanation(message.seq, ""))]
        try:
            reply = self._answer(peer, message, now)
        except KVStoreError as exc:
            return [(peer, refuse(peer, message, exc).reply)]
        return [] if reply is None else [(peer, reply)]

    def _answer(self, peer: bytes, message: wire.Request, now: float) -> wire.Reply | None:
        """Return the answer to a guest's question; None if it comes later."""
        raise NotImplementedError

    def _leave(self, nonce: int) -> None:
        self._seats.pop(nonce, None)

    def _seat(self, nonce: int, now: float) -> int:
        while self._seats and now - next(iter(self._seats.values())).heard > self._silent_s:
            self._seats.popitem(last=False)
        seat = self._seats.get(nonce)
        if seat is None:
            if len(self._seats) >= self._most:
                raise UsageError(f"the job has its {self._most} {self._full}; close one, and ask again")
            taken = {other.rank for other in self._seats.values()}
            seat = _Seat(next(rank for rank in range(self._most) if rank not in taken), now)
        self._seats[nonce] = seat._replace(heard=now)
        self._seats.move_to_end(nonce)
        return seat.rank


class Readers(Guests):
    """The readers of a job: they ask which process may read, where the servers are, and which keys there are.

    ``servers`` is empty until all members have joined. ``ended`` returns the error that says why nobody can read any
    more; None while the job goes on.
    """

    def __init__(
        self,
        most: int,
        key: str,
        admission: Admission | None,
        stores: Stores,
        servers: Callable[[], Sequence[str]],
        ended: Callable[[], KVStoreError | None],
    ) -> None:
        links = ReaderLinks(most, key, admission)
        super().__init__(links, most, "readers already (KVSTORE_READERS)", READERS_SILENT_S)
        self._stores = stores
        self._servers = servers
        self._ended = ended

    def _answer(self, peer: bytes, message: wire.Request, now: float) -> wire.Reply:
        error = self._ended()
        if error is not None:
            raise error
        rank = self._seat(message.node.incarnation, now)
        if isinstance(message, wire.Connect):
            return wire.Connected(message.seq, rank, list(self._servers()))
        if isinstance(message, wire.FindKeys):
            return self._find(message)
        if isinstance(message, wire.ListKeys):
            names = self._stores.find(message.name)[1].keys.names(message.start, PAGE + 1)
            return wire.KeysListed(message.seq, names[:PAGE], len(names) > PAGE)
        raise UsageError(f"the scheduler has no values; send a {type(message).__name__} to the servers")

    def _find(self, message: wire.FindKeys) -> wire.KeysFound:
        try:
            number, store = self._stores.find(message.name)
        except KeyNotInitialized as exc:
            raise KeyNotInitialized(f"{exc}{''.join(map(self._elsewhere, message.keys[:1]))}") from None
        known = store.keys.with_values
        for key in message.keys:
            if key not in known:
                raise self._without_value(key, message.name, known)
        specs, columns = store.keys.look_up(message.keys)
        kinds = {spec: kind for kind, spec in enumerate(dict.fromkeys(specs))}
        return wire.KeysFound(
            message.seq,
            number,
            [kinds[spec] for spec in specs],
            [list(spec.shape) for spec in kinds],
            [spec.dtype for spec in kinds],
            [spec.table.described if isinstance(spec, TableSpec) else None for spec in kinds],
            *columns,
        )

    def _without_value(self, key: Key, name: str, known: Collection[Key]) -> KeyNotInitialized:
        if elsewhere := self._elsewhere(key):
            return KeyNotInitialized(f"key {key!r} has no value in store {name}, which this reader reads{elsewhere}")
        close = nearest(key, known)
        advice = f"did you mean {close!r}?" if close else "no worker has initialized it"
        return KeyNotInitialized(f"key {key!r} has no value in this job yet; {advice}")

    def _elsewhere(self, key: Key) -> str:
        stores = self._stores.having(key)
        if not stores:
            return ""
        have = f"store {stores[0]} has" if len(stores) == 1 else f"stores {', '.join(stores)} have"
        first = stores[0] if stores[0].isdecimal() else repr(stores[0])
        return f"; {have} key {key!r}: pass store={first} to kvstore.connect"
