"""Barriers that all have passed leave the log; a scheduler made from the rest is the same."""

from __future__ import annotations

from dataclasses import replace

from asking import Door
from rendezvous import LIMIT, Member

from kvstore import wire
from servers.scheduler import Scheduler
from servers.scheduler.logged import (
    Came,
    FormerLinks,
    LiveRecords,
    LoggedScheduler,
    Record,
    RecordPacker,
    beginning,
    unpack,
)

BEGINS = beginning(2)
PEERS = (b"a", b"b")


class Log:
    """A log of the barriers of two workers, and what is left of it."""

    def __init__(self) -> None:
        self.live = LiveRecords(2)
        self.packer = RecordPacker()

    def add(self, message: wire.Message) -> None:
        record = Came(0.0, b"link", "", message)
        self.live.add(self.packer.pack(record), record)

    def left(self) -> list[Record]:
        data = self.live.trim()
        assert self.live.nbytes == len(data)
        return [record for record, _ in unpack(BEGINS + data, BEGINS, RecordPacker()) if record is not None]

    def barriers(self) -> list[int]:
        return [record.message.number for record in self.left() if isinstance(record, Came)]  # type: ignore[attr-defined]


def barrier(rank: int, number: int, seq: int, done: int) -> wire.Barrier:
    worker = Member("worker", 1, rank)
    return replace(worker.barrier(number), sender=wire.Sender(worker.node, seq, done))


def test_a_barrier_stays_until_all_have_come_and_have_their_answers() -> None:
    log = Log()
    log.add(barrier(0, 1, seq=2, done=2))
    assert log.barriers() == [1]
    log.add(barrier(1, 1, seq=2, done=2))
    assert log.barriers() == [1, 1]
    log.add(barrier(0, 2, seq=3, done=3))
    assert log.barriers() == [1, 1, 2], "worker 1 may repeat its request"
    log.add(barrier(1, 2, seq=3, done=3))
    assert log.barriers() == [2, 2]


def test_a_barrier_to_which_one_came_twice_stays_until_that_is_answered() -> None:
    """It was sent away, because the other was inside ``join``."""
    log = Log()
    log.add(barrier(0, 1, seq=2, done=2))
    log.add(barrier(0, 1, seq=3, done=3))
    log.add(barrier(1, 1, seq=2, done=2))
    log.add(barrier(1, 2, seq=3, done=3))
    assert log.barriers() == [1, 1, 1, 2]


def test_the_log_of_a_million_barriers_would_be_short() -> None:
    log = Log()
    for number in range(1, 1001):
        for rank in range(2):
            log.add(barrier(rank, number, seq=number, done=number))
    assert log.barriers() == [1000, 1000]
    assert log.live.nbytes < 200


def test_a_scheduler_from_a_trimmed_log_answers_as_one_from_the_whole() -> None:
    whole: list[Record] = []
    trimmed = LiveRecords(2)
    packer = RecordPacker()

    def take(record: Record) -> None:
        whole.append(record)
        trimmed.add(packer.pack(record), record)

    links = FormerLinks(Door())
    scheduler = LoggedScheduler(Scheduler(2, 0, LIMIT, 0.0, links), links, take)
    members = [Member("worker", 100 + rank, rank) for rank in range(2)]
    for member in members:
        scheduler.handle(member.peer, member.join(), 1.0)
    for number in range(1, 8):
        for rank in range(2 if number < 7 else 1):
            scheduler.handle(members[rank].peer, barrier(rank, number, number + 1, number + 1), 1.0)
    rest = [record for record, _ in unpack(BEGINS + trimmed.trim(), BEGINS, RecordPacker()) if record is not None]
    assert len(rest) == 2 + 2 + 1
    heard = []
    for records in (whole, rest):
        links = FormerLinks(Door())
        again = LoggedScheduler(Scheduler(2, 0, LIMIT, 0.0, links), links, lambda record: None)
        again.replay(records, 2.0)
        said = [
            again.handle(PEERS[rank], barrier(rank, number, number + 1, 1), 2.0)
            for rank, number in ((1, 5), (1, 6), (0, 6), (0, 7), (1, 7))
        ]
        heard.append(said)
    assert heard[0] == heard[1]
    assert [len(outbox) for outbox in heard[0]] == [0, 1, 0, 0, 2]
