from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from asking import sender

from kvstore import wire
from kvstore.rule import Rule
from kvstore.transport.memory import Heap
from servers.reading.desk import MOST_WAITING, ReadDesk
from servers.requests.guest_links import ReaderLinks
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
