"""A server's logic: who may ask what, and what becomes of requests that come twice, late, or from nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from asking import Desk, Worker, floats, sender, sent, text_of, values_in

from kvstore import wire
from kvstore.errors import UsageError
from kvstore.spec import Spec
from servers.shard import Shard, Speakers

ONE = [Spec((1,), "float32")]


# ---- repeats


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.open(store=1),
        lambda w: w.open("async", store=1),
        lambda w: w.init({2: floats(1)}),
        lambda w: w.init({1: floats(1)}),
        lambda w: w.push({1: floats(1)}, want=False),
        lambda w: w.push({1: floats(1)}, want=True),
        lambda w: w.push({1: floats(1, 1)}),
        lambda w: w.pull([1]),
        lambda w: w.pull([9]),
        lambda w: w.set_optimizer("sgd", 0.5, version=2),
        lambda w: w.set_optimizer("sgd", -1.0, version=2),
        lambda w: w.get_states([1]),
        lambda w: w.put_states({(1, "momentum_buffer"): floats(3)}),
        lambda w: w.explain(1),
    ],
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_repeat_is_answered_again_and_not_applied_again(make: Callable[[Worker], wire.Message], mode: str):
    desk, a = Desk(1, mode, values={1: floats(0)}).and_workers()
    desk.reply(a, a.set_optimizer("sgd", 1.0, momentum=0.5))
    desk.reply(a, a.push({1: floats(1)}, 1))
    message = make(a)
    first = desk.reply(a, message)
    value = desk.value().tolist()
    states = desk.reply(a, a.get_states([1])).buffers
    for _ in range(3):
        assert desk.reply(a, message) == first
    assert desk.value().tolist() == value
    assert desk.reply(a, a.get_states([1])).buffers == states


def test_a_repeat_of_a_request_that_waits_is_answered_when_it_is_time_and_once():
    desk, a, b = Desk(2, values={1: floats(0)}).and_workers()
    push, pull = a.push({1: floats(1)}, want=True), a.pull([1], 1)
    for message in (push, pull, push, pull):
        assert desk.ask(a, message) == {}
    theirs = b.push({1: floats(2)})
    assert desk.ask(b, theirs).keys() == {(0, push.seq), (0, pull.seq), (1, theirs.seq)}
    for message in (push, pull):
        assert values_in(desk.reply(a, message), ONE)[0].tolist() == [3]


def test_who_waits_is_answered_over_the_link_that_it_asks_again_over():
    desk, a, b = Desk(2, values={1: floats(0)}).and_workers()
    push = a.push({1: floats(1)}, want=True)
    for link in (a.peer, b"made anew", a.peer):  # the last is what was left of the first
        assert desk.shard.handle(link, sent(push)) == []
    answers = dict(desk.shard.handle(b.peer, sent(b.push({1: floats(2)}))))
    assert answers.keys() == {a.peer, b"made anew", b.peer}
    assert isinstance(answers[b"made anew"], wire.Values)


def test_a_repeated_set_optimizer_that_waits_is_answered_once():
    desk, a, b = Desk(2).and_workers()
    theirs = b.set_optimizer()
    assert desk.ask(b, theirs) == {}
    assert desk.ask(b, theirs) == {}
    mine = a.set_optimizer()
    assert desk.ask(a, mine) == {(0, mine.seq): wire.Ack(mine.seq), (1, theirs.seq): wire.Ack(theirs.seq)}
    assert desk.reply(b, theirs) == wire.Ack(theirs.seq)


def test_a_repeated_pull_gets_the_values_of_its_round():
    desk, a = Desk(1, values={1: floats(0)}).and_workers()
    pull = a.pull([1])
    assert values_in(desk.reply(a, pull), ONE)[0].tolist() == [0]
    push = a.push({1: floats(5)}, want=True)
    assert values_in(desk.reply(a, push), ONE)[0].tolist() == [5]
    desk.ask(a, a.push({1: floats(6)}))
    for request, value in ((pull, 0), (push, 5)):
        assert values_in(desk.reply(a, request), ONE)[0].tolist() == [value]


def test_in_an_async_store_a_repeated_pull_gets_the_values_of_now():
    desk, a = Desk(1, values={1: floats(0)}, mode="async").and_workers()
    desk.reply(a, a.set_optimizer("sgd", 1.0))
    pull = a.pull([1])
    assert values_in(desk.reply(a, pull), ONE)[0].tolist() == [0]
    desk.ask(a, a.push({1: floats(5)}))
    assert values_in(desk.reply(a, pull), ONE)[0].tolist() == [-5]


def test_a_repeat_of_what_is_done_is_dropped():
    desk, a = Desk(1, values={1: floats(0)}).and_workers()
    push = a.push({1: floats(1)})
    desk.reply(a, push)
    a.done = push.seq + 1
    desk.reply(a, a.pull([1]))
    assert desk.ask(a, push) == {}
    assert desk.value(clock=1).tolist() == [1]


def test_requests_that_overtake_each_other_end_the_same():
    grads = [floats(g) for g in (3.0, -1.5, 0.25)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]):
        desk, a = Desk(1, values={1: floats(0)}).and_workers()
        desk.reply(a, a.set_optimizer("sgd", 0.5, momentum=0.5))
        messages: list[wire.Message] = [a.push({1: grad}, clock) for clock, grad in enumerate(grads, start=1)]
        messages.append(a.pull([1], 3))
        replies: dict[tuple[int, int], Any] = {}
        for position in order:
            replies |= desk.ask(a, messages[position])
        assert len(replies) == 4
        # by hand: momentum 3, 0, 0.25, steps of half of it
        assert values_in(replies[0, messages[3].seq], ONE)[0].tolist() == [-0.5 * (3.0 + 0.0 + 0.25)]


# ---- who may ask


@pytest.mark.parametrize(
    "stranger",
    [
        Worker(2),
        Worker(-1),
        Worker(0, incarnation=0),
        Worker(0, incarnation=2**62),
        Worker(0, role="server"),
        Worker(0, role="scheduler"),
        Worker(0, role="launcher"),
        Worker(0, role="aggregator"),
    ],
    ids=lambda w: f"{w.role} {w.rank}.{w.incarnation}",
)
def test_a_stranger_is_refused_and_leaves_no_trace(stranger: Worker):
    desk, a, b = Desk(2, values={1: floats(0)}).and_workers()
    for message in (stranger.open(), stranger.push({1: floats(9)}), stranger.explain(1), stranger.set_optimizer()):
        ((peer, reply),) = desk.shard.handle(stranger.peer, message)
        assert peer == stranger.peer
        assert text_of(reply, "UsageError").endswith("is neither a worker nor an aggregator of this job")
    assert len(desk.shard.ledger) == 3
    desk.ask(a, a.push({1: floats(1)}))
    assert len(desk.ask(b, b.push({1: floats(1)}))) == 2
    assert desk.value(clock=1).tolist() == [2]


@pytest.mark.parametrize(
    "message",
    [wire.Alive(), wire.Stop(), wire.Beat(wire.Node("worker", 0, 1)), wire.Ack(1), wire.Values(1, buffers=[b"1234"])],
)
def test_what_is_no_request_is_dropped(message: wire.Message):
    assert Shard(0, 1).handle(b"x", message) == []


@pytest.mark.parametrize(
    "message",
    [
        wire.Barrier(sender(0, 50), store=0, number=1),
        wire.Leave(sender(0, 50), error=None),
        wire.Census(sender(0, 50)),
        wire.Declare(
            sender(0, 50), store=0, keys=["a"], kinds=[0], shapes=[[1]], dtypes=["float32"], bound=1, longest=2**40
        ),
    ],
)
def test_what_is_for_the_scheduler_is_refused(message: wire.Message):
    ((_, reply),) = Shard(0, 1).handle(b"x", message)
    assert text_of(reply, "UsageError") == f"servers do not handle a {type(message).__name__}"


def test_a_store_must_be_opened_first():
    shard, worker = Shard(0, 1), Worker()
    ((_, reply),) = shard.handle(worker.peer, worker.pull([1], store=3))
    assert text_of(reply, "UsageError") == "store 3 is not open; send Open first"


def test_a_store_has_one_mode():
    desk = Desk(2, "sync")
    reply = desk.reply(desk.workers[1], desk.workers[1].open("async"))
    assert text_of(reply, "Mismatch") == "store 0 is async on worker 1, but sync on worker 0"


@pytest.mark.parametrize("what", ["init", "put_states"])
def test_only_worker_0_gives_values_and_states(what: str):
    desk, a, b = Desk(2, values={1: floats(0)}).and_workers()
    desk.ask(a, a.set_optimizer(momentum=0.9))
    message = b.init({2: floats(1)}) if what == "init" else b.put_states({(1, "momentum_buffer"): floats(1)})
    assert text_of(desk.reply(b, message), "UsageError").startswith("only worker 0 may send ")


def test_stores_do_not_share_segments_or_optimizers():
    desk, a = Desk(1, values={1: floats(1)}).and_workers()
    desk.reply(a, a.open("async", store=7))
    desk.reply(a, a.init({1: floats(70)}, store=7))
    desk.reply(a, a.set_optimizer("sgd", 1.0, store=7))
    desk.reply(a, a.push({1: floats(1)}, store=7))
    desk.reply(a, a.push({1: floats(5)}))
    assert desk.value(1, store=7).tolist() == [69]
    assert desk.value(1, clock=1).tolist() == [5]


# ---- departures and explanations


def test_a_store_opened_after_a_departure_knows_of_it():
    desk = Desk(2)
    a = desk.workers[0]
    desk.shard.depart([1])
    desk.reply(a, a.open(store=1))
    desk.reply(a, a.init({1: floats(0)}, store=1))
    assert desk.reply(a, a.push({1: floats(1)}, store=1)).kind == "NodeLost"


def test_an_explanation_fits_into_a_message():
    keys = {number: floats(0) for number in range(8)}
    desk = Desk(30)
    a = desk.workers[0]
    desk.reply(a, a.init(keys, keys=[f"{number}" * 1000 for number in keys]))
    push = a.push(dict.fromkeys(keys, floats(1)))
    desk.ask(a, push)
    said = desk.reply(a, a.explain(push.seq))
    assert (len(said.text), said.missing) == (4000, [*range(1, 30)])


def test_nothing_is_known_of_a_request_that_does_not_wait():
    desk, a = Desk(1, values={1: floats(0)}).and_workers()
    assert desk.reply(a, a.explain(12345)).text == ""


def test_an_unexpected_error_is_answered_with_its_name_and_a_bounded_text(monkeypatch: pytest.MonkeyPatch):
    desk, a = Desk(1, values={1: floats(0)}).and_workers()

    def fail(*_args: Any) -> None:
        raise RuntimeError("x" * 10_000)

    monkeypatch.setattr(desk.shard.stores[0].waiting, "park", fail)
    reply = desk.reply(a, a.pull([1]))
    assert isinstance(reply, wire.Failure)
    assert reply.kind == "ServerError"
    assert reply.text.startswith("RuntimeError: xxx")
    assert len(reply.text) == 4000


def test_memory_for_repeats_is_bounded_by_what_is_outstanding():
    desk, a = Desk(1, values={1: torch.zeros(4)}).and_workers()
    for _ in range(200):
        a.done = a.seq + 1
        desk.reply(a, a.pull([1]))
    assert len(desk.shard.ledger) == 1


@pytest.mark.parametrize(
    ("mode", "rule", "words"),
    [
        ("sync", {"staleness": 1}, "staleness is for 'dist_ssp' stores"),
        ("sync", {"compensation": 0.1}, "delay_compensation for 'dist_async'"),
        ("async", {"quorum": 1}, "a quorum is for stores with rounds"),
        ("sync", {"quorum": 3}, "quorum=3 is more than the 2 workers"),
        ("async", {"compensation": -1.0}, "must be a finite number"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(mode: str, rule: dict[str, Any], words: str) -> None:
    desk = Desk(2)
    worker: Worker = desk.workers[0]
    assert words in text_of(desk.reply(worker, worker.open(mode, store=5, **rule)), "UsageError")


def test_workers_with_different_rules_are_told() -> None:
    desk, a, b = Desk(2).and_workers()
    desk.reply(a, a.open("async", store=3, staleness=2))
    text = text_of(desk.reply(b, b.open("async", store=3, staleness=3)), "Mismatch")
    assert text == "store 3 is async, staleness 3 on worker 1, but async, staleness 2 on worker 0"


def test_how_far_it_is() -> None:
    desk, a = Desk(1, values={1: floats(0), 2: floats(0)}).and_workers()
    assert (Shard(0, 1).rounds, desk.shard.rounds) == (0, 0)
    for clock in (1, 2):
        desk.reply(a, a.push({2: floats(1)}, clock))
    assert desk.shard.rounds == 2


def test_whether_somebody_may_speak_is_found_out_without_serving_them() -> None:
    desk, a = Desk(1, values={1: floats(0)}).and_workers()
    assert desk.shard.refusal(b"link", a.push({1: floats(1)}, 1)) is None
    (answer,) = desk.shard.refusal(b"link", wire.Census(sender(7))) or []
    assert text_of(answer[1], "UsageError").startswith("worker 7 is neither a worker nor an aggregator of this job")
    assert desk.shard.rounds == 0


HOSTS = [[0, 1], [2, 4]]


@pytest.fixture
def speakers() -> Speakers:
    return Speakers(5, ["w0", "w1"], HOSTS, ["a0"])


def test_members_are_known_by_their_keys_and_nobody_else_is(speakers: Speakers):
    known = {wire.Node("worker", 0, 1): "w0", wire.Node("worker", 1, 1): "w1", wire.Node("aggregator", 0, 1): "a0"}
    known |= {wire.Node("worker", 4, 1): "", wire.Node("aggregator", 1, 1): ""}
    assert {node: speakers.key(node) for node in known} == known
    for stranger in (("worker", 5, 1), ("worker", 0, 2), ("aggregator", 2, 1), ("aggregator", -1, 1), ("server", 0, 1)):
        assert speakers.key(wire.Node(*stranger)) is None


def test_each_may_say_what_is_its_own_to_say(speakers: Speakers):
    worker, aggregator = Worker(4), Worker(1, role="aggregator")
    for message in (
        worker.push({1: floats(1)}),
        worker.pull([1]),
        worker.init({1: floats(1)}),
        aggregator.push({1: floats(1)}, ranks=[2, 4]),
        aggregator.push({1: floats(1)}, ranks=[4], rank_clocks=[1]),
        aggregator.pull([1], ranks=[2]),
    ):
        speakers.require(message)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Worker(3).push({1: floats(1)}, ranks=[3]), "worker 3 sent a Push for worker 3; a worker sends without ranks"),
        (Worker(3).pull([1], ranks=[0, 1]), "worker 3 sent a Pull for workers 0, 1; a worker sends without ranks"),
        (replace(Worker(0).push({1: floats(1)}), encode=["fp16", []]), "worker 0 sent a Push with encode"),
        (
            replace(Worker(0, role="aggregator").push({1: floats(1)}, ranks=[0]), encode=["fp16", []]),
            "aggregator 0 sent a Push with encode, which asks an aggregator to compress",
        ),
        (Worker(0, role="aggregator").push({1: floats(1)}), "aggregator 0 sent a Push without ranks"),
        (Worker(0, role="aggregator").pull([1]), "aggregator 0 sent a Pull without ranks"),
        (
            Worker(0, role="aggregator").push({1: floats(1)}, ranks=[0, 1, 2]),
            "aggregator 0 sent a Push for workers 0 to 2; it speaks for workers 0, 1 only",
        ),
        (Worker(1, role="aggregator").pull([1], ranks=[3]), "a Pull for worker 3; it speaks for workers 2, 4 only"),
        (Worker(1, role="aggregator").open(), "aggregator 1 sent a Open; servers take Push, Pull and Explain from"),
        (Worker(1, role="aggregator").pause({}), "aggregator 1 sent a Pause; servers take Push, Pull and Explain from"),
    ],
)
def test_nobody_speaks_for_others_than_it_may(speakers: Speakers, message: wire.Request, words: str):
    with pytest.raises(UsageError, match=words):
        speakers.require(message)
