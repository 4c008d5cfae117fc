"""What contributions do to values: sums, steps of the optimizer, delay compensation, and updates that fail."""

from __future__ import annotations

import pytest
import torch
from asking import Desk, floats, optimized, read, sender, sent, text_of, updating, values_in
from pairs import Pair, copied
from waiting import until

from kvstore import wire
from kvstore.errors import WeightsInDoubt
from kvstore.optim.optimizer import OptimizerClass, builtin
from kvstore.optim.updater import Updater
from kvstore.spec import Spec
from kvstore.transport.memory import Heap
from kvstore.wire.guests import NOT_HELD
from servers.reading.desk import ValueRead
from servers.saving import Saver
from servers.store.bucket import Bucket
from servers.store.recording import LEAST_BYTES, MOST_BYTES, ROUNDS, HandOver, interval
from servers.store.rounds import Rounds
from servers.store.target import HeldSegments


def test_a_gradient_is_corrected_for_what_others_have_changed() -> None:
    desk, a, b = updating(2, compensation=0.5).and_workers()
    assert read(desk, desk.reply(a, a.pull([1]))) == 0
    desk.ask(b, b.push({1: floats(4)}, 1))  # b has read nothing: as it is
    assert desk.value() == -4
    a, b = desk.workers
    reply = desk.reply(b, b.pull([1]))
    assert read(desk, reply) == -4
    desk.ask(a, a.push({1: floats(1)}, 1))  # a has read -4 by ``value``
    assert desk.value() == -5
    desk.ask(b, b.push({1: floats(2)}, 2))  # 2 + 0.5 * 2 * 2 * (-5 - -4) = 0
    assert desk.value() == -5


def test_who_alone_trains_gets_plain_updates() -> None:
    desk = updating(1, compensation=2.0)
    worker = desk.workers[0]
    for clock in (1, 2, 3):
        assert read(desk, desk.reply(worker, worker.push({1: floats(1)}, clock, want=True))) == -clock


def test_what_was_read_goes_along_when_buckets_change() -> None:
    desk = Desk(2, "async", values={1: floats(0), 2: floats(0)}, compensation=1.0)
    for worker in reversed(desk.workers):
        desk.ask(worker, worker.set_optimizer("sgd", lr=1.0))
    a, b = desk.workers
    desk.ask(a, a.push({1: floats(0), 2: floats(0)}, 1, want=True))
    desk.ask(b, b.push({2: floats(1)}, 1))
    desk.ask(a, a.push({2: floats(1)}, 2))  # 1 + 1 * (-1 - 0) = 0
    assert desk.value(2) == -1


def test_an_update_uses_the_sum_and_the_rescaled_gradient():
    desk = optimized(Desk(2, values={1: floats(10)}), lr=0.5)
    for worker in desk.workers:
        desk.ask(worker, worker.push({1: floats(4)}, rescale=0.5))
    assert desk.value(clock=1).tolist() == [10 - 0.5 * 0.5 * 8]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_optimizer_that_throws_is_told_to_all_who_pushed(monkeypatch, workers, mode):
    desk = optimized(Desk(workers, mode, values={1: floats(0)}))
    step = Updater.step
    monkeypatch.setattr(Updater, "step", lambda *args, **kwargs: 1 / 0)
    replies = {}
    for worker in desk.workers:
        replies |= desk.ask(worker, worker.push({1: floats(1)}, want=worker.rank % 2 == 0))
    assert sorted(rank for rank, _ in replies) == list(range(workers))
    for reply in replies.values():
        assert text_of(reply, "ServerError") == (
            "ZeroDivisionError: division by zero; no array of this update of 'k1' has changed"
        )
    monkeypatch.setattr(Updater, "step", step)
    for worker in desk.workers:
        desk.ask(worker, worker.push({1: floats(1)}, 2))
    assert desk.value(clock=2).tolist() == [-0.5 * workers]


class Fails(torch.optim.RMSprop):
    """An optimizer of the kind that changes arrays one after the other, and fails at the array of so many elements."""

    at = 0

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        for group in self.param_groups:
            for param in group["params"]:
                if param.numel() == Fails.at:
                    raise ArithmeticError("it diverged")
                with torch.no_grad():
                    param.sub_(param.grad)


def failing(monkeypatch, at, workers=1, mode="sync", unseen=False, make=Desk):
    desk = make(workers, mode, values={1: floats(0), 2: floats(0, 0), 3: floats(0, 0, 0)})
    monkeypatch.setitem(builtin(), "rmsprop", OptimizerClass(Fails, unseen=unseen))
    for worker in reversed(desk.workers):
        desk.ask(worker, worker.set_optimizer("rmsprop", lr=1.0))
    monkeypatch.setattr(Fails, "at", at)
    return desk


DOUBT = (
    "rmsprop failed in the middle of an update of 'k1', 'k2', which may be half made: ArithmeticError: it diverged; "
    "no push or pull of these keys is served any more: go on from a checkpoint"
)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_an_optimizer_may_have_half_updated_is_not_served_any_more_and_all_else_is(monkeypatch, mode):
    desk, a, b = failing(monkeypatch, 2, workers=2, mode=mode).and_workers()
    early = a.push({1: floats(1), 2: floats(1, 1)}, want=True)
    replies = desk.ask(a, early)
    ahead = a.push({1: floats(1), 2: floats(1, 1)}, 2)
    replies |= desk.ask(a, ahead)  # in rounds, it waits for b's second push, which never comes
    late = b.push({1: floats(1), 2: floats(1, 1)})
    replies |= desk.ask(b, late)
    for answer in (replies[0, early.seq], replies[0, ahead.seq], replies[1, late.seq]):
        assert text_of(answer, "WeightsInDoubt") == DOUBT
    monkeypatch.setattr(Fails, "at", 0)
    for asked in (b.push({1: floats(1)}, 2), b.pull([1]), b.pull([3, 2]), b.get_states([1, 3])):
        assert text_of(desk.reply(b, asked), "WeightsInDoubt") == DOUBT
    for worker in desk.workers:
        desk.ask(worker, worker.push({3: floats(1, 1, 1)}))
    assert desk.value(3, clock=1).tolist() == [-2, -2, -2]


def test_where_torch_does_not_count_changes_each_array_of_the_update_is_in_doubt(monkeypatch):
    desk, a = failing(monkeypatch, 1, unseen=True).and_workers()
    reply = desk.reply(a, a.push({1: floats(1), 2: floats(1, 1)}))
    assert text_of(reply, "WeightsInDoubt") == DOUBT


@pytest.mark.parametrize("fails_too", [False, True])
def test_a_standby_refuses_the_same_arrays_whether_it_has_followed_or_is_new(monkeypatch, fails_too):
    desk, a = failing(monkeypatch, 2, make=Pair).and_workers()
    desk.ask(a, a.push({1: floats(1), 2: floats(1, 1)}))
    monkeypatch.setattr(Fails, "at", 2 if fails_too else 0)
    desk.catch_up()
    for shard in (desk.shard, desk.standby, copied(desk.shard, 1)):
        told = [shard.handle(a.peer, sent(a.pull([number])))[0][1] for number in (1, 3)]
        assert text_of(told[0], "WeightsInDoubt") == DOUBT
        assert isinstance(told[1], wire.Values)


def test_of_arrays_in_doubt_there_is_no_checkpoint_and_readers_are_told(monkeypatch, tmp_path):
    desk, a = failing(monkeypatch, 2).and_workers()
    written = []
    saver = Saver(desk.shard.checkpoints.memory, tmp_path, 0, lambda *outcome: written.append(outcome[2]))
    desk.shard.checkpoints.save = saver.save
    desk.ask(a, wire.Capture(a.me(), 0, 1, [1, 2], [1, 1]))  # as they are after the round that fails
    desk.ask(a, a.push({1: floats(1), 2: floats(1, 1)}))
    until(lambda: bool(written))
    assert [str(error) for error in written] == [f"checkpoint 1 failed: server 0: {DOUBT}"]
    (store,) = desk.shard.stores.values()
    read = ValueRead(store, wire.ReadValues(sender(role="reader"), 0, [1], 0, [NOT_HELD], 0), Heap())
    with pytest.raises(WeightsInDoubt, match="of 'k1', 'k2'"):
        read.step(1 << 20)


def test_an_update_that_fails_before_it_has_changed_anything_is_over_and_others_follow(monkeypatch):
    desk, a = failing(monkeypatch, 1).and_workers()
    push = a.push({1: floats(1), 2: floats(1, 1)})
    replies = desk.ask(a, push)
    assert text_of(replies[0, push.seq], "ServerError") == (
        "ArithmeticError: it diverged; no array of this update of 'k1', 'k2' has changed"
    )
    monkeypatch.setattr(Fails, "at", 0)
    desk.ask(a, a.push({1: floats(1), 2: floats(1, 1)}, 2))
    assert (desk.value(1, clock=2).tolist(), desk.value(2, clock=2).tolist()) == ([-1], [-1, -1])


def test_one_key_that_fails_does_not_fail_those_beside_it():
    desk, a, b = optimized(Desk(2, values={1: floats(0), 2: floats(0)})).and_workers()
    one, two = a.push({1: floats(1)}, lr=0.1), a.push({2: floats(1)}, lr=0.2)
    desk.ask(a, one)
    desk.ask(a, two)
    replies = desk.ask(b, b.push({1: floats(1), 2: floats(1)}, lr=0.2))
    assert replies[0, two.seq] == wire.Ack(two.seq)
    assert replies[0, one.seq].kind == replies[1, b.seq].kind == "Mismatch"


def test_all_segments_of_a_message_are_updated_in_one_call(monkeypatch):
    desk = optimized(Desk(1, values={1: floats(0), 2: floats(0, 0)}))
    calls = []
    step = Updater.step
    monkeypatch.setattr(
        Updater,
        "step",
        lambda self, groups, *more, **how: (
            calls.append([len(group.params) for group in groups]) or step(self, groups, *more, **how)
        ),
    )
    (a,) = desk.workers
    desk.ask(a, a.push({1: floats(1), 2: floats(1, 1)}))
    assert calls == [[2]]


def test_async_every_push_is_an_update_at_once():
    desk, a, b = optimized(Desk(2, "async", values={1: floats(0)}), lr=1.0).and_workers()
    for count, (worker, clock) in enumerate([(a, 1), (b, 1), (b, 2), (a, 2)], start=1):
        reply = desk.reply(worker, worker.push({1: floats(1)}, clock, want=True))
        assert values_in(reply, [Spec((1,), "float32")])[0].tolist() == [-count]


def test_async_without_an_optimizer_a_push_says_what_to_call():
    desk, a = Desk(1, "async", values={1: floats(0)}).and_workers()
    assert "call set_optimizer(name, ...) first" in text_of(desk.reply(a, a.push({1: floats(1)})), "UsageError")
    assert desk.value().tolist() == [0]


def test_an_optimizer_refuses_integers_whichever_came_first():
    desk, a = Desk(1, values={1: torch.zeros(2, dtype=torch.int32)}).and_workers()
    assert "floating point only" in text_of(desk.reply(a, a.set_optimizer()), "Mismatch")
    push = a.push({1: torch.ones(2, dtype=torch.int32)})
    assert desk.reply(a, push) == wire.Ack(push.seq), "without one they are summed"
    other = Desk(1)
    (a,) = other.workers
    optimized(other)
    other.reply(a, a.init({1: torch.zeros(2, dtype=torch.int32)}))
    assert "floating point only" in text_of(other.reply(a, a.push({1: torch.ones(2, dtype=torch.int32)})), "Mismatch")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_other_dtypes_are_summed(dtype):
    desk = Desk(2, values={1: torch.zeros(3, dtype=dtype)})
    for worker in desk.workers:
        desk.ask(worker, worker.push({1: torch.tensor([1, 2, 3], dtype=dtype)}))
    assert desk.value(clock=1).tolist() == [2, 4, 6]


@pytest.mark.parametrize("optimizer", ["none", "sgd"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_fail_their_round_and_name_who_pushed_them(optimizer: str, bad: float):
    desk = Desk(2, values={1: floats(5), 2: floats(5, 5)}, finite=True)
    if optimizer == "sgd":
        optimized(desk, lr=1.0)
    start, sign = (5, -1) if optimizer == "sgd" else (0, 1)
    a, b = desk.workers
    desk.ask(a, a.push({1: floats(1), 2: floats(1, 1)}, 1))
    replies = desk.ask(b, b.push({1: floats(1), 2: floats(1, bad)}, 1))
    assert len(replies) == 2
    for reply in replies.values():
        assert text_of(reply, "NotFinite") == (
            "push 1 of 'k2' by worker 1 has NaN or infinite elements; its segment has not been updated"
        )
    assert desk.value(1, clock=1).tolist() == [5]
    assert desk.value(2, clock=1).tolist() == [5, 5]
    for worker in (a, b):
        desk.ask(worker, worker.push({1: floats(1), 2: floats(1, 2)}, 2))
    assert (desk.value(1, clock=2) - start).tolist() == [2 * sign], "and the next round goes on"
    assert (desk.value(2, clock=2) - start).tolist() == [2 * sign, 4 * sign]


def test_a_sum_that_is_not_finite_although_all_its_parts_are():
    desk, a, b = Desk(2, values={1: torch.zeros(2, dtype=torch.float16)}, finite=True).and_workers()
    desk.ask(a, a.push({1: torch.full((2,), 60000.0, dtype=torch.float16)}))
    push = b.push({1: torch.full((2,), 60000.0, dtype=torch.float16)})
    text = text_of(desk.ask(b, push)[1, push.seq], "NotFinite")
    assert text.startswith("push 1 of 'k1': each worker's values are finite, their sum is not in float16")


def test_async_pushes_that_are_not_finite_are_refused_alone():
    desk, a, b = optimized(Desk(2, "async", values={1: floats(0)}, finite=True), lr=1.0).and_workers()
    push = a.push({1: floats(float("nan"))}, 1)
    assert "by worker 0" in text_of(desk.ask(a, push)[0, push.seq], "NotFinite")
    desk.ask(b, b.push({1: floats(3)}, 1))
    desk.ask(a, a.push({1: floats(4)}, 2))
    assert desk.value(1).tolist() == [-7]


def states_of(desk: Desk, ids: list[int]) -> tuple[wire.OptimizerStates, dict[tuple[int, str], torch.Tensor]]:
    worker = desk.workers[0]
    reply = desk.reply(worker, worker.get_states(ids))
    assert isinstance(reply, wire.OptimizerStates), reply
    specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(reply.shapes, reply.dtypes, strict=True)]
    parts = wire.unpack_arrays(reply.buffers, [spec.nbytes for spec in specs])
    tensors = [
        torch.frombuffer(p, dtype=getattr(torch, s.dtype)).view(s.shape) for p, s in zip(parts, specs, strict=True)
    ]
    return reply, dict(zip(zip(reply.ids, reply.names, strict=True), tensors, strict=True))


def test_states_travel_and_come_back():
    one, two = Desk(1, values={1: floats(0, 0)}), Desk(1, values={1: floats(0, 0)})
    for desk in (one, two):
        optimized(desk, "adam", lr=0.1)
    a = one.workers[0]
    for clock in (1, 2):
        one.ask(a, a.push({1: floats(1, 2)}, clock))
    reply, states = states_of(one, [1])
    assert reply.optimizer == "adam"
    assert {name for _, name in states} == {"step", "exp_avg", "exp_avg_sq"}
    b = two.workers[0]
    two.ask(b, b.push({1: floats(9, 9)}, 1))  # has state of its own by now
    put = b.put_states(states)
    assert two.reply(b, put) == wire.Ack(put.seq)
    before = one.value(clock=2) - two.value(clock=1)
    one.ask(a, a.push({1: floats(3, 3)}, 3))
    two.ask(b, b.push({1: floats(3, 3)}, 2))
    torch.testing.assert_close(one.value(clock=3) - two.value(clock=2), before)


def test_states_that_were_sent_do_not_change():
    desk = optimized(Desk(1, values={1: floats(0)}), momentum=0.5)
    a = desk.workers[0]
    desk.ask(a, a.push({1: floats(1)}, 1))
    ((_, reply),) = desk.shard.handle(a.peer, a.get_states([1]))
    before = bytes(reply.buffers[0])
    desk.ask(a, a.push({1: floats(1)}, 2))
    assert bytes(reply.buffers[0]) == before
    assert states_of(desk, [1])[1][1, "momentum_buffer"].tolist() == [1.5]


def test_without_an_optimizer_there_are_no_states():
    desk = Desk(1, values={1: floats(0)})
    reply, states = states_of(desk, [1])
    assert (reply.optimizer, states) == (None, {})
    a = desk.workers[0]
    text = text_of(desk.reply(a, a.put_states({(1, "x"): floats(1)})), "UsageError")
    assert "call set_optimizer first" in text


@pytest.mark.parametrize(
    "states",
    [
        {(1, "momentum_buffer"): torch.zeros(3)},  # torch's fused step would read past its end
        {(1, "momentum_buffer"): torch.zeros(1, 50_000)},
        {(1, "momentum_buffer"): torch.zeros(50_000, dtype=torch.float16)},
        {(1, "momentum_buffer"): torch.zeros(50_000), (1, "extra"): torch.zeros(1)},
        {(1, "other"): torch.zeros(50_000)},
        {(1, "momentum_buffer"): torch.zeros(50_000), (2, "momentum_buffer"): torch.zeros(1)},
    ],
)
def test_states_that_do_not_fit_are_refused_and_change_nothing(states):
    desk = optimized(Desk(1, values={1: torch.zeros(50_000), 2: floats(0, 0)}), momentum=0.5)
    a = desk.workers[0]
    desk.ask(a, a.push({1: torch.ones(50_000), 2: floats(1, 1)}, 1))
    text = text_of(desk.reply(a, a.put_states(states)), "Mismatch")
    assert text.startswith("these are not sgd's states of key 'k")
    assert "momentum_buffer float32[50000] belong there" in text or "momentum_buffer float32[2] belong there" in text
    push = a.push({1: torch.ones(50_000), 2: floats(1, 1)}, 2)
    assert desk.reply(a, push) == wire.Ack(push.seq)
    assert set(states_of(desk, [1])[1][1, "momentum_buffer"].tolist()) == {1.5}


def test_a_value_that_was_sent_survives_loaded_states():
    desk = Desk(1, values={1: floats(4)})
    a = desk.workers[0]
    ((_, reply),) = desk.shard.handle(a.peer, a.pull([1]))
    optimized(desk, momentum=0.5)
    desk.reply(a, a.put_states({(1, "momentum_buffer"): floats(1)}))
    desk.ask(a, a.push({1: floats(1)}, 1))
    assert values_in(reply, [Spec((1,), "float32")])[0].tolist() == [4]
    assert desk.value(clock=1).tolist() == [4 - 0.5 * 1.5]


LARGE = LEAST_BYTES


def bucket() -> Bucket:
    return Bucket(HeldSegments([], [], [], []), "float32", Rounds([0]), Heap())


@pytest.mark.parametrize(
    ("random", "shares", "round_bytes", "store_bytes", "every"),
    [
        (False, True, LARGE, LARGE, ROUNDS),
        (False, True, LARGE, MOST_BYTES // ROUNDS, ROUNDS),
        (False, True, LARGE, MOST_BYTES // 2, 2),
        (False, True, LARGE, MOST_BYTES // 2 + 1, 0),
        (False, True, LARGE - 1, LARGE, 0),
        (False, False, LARGE, LARGE, 0),
        (True, False, 4, MOST_BYTES, 1),
    ],
)
def test_after_how_many_rounds(random: bool, shares: bool, round_bytes: int, store_bytes: int, every: int) -> None:
    assert interval(random, shares, round_bytes, store_bytes) == every


def test_arrays_are_handed_over_once_so_many_rounds_are_kept() -> None:
    hand_over, one, other = HandOver(), bucket(), bucket()
    for _ in range(3):
        assert hand_over.keeps([one], 2)
        assert not hand_over.due([one], 2)
        assert hand_over.keeps([one, other], 2)
        assert hand_over.due([one, other], 2)
    assert hand_over.keeps([other], 2)
    assert not hand_over.due([other], 2)
    assert not hand_over.keeps([other], 0)
    assert not hand_over.due([other], 0)


def test_after_an_update_that_has_failed_the_standby_makes_the_next_ones_before_it_keeps_any() -> None:
    hand_over, one = HandOver(), bucket()
    assert hand_over.keeps([one], 2)
    hand_over.fail()
    assert not hand_over.keeps([one], 2)
    assert hand_over.keeps([one], 2)
