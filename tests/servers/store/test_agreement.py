"""What workers must agree on: the optimizer, and the hyper-parameters of a round."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from asking import Desk, floats, optimized, text_of
from pairs import Pair, copied

from kvstore import wire
from kvstore.errors import Mismatch
from servers.store.hyperparameters import UpdateHyperparameters, agreed

# ---- calls of ``set_optimizer``, told through the shard whose store they are of


def test_workers_that_disagree_on_the_optimizer_learn_it():
    desk, a, b, c = Desk(3).and_workers()
    theirs = b.set_optimizer("adam", 0.1)
    desk.ask(b, theirs)
    replies = desk.ask(a, a.set_optimizer("sgd", 0.1))
    assert "set_optimizer differs from worker 0's" in text_of(replies[1, theirs.seq], "Mismatch")
    assert replies[0, a.seq] == wire.Ack(a.seq)
    assert desk.reply(c, c.set_optimizer("sgd", 0.1)) == wire.Ack(c.seq)


@pytest.mark.parametrize(
    ("hyper", "kind", "words"),
    [
        ({"lr": -1.0}, "ServerError", "Invalid learning rate: -1.0"),
        ({"name": "nothing"}, "UnknownName", "choose from"),
        ({"momentun": 0.9}, "UnknownName", "momentun"),
        ({"momentum": "much"}, "ServerError", ""),
        ({"name": "adam", "betas": [0.9]}, "ServerError", ""),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_the_callers_error(hyper: dict[str, Any], kind: str, words: str):
    desk, a = Desk(1, values={1: floats(0)}).and_workers()
    assert words in text_of(desk.reply(a, a.set_optimizer(**hyper)), kind)
    push = a.push({1: floats(4)})
    assert desk.reply(a, push) == wire.Ack(push.seq)
    assert desk.value(clock=1).tolist() == [4], "no optimizer was set"


@pytest.mark.parametrize(
    "name", ["sdg", "os:system", "torch.optim:sgd", "torch.optim.sgd", "__import__('os')", "", "x"]
)
def test_an_optimizer_that_this_server_has_not_is_refused_by_its_rank(name: str):
    desk, a = Desk(1, values={1: floats(0)}).and_workers()
    text = text_of(desk.reply(a, a.set_optimizer(name)), "UnknownName")
    assert text.startswith(f"server 0: no optimizer {name!r}; choose from ")


def test_other_numbers_keep_the_state_and_another_rule_drops_it(caplog: pytest.LogCaptureFixture):
    desk, a = Desk(1, values={1: floats(0)}).and_workers()
    desk.reply(a, a.set_optimizer("sgd", 1.0, momentum=0.5))
    desk.reply(a, a.push({1: floats(1)}, 1))
    desk.reply(a, a.set_optimizer("sgd", 2.0, version=2, momentum=0.5))
    desk.reply(a, a.push({1: floats(1)}, 2))
    assert desk.value(clock=2).tolist() == [-1 - 2 * 1.5]
    assert not caplog.records
    desk.reply(a, a.set_optimizer("adam", 1.0, version=3))
    assert "adam replaces sgd, whose state is dropped" in caplog.text
    assert desk.reply(a, a.get_states([1])).names == []


def test_who_waits_for_worker_0_to_set_the_optimizer_is_told_when_it_leaves():
    desk, _, b, c = Desk(3).and_workers()
    early = b.set_optimizer()
    desk.ask(b, early)
    said = desk.reply(b, b.explain(early.seq))
    assert (said.text, said.missing) == ("waits for worker 0, which has not called set_optimizer", [0])
    assert desk.named(desk.shard.depart([2])) == {}
    replies = desk.named(desk.shard.depart([0, 2]))
    assert "without calling set_optimizer" in text_of(replies[1, early.seq], "NodeLost")
    assert "without calling set_optimizer" in text_of(desk.reply(c, c.set_optimizer()), "NodeLost")
    assert desk.reply(b, early).kind == "NodeLost", "and a repeat is told again"


@pytest.mark.parametrize("captured", [False, True])
def test_a_call_of_set_optimizer_is_answered_by_the_standby(captured: bool):
    pair = Pair(2, values={1: floats(1)})
    a, b = pair.workers
    waiting, same, other = (b.set_optimizer("sgd", lr=lr, version=v) for lr, v in ((0.5, 1), (0.5, 2), (0.25, 2)))
    assert pair.ask(b, waiting) == {}
    pair.ask(a, a.set_optimizer("sgd", lr=0.5, version=1))
    decided = a.set_optimizer("sgd", lr=0.5, version=2)
    pair.ask(a, decided)
    late = b.set_optimizer("sgd", lr=0.5, version=3)
    pair.ask(b, late)
    pair.catch_up()
    if captured:
        pair.standby = copied(pair.shard, 2)
    pair.take_over()
    assert pair.ask(b, waiting) == {(1, waiting.seq): wire.Ack(waiting.seq)}
    assert pair.reply(b, same) == wire.Ack(same.seq)
    assert "differs from worker 0's" in text_of(pair.reply(b, other), "Mismatch")
    assert pair.ask(b, late) == {}
    assert pair.ask(a, a.set_optimizer("sgd", lr=0.5, version=3)).keys() == {(0, a.seq), (1, late.seq)}


def test_an_optimizer_that_does_not_fit_here_fails_for_all_who_agreed():
    desk, a, b, c, d = Desk(4, values={1: torch.tensor([0])}).and_workers()
    early, other = b.set_optimizer("sgd", 0.1), c.set_optimizer("adam", 0.1)
    assert desk.ask(b, early) == desk.ask(c, other) == {}
    replies = desk.ask(a, a.set_optimizer("sgd", 0.1))
    assert list(replies) == [(0, a.seq), (1, early.seq), (2, other.seq)]
    text = text_of(replies[0, a.seq], "Mismatch")
    assert text_of(replies[1, early.seq], "Mismatch") == text
    assert "differs from worker 0's" in text_of(replies[2, other.seq], "Mismatch")
    assert text_of(desk.reply(d, d.set_optimizer("sgd", 0.1)), "Mismatch") == text


def test_the_nth_call_meets_the_nth():
    desk, a, b = Desk(2).and_workers()
    second = b.set_optimizer("adam", version=2)
    assert desk.ask(b, second) == {}
    assert desk.reply(a, a.set_optimizer("sgd", version=1)) == wire.Ack(a.seq)
    assert desk.ask(a, a.set_optimizer("adam", version=2)).keys() == {(0, a.seq), (1, second.seq)}


# ---- the hyper-parameters that pushes bring: which round they hold for, and workers that disagree


def test_a_learning_rate_holds_for_its_round_whoever_gave_it():
    desk, a, b = optimized(Desk(2, values={1: floats(0)}), lr=1.0).and_workers()
    for clock, (first, second) in enumerate([(None, None), (0.25, None), (None, 0.5), (0.125, 0.125)], start=1):
        desk.ask(a, a.push({1: floats(1)}, clock, lr=first))
        desk.ask(b, b.push({1: floats(1)}, clock, lr=second))
    assert desk.value(clock=4).tolist() == [-2 * (1.0 + 0.25 + 0.5 + 0.125)]


def test_numbers_of_one_round_do_not_leak_into_another_that_comes_later():
    desk, a = optimized(Desk(1, values={1: floats(0), 2: floats(0)}), lr=1.0).and_workers()
    desk.ask(a, a.push({2: floats(1)}, lr=0.5, rescale=0.5))
    desk.ask(a, a.push({1: floats(1)}))
    assert desk.value(1, clock=1).tolist() == [-1.0]


def test_workers_that_disagree_on_the_learning_rate_all_learn_it():
    desk, a, b = optimized(Desk(2, values={1: floats(0), 2: floats(0)})).and_workers()
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


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            {"lr": 0.5, "changes": [[0, "weight_decay", 0.25]]},
            {"lr": 0.5},
            "weight_decay .*: 0.25 on worker 0, 0 on wo",
        ),
        ({"lr": 0.5}, {"lr": 0.5, "changes": [[0, "lr_mult", 2.0]]}, "lr_mult .*: 1 on worker 0, 2 on worker 1"),
        ({"changes": [[1, "lr", 0.5]]}, {"changes": [[0, "momentum", 0.25]]}, "momentum .*: 0.5 on worker 0, 0.25 on"),
        ({"lr": 0.5, "changes": [[0, "weight_decay", 0.0]]}, {"lr": 0.5}, ""),
        ({"lr": 0.5, "changes": [[0, "weight_decay", 0.25]]}, {}, ""),
    ],
    ids=["decay", "multiplier", "of a group", "what it had", "said by one for all"],
)
def test_a_worker_that_sets_its_numbers_has_the_optimizers_own_where_it_changes_none(
    one: dict[str, Any], other: dict[str, Any], words: str
):
    desk, a, b = Desk(2, values={1: floats(0)}).and_workers()
    for worker in (a, b):
        desk.ask(worker, replace(worker.set_optimizer("sgd", 1.0, momentum=0.5), groups=[[["k2"], []]]))
    desk.ask(a, replace(a.push({1: floats(1)}), **one))
    replies = desk.ask(b, replace(b.push({1: floats(1)}), **other))
    assert len(replies) == 2
    for reply in replies.values():
        if words:
            assert re.search(f"workers disagree on the {words}", text_of(reply, "Mismatch"))
        else:
            assert isinstance(reply, wire.Ack)


@pytest.mark.parametrize("late", ["keep", "drop"])
def test_with_a_quorum_nothing_is_compared_for_who_was_late_is_behind_in_its_schedules(late: str):
    desk, a, b = optimized(Desk(2, values={1: floats(0)}, quorum=1, late=late, grace=1.0), lr=1.0).and_workers()
    desk.ask(b, b.push({1: floats(1)}, 1, lr=0.25))
    desk.ask(a, replace(a.push({1: floats(1)}, 1, lr=0.5), changes=[[0, "alike", "'w' frozen"]]))
    assert desk.value(clock=1).tolist() == [-2 * 0.5], "of worker 0"
    desk.ask(b, replace(b.push({1: floats(1)}, 2, lr=0.125), changes=[[0, "weight_decay", 0.0]]))
    desk.ask(a, a.push({1: floats(1)}, 2))
    assert desk.value(clock=2).tolist() == [-2 * (0.5 + 0.125)], "worker 0 sets nothing"


def test_async_a_learning_rate_stays_until_another_comes():
    desk, a, b = optimized(Desk(2, "async", values={1: floats(0)}), lr=1.0).and_workers()
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


def test_what_pushes_say_is_compared_and_nothing_is_something_else():
    desk, a, b = Desk(2, values={1: floats(0)}).and_workers()  # without an optimizer, too
    said = [[0, "alike", "'w' frozen"]]
    for clock, theirs in ((1, said), (2, [])):
        desk.ask(a, replace(a.push({1: floats(1)}, clock), changes=said))
        replies = desk.ask(b, replace(b.push({1: floats(1)}, clock), changes=theirs))
        assert len(replies) == 2
        for reply in replies.values():
            if not theirs:
                assert "'w' frozen on worker 0; nothing of the kind on worker 1" in text_of(reply, "Mismatch")


def test_a_worker_that_asks_for_another_compression_of_what_comes_back_is_found_out_in_its_round():
    desk, a, b = Desk(2, values={1: floats(0)}).and_workers()
    for clock, theirs in ((1, None), (2, ["fp16", []])):
        push = a.push({1: floats(1)}, clock, want=True)
        desk.ask(a, push)
        replies = desk.ask(b, b.push({1: floats(1)}, clock, want=True, back=theirs))
        assert len(replies) == 2
        for reply in replies.values():
            if theirs is not None:
                assert "none on worker 0, fp16 on worker 1" in text_of(reply, "Mismatch")
