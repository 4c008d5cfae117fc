"""A reader's key is good for reads, whatever the messages say who they are from."""

from __future__ import annotations

from typing import Any

import pytest
from any_message import CLASSES, any_message
from asking import Door, sender
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.wire import Barrier, Connect, Failure, Here, Leave, Lost, Message, Node, Push, ReadValues, Request
from servers.requests.reader_links import MAY, ReaderLinks

READERS, WORKER = "the readers' key", "worker 0's key"


def door() -> Door:
    return Door({b"reader": READERS, b"other": READERS, b"worker": WORKER})


def read(role: str = "reader", rank: int = 0) -> ReadValues:
    return ReadValues(sender(rank, role=role), 0, [1], [-1], 0)


def why(refusal: Any) -> str:
    [(_, reply)] = refusal
    assert isinstance(reply, Failure)
    return reply.text


@pytest.mark.parametrize("key", [READERS, ""])
def test_a_reader_is_let_in(key: str) -> None:
    there = door() if key else Door()
    links = ReaderLinks(2, key, there)
    assert links.concerns(b"reader", read())
    assert links.refusal(b"reader", read()) is None
    assert there.admitted == [b"reader"]


def test_a_workers_link_is_no_concern() -> None:
    links = ReaderLinks(2, READERS, door())
    assert not links.concerns(b"worker", Here(Node("worker", 0, 1)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(CLASSES).flatmap(any_message))
def test_over_a_link_with_the_readers_key_nothing_but_reads_is_handled(message: Message) -> None:
    links = ReaderLinks(2, READERS, door())
    assert links.concerns(b"reader", message)
    handled = links.refusal(b"reader", message) is None
    reads = isinstance(message, (*MAY, Here)) and message.node.role == "reader"  # type: ignore[union-attr]
    assert handled == reads


def test_a_reader_that_calls_itself_a_worker_is_refused() -> None:
    links = ReaderLinks(2, READERS, door())
    assert "good for reading alone" in why(links.refusal(b"reader", Barrier(sender(0), 0, 1)))
    assert links.refusal(b"reader", Lost("worker", 1, "was killed")) == []  # it asks for no answer


def test_a_reader_that_pushes_is_refused_by_its_role() -> None:
    push = Push(sender(0, role="reader"), 0, [1], [1], False, None, None)
    links = ReaderLinks(2)
    assert links.concerns(b"anybody", push)
    assert "readers change nothing" in why(links.refusal(b"anybody", push))


def test_a_worker_that_calls_itself_a_reader_is_refused() -> None:
    links = ReaderLinks(2, READERS, door())
    assert "another key than readers have" in why(links.refusal(b"worker", read()))


def test_the_longest_silent_link_goes_when_there_are_too_many() -> None:
    there = Door()
    links = ReaderLinks(2, "", there)
    for peer in (b"a", b"b", b"a", b"c"):
        links.refusal(peer, read())
    assert (there.refused, len(links)) == ([b"b"], 2)


def test_links_that_have_ended_go_first() -> None:
    there = Door()
    links = ReaderLinks(2, "", there)
    links.refusal(b"a", read())
    links.refusal(b"b", read())
    there.ended.add(b"b")
    links.refusal(b"c", read())
    assert there.refused == []


def test_readers_may_leave_and_connect() -> None:
    links = ReaderLinks(1)
    requests: list[Request] = [Connect(sender(-1, role="reader")), Leave(sender(0, role="reader"), None)]
    assert [links.refusal(b"a", request) for request in requests] == [None, None]
