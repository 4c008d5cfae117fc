"""Tables that are followed, without sockets: real shards and standbys, real followers, answers that come in pieces.

Whatever is pushed, evicted, put and published between the pieces of an answer, and whoever takes over: a follower has
all rows as they were when its version was published, on all servers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from asking import floats, sender, sent
from asking_rows import evict, init_tables, push_rows, put_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import Pair, Records, copied

from kvstore import wire
from kvstore.errors import KeyNotInitialized, UsageError, WireError
from kvstore.reading.followed_table import FetchedRows, RowsAsk, RowsById, Stripe
from kvstore.reading.held import ReadSegment
from kvstore.rows import admission
from kvstore.rows.ids import stripes_of
from kvstore.table import Capacity, Table, Unseen
from kvstore.transport.memory import Heap
from servers.reading import desk
from servers.reading.desk import TableRead
from servers.store.tables import published_rows

Rows = dict[int, list[float]]

FIXED = Table(shape=(40, 2))
GROWING = Table(dim=2, evict=[Unseen(6), Capacity(24)], dtype="bfloat16")
TABLES = {4: GROWING, 5: FIXED}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_rows, "MOST_SLOTS", 4)
    monkeypatch.setattr(published_rows, "HELD", 8)
    monkeypatch.setattr(desk, "MOST_ROW_BYTES", 48)
    monkeypatch.setattr(desk, "PIECE_ROWS", 2)
    monkeypatch.setattr(admission, "KEPT", 12)


class Server(Pair):
    """A shard that has one stripe of each table, and its standby."""

    def __init__(self, rank: int, servers: int) -> None:
        super().__init__(1)
        self.rank, self.servers = rank, servers
        self.tell(init_tables(self.workers[0], TABLES, rank, servers))

    def tell(self, message: wire.Message) -> None:
        reply = self.reply(self.workers[0], message)
        assert isinstance(reply, wire.Ack | wire.PublishNoted), reply

    def own(self, number: int, ids: list[int]) -> list[int]:
        where = stripes_of(TABLES[number], np.array(ids, np.int64), self.servers)
        return [each for each, server in zip(ids, where.tolist(), strict=True) if server == self.rank]

    def rows(self, number: int) -> Rows:
        """The rows as they are now, read as a save reads them."""
        frozen = self.shard.stores[0].buckets.read_tables([number])[0].table.freeze()
        ids, rows, _ = frozen.page(0, frozen.slots)
        frozen.thaw()
        return dict(zip(ids.tolist(), rows.tolist(), strict=True))

    def replace(self) -> None:
        """Let the standby take over, and have a new one."""
        self.catch_up()
        self.take_over()
        self.standby = copied(self.shard, 1)
        self.records, self.applied = Records(), 0
        self.shard.record(self.records)


class Job:
    """Servers, and the rows of each version that was published."""

    def __init__(self, servers: int, rng: random.Random | None = None) -> None:
        self.rng = rng or random.Random(1)
        self.servers = [Server(rank, servers) for rank in range(servers)]
        self.clock = self.number = 0
        self.published: dict[tuple[int, int], Rows] = {}
        self._late: list[Server] = []  # which have not heard yet of the version

    def has_other_than(self, lineage: int, number: int, server: int) -> bool:
        publishing = self.servers[server].shard.stores[0].publishing
        return bool(publishing.whole) and (publishing.lineage, publishing.newest) != (lineage, number)

    def push(self, ids: list[int], value: float) -> None:
        self.reach_all()
        self.clock += 1
        for server in self.servers:
            rows = {n: {each: [value, each] for each in server.own(n, sorted(ids))} for n in TABLES}
            server.tell(push_rows(server.workers[0], rows, self.clock, wide=True, in_float32=True))

    def put(self, ids: list[int]) -> None:
        self.reach_all()
        for server in self.servers:
            rows = {each: [-1.0, each] for each in server.own(4, ids)}
            server.tell(put_rows(server.workers[0], 4, rows, GROWING.dtype))

    def evict(self) -> None:
        self.reach_all()
        for server in self.servers:
            server.tell(evict(server.workers[0], 4, self.clock))

    def publish(self, late: int = 0) -> None:
        """Publish a version. The last ``late`` servers hear of it later: see ``reach_all``."""
        self.reach_all()
        self.number += 1
        for number in TABLES:
            self.published[self.number, number] = {}
        self._late = self.servers[len(self.servers) - late :]
        self._reach([each for each in self.servers if each not in self._late])

    def reach_all(self) -> None:
        self._reach(self._late)
        self._late = []

    def _reach(self, servers: Sequence[Server]) -> None:
        for server in servers:
            fields = {"lineage": 5, "number": self.number, "label": f"v{self.number}", "rounded": None}
            clocks = [self.clock] * len(TABLES)
            server.tell(wire.Publish(server.workers[0].me(), 0, **fields, ids=list(TABLES), clocks=clocks))
            for number in TABLES:
                self.published[self.number, number] |= server.rows(number)


class Follower:
    """A follower of a table, whose questions are answered piece by piece."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.fetched = FetchedRows(TABLES[number], [ReadSegment(number, at, 0, 1) for at in range(len(job.servers))])
        self.rows = RowsById(TABLES[number])
        self.version, self.nbytes = 0, 0
        self._asked: list[tuple[RowsAsk, wire.ReadTable]] = []
        self._anew = True
        self._under_way: tuple[RowsAsk, TableRead] | None = None
        self.waits = 0  # for another version that have come to an end
        self._waits_for: Stripe | None = None  # whose server is to have another version

    def go_on(self, nbytes: int = 1) -> None:
        """Ask, or have a piece of an answer made, and take the answer that is complete."""
        if self._waits_for is not None:
            if not self.job.has_other_than(self.fetched.lineage, self._waits_for.newest, self._waits_for.server):
                return
            self.waits += 1
            self._waits_for = None
        if self._under_way is None:
            if not self._asked:
                for ask in self.fetched.asks(self._anew):
                    request = sent(wire.ReadTable(sender(role="reader"), store=0, **self.fetched.fields(ask)))
                    self._asked.append((ask, request))
                self._anew = False
            if not self._asked:
                self._have()
                return
            ask, request = self._asked.pop(self.job.rng.randrange(len(self._asked)))
            self._under_way = ask, TableRead(self.job.servers[ask.stripe.server].shard.stores[0], request, Heap())
            return
        ask, read = self._under_way
        reply = read.step(nbytes)
        if reply is None:
            return
        self._under_way = None
        self.nbytes += sum(map(len, reply.buffers))
        brought = self.fetched.take(ask, sent(reply))
        if self._asked:
            return
        if not brought:
            self._anew = True
        if not all(stripe.there for stripe in self.fetched.stripes):
            self._waits_for = self.fetched.last()

    def drop(self) -> None:
        """Lose what is under way."""
        self._under_way, self._asked, self._anew, self._waits_for = None, [], True, None

    def _have(self) -> None:
        self._anew = True
        if not self.fetched.number:
            return
        before, fresh = self.all(), not self.version
        self.rows, changed = self.fetched.merged(self.rows)
        self.fetched.taken()
        assert self.fetched.number >= self.version
        self.version = self.fetched.number
        assert self.fetched.label == f"v{self.version}"
        rows = self.all()
        assert rows == self.job.published[self.version, self.number]
        if changed is None:
            return
        assert not fresh
        differ = {each for each in before.keys() | rows.keys() if before.get(each) != rows.get(each)}
        assert differ <= set(changed.tolist())

    def all(self) -> Rows:
        ids, rows = self.rows.all()
        return dict(zip(ids.tolist(), rows.tolist(), strict=True))

    def catch_up(self) -> None:
        for _ in range(1000):
            if self.version == self.job.number:
                return
            self.go_on()
        raise AssertionError("it does not come to the newest version")


@settings(max_examples=8)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_a_follower_has_all_rows_of_one_version(seed: int, servers: int) -> None:
    rng = random.Random(seed)
    job = Job(servers, rng)
    followers = [Follower(job, number) for number in TABLES for _ in range(2)]
    weights = {"push": 6, "publish": 3, "evict": 1, "put": 1, "replace": 1, "drop": 1, "go on": 60}
    for step in range(300):
        kind = rng.choices(list(weights), list(weights.values()))[0]
        if kind == "push":
            job.push(rng.sample(range(40), rng.randrange(9)), step)
        elif kind == "publish":
            job.publish(late=rng.randrange(servers))
        elif kind == "evict":
            job.evict()
        elif kind == "put" and rng.random() < 0.3:
            job.put(rng.sample(range(40), 3))
        elif kind == "replace":
            job.reach_all()
            rng.choice(job.servers).replace()
        elif kind == "drop":
            rng.choice(followers).drop()
        else:
            followers[rng.choice([0, 0, 0, 1, 2, 2, 2, 3])].go_on()
    job.reach_all()
    for _ in range(2):  # the last version is not there for those that ask for the first time, or of a new server
        job.push([1, 2], -2)
        for follower in followers:
            for _ in range(200):
                follower.go_on()
        job.publish()
    for follower in followers:
        follower.catch_up()


def settled(servers: int = 1) -> Iterator[tuple[Job, Follower]]:
    job = Job(servers)
    job.push(list(range(40)), 1)
    job.publish()
    follower = Follower(job, 5)
    follower.catch_up()
    yield job, follower


def test_rows_that_have_not_changed_since_the_version_need_no_other_version() -> None:
    ((job, follower),) = settled()
    assert follower.all() == {each: [1, each] for each in range(40)}
    assert job.number == 1


def test_who_waits_for_a_version_waits_for_the_server_that_makes_it_last() -> None:
    job = Job(2)
    job.push(list(range(40)), 1)
    job.publish(late=1)
    follower = Follower(job, 5)
    for _ in range(99):
        follower.go_on()
    assert (follower.version, follower.waits) == (0, 0)
    job.reach_all()
    follower.catch_up()
    assert follower.waits == 1


def test_one_answer_has_what_many_versions_have_changed() -> None:
    ((job, follower),) = settled()
    for number in range(100):
        job.push([7, 30], number)
        job.publish()
    before = follower.nbytes
    follower.catch_up()
    assert follower.version == 101
    assert follower.nbytes - before < 2 * 8 + 40
    assert follower.all()[7] == [99, 7]


def test_a_version_of_a_table_that_nobody_reads_costs_nothing() -> None:
    job = Job(1)
    job.push([1], 1)
    job.publish()
    table = job.servers[0].shard.stores[0].buckets.read_tables([5])[0].table
    assert not table.frozen
    Follower(job, 5).catch_up()
    assert table.frozen
    for _ in range(published_rows.FOLLOWED + 1):
        job.publish()
    assert not table.frozen


def test_a_follower_of_several_servers_gets_versions_that_are_made_faster_than_it_reads() -> None:
    job = Job(2)
    follower = Follower(job, 5)
    versions = set()
    for step in range(300):
        job.push([step % 40], step)
        for _ in job.servers:  # they are never asked at the same version
            job.publish()
            follower.go_on(1 << 20)
        versions.add(follower.version)
    assert len(versions) > 10


def test_another_follower_that_comes_while_rows_change_waits_for_the_next_version() -> None:
    job = Job(1)
    job.push([1], 1)
    job.publish()
    job.push([1], 2)
    follower = Follower(job, 5)
    for _ in range(9):
        follower.go_on()
    assert not follower.version
    job.publish()
    follower.catch_up()
    assert follower.all() == {1: [2, 1]}


def ask(job: Job, **fields: Any) -> wire.TableRead:
    named = {"id": 5, "lineage": 0, "want": 0, "at": [0, 0], "layout": 0, "held": [], "skip": 0} | fields
    read = TableRead(
        job.servers[0].shard.stores[0], sent(wire.ReadTable(sender(role="reader"), store=0, **named)), Heap()
    )
    while (reply := read.step(1 << 20)) is None:
        pass
    return reply


@pytest.mark.parametrize(
    "fields",
    [
        {"at": [3, 1], "held": [1]},
        {"at": [7000, 99], "held": [1]},
        {"at": [7000, 1], "held": [99]},
        {"at": [0, 0], "held": [1]},
    ],
)
def test_what_is_named_of_another_course_is_not_known(fields: dict[str, Any]) -> None:
    ((job, _),) = settled()
    reply = ask(job, **fields)
    assert (reply.known, reply.number, reply.done, reply.count) == (False, 1, 0, 0)


def test_parts_of_another_servers_layout_bring_nothing_but_the_layout() -> None:
    ((job, _),) = settled()
    reply = ask(job, at=[7000, 1], held=[1, 0], layout=3)
    assert (reply.known, reply.more, reply.done, reply.evicted, reply.parts) == (True, True, 0, 0, 10)
    assert ask(job, at=[7000, 1], held=[1], layout=3).done == 10


def test_a_version_that_is_not_there_yet_brings_nothing() -> None:
    ((job, _),) = settled()
    reply = ask(job, lineage=5, want=2)
    assert (reply.number, reply.done, reply.count, reply.buffers) == (1, 0, 0, [])


def test_a_table_that_no_version_has_is_not_there_yet_and_an_array_is_refused() -> None:
    ((job, _),) = settled()
    server = job.servers[0]
    server.tell(init_tables(server.workers[0], {9: FIXED}))
    reply = ask(job, id=9)
    assert (reply.number, reply.newest, reply.done) == (0, 1, 0)
    server.tell(server.workers[0].init({1: floats(0)}))
    with pytest.raises(UsageError, match="is an array"):
        ask(job, id=1)
    with pytest.raises(KeyNotInitialized):
        ask(job, id=77)


def test_an_answer_that_was_damaged_is_refused_and_changes_nothing() -> None:
    ((job, follower),) = settled()
    job.push([3, 4], 8)
    job.publish()
    (one,) = follower.fetched.asks(True)
    fields = follower.fetched.fields(one)
    good = ask(job, **fields)
    data = bytearray(good.buffers[0])
    for change in (
        {"buffers": [bytes([data[0] ^ 1]) + data[1:]]},
        {"buffers": [data[:-1]]},
        {"buffers": []},
        {"count": 1},
        {"count": 1 << 31},
        {"evicted": 1},
        {"done": 11},
        {"more": True},
    ):
        bad = wire.TableRead(**{name: getattr(good, name) for name in good.__dataclass_fields__} | change)
        with pytest.raises(WireError):
            follower.fetched.take(one, bad)
    assert not follower.fetched.torn
    follower.catch_up()


def test_an_update_that_was_cut_short_is_followed_by_all_rows() -> None:
    ((job, follower),) = settled()
    job.push([3, 4], 8)
    job.publish()
    follower.fetched.merged(follower.rows)  # and what came is not taken
    assert follower.fetched.torn
    follower.fetched.forget()
    job.push([5], 9)
    job.publish()
    follower.catch_up()
