"""The hyper-parameters that pushes bring: which round they hold for, and workers that disagree."""

from __future__ import annotations

import pytest
from asking import Desk, floats, optimized, text_of

from kvstore import wire
from kvstore.errors import Mismatch
from servers.store.hyperparameters import UpdateHyperparameters, agreed


def test_a_learning_rate_holds_for_its_round_whoever_gave_it():
    desk = Desk(2, values={1: floats(0)})
    optimized(desk, lr=1.0)
    a, b = desk.workers
    for clock, (first, second) in enumerate([(None, None), (0.25, None), (None, 0.5), (0.125, 0.125)], start=1):
        desk.ask(a, a.push({1: floats(1)}, clock, lr=first))
        desk.ask(b, b.push({1: floats(1)}, clock, lr=second))
    assert desk.value(clock=4).tolist() == [-2 * (1.0 + 0.25 + 0.5 + 0.125)]


def test_numbers_of_one_round_do_not_leak_into_another_that_comes_later():
    desk = Desk(1, values={1: floats(0), 2: floats(0)})
    optimized(desk, lr=1.0)
    (a,) = desk.workers
    desk.ask(a, a.push({2: floats(1)}, lr=0.5, rescale=0.5))
    desk.ask(a, a.push({1: floats(1)}))
    assert desk.value(1, clock=1).tolist() == [-1.0]


def test_workers_that_disagree_on_the_learning_rate_all_learn_it():
    desk = Desk(2, values={1: floats(0), 2: floats(0)})
    optimized(desk)
    a, b = desk.workers
    push, pull = a.push({1: floats(1)}, lr=0.1), a.pull([1], 1)
    desk.ask(a, push)
    desk.ask(a, pull)
    replies = desk.ask(b, b.push({1: floats(1)}, lr=0.2, want=True))
    assert replies.keys() == {(0, push.seq), (0, pull.seq), (1, b.seq)}
    for reply in replies.values():
        text = text_of(reply, "Mismatch")
        assert (
            text == "workers disagree on the learning rate for the same round of 'k1': 0.1 on worker 0, 0.2 on worker 1"
        )
    assert desk.value(clock=1).tolist() == [0], "a round that fails changes nothing"
    for worker in (a, b):
        replies = desk.ask(worker, worker.push({1: floats(1)}, 2, lr=0.5))
    assert set(map(type, replies.values())) == {wire.Ack}, "and the next one goes on"


def test_async_a_learning_rate_stays_until_another_comes():
    desk = Desk(2, "async", values={1: floats(0)})
    optimized(desk, lr=1.0)
    a, b = desk.workers
    desk.ask(a, a.push({1: floats(1)}, lr=0.25))
    desk.ask(b, b.push({1: floats(1)}))
    assert desk.value().tolist() == [-0.5]


def test_workers_that_compress_differently_are_named_where_that_is_known():
    def given(one, two):
        return agreed({"worker 0": UpdateHyperparameters(**one), "worker 1": UpdateHyperparameters(**two)}, {"k": None})

    with pytest.raises(
        Mismatch, match="on the compression for the same round of 'k': fp16 on worker 0, none on worker"
    ):
        given({"pushed": "fp16"}, {"pushed": "none"})
    with pytest.raises(Mismatch, match=r"on the compression of what comes back .*: none on worker 0, fp16 on worker 1"):
        given({"pushed": "none", "back": "none"}, {"pushed": "none", "back": "fp16"})
    # A push that wants nothing back, and one that another server has recorded, do not say.
    assert given({"lr": 0.5, "pushed": "none", "back": "none"}, {"pushed": "none"}).lr == 0.5
    given({"pushed": "fp16"}, {})


def test_a_worker_that_asks_for_another_compression_of_what_comes_back_is_found_out_in_its_round():
    desk = Desk(2, values={1: floats(0)})
    a, b = desk.workers
    for clock, theirs in ((1, None), (2, ["fp16", []])):
        push = a.push({1: floats(1)}, clock, want=True)
        desk.ask(a, push)
        replies = desk.ask(b, b.push({1: floats(1)}, clock, want=True, back=theirs))
        assert len(replies) == 2
        for reply in replies.values():
            if theirs is not None:
                assert "none on worker 0, fp16 on worker 1" in text_of(reply, "Mismatch")
