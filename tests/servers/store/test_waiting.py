"""Workers that wait and workers that pause."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from asking import Desk, Worker, floats, text_of, values_in
from hypothesis import given, settings
from hypothesis import strategies as st
from threaded import ThreadedJob, set_limits
from waiting import LONG

from kvstore import wire
from kvstore.client import DistStore
from kvstore.errors import DeadlineExceeded, NodeLost
from kvstore.member.session import Session
from kvstore.spec import Spec
from servers.store.rounds import Rounds, WorkerClocks
from servers.store.waiting import Pauses

# ---- what those who wait are told: whose pushes are missing, and what to do about it


HINT = "uneven batches? See join()"


def pushed(desk: Desk, worker: Worker, clocks: int, numbers: tuple[int, ...] = (1,)) -> None:
    for clock in range(1, clocks + 1):
        desk.ask(worker, worker.push({number: floats(1) for number in numbers}, clock))


# ---- a worker that has left


@pytest.mark.parametrize("left_first", [True, False])
def test_who_waits_for_a_push_beyond_the_last_of_a_worker_that_has_left_is_told_of_both(left_first: bool):
    desk, zero, one = Desk(2, values={1: floats(0)}).and_workers()
    pushed(desk, zero, 6)
    pushed(desk, one, 6)
    last = one.push({1: floats(1)}, 7)
    if left_first:
        desk.shard.depart([0])
        replies = desk.ask(one, last)
    else:
        desk.ask(one, last)
        replies = desk.named(desk.shard.depart([0]))
    assert text_of(replies[1, last.seq], "NodeLost") == (
        f"worker 0 has left the job after push 6 of 'k1', and worker 1 waits for push 7: {HINT}"
    )


def test_each_worker_that_has_left_is_named_with_its_last_push_of_each_key():
    desk = Desk(4, values={1: floats(0), 2: floats(0), 3: floats(0)})
    pushed(desk, desk.workers[0], 1, (1, 2))
    pushed(desk, desk.workers[1], 2, (1, 2, 3))
    pushed(desk, desk.workers[3], 2, (1, 2, 3))
    asked = desk.workers[3].pull([1, 2, 3], 2)
    desk.ask(desk.workers[3], asked)
    replies = desk.named(desk.shard.depart([0, 1]))
    assert text_of(replies[3, asked.seq], "NodeLost") == (
        "worker 0 has left the job without a push of 'k3', and worker 3 waits for push 1; "
        f"worker 0 has left the job after push 1 of 'k1', 'k2', and worker 3 waits for push 2: {HINT}"
    ), "nobody has to wait for worker 1, and worker 2 may still come"


def test_of_many_who_have_left_a_few_are_named_and_what_to_do_is_said_all_the_same():
    desk = Desk(300, values={1: floats(0)})
    asked = desk.workers[0].push({1: floats(1)})
    desk.ask(desk.workers[0], asked)
    text = text_of(desk.named(desk.shard.depart(range(1, 300)))[0, asked.seq], "NodeLost")
    assert text.count("has left the job without a push of 'k1'") == 8
    assert text.endswith(f"; and 291 more: {HINT}")


def test_uneven_batches_without_join_are_said_to_be_that(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("servers.scheduler_process.FAREWELL_S", 0.2)

    def work(session: Session) -> str:
        store = DistStore(session)
        store.init("w", torch.zeros(3))
        out = torch.zeros(3)
        for _ in range(2 + session.rank):
            try:
                store.pushpull("w", torch.ones(3), out)
            except NodeLost as exc:
                return str(exc)
        session.leave()
        return ""

    with ThreadedJob(2, 1) as cluster:
        _, text = cluster.run_sessions(work)
    assert text == f"worker 0 has left the job after push 2 of 'w', and worker 1 waits for push 3: {HINT}"


# ---- explanations


def test_a_request_whose_keys_wait_for_different_pushes_of_a_worker_says_which():
    desk, zero, one = Desk(2, values={1: floats(0), 2: floats(0)}).and_workers()
    pushed(desk, zero, 2)
    pushed(desk, one, 3, (1, 2))
    asked = one.pull([1, 2], 3)
    desk.ask(one, asked)
    said = desk.reply(one, one.explain(asked.seq))
    assert said.text == "waits for worker 0, whose push 1 of 'k2' is missing; worker 0, whose push 3 of 'k1' is missing"
    assert said.missing == [0]


def test_workers_that_wait_for_each_other_at_a_barrier_and_in_a_pushpull_can_be_told_from_what_each_is_told():
    def work(store: DistStore) -> str:
        store.init("w", torch.zeros(3))
        call = store.barrier if store.rank == 1 else lambda: store.pushpull("w", torch.ones(3), torch.zeros(3))
        set_limits(store, 0.1)
        with pytest.raises(DeadlineExceeded) as late:
            call()
        both_late.wait()
        set_limits(store, LONG)
        if store.rank == 1:
            store.pushpull("w", torch.ones(3), torch.zeros(3))
        store.barrier()
        return str(late.value)

    both_late = threading.Barrier(2, timeout=LONG)
    with ThreadedJob(2, 1) as cluster:
        in_pushpull, at_barrier = cluster.run(work)
    assert ": server 0 waits for worker 1, whose push 1 of 'w' is missing; worker 1 is at " in in_pushpull
    assert ": the scheduler waits at the barrier for worker 0 (has not come yet); worker 0 is at " in at_barrier


def test_who_waits_for_a_worker_that_has_left_is_told():
    desk, a, b, _ = Desk(3, values={1: floats(0)}).and_workers()
    push, pull = a.push({1: floats(1)}), a.pull([1], 1)
    desk.ask(a, push)
    desk.ask(a, pull)
    assert desk.named(desk.shard.depart([2])).keys() == {(0, push.seq), (0, pull.seq)}
    reply = desk.reply(b, b.push({1: floats(1)}))
    assert text_of(reply, "NodeLost") == (
        "worker 2 has left the job without a push of 'k1', and worker 1 waits for push 1: uneven batches? See join()"
    )


def test_what_a_worker_pushed_before_it_left_still_counts():
    desk, a, b = Desk(2, values={1: floats(0), 2: floats(0)}).and_workers()
    desk.ask(b, b.push({1: floats(1)}))
    push = a.push({2: floats(1)})
    desk.ask(a, push)
    assert desk.named(desk.shard.depart([1])).keys() == {(0, push.seq)}
    good = a.push({1: floats(1)}, want=True)
    assert values_in(desk.ask(a, good)[0, good.seq], [Spec((1,), "float32")])[0].tolist() == [2]


def test_a_request_given_up_is_answered_once():
    desk, a, b = Desk(2, values={1: floats(0), 2: floats(0)}).and_workers()
    desk.ask(b, b.push({1: floats(1)}))
    both = a.push({1: floats(1), 2: floats(1)})
    assert desk.ask(a, both).keys() == {(1, b.seq)}
    assert desk.named(desk.shard.depart([1])).keys() == {(0, both.seq)}
    assert desk.named(desk.shard.depart([1])) == {}
    assert desk.value(1, clock=1).tolist() == [2]


def test_explain_names_workers_rounds_and_keys():
    desk, a, b, _ = Desk(3, values={1: floats(0), 2: floats(0)}).and_workers()
    desk.ask(b, b.push({1: floats(1)}))
    push = a.push({1: floats(1), 2: floats(1)})
    desk.ask(a, push)
    assert desk.reply(a, a.explain(push.seq)).text == (
        "waits for worker 1, whose push 1 of 'k2' is missing; worker 2, whose push 1 of 'k1', 'k2' is missing"
    )
    assert desk.reply(b, b.explain(push.seq)).text == "", "of another worker's request nothing is known"


def test_explaining_a_request_for_a_distant_round_takes_no_time():
    desk = Desk(2, values={1: floats(0)})
    a = desk.workers[0]
    pull = a.pull([1], 2**61)
    assert desk.ask(a, pull) == {}
    assert "push 1 of 'k1'" in desk.reply(a, a.explain(pull.seq)).text
    assert desk.named(desk.shard.depart([1])).keys() == {(0, pull.seq)}


# ---- workers that pause: which rounds they are in is what they have pushed, in whatever order that comes to be known


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
def test_any_interleaving_of_pushes_and_pauses_gives_the_same_rounds(counts: list[int], data: st.DataObject):
    events = [(rank, clock) for rank, count in enumerate(counts) for clock in range(count + 1)]  # 0: the pause
    rounds: Rounds[int] = Rounds(range(len(counts)))
    completed, shares = [], []
    for rank, clock in data.draw(st.permutations(events)):
        if clock:
            rounds.contribute([rank], clock, rank)
        else:
            rounds.pause(rank, counts[rank])
        while (items := rounds.complete()) is not None:
            completed.append(items)
            shares.append(rounds.share)
    assert completed == [[rank for rank, count in enumerate(counts) if count >= n] for n in range(1, max(counts) + 1)]
    assert shares == [len(items) for items in completed]
    assert rounds.settled
    assert rounds.missing(2**61) == {}
    rounds.resume()
    assert rounds.missing(max(counts) + 1) == dict.fromkeys(range(len(counts)), max(counts) + 1)
    assert not rounds.contribute([0], max(counts), 0)


def test_rounds_wait_for_a_push_that_comes_after_its_workers_pause():
    rounds: Rounds[int] = Rounds([0, 1])
    rounds.pause(0, 2)
    rounds.pause(1, 1)
    rounds.contribute([0], 1, 0)
    assert rounds.complete() is None
    assert rounds.missing(2) == {0: 2, 1: 1}
    assert not rounds.settled
    assert not rounds.contribute([1], 2, 1), "it has said that it would not"
    rounds.contribute([1], 1, 1)
    assert rounds.complete() == [0, 1]
    assert not rounds.settled
    assert rounds.copy().missing(2) == {0: 2}
    rounds.contribute([0], 2, 0)
    assert rounds.complete() == [0]
    assert rounds.settled


def test_a_quorum_is_of_those_who_do_not_pause():
    rounds: Rounds[int] = Rounds(range(4), quorum=3)
    rounds.pause(3, 0)
    rounds.pause(2, 1)
    for rank in (0, 1, 2):
        rounds.contribute([rank], 1, rank)
    assert rounds.complete() == [0, 1, 2]
    assert rounds.share == 3
    rounds.contribute([0], 2, 0)
    assert rounds.complete() is None
    rounds.contribute([1], 2, 1)
    assert rounds.complete() == [0, 1]
    assert rounds.share == 2


def test_nobody_is_ahead_of_a_worker_that_pauses():
    clocks: WorkerClocks[None] = WorkerClocks(range(3))
    for rank, count in enumerate((1, 5, 3)):
        clocks.contribute([rank], count, None)
    assert clocks.version == 1
    clocks.pause(0, 1)
    assert clocks.version == 3
    assert clocks.missing(4) == {2: 4}
    assert clocks.copy().state == clocks.state
    clocks.pause(2, 3)
    clocks.pause(1, 5)
    clocks.resume()
    assert clocks.version == 5, "all go on from where the first is"
    assert clocks.missing(6) == {0: 6, 1: 6, 2: 6}
    clocks.leave([0])
    clocks.pause(0, 9)
    clocks.resume()
    assert clocks.missing(6) == {1: 6, 2: 6}, "who has left does not come back"


SIZES = {1: 2, 2: 3, 3: 1}
LISTS = ([1, 2, 3], [1], [2, 3], [1, 2])


@st.composite
def plans(draw: st.DrawFn) -> list[list[list[int]]]:
    """For each worker, the lists of segments that it pushes, one after the other."""
    return draw(st.lists(st.lists(st.sampled_from(LISTS), max_size=4), min_size=2, max_size=3))


class Run:
    """A shard with an optimizer whose result depends on what is summed together, and all messages of some plans."""

    def __init__(self, plan: list[list[list[int]]]) -> None:
        self.desk = Desk(len(plan), values={number: torch.zeros(size) for number, size in SIZES.items()})
        first = self.desk.workers[0]
        assert self.desk.reply(first, first.set_optimizer("sgd", lr=0.1, momentum=0.5)) == wire.Ack(first.seq)
        self.clocks: list[dict[int, int]] = []
        self.messages: list[tuple[Worker, Any]] = []
        for worker, lists in zip(self.desk.workers, plan, strict=True):
            clocks = dict.fromkeys(SIZES, 0)
            for ids in lists:
                for number in ids:
                    clocks[number] += 1
                values = {n: torch.full((SIZES[n],), (worker.rank + 1) * 0.7 ** clocks[n]) for n in ids}
                self.messages.append((worker, worker.push(values, [clocks[n] for n in ids])))
            self.clocks.append(clocks)
            self.messages.append((worker, worker.pause(clocks)))

    def play(self, order: list[int]) -> tuple[list[torch.Tensor], list[wire.Resume]]:
        replies: dict[tuple[int, int], Any] = {}
        for place in order:
            replies |= self.desk.ask(*self.messages[place])
        assert len(replies) == len(self.messages), "somebody waits for ever"
        worker = self.desk.workers[0]
        latest = {number: max(clocks[number] for clocks in self.clocks) for number in SIZES}
        reply = self.desk.reply(worker, worker.pull(list(latest), list(latest.values())))
        assert isinstance(reply, wire.Values)
        specs = [self.desk.segment(number).spec for number in SIZES]
        resumed = [reply for reply in replies.values() if isinstance(reply, wire.Resume)]
        assert [dict(zip(SIZES, resume.clocks, strict=True)) for resume in resumed] == [latest] * len(self.clocks)
        return values_in(reply, specs), resumed


@settings(max_examples=40, deadline=None)
@given(plans(), st.data())
def test_a_shard_ends_with_the_same_bits_whatever_overtakes_what(plan: list[list[list[int]]], data: st.DataObject):
    straight = Run(plan)
    expected, resumed = straight.play(list(range(len(straight.messages))))
    mixed = Run(plan)
    values, again = mixed.play(data.draw(st.permutations(range(len(mixed.messages)))))
    for mine, theirs in zip(values, expected, strict=True):
        assert torch.equal(mine, theirs)
    most = max(range(len(plan)), key=lambda rank: (sum(mixed.clocks[rank].values()), rank))
    assert {reply.last for reply in again + resumed} == {most}


def test_after_a_pause_everybody_is_in_the_next_round():
    desk, zero, one = Desk(values={1: floats(0)}).and_workers()
    pushed = zero.push({1: floats(1)}, 1)
    assert desk.reply(zero, pushed) is None
    assert desk.ask(one, one.pause({1: 0})) == {(0, pushed.seq): wire.Ack(pushed.seq)}
    assert desk.ask(zero, zero.pause({1: 1})).keys() == {(0, zero.seq), (1, one.seq)}
    late = one.push({1: floats(2)}, 2, want=True)
    assert desk.reply(one, late) is None, "the next round waits for all again"
    replies = desk.ask(zero, zero.push({1: floats(3)}, 2))
    assert values_in(replies[1, late.seq], [desk.segment(1).spec])[0] == 5


def test_a_repeated_pause_is_answered_and_does_nothing_more():
    desk, zero, one = Desk(values={1: floats(0)}).and_workers()
    first = one.pause({1: 0})
    assert desk.reply(one, first) is None
    assert desk.reply(one, first) is None
    answers = desk.ask(zero, zero.pause({1: 0}))
    assert desk.reply(one, first) == answers[1, first.seq]
    assert "inside join() already" not in str(answers)
    again = one.pause({1: 0}, 2)
    assert desk.reply(one, again) is None
    assert "inside join() already" in text_of(desk.reply(one, one.pause({1: 0}, 3)), "UsageError")


def test_a_push_beyond_a_pause_is_refused():
    desk = Desk(values={1: floats(0), 2: floats(0)})
    one = desk.workers[1]
    desk.ask(one, one.pause({1: 1}))
    assert "must not push before all workers are" in text_of(desk.reply(one, one.push({1: floats(1)}, 2)), "UsageError")
    assert "must not push before all workers are" in text_of(desk.reply(one, one.push({2: floats(1)}, 1)), "UsageError")
    assert desk.reply(one, one.push({1: floats(1)}, 1)) is None, "one that was on its way is welcome"


@pytest.mark.parametrize("pause_first", [True, False])
def test_a_key_that_a_worker_does_not_know_of_cannot_do_without_it(pause_first: bool):
    desk, zero, one = Desk(values={1: floats(0)}).and_workers()
    pushed, pause = zero.push({1: floats(1)}, 1), one.pause({})
    for worker, message in [(one, pause), (zero, pushed)][:: 1 if pause_first else -1]:
        replies = desk.ask(worker, message)
    text = text_of(replies[0, pushed.seq], "UsageError")
    assert text == "worker 1, whose push 1 of 'k1' is missing, is inside join() and has not initialized it"


def test_a_worker_that_has_left_never_joins():
    desk, zero, one, _ = Desk(3, values={1: floats(0)}).and_workers()
    waiting = zero.pause({1: 0})
    assert desk.reply(zero, waiting) is None
    explained = desk.reply(one, one.explain(waiting.seq)).text
    assert explained == "", "it is not this worker's"
    assert desk.reply(zero, zero.explain(waiting.seq)).text.startswith("waits for worker 1, worker 2 to join")
    answers = desk.named(desk.shard.depart([2]))
    assert text_of(answers[0, waiting.seq], "NodeLost") == "worker 2 has left the job without join()"


@pytest.mark.parametrize("rule", [{"mode": "async"}, {"quorum": 1}])
def test_where_nobody_waits_for_a_worker_that_has_left_joins_do_not_either(rule: dict[str, Any]):
    desk = Desk(values={1: floats(0)}, **rule)
    zero = desk.workers[0]
    waiting = zero.pause({1: 0})
    assert desk.reply(zero, waiting) is None
    assert desk.named(desk.shard.depart([1])) == {(0, waiting.seq): wire.Resume(waiting.seq, 0, [0])}


def test_others_do_not_wait_for_worker_0_to_set_an_optimizer_once_it_has_joined():
    desk, zero, one = Desk(values={1: floats(0)}).and_workers()
    asked = one.set_optimizer()
    assert desk.reply(one, asked) is None
    replies = desk.ask(zero, zero.pause({1: 0}))
    expected = "worker 0 is inside join(), and has not called set_optimizer"
    assert text_of(replies[1, asked.seq], "UsageError") == expected
    assert text_of(desk.reply(one, one.set_optimizer(version=2)), "UsageError") == expected


def test_who_pushes_most_is_the_last():
    pauses = Pauses()
    for rank, clock in enumerate((2, 4, 4, 1)):
        worker = Worker(rank)
        pauses.add(worker.peer, worker.pause({1: clock}))
    assert pauses.last == 2
    assert [request.node.rank for _, request in pauses.end()] == [0, 1, 2, 3]
    assert pauses.ranks == frozenset()


def test_who_waits_in_another_store_is_told_who_is_inside_join():
    desk, zero, one = Desk(values={1: floats(0)}).and_workers()
    for worker in desk.workers:
        desk.ask(worker, worker.open(store=1))
    desk.ask(zero, zero.init({2: floats(0)}, store=1))
    desk.ask(one, one.pause({1: 0}))
    waiting = zero.push({2: floats(1)}, 1, store=1)
    assert desk.reply(zero, waiting) is None
    text = desk.reply(zero, zero.explain(waiting.seq)).text
    assert text == "waits for worker 1, whose push 1 of 'k2' is missing; inside join(): worker 1"


def test_segments_that_a_worker_pauses_after_different_pushes_are_not_put_together():
    desk, zero, one = Desk(values={1: floats(0), 2: floats(0)}).and_workers()
    both = {1: floats(1), 2: floats(1)}
    desk.ask(zero, zero.push(both, 1))
    desk.ask(one, one.push(both, 1))
    last = one.push({1: floats(10)}, 2)
    desk.ask(one, one.pause({1: 2, 2: 1}))  # overtakes its last push
    waiting = zero.push(both, 2)
    assert desk.reply(zero, waiting) is None
    assert desk.ask(one, last) == {(0, waiting.seq): wire.Ack(waiting.seq), (1, last.seq): wire.Ack(last.seq)}
    assert (desk.value(1, 2), desk.value(2, 2)) == (11, 1)
