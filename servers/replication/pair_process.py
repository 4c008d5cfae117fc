"""One of the two processes of a server's rank: it joins the job, and serves or stands by as the scheduler says."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore import wire
from kvstore.errors import REPLACED_EXIT, WireError
from kvstore.job.exit_report import report_consequence
from kvstore.rare_log import Drops
from kvstore.transport import Peer, Transport
from servers.member import Surroundings
from servers.replication.replica import Replaced, Replica
from servers.requests.replies import Outbox
from servers.server import ShardMember

log = logging.getLogger(__name__)


class StandbyLink:
    """The primary's link to its standby, over the transport of this process, so that one loop serves all."""

    def __init__(self, transport: Transport, address: str, node: wire.Node) -> None:
        self._transport = transport
        self._address = address
        self._node = node
        self.peer = self._connect()

    def renew(self) -> None:
        self.close()
        self.peer = self._connect()

    def introduce(self) -> None:
        """Say whose link this is, as has to be said again when the transport has reconnected it."""
        self.send(wire.Here(self._node))

    def send(self, message: wire.Message) -> None:
        """Send ``message``. Its large frames go by reference where the standby can map this process's memory."""
        self._transport.send(self.peer, wire.encode(message))

    def close(self) -> None:
        self._transport.disconnect(self.peer)

    def _connect(self) -> Peer:
        peer = self._transport.connect(self._address, bulk=True)
        self._transport.send(peer, wire.encode(wire.Here(self._node)))
        return peer


def stored(frames: list[wire.Buffer]) -> wire.Stored:
    message = wire.decode(frames)
    if not isinstance(message, wire.Stored):
        raise WireError(f"expected Stored of a standby, got {type(message).__name__}")
    return message


class ReplicaProcess(ShardMember):
    """A member that is the primary or the standby of a server's rank, as the scheduler says."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around, recorder=self, on_line_back=self._renew)
        self._interval_s = around.config.heartbeat_s / 2
        self._stands_at = 0.0
        self._replaced: Replaced | None = None
        self._drops = Drops(log)
        self._link: StandbyLink | None = None
        self._replica = Replica(
            self._session.client.node, self._shard, self._transport, self, around.config.heartbeat_timeout_s
        )

    def run(self) -> int:
        """Serve; return ``REPLACED_EXIT`` if another process has this one's place."""
        code = super().run()
        if self._replaced is None:
            return code
        report_consequence(f"{self.name} ends", str(self._replaced))
        return REPLACED_EXIT

    # ---- as the shard's ``Recorder``

    @property
    def shares(self) -> bool:
        """Whether there is a standby that reads this process's memory, and is sent changes as they are made."""
        link = self._link
        return link is not None and not self._replica.primary.capturing and self._transport.shares(link.peer)

    def note(self, message: wire.Message) -> None:
        self._replica.primary.record(message)

    # ---- as the replica's ``Neighbors``

    def link(self, address: str) -> None:
        self.unlink()
        self._link = StandbyLink(self._transport, address, self._session.client.node)

    def record(self, record: wire.Record) -> None:
        if self._link is not None:
            self._link.send(record)

    def unlink(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def tell(self, standing: wire.Standing) -> None:
        self._session.report(standing)

    # ---- in the loop

    def _leave(self, error: str | None) -> None:
        if self._replaced is None:
            super()._leave(error)
        else:  # the scheduler knows
            self._session.abandon()
            self._transport.close()

    def _answer(self, outbox: Outbox) -> Outbox:
        return self._replica.primary.answer(outbox)

    def _serve(self) -> None:
        if self._pace is not None:  # readers' answers wait as all others do: a standby has what a reader has seen
            self._pace.gate = self._replica.primary.answer
        self._service.run(self._handling(self._replica.handle), self._tick, self._soon, self._take, self._pace)

    def _take(self, peer: bytes, frames: list[wire.Buffer]) -> Outbox | None:
        link = self._link
        if link is None or peer != link.peer:
            return None
        if not frames:  # the link has been reconnected
            link.introduce()
            self._replica.link_made_anew()
            return []
        try:
            return self._unless_replaced(lambda: self._replica.stored(stored(frames)))
        except WireError as exc:
            self._drops.note("a bad message from the standby", exc)
            return []

    def _notice(self, notice: wire.Message) -> Outbox:
        if isinstance(notice, wire.View):
            return self._unless_replaced(lambda: self._replica.look(notice))
        if isinstance(notice, wire.Roster):
            return self._replica.depart(notice)
        return []

    def _renew(self) -> Outbox:
        if self._link is not None:
            self._link.renew()
            self._replica.link_made_anew()
        return []

    def _soon(self) -> float | None:
        if self._replica.busy:
            return self._clock()
        return self._shard.due() if self._replica.serves else None

    def _tick(self) -> Outbox:
        if self._failed() or self._replaced is not None:
            return []
        self._report()
        self._replica.go_on()
        now = self._clock()
        if now >= self._stands_at:
            self._stands_at = now + self._interval_s
            self._replica.stand(now)
            if self._replica.serves:
                self._prepare()
        return self._answer(self._shard.tick(now)) if self._replica.serves else []

    def _unless_replaced(self, action: Callable[[], Outbox]) -> Outbox:
        try:
            return action()
        except Replaced as exc:
            self._replaced = exc
            self._service.stop()
            return []
