"""A replica: what it does with requests, records and views as primary, as standby, and before it is either."""

from __future__ import annotations

from dataclasses import replace

import pytest
from asking import Door
from replication.pairs import SERVER, STANDBY, Counting, arrived, change, number_of

from kvstore import wire
from kvstore.errors import WireError
from servers.replication.replica import MOST_READS, HeldRequests, Replaced, Replica

WORKER = wire.Node("worker", 0, 1)
FIRST = wire.View(SERVER, 1, "", ["standby", 1], "inproc://standby", "", True)
TAKEN_OVER = wire.View(STANDBY, 2)
HEALED = wire.View(STANDBY, 3, "", ["server", 2], "inproc://server.2", "", False)


class Setup:
    def __init__(self, node: wire.Node) -> None:
        self.shard = Counting()
        self.links: list[str | None] = []
        self.records: list[wire.Record] = []
        self.told: list[wire.Standing] = []
        self.door = Door()
        self.replica = Replica(node, self.shard, self.door, self, 5.0)
        self.shard.recorder = self.replica.primary.record

    def link(self, address: str) -> None:
        self.links.append(address)

    def record(self, record: wire.Record) -> None:
        self.records.append(record)

    def unlink(self) -> None:
        self.links.append(None)

    def tell(self, standing: wire.Standing) -> None:
        self.told.append(standing)


def standing_by() -> Setup:
    setup = Setup(STANDBY)
    assert setup.replica.look(FIRST) == []
    assert setup.replica.handle(b"primary", wire.Here(SERVER)) == []
    return setup


def record(number: int, epoch: int = 1) -> wire.Record:
    return arrived(wire.Record(epoch, number, wire.encode(change(number))))


def test_before_its_first_view_it_keeps_what_is_asked_and_says_so() -> None:
    setup = Setup(SERVER)
    assert setup.replica.handle(b"w", change(1)) == []
    why = "waits for the scheduler, which has not said which process serves server 1"
    assert setup.replica.handle(b"w", wire.Explain(wire.Sender(WORKER, 2, 0), 1)) == [(b"w", wire.Explanation(2, why))]
    assert setup.replica.look(FIRST) == []  # the answer waits for the standby
    assert setup.links == ["inproc://standby"]
    assert [number_of(each) for each in setup.records] == [1]
    assert setup.replica.stored(wire.Stored(1, 1)) == [(b"w", wire.Ack(1))]
    assert setup.told == [wire.Standing(SERVER, 1, 1, True)]


def test_who_may_not_speak_is_not_kept() -> None:
    setup = Setup(SERVER)
    setup.shard.strangers = {b"stranger"}
    setup.replica.handle(b"stranger", change(1))
    setup.replica.look(wire.View(SERVER, 1))
    assert setup.shard.noted == []


def test_a_standby_that_takes_over_applies_what_it_has_stored_and_then_answers_what_it_has_kept() -> None:
    setup = standing_by()
    replica = setup.replica
    assert replica.handle(b"primary", record(1)) == [(b"primary", wire.Stored(1, 1))]
    assert replica.handle(b"w", change(9)) == []
    assert replica.handle(b"primary", record(2)) == [(b"primary", wire.Stored(1, 2))]
    ask = wire.Explain(wire.Sender(WORKER, 10, 0), 9)
    why = "waits for the standby of server 1, which has not taken over yet"
    assert replica.handle(b"w", ask) == [(b"w", wire.Explanation(10, why))]
    replica.depart(wire.Roster(1, [3], [2], [1]))
    assert (setup.shard.departed, setup.shard.lost) == ([], [])  # its primary says when
    assert replica.busy
    assert replica.look(TAKEN_OVER) == [(b"w", wire.Ack(9))]
    assert setup.shard.noted == [1, 2, 9]
    assert (setup.shard.departed, setup.shard.lost) == ([3], [2])
    assert replica.serves
    assert setup.told == [wire.Standing(STANDBY, 2, 3, False)]
    assert replica.handle(b"w", change(11)) == [(b"w", wire.Ack(11))]


def test_a_primary_that_has_been_replaced_is_told_and_ends() -> None:
    new, old = standing_by(), Setup(SERVER)
    new.replica.handle(b"primary", record(1))
    old.replica.look(FIRST)
    old.replica.handle(b"w", change(1))
    new.replica.look(TAKEN_OVER)
    (answer,) = new.replica.handle(b"primary", record(2))
    assert answer == (b"primary", wire.Stored(2, 0))
    assert new.shard.noted == [1]
    with pytest.raises(Replaced, match="server 1 is served by another process, in view 2"):
        old.replica.stored(wire.Stored(2, 0))


@pytest.mark.parametrize("node", [SERVER, wire.Node("standby", 1, 2)])
def test_a_view_that_does_not_name_it_ends_it(node: wire.Node) -> None:
    setup = Setup(node)
    if node == SERVER:
        setup.replica.look(FIRST)
    with pytest.raises(Replaced):
        setup.replica.look(HEALED)


def test_a_primary_never_becomes_a_standby() -> None:
    setup = Setup(SERVER)
    setup.replica.look(FIRST)
    with pytest.raises(Replaced):
        setup.replica.look(wire.View(STANDBY, 3, "", ["server", 1], "inproc://server", "", True))


def test_old_views_and_views_that_come_twice_change_nothing() -> None:
    setup = Setup(STANDBY)
    setup.replica.look(HEALED)
    setup.replica.look(FIRST)
    setup.replica.look(HEALED)
    assert setup.replica.serves
    assert setup.links == ["inproc://server.2"]


def test_a_newcomer_is_brought_into_step_and_the_scheduler_hears_of_it() -> None:
    old, new = standing_by(), Setup(wire.Node("server", 1, 2))
    old.replica.handle(b"primary", record(1))
    old.replica.look(TAKEN_OVER)
    old.replica.handle(b"w", change(2))
    assert not old.replica.busy
    assert old.replica.look(HEALED) == []
    assert old.links == [None, "inproc://server.2"]
    new.replica.look(HEALED)
    new.replica.handle(b"p", wire.Here(STANDBY))
    passed = 0
    while old.replica.busy or passed < len(old.records):
        old.replica.go_on()
        for each in old.records[passed:]:
            passed += 1
            for _, said in new.replica.handle(b"p", arrived(each)):
                old.replica.stored(said)  # type: ignore[arg-type]
    assert [standing.synced for standing in old.told] == [False, False, True]
    assert [standing.nbytes > 0 for standing in old.told] == [False, False, True]
    while new.replica.busy:
        new.replica.go_on()
    assert new.shard.noted == old.shard.noted == [1, 2]
    synced = wire.View(STANDBY, 4, "", ["server", 2], "inproc://server.2", "", True)
    assert old.replica.look(synced) == new.replica.look(synced) == []
    assert old.links == [None, "inproc://server.2"]
    assert old.replica.handle(b"w", change(3)) == []
    (last,) = old.records[passed:]
    ((_, stored),) = new.replica.handle(b"p", arrived(last))
    assert old.replica.stored(stored) == [(b"w", wire.Ack(3))]  # type: ignore[arg-type]


def test_over_a_new_link_the_standby_is_sent_what_it_lacks() -> None:
    setup = Setup(SERVER)
    setup.replica.link_made_anew()
    setup.replica.look(FIRST)
    setup.replica.handle(b"w", change(5))
    setup.replica.link_made_anew()
    assert [(each.number, number_of(each)) for each in setup.records] == [(1, 5), (1, 5)]


def test_when_the_standby_is_lost_what_waited_is_answered() -> None:
    setup = Setup(SERVER)
    setup.replica.look(FIRST)
    setup.replica.handle(b"w", change(5))
    assert setup.replica.look(wire.View(SERVER, 2)) == [(b"w", wire.Ack(5))]
    assert setup.links == ["inproc://standby", None]
    assert setup.told[-1] == wire.Standing(SERVER, 2, 1, False)


def test_only_the_primary_stands() -> None:
    setup = standing_by()
    setup.replica.stand()
    assert setup.told == []


def test_a_record_for_nobody_is_refused() -> None:
    setup = standing_by()
    with pytest.raises(WireError, match="a record of view 7"):
        setup.replica.handle(b"primary", record(1, epoch=7))


def test_a_standby_that_stores_nothing_for_too_long_is_not_in_step() -> None:
    setup = Setup(SERVER)
    setup.replica.look(FIRST)

    def synced(now: float) -> bool:
        setup.replica.stand(now)
        return setup.told[-1].synced

    assert synced(0.0)
    assert synced(100.0)  # nothing waits
    setup.replica.handle(b"w", change(5))
    setup.replica.handle(b"w", change(6))
    assert synced(101.0)
    assert synced(106.0)
    setup.replica.stored(wire.Stored(1, 1))
    assert synced(106.5)
    assert not synced(112.0)
    assert setup.replica.handle(b"w", change(7)) == []  # only a view lets it go on alone
    setup.replica.stored(wire.Stored(1, 3))
    assert synced(112.5)


def test_reads_are_kept_too_but_only_so_many() -> None:
    setup = standing_by()
    for seq in range(MOST_READS + 1):
        read = replace(change(1), sender=wire.Sender(wire.Node("reader", 0, 7), seq, 0), ids=[], clocks=[])
        assert setup.replica.handle(b"r", read) == []
    assert setup.replica.look(TAKEN_OVER) == [(b"r", wire.Ack(seq)) for seq in range(MOST_READS)]


def ask(seq: int, done: int = 0, rank: int = 0) -> wire.Barrier:
    return wire.Barrier(wire.Sender(wire.Node("worker", rank, 1), seq, done), 0, seq)


def test_they_come_out_in_order_once() -> None:
    held = HeldRequests()
    first, second, other = ask(1), ask(2), ask(1, rank=1)
    for request in (first, other, second):
        held.add(b"link", request)
    assert held.release() == [(b"link", first), (b"link", other), (b"link", second)]
    assert held.release() == []


def test_a_repeat_keeps_its_place_and_is_answered_over_its_last_link() -> None:
    held = HeldRequests()
    for peer, request in ((b"old", ask(1)), (b"old", ask(2)), (b"new", ask(1)), (b"new", ask(2))):
        held.add(peer, request)
    assert held.release() == [(b"new", ask(1)), (b"new", ask(2))]


def test_what_its_sender_has_an_answer_for_is_forgotten() -> None:
    held = HeldRequests()
    for request in (ask(1), ask(2), ask(1, rank=1), ask(5, done=3), ask(2), ask(3, done=3)):
        held.add(b"link", request)
    assert len(held) == 3
    assert held.release() == [(b"link", ask(1, rank=1)), (b"link", ask(5, done=3)), (b"link", ask(3, done=3))]


def test_who_waits_for_a_file_may_still_have_no_answer() -> None:
    held = HeldRequests()
    waits = wire.AwaitCapture(wire.Sender(wire.Node("worker", 0, 1), 2, 2), 0, 1)
    for request in (waits, ask(5, done=5), waits):
        held.add(b"link", request)
    assert held.release() == [(b"link", waits), (b"link", ask(5, done=5))]
