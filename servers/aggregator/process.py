"""The aggregator as a process: it joins the job, and serves its host's workers until they are done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from kvstore import wire
from kvstore.devices import device_memory
from kvstore.job.config import Config
from kvstore.transport import Transport
from servers.activity import ServedActivity
from servers.aggregator.core import Aggregator
from servers.aggregator.exchanges import Exchange
from servers.aggregator.loans import Loans
from servers.aggregator.upstream import Upstream
from servers.member import ServingMember, Surroundings
from servers.requests.replies import Outbox


class AggregatorProcess(ServingMember):
    """A member that serves its host's workers until all workers are done or the job has failed.

    See ``ServingMember``.
    """

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around, self._renew)
        config = around.config
        self._outbox: Outbox = []
        self._upstream = Upstream(
            self._transport,
            self._session.client.node,
            self._session.addresses,
            config.window_bytes,
            around.clock,
            lambda peer, seq, reason: self._outbox.extend(self._aggregator.explained(peer, seq, reason)),
        )
        self._session.when_traced(self._upstream.trace)
        workers = self._session.aggregated[self._session.rank]
        keys = self._session.worker_keys
        self._aggregator = Aggregator(
            workers,
            self._transport,
            self._upstream,
            self._transport,
            {rank: keys[rank] for rank in workers} if keys else {},
            Loans(None if config.device_sum == "off" else partial(device_memory, config.device_sum)),
        )

    def _serve(self) -> None:
        self._service.run(self._handle, self._tick, self._due, self._take)

    # ---- in the loop

    def _handle(self, peer: bytes, message: wire.Message) -> Outbox:
        return self._with_answers(self._aggregator.handle(peer, message, self._clock()), [])

    def _take(self, peer: bytes, frames: list[wire.Buffer]) -> Outbox | None:
        answers = self._upstream.take(peer, frames)
        return None if answers is None else self._with_answers([], answers)

    def _tick(self) -> Outbox:
        if self._failed():
            return []
        self._report()
        return self._with_answers(self._aggregator.tick(self._clock()), self._upstream.tick())

    def _activity(self) -> ServedActivity:
        return self._aggregator.activity(self._clock())

    def _due(self) -> float | None:
        times = [due for due in (self._aggregator.due(), self._upstream.due()) if due is not None]
        return min(times, default=None)

    def _notice(self, notice: wire.Message) -> Outbox:
        if isinstance(notice, wire.Roster):
            return self._with_answers(self._aggregator.depart(notice.departed), [])
        if isinstance(notice, wire.Moved):
            self._upstream.move(notice.rank, notice.address)
            return self._with_answers([], self._upstream.tick())
        return []

    def _renew(self) -> Outbox:
        self._upstream.renew()
        return self._with_answers([], self._upstream.tick())

    def _with_answers(self, outbox: Outbox, answers: list[tuple[Exchange, wire.Reply]]) -> Outbox:
        """Return ``outbox`` and what follows from the servers' answers."""
        for exchange, reply in answers:
            outbox += self._aggregator.answered(exchange, reply)
        outbox += self._outbox
        self._outbox = []
        return outbox


def run_aggregator(
    config: Config,
    make_transport: Callable[[], Transport],
    endpoint: str,
    clock: Callable[[], float] = time.monotonic,
    thread: Callable[..., threading.Thread] = threading.Thread,
) -> int:
    """Be an aggregator; see ``AggregatorProcess``."""
    return AggregatorProcess(Surroundings(config, make_transport, endpoint, clock, thread)).run()
