"""Over which link a sender is answered."""

from __future__ import annotations

from asking import Worker

from kvstore.wire import Ack, Request
from servers.replies import Answer
from servers.senders import KEPT, Senders


def outbox(senders: Senders, peer: bytes, request: Request) -> list[bytes]:
    return [link for link, _ in senders.outbox([Answer(peer, request, Ack(request.seq))])]


def test_a_sender_is_answered_over_its_latest_link() -> None:
    senders, worker, other = Senders(), Worker(0), Worker(1)
    asked = worker.push({})
    senders.note(b"first", asked)
    senders.note(b"other", other.push({}))
    assert outbox(senders, b"first", asked) == [b"first"]
    senders.note(b"second", worker.push({}))
    assert outbox(senders, b"first", asked) == [b"second"]
    assert outbox(senders, b"other", other.push({})) == [b"other"]


def test_what_is_left_of_an_older_link_changes_nothing() -> None:
    senders, worker = Senders(), Worker(0)
    for link in (b"first", b"second", b"first"):
        senders.note(link, worker.push({}))
    assert outbox(senders, b"first", worker.push({})) == [b"second"]


def test_a_link_that_is_lost_again_and_again_costs_no_memory() -> None:
    senders, worker = Senders(), Worker(0)
    for number in range(100):
        senders.note(b"%d" % number, worker.push({}))
    assert outbox(senders, b"0", worker.push({})) == [b"99"]
    assert [len(links) for links in senders._links.values()] == [KEPT]


def test_whoever_is_not_known_is_answered_where_it_asked() -> None:
    senders = Senders()
    senders.note(b"link", Worker(0).push({}))
    for stranger in (Worker(1), Worker(0, incarnation=2), Worker(0, role="server")):
        assert outbox(senders, b"here", stranger.push({})) == [b"here"]
