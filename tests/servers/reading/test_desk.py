from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from asking import floats, sender

from kvstore import wire
from kvstore.codecs.changes import checksum
from kvstore.errors import KeyNotInitialized, UsageError
from kvstore.optim.optimizer import describe
from kvstore.rule import Rule
from kvstore.transport.memory import Heap
from kvstore.values import from_buffer
from kvstore.wire.guests import NOT_HELD, aligned
from servers.reading import desk as desk_module
from servers.reading.desk import MOST_WAITING, SILENT, TRIES, ReadDesk, ValueRead
from servers.requests.guest_links import ReaderLinks
from servers.store.publishing import PATIENCE
from servers.store.served_store import ServedStore


def desk() -> ReadDesk:
    served = ServedStore(Rule("sync"), range(1))
    data = bytearray(torch.arange(100.0).numpy().tobytes())
    served.init(wire.Init(sender(), 0, [4], ["w"], [0], [[100]], "float32", [data]))
    return ReadDesk({0: served}, Heap(), ReaderLinks(4))


def read(rank: int = 0, seq: int = 1, store: int = 0) -> wire.ReadValues:
    return wire.ReadValues(sender(rank, seq, role="reader"), store, [4], 0, [-1], 0)


def answers(one: ReadDesk) -> list[tuple[bytes, Any]]:
    given = []
    while one.busy:
        given += one.step(64)
    return given


def test_a_read_is_answered_in_pieces() -> None:
    one = desk()
    assert one.handle(b"a", read()) == []
    pieces = 0
    while not (outbox := one.step(64)):
        pieces += 1
    [(peer, reply)] = outbox
    assert (peer, type(reply), reply.versions, pieces > 2, one.busy) == (b"a", wire.ValuesRead, [0], True, False)


def test_readers_take_turns() -> None:
    one = desk()
    for peer, rank, seq in ((b"a", 0, 1), (b"a", 0, 2), (b"b", 1, 1)):
        one.handle(peer, read(rank, seq))
    assert [(peer, reply.seq) for peer, reply in answers(one)] == [(b"a", 1), (b"b", 1), (b"a", 2)]


def test_a_repeat_is_answered_over_its_link() -> None:
    one = desk()
    one.handle(b"old", read())
    one.handle(b"new", read())
    assert [peer for peer, _ in answers(one)] == [b"new"]


def test_a_reader_that_asks_without_end_is_refused() -> None:
    one = desk()
    for seq in range(MOST_WAITING):
        assert one.handle(b"a", read(seq=seq)) == []
    [(_, refused)] = one.handle(b"a", read(seq=MOST_WAITING))
    assert f"{MOST_WAITING} requests of reader 0 wait here already" in refused.text
    assert len(answers(one)) == MOST_WAITING


def test_what_a_reader_that_leaves_has_asked_for_is_forgotten() -> None:
    one = desk()
    one.handle(b"a", read())
    assert one.handle(b"a", wire.Leave(sender(0, 2, role="reader"), None)) == [(b"a", wire.Ack(2))]
    assert answers(one) == []


def test_a_store_that_is_not_open_is_an_error_of_the_request_alone() -> None:
    one = desk()
    one.handle(b"a", read(store=3))
    one.handle(b"b", read(1))
    [(_, refused), (_, reply)] = answers(one)
    assert (refused.kind, refused.text, type(reply)) == ("UsageError", "store 3 is not open here", wire.ValuesRead)


@pytest.mark.parametrize("make", [lambda me: wire.FindKeys(me, "1", ["w"]), lambda me: wire.ListKeys(me, "1", 0)])
def test_places_of_keys_are_the_schedulers(make: Callable[[Any], wire.Request]) -> None:
    [(_, refused)] = desk().handle(b"a", make(sender(0, role="reader")))
    assert "to the scheduler" in refused.text


def test_a_late_answer_is_explained() -> None:
    [(_, explanation)] = desk().handle(b"a", wire.Explain(sender(0, 2, role="reader"), 1))
    assert explanation.text == "answers readers in the time that workers leave it"


def test_an_unexpected_error_goes_to_the_reader() -> None:
    class Broken(Heap):
        def allocate(self, nbytes: int) -> memoryview:
            raise MemoryError("all gone")

    served = ServedStore(Rule("sync"), range(1))
    served.init(wire.Init(sender(), 0, [4], ["w"], [0], [[1]], "float32", [bytearray(4)]))
    one = ReadDesk({0: served}, Broken(), ReaderLinks(4))
    one.handle(b"a", read())
    assert [reply.text for _, reply in answers(one)] == ["MemoryError: all gone"]


SIZES = {4: 100, 9: 3}


def store(mode: str = "sync") -> ServedStore:
    served = ServedStore(Rule(mode), range(1), lineage=7)
    for number, size in SIZES.items():
        data = bytearray(torch.zeros(size).numpy().tobytes())
        served.init(wire.Init(sender(), 0, [number], [f"key {number}"], [0], [[size]], "float32", [data]))
    return served


def push(served: ServedStore, number: int, clock: int, value: float) -> None:
    data = bytearray(torch.full((SIZES[number],), value).numpy().tobytes())
    served.push(b"", wire.Push(sender(seq=clock), 0, [number], [clock], False, None, None, buffers=[data]))


def begin(served: ServedStore, held: dict[int, int], slack: int = 0, lineage: int = 7) -> ValueRead:
    message = wire.ReadValues(sender(role="reader"), 0, list(held), lineage, list(held.values()), slack)
    return ValueRead(served, message, Heap())


def finish(read: ValueRead, nbytes: int = 1 << 20) -> wire.ValuesRead:
    while (reply := read.step(nbytes)) is None:
        pass
    return reply


def values(reply: wire.ValuesRead, number: int, at: int = 0) -> torch.Tensor:
    return from_buffer(reply.buffers[0][at : at + 4 * SIZES[number]], "float32")


def test_values_come_with_their_rounds() -> None:
    served = store()
    push(served, 9, 1, 2.0)
    reply = finish(begin(served, {4: NOT_HELD, 9: NOT_HELD}))
    assert (reply.versions, reply.positions) == ([0, 1], [0, 1])
    assert torch.equal(values(reply, 9, aligned(400)), floats(2, 2, 2))


@pytest.mark.parametrize(
    ("held", "slack", "comes"), [(1, 0, True), (2, 0, False), (1, 1, False), (0, 1, True), (3, 0, True)]
)
def test_what_is_fresh_enough_does_not_come(held: int, slack: int, comes: bool) -> None:
    served = store()
    push(served, 9, 1, 1.0)
    push(served, 9, 2, 2.0)
    reply = finish(begin(served, {9: held}, slack))
    assert (reply.versions, reply.positions, len(reply.buffers)) == ([2], [0] * comes, comes)


@pytest.mark.parametrize("lineage", [0, 6, 8])
def test_what_is_held_of_another_lineage_is_not_fresh(lineage: int) -> None:
    reply = finish(begin(store(), {4: 0, 9: NOT_HELD}, slack=9, lineage=lineage))
    assert (reply.lineage, reply.positions) == (7, [0, 1])


def test_a_segment_that_a_round_changes_is_copied_anew() -> None:
    served = store()
    read = begin(served, {4: NOT_HELD})
    assert read.step(40) is None
    push(served, 4, 1, 1.0)
    reply = finish(read, 40)
    assert reply.versions == [1]
    assert torch.equal(values(reply, 4), torch.ones(100))


def test_a_segment_that_rounds_always_overtake_is_copied_at_once() -> None:
    served = store()
    read = begin(served, {4: NOT_HELD})
    steps, reply = 0, None
    while reply is None:
        reply = read.step(40)
        steps += 1
        push(served, 4, steps, float(steps))
    assert steps == TRIES + 1
    assert torch.equal(values(reply, 4), torch.full((100,), float(TRIES)))
    assert reply.versions == [TRIES]


def test_what_was_read_stays_and_does_not_hold_up_the_next_round() -> None:
    served = store()
    reply = finish(begin(served, {9: NOT_HELD}))
    memory = served.buckets.value(9).data_ptr()
    push(served, 9, 1, 5.0)
    assert torch.equal(values(reply, 9), torch.zeros(3))
    assert served.buckets.value(9).data_ptr() == memory


def test_in_an_async_store_every_push_is_a_version() -> None:
    served = ServedStore(Rule("async"), range(2))
    served.set_optimizer(describe("sgd", {"lr": 0.1}))
    served.init(wire.Init(sender(), 0, [9], ["w"], [0], [[3]], "float32", [bytearray(12)]))
    for clock in (1, 2):
        data = bytearray(floats(1, 1, 1).numpy().tobytes())
        served.push(b"", wire.Push(sender(seq=clock), 0, [9], [clock], False, None, None, buffers=[data]))
    assert finish(begin(served, {9: NOT_HELD})).versions == [2]  # though worker 1 has not pushed


def test_an_unknown_segment_is_refused() -> None:
    with pytest.raises(KeyNotInitialized):
        begin(store(), {5: NOT_HELD})


def test_too_much_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "MOST_BYTES", 300)
    with pytest.raises(UsageError, match="ask for at most 300"):
        begin(store(), {4: NOT_HELD, 9: NOT_HELD})
    assert finish(begin(store(), {4: NOT_HELD})).positions == [0]


def test_too_many_segments_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "MOST_SEGMENTS", 1)
    with pytest.raises(UsageError, match="2 segments are too many"):
        begin(store(), {4: NOT_HELD, 9: NOT_HELD})


def waits(rank: int = 0, seq: int = 1, held: int = 0, lineage: int = 0) -> wire.ReadVersion:
    return wire.ReadVersion(sender(rank, seq, role="reader"), 0, [], lineage, [held], 0, newer=True)


def publish(one: ReadDesk, number: int, label: str = "") -> None:
    one.stores[0].publishing.begin(wire.Publish(sender(), 0, 1 << 60, number, label, None, [4], [0]))


def test_a_follower_waits_for_another_version_than_it_has() -> None:
    one = desk()
    one.handle(b"a", waits())
    assert not one.busy
    publish(one, 1, "first")
    [(peer, reply)] = answers(one)
    assert (peer, reply.number, reply.label, reply.counts) == (b"a", 1, "first", [])
    one.handle(b"a", waits(seq=2, held=1, lineage=1 << 60))
    one.handle(b"b", waits(1, held=1, lineage=2 << 60))  # it was told by another store
    assert [peer for peer, _ in answers(one)] == [b"b"]
    publish(one, 2)
    assert [(peer, reply.number) for peer, reply in answers(one)] == [(b"a", 2)]


def fetches(one: ReadDesk, rank: int, want: int) -> int:
    """Ask for a part of a version; return the number of the one that comes."""
    ask = wire.ReadVersion(sender(rank, role="reader"), 0, [4], 1 << 60, [0], want)
    one.handle(b"fetches", ask)
    [number] = [reply.number for peer, reply in answers(one) if peer == b"fetches"]
    return int(number)


def test_a_version_stays_while_a_reader_fetches_it() -> None:
    one = desk()
    publish(one, 1)
    assert fetches(one, 0, 1) == 1
    for number in range(2, PATIENCE):
        publish(one, number)
        assert fetches(one, 1, number) == number  # another one, and faster
    assert list(one.stores[0].publishing.whole) == [1, number]
    one.handle(b"", waits(0, 2, held=1, lineage=1 << 60))  # it has it
    publish(one, number + 1)
    assert fetches(one, 1, number) == number
    for later in range(number + 2, number + 2 * PATIENCE):  # the other one is gone
        publish(one, later)
    assert list(one.stores[0].publishing.whole) == [later - 1, later]


def test_a_version_that_stays_is_taken_for_no_later_one() -> None:
    served = store()
    publishing = served.publishing

    def version(number: int) -> None:
        clocks = [number - 1, number - 1]
        publishing.begin(wire.Publish(sender(), 0, 1 << 60, number, "", None, [4, 9], clocks))

    version(1)
    for key in (4, 9):
        push(served, key, 1, 1.0)
    version(2)
    publishing.fetches(sender(role="reader").node, 1)
    for number in (3, 4):  # one segment is two rounds ahead of the other
        push(served, 4, number - 1, float(number))
        version(number)
    push(served, 9, 2, 3.0)
    assert list(publishing.whole) == [1, 3]
    (ahead,), (behind,) = (publishing.pieces_of([key]) for key in (4, 9))
    assert publishing.changes(ahead, 0, 3) is None
    for piece in (ahead, behind):
        assert publishing.changes(piece, 0, 1) == (checksum(np.zeros(piece.size, "f4")), ANY)
    assert publishing.changes(behind, 0, 3) == (checksum(np.full(piece.size, 3, "f4")), ANY)
    publishing.fetches(sender(role="reader").node, 2)  # which is gone
    push(served, 4, 4, 5.0)
    version(5)
    assert (ahead.newest, ahead.previous, behind.previous) == (5, 4, 1)


def test_who_follows_is_told_and_how_far_behind() -> None:
    one = desk()
    assert one.followed_by() == (0, 0, 0)
    one.handle(b"a", waits(0, held=0))
    one.handle(b"b", waits(1, held=0))
    for number in (1, 2, 3):
        publish(one, number)
    answers(one)
    one.handle(b"b", waits(1, 2, held=3, lineage=1 << 60))  # and it waits on
    assert one.followed_by() == (3, 2, 3)
    for _ in range(SILENT):
        one.followed_by()
    assert one.followed_by() == (3, 1, 0)


def test_a_follower_that_has_left_is_not_answered() -> None:
    one = desk()
    one.handle(b"a", waits())
    one.handle(b"a", wire.Leave(sender(seq=2, role="reader"), None))
    publish(one, 1)
    assert answers(one) == []


def test_what_is_in_no_version_cannot_be_followed() -> None:
    one = desk()
    publish(one, 1)
    one.handle(b"a", wire.ReadVersion(sender(role="reader"), 0, [5], 0, [0], 0))
    [(_, reply)] = answers(one)
    assert (reply.kind, "5" in reply.text) == ("KeyNotInitialized", True)
