"""What tests of replication have in common: a shard that is a list of numbers, and records as they arrive."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvstore import wire
from servers.requests.replies import Outbox

SERVER, STANDBY = wire.Node("server", 1, 1), wire.Node("standby", 1, 1)


def change(number: int) -> wire.Pull:
    return wire.Pull(wire.Sender(wire.Node("worker", 0, 1), number, 0), 0, [number], [0])


def number_of(record: wire.Record) -> int:
    inner = wire.decode([bytearray(frame) for frame in record.buffers])
    return int(inner.ids[0])


def closed(version: int, ids: tuple[int, ...] = (1,), *, store: int = 0, kept: bool = True) -> wire.ClosedRounds:
    return wire.ClosedRounds(
        store,
        list(ids),
        [1] * len(ids),
        versions=[version] * len(ids),
        contributors=[],
        scales=[],
        lr=None,
        rescale=1.0,
        changes=[],
        failures=[],
        assigned=False,
        kept=kept,
        buffers=[bytes(8)],
    )


def updated(version: int, ids: tuple[int, ...] = (1,), *, store: int = 0) -> wire.Updated:
    """A record of what the rounds up to ``version`` have made of arrays."""
    return wire.Updated(store, list(ids), [1] * len(ids), [version] * len(ids), [], [], [], [], [], [bytes(8)])


class Counting:
    """A shard that notes the numbers that it is asked to note, records them, and answers each with an ``Ack``."""

    def __init__(self, rank: int = 1) -> None:
        self._rank = rank
        self.noted: list[int] = []
        self.departed: list[int] = []
        self.lost: list[int] = []
        self.recorder = lambda message: None
        self.strangers: set[bytes] = set()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def rounds(self) -> int:
        return len(self.noted)

    def refusal(self, peer: bytes, message: wire.Message) -> Outbox | None:
        return [] if peer in self.strangers else None

    def handle(self, peer: bytes, message: wire.Message) -> Outbox:
        if not isinstance(message, wire.Request):
            return []
        if isinstance(message, wire.Explain):
            return [(peer, wire.Explanation(message.seq, ""))]
        if isinstance(message, wire.Pull) and message.ids:
            self.recorder(message)
            self.apply(message)
        return [(peer, wire.Ack(message.seq))]

    def depart(
        self,
        workers: Collection[int],
        lost: Collection[int] = (),
        came: Collection[int] = (),
        aggregators: Collection[int] = (),
    ) -> Outbox:
        self.departed, self.lost = list(workers), list(lost)
        return []

    def apply(self, message: wire.Message) -> None:
        if isinstance(message, wire.ClosedRounds | wire.Updated):
            self.noted += message.versions
            return
        assert isinstance(message, wire.Pull)
        self.noted += message.ids

    def capture(self) -> Iterator[wire.Message]:
        return iter([change(number) for number in self.noted])


def arrived(record: wire.Record) -> wire.Record:
    message = wire.decode([bytearray(frame) for frame in wire.encode(record)])
    assert isinstance(message, wire.Record)
    return message
