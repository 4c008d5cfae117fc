"""The core of an aggregator: who may speak, which stores there are, and what it does not handle."""

from __future__ import annotations

from asking import Door, Worker, sent, text_of
from hosting import Host, describe

from kvstore import wire
from kvstore.transport.memory import Heap
from servers.activity import Lateness
from servers.aggregator.aggregator import Aggregator
from servers.requests.reasons import Reason


def test_only_workers_of_the_host_are_served():
    host = Host((2, 3))
    for stranger in (Worker(0), Worker(2, incarnation=2), Worker(2, role="server")):
        ((peer, reply),) = host.core.handle(stranger.peer, sent(stranger.pull([1])), 0.0)
        assert "is not a worker of this host" in text_of(reply, "UsageError")
        assert peer == stranger.peer


def test_a_link_with_another_key_is_turned_away():
    door = Door({b"good": "key of 2", b"bad": "other"})
    core = Aggregator([2], Heap(), Host((9,)), door, {2: "key of 2"})
    worker = Worker(2)
    assert core.handle(b"good", sent(worker.open()), 0.0) == [(b"good", wire.Ack(1))]
    ((_, reply),) = core.handle(b"bad", sent(worker.open()), 0.0)
    assert "another key" in text_of(reply, "UsageError")
    assert door.admitted == [b"good"]


def test_a_store_must_be_open():
    host = Host()
    worker = host.workers[2]
    assert "not open" in text_of(host.reply(worker, worker.pull([1], store=7)), "UsageError")


def test_workers_agree_on_the_rule():
    host = Host()
    worker = host.workers[3]
    assert "store 0 is async" in text_of(host.reply(worker, worker.open("async")), "Mismatch")


def test_what_belongs_to_servers_is_refused():
    host = Host()
    worker = host.workers[2]
    assert "send it to the servers" in text_of(host.reply(worker, worker.set_optimizer()), "UsageError")


def test_notices_and_greetings_are_not_answered():
    host = Host()
    worker = host.workers[2]
    assert host.core.handle(worker.peer, wire.Here(worker.node), 0.0) == []
    assert host.core.handle(worker.peer, wire.Stop(), 0.0) == []


def test_a_bad_description_is_refused():
    host = Host()
    worker = host.workers[2]
    assert "differently" in text_of(host.reply(worker, describe(worker, {1: ("a", 1, 2)})), "Mismatch")


def test_what_a_request_waits_for_is_asked_of_the_server():
    host = Host((2,))
    message = host.push(2, {1: [1, 2]})
    question = host.workers[2].explain(message.seq)
    assert host.ask(2, question) == {}
    ((exchange, peer, seq),) = host.explained
    assert (exchange, peer, seq) == (host.sent[0], host.workers[2].peer, question.seq)
    assert host.named(host.core.explained(peer, seq, Reason("waits for worker 9", [9]))) == {
        (2, question.seq): wire.Explanation(question.seq, "waits for worker 9", [9])
    }


def test_what_is_known_here_is_explained_here():
    host = Host()
    message = host.push(2, {1: [1, 2]})
    missing = "waits for worker 3, whose push 1 of 'a' is missing"
    for about, text, ranks in ((message.seq, missing, [3]), (99, "", [])):
        question = host.workers[2].explain(about)
        assert host.ask(2, question) == {(2, question.seq): wire.Explanation(question.seq, text, ranks)}


def test_an_answer_for_a_store_that_was_closed_is_dropped():
    host = Host((2,))
    host.push(2, {1: [1, 2]})
    exchange = host.take()
    host.core.stores.clear()
    assert host.answer(exchange, wire.Failure(0, "ServerError", "late")) == {}


def test_those_who_have_left_before_a_store_is_opened_are_not_waited_for():
    host = Host((2, 3))
    host.core.depart([3])
    worker = host.workers[2]
    host.reply(worker, worker.open(store=1))
    assert host.core.stores[1] is not host.core.stores[0]


def test_an_aggregator_says_which_of_its_workers_comes_last():
    host = Host((2, 3))
    for clock, late in ((1, 0.75), (2, 0.25)):
        for rank in (2, 3):
            host.now += late if rank == 3 else 0.0
            host.push(rank, {1: [1.0, 1.0]}, clock)
            if rank == 2:
                waits = host.core.activity(host.now + 0.5).waits
                assert waits == ([2], [3], 0.5, f"waits for worker 3, whose push {clock} of 'a' is missing")
        host.sent.clear()
    activity = host.core.activity(host.now)
    assert activity.lateness == Lateness(2, [0, 0, 0, 2], [0.0, 0.0, 0.0, 1.0])
    assert activity.rounds == 2
    assert activity.waits.waiting == (), "for servers they wait elsewhere"
