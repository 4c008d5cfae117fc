"""The core of an aggregator: messages in, messages out; a ``HostStore`` holds each store. No I/O."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from kvstore import wire
from kvstore.errors import UsageError, WireError
from kvstore.transport.memory import Memory
from kvstore.transport.transport import Admission
from servers.activity import ServedActivity, together
from servers.aggregator.exchanges import Exchange, Servers
from servers.aggregator.loans import Loans
from servers.aggregator.store import HostStore
from servers.requests.openers import Openers
from servers.requests.reasons import Reason
from servers.requests.repeats import Ledger, Verdict
from servers.requests.replies import Answer, Outbox, refuse
from servers.requests.reply_links import ReplyLinks, turn_away
from servers.store.lateness import ArrivalTimes

log = logging.getLogger(__name__)


class Aggregator:
    """What one host's workers have in common: they push and pull through it.

    Args:
        workers: the ranks of this host's workers.
        admission: admits and refuses links.
        keys: the public keys that workers have joined with, by rank; empty where links prove no keys.
        loans: opens memory of devices that workers lend; None refuses it.
    """

    def __init__(
        self,
        workers: Sequence[int],
        memory: Memory,
        servers: Servers,
        admission: Admission | None = None,
        keys: Mapping[int, str] | None = None,
        loans: Loans | None = None,
    ) -> None:
        self._workers = tuple(workers)
        self._incarnations = dict.fromkeys(workers, 1)  # as the scheduler gives them; nobody is replaced yet
        self._memory = memory
        self._times = ArrivalTimes(max(workers, default=0) + 1)
        self._servers = servers
        self.stores: dict[int, HostStore] = {}
        self._openers = Openers(workers)
        self._departed: Collection[int] = ()
        self.ledger: Ledger[wire.Reply] = Ledger()
        self._reply_links = ReplyLinks(admission)
        self._keys = keys or {}
        self._loans = loans or Loans(None)

    def handle(self, peer: bytes, message: wire.Message, now: float) -> Outbox:
        if not isinstance(message, wire.Request) and not isinstance(message, wire.Here):
            log.debug("dropped a %s, which aggregators do not handle", type(message).__name__)
            return []
        node = message.node
        if node.role != "worker" or node.incarnation != self._incarnations.get(node.rank):
            return turn_away(peer, message, "is not a worker of this host")
        if not self._reply_links.admit(peer, message, self._keys.get(node.rank, "")):
            return turn_away(peer, message, "joined this job with another key than that of this link")
        if isinstance(message, wire.Here):
            return []
        if isinstance(message, wire.Explain):
            return self._explain(peer, message)
        verdict = self.ledger.admit(message)
        if verdict is not Verdict.NEW:
            return self._reply_links.again(peer, message, self.ledger) if verdict is Verdict.REPEAT else []
        try:
            answers = self._serve(peer, message, now)
        except Exception as exc:
            if not isinstance(exc, UsageError | WireError):
                log.exception("a request of %s failed", message.node)
            answers = [refuse(peer, message, exc)]
        return self._note(answers)

    def answered(self, exchange: Exchange, reply: wire.Reply) -> Outbox:
        store = self.stores.get(exchange.fields["store"])
        return [] if store is None else self._note(store.answered(exchange, reply))

    def explained(self, peer: bytes, seq: int, reason: Reason) -> Outbox:
        """Return the answer to a worker's question what a request waits for, which a server has answered."""
        return [(peer, reason.reply(seq))]

    def depart(self, workers: Collection[int], lost: Collection[int] = ()) -> Outbox:
        """Note which workers have left in order, and which are ``lost``: nobody of this host waits for them.

        What comes of one that is lost from now on is refused.
        """
        for rank in lost:
            incarnation = self._incarnations.pop(rank, None)
            if incarnation is not None:
                self._reply_links.forget(wire.Node("worker", rank, incarnation))
        self._departed = [*workers, *lost]
        return self._each(lambda store: store.depart(workers, lost))

    def tick(self, now: float) -> Outbox:
        return self._each(lambda store: store.tick(now))

    def due(self) -> float | None:
        """Return when ``tick`` has something to send; None if nothing waits for the time."""
        times = [due for store in self.stores.values() if (due := store.due()) is not None]
        return min(times, default=None)

    def activity(self, now: float) -> ServedActivity:
        stores = self.stores.values()
        waits = together(store.waits(now) for store in stores)
        rounds = max((store.gathering.rounds for store in stores), default=0)
        return ServedActivity(rounds, 0, self._times.lateness, waits)

    # ---- helpers

    def _serve(self, peer: bytes, message: wire.Request, now: float) -> list[Answer]:
        done = [Answer(peer, message, wire.Ack(message.seq))]
        if isinstance(message, wire.Open):
            self._open(message)
            return done
        if isinstance(message, wire.Close):
            return self._close(message) + done
        store = self.stores.get(getattr(message, "store", -1))
        if store is None:
            raise UsageError(f"a {type(message).__name__} for a store that is not open; send Open first")
        if isinstance(message, wire.Push):
            return store.push(peer, message, now)
        if isinstance(message, wire.PushLent):
            return store.push_lent(peer, message, self._loans, now)
        if isinstance(message, wire.Lend):
            return [Answer(peer, message, self._loans.take(message))]
        if isinstance(message, wire.Pull):
            return store.pull(peer, message)
        if isinstance(message, wire.Pause):
            return store.pause(message) + done
        if isinstance(message, wire.Describe):
            store.segments.add(message)
            return done
        if isinstance(message, wire.GetStates):
            return [Answer(peer, message, store.encoding.get_states(message))]
        if isinstance(message, wire.PutStates):
            store.encoding.put_states(message)
            return done
        raise UsageError(f"an aggregator does not handle a {type(message).__name__}; send it to the servers")

    def _open(self, message: wire.Open) -> None:
        known = self.stores.get(message.store)
        rule = self._openers.open(message, None if known is None else known.rule)
        if rule is not None:
            store = HostStore(rule, self._workers, self._memory, self._servers, self._times)
            self.stores[message.store] = store
            store.depart(self._departed)

    def _close(self, message: wire.Close) -> list[Answer]:
        self._loans.forget(message.store, message.node.rank)
        if not self._openers.close(message):
            return []
        return self.stores.pop(message.store).close(UsageError("this store has been closed by all workers of its host"))

    def _explain(self, peer: bytes, message: wire.Explain) -> Outbox:
        for store in self.stores.values():
            found = store.find(message.node.rank, message.about)
            if isinstance(found, Exchange):
                self._servers.explain(found, peer, message.seq)
                return []
            if found is not None:
                return self.explained(peer, message.seq, found)
        return self.explained(peer, message.seq, Reason())

    def _each(self, action: Callable[[HostStore], list[Answer]]) -> Outbox:
        return self._note([answer for store in self.stores.values() for answer in action(store)])

    def _note(self, answers: list[Answer]) -> Outbox:
        for _, request, reply in answers:
            self.ledger.note(request, reply)
        return self._reply_links.outbox(answers)
