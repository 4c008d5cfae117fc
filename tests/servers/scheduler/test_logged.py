"""A scheduler that is made again from its log goes on as the first one would have."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from asking import Door, sent
from rendezvous import LIMIT, Member, logged

from kvstore import wire
from kvstore.errors import KVStoreError
from servers.scheduler import Scheduler
from servers.scheduler.inquiries import ANSWER_S
from servers.scheduler.logged import (
    Came,
    FormerLinks,
    LiveRecords,
    LoggedScheduler,
    Record,
    RecordPacker,
    Succession,
    Ticked,
    beginning,
    sender_of,
    unpack,
)

WORKERS, SERVERS, FAREWELL_S = 3, 1, 2.0
KINDS = ("open", "close", "declare", "ready", "barrier", "pause", "leave")


@dataclass
class Talk:
    """What members say to a scheduler, as the dice fall, and what they hear."""

    dice: random.Random
    records: list[Record] = field(default_factory=list)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.logged, self.scheduler = logged(self.records, FAREWELL_S)
        self.members = [Member("worker", 100 + rank, rank) for rank in range(WORKERS)]
        self.members += [Member("server", 200, 0)]
        self.asked: dict[bytes, dict[int, wire.Request]] = {member.peer: {} for member in self.members}
        self.answered: dict[bytes, set[int]] = {member.peer: set() for member in self.members}
        self.barriers = dict.fromkeys(range(WORKERS), 0)
        self.gone: set[bytes] = set()

    def say(self, member: Member, message: wire.Message) -> None:
        if isinstance(message, wire.Request):
            self.asked[member.peer][message.seq] = message
        self.hear(self.logged.handle(member.peer, sent(message), self.now))

    def hear(self, outbox: list[tuple[bytes, wire.Message]]) -> None:
        for peer, message in outbox:
            if isinstance(message, wire.Welcome):
                member = next(member for member in self.members if member.peer == peer)
                member.incarnation, member.seq = 1, 1
            if isinstance(message, wire.Reply):
                self.answered[peer].add(message.seq)

    def me(self, member: Member) -> wire.Sender:
        member.seq += 1
        waiting = self.asked[member.peer].keys() - self.answered[member.peer]
        return wire.Sender(member.node, member.seq, min(waiting, default=member.seq))

    def go_on(self) -> None:
        """One more thing happens."""
        self.now += self.dice.choice((0.0, 0.1, 1.0))
        member = self.dice.choice(self.members)
        if self.dice.random() < 0.2:
            for other in self.members:  # nobody is silent for long
                if other.incarnation == 1 and other.peer not in self.gone:
                    self.say(other, wire.Beat(other.node))
            self.hear(self.logged.tick(self.now))
        elif member.peer in self.gone:
            return
        elif member.incarnation != 1:
            self.say(member, member.join())
        elif member.role == "worker":
            self.say(member, self.request(member))

    def request(self, worker: Member) -> wire.Request:
        me, dice = self.me(worker), self.dice
        at_barrier = any(seq not in self.answered[worker.peer] for seq in self.asked[worker.peer])
        kind = dice.choices(
            ("open", "close", "declare", "ready", "barrier", "pause", "leave"), (1, 1, 6, 4, 6, 1, 0.3)
        )[0]
        if kind == "leave":
            self.gone.add(worker.peer)
            return wire.Leave(me, error="ValueError" if dice.random() < 0.1 else None)
        if kind == "open":
            return wire.OpenStore(me, ordinal=dice.randint(1, 2))
        if kind == "close":
            return wire.CloseStore(me, store=1)
        if kind == "ready":
            return wire.Ready(me, store=0, keys=dice.sample("abc", 2))
        if kind == "barrier" and not at_barrier:
            self.barriers[worker.rank] += 1
            return replace(worker.barrier(self.barriers[worker.rank]), sender=me)
        if kind == "pause":
            return replace(worker.pause(1), sender=me)
        shape = (2,) if dice.random() < 0.1 else (1,)
        return replace(worker.declare(*dice.sample("abc", 2), shape=shape), sender=me)


def epilogue(talk: Talk) -> Iterator[tuple[bytes, wire.Message | float]]:
    """What comes after a restart: all make new links, and ask again; all come to a barrier; all leave."""
    there = [copy.copy(member) for member in talk.members if member.peer not in talk.gone]
    for member in there:
        peer = b"new " + member.peer
        if member.incarnation == 1:
            yield peer, wire.Here(member.node)
            yield b"beats on " + peer, wire.Beat(member.node)
        for seq in sorted(talk.asked[member.peer].keys() - talk.answered[member.peer]):
            yield peer, talk.asked[member.peer][seq]
        if member.incarnation != 1:
            yield peer, member.join()
        yield peer, member.explain(max(talk.asked[member.peer], default=1))
    yield b"", talk.now + 1.0
    ready = [member for member in there if member.incarnation == 1]
    for member in ready:
        if member.role == "worker":
            me = wire.Sender(member.node, member.seq + 10, 0)
            yield b"new " + member.peer, replace(member.declare("a", "z"), sender=me)
            yield b"new " + member.peer, replace(member.barrier(99), sender=me._replace(seq=member.seq + 11))
            yield b"new " + member.peer, replace(member.explain(member.seq + 11), sender=me)
    yield b"", talk.now + 2.0
    for member in ready:
        yield b"new " + member.peer, wire.Leave(wire.Sender(member.node, member.seq + 12, 0), error=None)
        yield b"", talk.now + 2.0


def heard(scheduler: Any, talk: Talk) -> list[list[tuple[bytes, wire.Message]]]:
    """What comes over the new links in the epilogue. Only a successor tells faults again."""
    said = []
    for peer, message in epilogue(talk):
        if isinstance(message, float):
            outbox = scheduler.tick(message)
        else:
            outbox = scheduler.handle(peer, sent(message), talk.now)
        over_new = [(to, reply) for to, reply in outbox if b"new " in to and not isinstance(reply, wire.Fault)]
        said.append(over_new)
    return said


@pytest.mark.parametrize("seed", range(12))
def test_a_replay_of_any_prefix_goes_on_as_the_first_scheduler(seed: int) -> None:
    talk = Talk(random.Random(seed))
    for _ in range(9):
        for _ in range(talk.dice.randint(1, 12)):
            talk.go_on()
        again, _ = logged([], FAREWELL_S)
        again.replay(copy.deepcopy(talk.records), talk.now)
        assert heard(again, talk) == heard(copy.deepcopy(talk.scheduler), talk)


def test_the_random_talks_are_of_all_kinds() -> None:
    """Else the test above would show little."""
    said: set[type] = set()
    answers: set[type] = set()
    for seed in range(12):
        talk = Talk(random.Random(seed))
        for _ in range(6 * seed + 4):
            talk.go_on()
        said |= {type(record.message) for record in talk.records if isinstance(record, Came)}
        said |= {Ticked for record in talk.records if isinstance(record, Ticked)}
        answers |= {type(reply) for outbox in heard(talk.scheduler, talk) for _, reply in outbox}
    assert len(said) == 9, said
    assert answers >= {wire.Alive, wire.Roster, wire.Stop, wire.JobFailed, wire.Welcome}


class Small:
    """A job whose members have joined, with its log."""

    def __init__(self, door: Door | None = None) -> None:
        self.records: list[Record] = []
        self.now = 1000.0
        self.logged, self.scheduler = logged(self.records, FAREWELL_S, door=door)
        self.workers = [Member("worker", 100 + rank, rank) for rank in range(WORKERS)]
        self.server = Member("server", 200, 0)
        members = (*self.workers, self.server)
        for member in members:
            self.logged.handle(member.peer, member.join(), self.now)
        for member in members:
            member.incarnation, member.seq = 1, 1
            self.beat(member)
        self.logged.tick(self.now)

    def beat(self, member: Member) -> list[wire.Message]:
        return [said for _, said in self.logged.handle(member.beats, wire.Beat(member.node), self.now)]

    def restart(self, after_s: float = 0.5) -> None:
        records = list(self.records)
        self.now += after_s
        self.records.clear()
        self.logged, self.scheduler = logged(self.records, FAREWELL_S)
        self.logged.replay(records, self.now)
        self.records[:0] = records


def test_beats_questions_and_repeats_of_joins_are_not_logged() -> None:
    job = Small()
    w0 = job.workers[0]
    assert len(job.records) == WORKERS + SERVERS
    job.beat(w0)
    job.logged.handle(w0.peer, w0.explain(1), job.now)
    job.logged.handle(w0.peer, w0.join(), job.now)
    job.logged.handle(w0.peer, wire.Locate(w0.me(), "worker", [0, 1]), job.now)
    job.logged.handle(w0.beats, wire.Stacks(w0.node, 1, "train.py:41 in load", "", []), job.now)
    job.logged.tick(job.now)
    ((whom, located),) = job.logged.tick(job.now + ANSWER_S)
    assert (whom, located.ranks) == (w0.peer, [0, 1])
    assert len(job.records) == WORKERS + SERVERS


def test_strangers_do_not_fill_the_log() -> None:
    job = Small()
    stranger = Member("worker", 999, 7)
    for message in (stranger.join(), stranger.barrier(), stranger.leave(), replace(stranger.barrier(), sender=_of(7))):
        job.logged.handle(stranger.peer, message, job.now)
    assert len(job.records) == WORKERS + SERVERS


def _of(rank: int) -> wire.Sender:
    return wire.Sender(wire.Node("worker", rank, 1), 1, 0)


def test_silence_before_the_restart_is_forgiven_and_that_after_it_is_not() -> None:
    job = Small()
    job.restart(after_s=3 * LIMIT)
    assert job.logged.tick(job.now) == []
    assert job.scheduler.failure is None
    for step in range(1, 10):
        job.now += LIMIT / 4
        job.logged.tick(job.now)
        for member in job.workers:
            job.beat(member)
        assert (job.scheduler.failure is None) == (step <= 4)


def test_who_was_silent_is_so_in_a_replay_and_nobody_else() -> None:
    job = Small()
    for _ in range(5):
        job.now += LIMIT / 4
        for member in (*job.workers[:2], job.server):
            job.beat(member)
        job.logged.tick(job.now)
    failure = job.scheduler.failure
    assert failure == f"worker 2 is lost: it has been silent for {1.25 * LIMIT:.1f} s"
    job.restart()
    assert job.scheduler.failure == failure
    assert job.scheduler.members.lost == 1
    assert wire.JobFailed(failure) in job.beat(job.workers[0])


def test_a_fault_is_told_again_under_its_number() -> None:
    job = Small()
    w0, w1, _ = job.workers
    job.logged.handle(w0.peer, w0.declare("a"), job.now)
    job.logged.handle(w0.peer, wire.Ready(w0.me(), store=0, keys=["a"]), job.now)
    (fault,) = [
        said
        for _, said in job.logged.handle(w1.peer, w1.declare("a", shape=(2,)), job.now)
        if isinstance(said, wire.Fault)
    ]
    assert fault.number == 1
    job.restart()
    assert fault in job.beat(w0)
    assert fault not in job.beat(w0)


def test_the_launcher_is_believed_by_its_key_in_a_replay_too() -> None:
    """A link with another member's key may report nothing, and a replay does not ask the links of now."""
    keys = {b"link of worker 100": "k0", b"link of worker 101": "k1", b"link of worker 102": "k2"}
    job = Small(Door({**keys, b"launcher": "k1", b"liar": "k0"}))
    job.logged.handle(b"liar", wire.Lost("worker", 1, "was killed by SIGKILL"), job.now)
    job.restart()
    assert job.scheduler.failure is None
    job = Small(Door({**keys, b"launcher": "k1"}))
    job.logged.handle(b"launcher", wire.Lost("worker", 1, "was killed by SIGKILL"), job.now)
    job.restart()
    assert job.scheduler.failure == "worker 1 was killed by SIGKILL"


BEGINS = beginning(2, 1)
W0, W1 = Member("worker", 1, 0), Member("worker", 2, 1)
RECORDS: list[Record] = [
    Came(1000.0, b"from:1", "key of 0", W0.join()),
    Came(1000.25, b"\0abcd", "", wire.Lost("server", 1, "was killed by SIGKILL", 2)),
    Succession(),
    Came(1001.0, b"from:1", "key of 0", W0.declare("a", "b")),
    Came(1001.5, b"from:2", "key of 1", W1.declare("a", "b")),
    Ticked(1002.0, [(wire.Node("worker", 0, 1), 995.5), (wire.Node("server", 1, 2), 996.0)]),
    Came(1003.0, b"from:2", "key of 1", W1.declare("c")),
]


def packed(records: list[Record]) -> list[bytes]:
    packer = RecordPacker()
    return [packer.pack(record) for record in records]


def unpacked(log: bytes) -> list[Record]:
    return [record for record, _ in unpack(log, BEGINS, RecordPacker()) if record is not None]


def test_what_is_packed_is_unpacked() -> None:
    log = BEGINS + b"".join(packed(RECORDS))
    assert unpacked(log) == RECORDS
    assert BEGINS + b"".join(data for _, data in unpack(log, BEGINS, RecordPacker())) == log


def test_a_log_that_is_cut_anywhere_has_its_whole_records() -> None:
    parts = packed(RECORDS)
    log = BEGINS + b"".join(parts)
    ends = [len(BEGINS) + len(b"".join(parts[:count])) for count in range(len(parts) + 1)]
    for length in range(len(BEGINS), len(log) + 1):
        whole = sum(end <= length for end in ends) - 1
        assert unpacked(log[:length]) == RECORDS[:whole]


def test_a_byte_that_has_changed_is_an_error() -> None:
    log = BEGINS + b"".join(packed(RECORDS))
    for place in range(len(log)):
        wrong = bytearray(log)
        wrong[place] ^= 0x10
        with pytest.raises(KVStoreError, match=r"damaged: the record at byte \d+|of another job"):
            unpacked(bytes(wrong))


def test_a_log_of_another_job_is_refused() -> None:
    with pytest.raises(KVStoreError, match="of another job, or of another version"):
        list(unpack(beginning(3, 1), BEGINS, RecordPacker()))


def test_equal_declarations_of_many_workers_are_kept_once() -> None:
    keys = [f"layer {number}" for number in range(1000)]
    first, second = packed([Came(0.0, b"a", "", W0.declare(*keys)), Came(0.0, b"b", "", W1.declare(*keys))])
    assert len(second) < 100 < len(first)


def test_a_log_goes_on_with_the_bodies_that_are_in_it() -> None:
    packer = RecordPacker()
    log = BEGINS + b"".join(packed(RECORDS[:4]))
    assert len(list(unpack(log, BEGINS, packer))) == 5
    more = packer.pack(RECORDS[4])
    assert unpacked(log + more) == RECORDS[:5]
    assert len(more) < 60


def test_only_requests_have_senders() -> None:
    assert [sender_of(record) is None for record in RECORDS] == [False, True, True, False, False, True, False]
    assert sender_of(None) is None


BEGINNING = beginning(2)
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
        return [record for record, _ in unpack(BEGINNING + data, BEGINNING, RecordPacker()) if record is not None]

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
    rest = [record for record, _ in unpack(BEGINNING + trimmed.trim(), BEGINNING, RecordPacker()) if record is not None]
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
