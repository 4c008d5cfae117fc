"""Over which links members are heard and answered."""

from __future__ import annotations

import pytest
from asking import Door, Worker

from kvstore import wire
from kvstore.errors import KVStoreError, Mismatch, UsageError
from servers.requests.reasons import Reason
from servers.requests.repeats import Ledger
from servers.requests.replies import Answer, refuse
from servers.requests.reply_links import KEPT, ReplyLinks


def outbox(reply_links: ReplyLinks, peer: bytes, request: wire.Request) -> list[bytes]:
    sent = reply_links.outbox([Answer(peer, request, wire.Ack(request.seq))])
    assert {reply for _, reply in sent} == {wire.Ack(request.seq)}
    return [link for link, _ in sent]


def test_an_answer_goes_where_its_request_came_from() -> None:
    reply_links, worker = ReplyLinks(), Worker(0)
    first, second = worker.push({}), worker.push({})
    assert reply_links.admit(b"first", first, "")
    assert reply_links.admit(b"second", second, ""), "somebody else, perhaps, who says that it is the same"
    assert outbox(reply_links, b"first", first) == [b"first"]
    assert outbox(reply_links, b"second", second) == [b"second"]


def test_and_over_each_link_that_it_was_made_again_over() -> None:
    reply_links, worker = ReplyLinks(), Worker(0)
    request, other = worker.push({}), worker.push({})
    for link in (b"first", b"second", b"third", b"second"):
        reply_links.repeat(link, request)
    assert outbox(reply_links, b"first", other) == [b"first"]
    assert outbox(reply_links, b"first", request) == [b"first", b"second", b"third"]
    assert outbox(reply_links, b"first", request) == [b"first"], "it has been answered"


def test_a_repeat_gets_the_answer_of_the_first_and_one_that_waits_gets_it_later() -> None:
    reply_links, ledger, request = ReplyLinks(), Ledger[wire.Reply](), Worker(0).push({})
    ledger.admit(request)
    assert reply_links.again(b"second", request, ledger) == []
    assert outbox(reply_links, b"first", request) == [b"first", b"second"]
    ledger.note(request, wire.Ack(request.seq))
    assert reply_links.again(b"third", request, ledger) == [(b"third", wire.Ack(request.seq))]


def test_a_request_that_is_made_again_and_again_costs_no_memory() -> None:
    reply_links, request = ReplyLinks(), Worker(0).push({})
    for number in range(100):
        reply_links.repeat(b"%d" % number, request)
    assert outbox(reply_links, b"0", request) == [b"0", *(b"%d" % number for number in range(100 - KEPT, 100))]


def test_a_link_is_a_members_from_the_first_message_on_that_names_it() -> None:
    door, worker = Door(), Worker(0)
    reply_links = ReplyLinks(door)
    for message in (
        worker.push({}),
        worker.push({}),
        wire.Here(wire.Node("worker", 0, 1)),
        wire.Beat(wire.Node("worker", 0, 1)),
    ):
        assert reply_links.admit(b"link", message, "")
    assert door.admitted == [b"link"]


def test_whoever_has_another_key_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    door, worker = Door({b"own": "its key", b"other": "another's"}), Worker(0)
    reply_links = ReplyLinks(door)
    for _ in range(15):
        assert reply_links.admit(b"own", worker.push({}), "its key")
        assert not reply_links.admit(b"other", worker.push({}), "its key")
        assert not reply_links.admit(b"none", worker.push({}), "its key")
    assert door.admitted == [b"own"]
    assert [record.getMessage() for record in caplog.records] == [
        f"dropped a Push in the name of worker 0 ({count} so far): it came over a link with another key than its own"
        for count in (1, 10)
    ]


def test_a_member_has_so_many_links_and_no_more() -> None:
    door, worker = Door(), Worker(0)
    reply_links = ReplyLinks(door)
    for number in range(KEPT):
        assert reply_links.admit(b"%d" % number, worker.push({}), "")
    assert reply_links.admit(b"another member's", Worker(1).push({}), "")
    assert door.refused == []
    for number in range(KEPT, KEPT + 3):
        assert reply_links.admit(b"%d" % number, worker.push({}), "")
    assert door.refused == [b"0", b"1", b"2"]


def test_links_that_are_gone_do_not_count() -> None:
    door, worker = Door(), Worker(0)
    reply_links = ReplyLinks(door)
    for number in range(100):
        assert reply_links.admit(b"%d" % number, worker.push({}), "")
        if number:
            door.ended.add(b"%d" % number)
    assert door.refused == []


def test_the_links_of_who_is_no_member_any_more_are_dropped() -> None:
    door, worker = Door(), Worker(0)
    reply_links = ReplyLinks(door)
    assert reply_links.admit(b"link", worker.push({}), "")
    reply_links.forget(wire.Node("worker", 1, 1))
    assert door.refused == []
    reply_links.forget(wire.Node("worker", 0, 1))
    assert door.refused == [b"link"]


def test_a_reason_is_an_answer_with_the_workers_in_order() -> None:
    assert Reason("waits for both", {4, 1}).reply(7) == wire.Explanation(7, "waits for both", [1, 4])
    assert Reason().reply(7) == wire.Explanation(7, "", [])


def test_a_long_reason_is_cut() -> None:
    assert len(Reason("x" * (wire.MAX_REASON + 1)).reply(1).text) == wire.MAX_REASON


class OfATest(KVStoreError):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UsageError("no such key"), "UsageError", "no such key"),
        (Mismatch("not so"), "Mismatch", "not so"),
        (ZeroDivisionError("division by zero"), "ServerError", "ZeroDivisionError: division by zero"),
        (OfATest("private"), "ServerError", "OfATest: private"),
    ],
)
def test_an_error_is_answered_by_its_name_or_as_the_servers(error: Exception, kind: str, text: str) -> None:
    request = Worker().pull([1])
    assert refuse(b"link", request, error) == Answer(b"link", request, wire.Failure(request.seq, kind, text))


@pytest.mark.parametrize("kind", [UsageError, ZeroDivisionError])
def test_a_long_text_is_cut(kind: type[Exception]) -> None:
    answer = refuse(b"link", Worker().pull([1]), kind("x" * (wire.MAX_REASON + 1)))
    assert isinstance(answer.reply, wire.Failure)
    assert len(answer.reply.text) == wire.MAX_REASON
