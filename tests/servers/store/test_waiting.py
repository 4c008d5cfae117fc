"""What those who wait are told: whose pushes are missing, and what to do about it."""

from __future__ import annotations

import threading

import pytest
import torch
from asking import Desk, Worker, floats, text_of, values_in
from threaded import ThreadedJob, set_limits
from waiting import LONG

from kvstore.client import DistStore
from kvstore.errors import DeadlineExceeded, NodeLost
from kvstore.member.session import Session
from kvstore.spec import Spec

HINT = "uneven batches? See join()"


def pushed(desk: Desk, worker: Worker, clocks: int, numbers: tuple[int, ...] = (1,)) -> None:
    for clock in range(1, clocks + 1):
        desk.ask(worker, worker.push({number: floats(1) for number in numbers}, clock))


# ---- a worker that has left


@pytest.mark.parametrize("left_first", [True, False])
def test_who_waits_for_a_push_beyond_the_last_of_a_worker_that_has_left_is_told_of_both(left_first: bool):
    desk = Desk(2, values={1: floats(0)})
    zero, one = desk.workers
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
    desk = Desk(2, values={1: floats(0), 2: floats(0)})
    zero, one = desk.workers
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
    desk = Desk(3, values={1: floats(0)})
    a, b, _ = desk.workers
    push, pull = a.push({1: floats(1)}), a.pull([1], 1)
    desk.ask(a, push)
    desk.ask(a, pull)
    assert desk.named(desk.shard.depart([2])).keys() == {(0, push.seq), (0, pull.seq)}
    reply = desk.reply(b, b.push({1: floats(1)}))
    assert text_of(reply, "NodeLost") == (
        "worker 2 has left the job without a push of 'k1', and worker 1 waits for push 1: uneven batches? See join()"
    )


def test_what_a_worker_pushed_before_it_left_still_counts():
    desk = Desk(2, values={1: floats(0), 2: floats(0)})
    a, b = desk.workers
    desk.ask(b, b.push({1: floats(1)}))
    push = a.push({2: floats(1)})
    desk.ask(a, push)
    assert desk.named(desk.shard.depart([1])).keys() == {(0, push.seq)}
    good = a.push({1: floats(1)}, want=True)
    assert values_in(desk.ask(a, good)[0, good.seq], [Spec((1,), "float32")])[0].tolist() == [2]


def test_a_request_given_up_is_answered_once():
    desk = Desk(2, values={1: floats(0), 2: floats(0)})
    a, b = desk.workers
    desk.ask(b, b.push({1: floats(1)}))
    both = a.push({1: floats(1), 2: floats(1)})
    assert desk.ask(a, both).keys() == {(1, b.seq)}
    assert desk.named(desk.shard.depart([1])).keys() == {(0, both.seq)}
    assert desk.named(desk.shard.depart([1])) == {}
    assert desk.value(1, clock=1).tolist() == [2]


def test_explain_names_workers_rounds_and_keys():
    desk = Desk(3, values={1: floats(0), 2: floats(0)})
    a, b, _ = desk.workers
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
