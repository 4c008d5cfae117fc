"""A guest's key is good for what guests may ask, whatever the messages say who they are from."""

from __future__ import annotations

from typing import Any

import pytest
from any_message import CLASSES, any_message
from asking import Door, sender
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import wire
from servers.requests.guest_links import GuestLinks, ReaderLinks

GUESTS, WORKER = "the guests' key", "worker 0's key"
ASKS = (wire.Observe, wire.Locate)


def links_of(most: int, key: str = "", admission: Any = None) -> GuestLinks:
    return GuestLinks("observer", ASKS, "looking on", most, key, admission)


def door() -> Door:
    return Door({b"guest": GUESTS, b"other": GUESTS, b"worker": WORKER})


def observe(role: str = "observer", rank: int = -1) -> wire.Observe:
    return wire.Observe(sender(rank, role=role), 0)


def why(refusal: Any) -> str:
    [(_, reply)] = refusal
    assert isinstance(reply, wire.Failure)
    return reply.text


@pytest.mark.parametrize("key", [GUESTS, ""])
def test_a_guest_is_let_in(key: str) -> None:
    there = door() if key else Door()
    links = links_of(2, key, there)
    assert links.concerns(b"guest", observe())
    assert links.refusal(b"guest", observe()) is None
    assert there.admitted == [b"guest"]


def test_a_workers_link_is_no_concern() -> None:
    links = links_of(2, GUESTS, door())
    assert not links.concerns(b"worker", wire.Here(wire.Node("worker", 0, 1)))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(CLASSES).flatmap(any_message))
def test_over_a_link_with_the_guests_key_nothing_but_their_questions_is_handled(message: wire.Message) -> None:
    links = links_of(2, GUESTS, door())
    assert links.concerns(b"guest", message)
    handled = links.refusal(b"guest", message) is None
    may = isinstance(message, (*ASKS, wire.Explain, wire.Leave, wire.Here)) and message.node.role == "observer"  # type: ignore[union-attr]
    assert handled == may


def test_a_guest_that_calls_itself_a_worker_is_refused() -> None:
    links = links_of(2, GUESTS, door())
    assert "good for looking on alone" in why(links.refusal(b"guest", wire.Barrier(sender(0), 0, 1)))
    assert links.refusal(b"guest", wire.Lost("worker", 1, "was killed")) == []  # it asks for no answer


def test_a_guest_that_pushes_is_refused_by_its_role() -> None:
    push = wire.Push(sender(0, role="observer"), 0, [1], [1], False, None, None)
    links = links_of(2)
    assert links.concerns(b"anybody", push)
    assert "observers change nothing, and send Observe, Locate" in why(links.refusal(b"anybody", push))


def test_a_worker_that_calls_itself_a_guest_is_refused() -> None:
    links = links_of(2, GUESTS, door())
    assert "another key than observers have" in why(links.refusal(b"worker", observe()))


def test_the_longest_silent_link_goes_when_there_are_too_many() -> None:
    there = Door()
    links = links_of(2, "", there)
    for peer in (b"a", b"b", b"a", b"c"):
        links.refusal(peer, observe())
    assert (there.refused, len(links)) == ([b"b"], 2)


def test_links_that_have_ended_go_first() -> None:
    there = Door()
    links = links_of(2, "", there)
    links.refusal(b"a", observe())
    links.refusal(b"b", observe())
    there.ended.add(b"b")
    links.refusal(b"c", observe())
    assert there.refused == []


def test_guests_may_leave_and_are_asked_of_nothing_else() -> None:
    links = links_of(1)
    asked: list[wire.Request] = [
        wire.Explain(sender(-1, role="observer"), 1),
        wire.Leave(sender(-1, role="observer"), None),
    ]
    assert [links.refusal(b"a", request) for request in asked] == [None, None]
    read = wire.ReadValues(sender(-1, role="observer"), 0, [1], 0, [-1], 0)
    assert "sent a ReadValues" in why(links.refusal(b"a", read))


def requests(role: str = "reader") -> list[wire.Request]:
    return [
        wire.Connect(sender(-1, role=role)),
        wire.ReadValues(sender(0, role=role), 0, [1], 0, [-1], 0),
        wire.Leave(sender(0, role=role), None),
    ]


def test_readers_may_connect_read_and_leave() -> None:
    links = ReaderLinks(1)
    assert [links.refusal(b"a", request) for request in requests()] == [None] * 3


@pytest.mark.parametrize("request_", requests("observer"))
def test_over_their_links_nobody_else_speaks(request_: wire.Request) -> None:
    links = ReaderLinks(1, "the readers' key", Door({b"a": "the readers' key"}))
    assert links.concerns(b"a", request_)
    [(_, refused)] = links.refusal(b"a", request_) or []
    assert isinstance(refused, wire.Failure)
    assert "the readers' key, which is good for reading alone" in refused.text
