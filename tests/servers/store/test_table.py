"""What pushes and pulls do to a store's segments, told through the shard that holds them."""

from __future__ import annotations

import itertools

import pytest
import torch
from asking import Desk, floats, text_of, values_in

from kvstore.errors import WeightsInDoubt
from kvstore.optim.optimizer import classes
from kvstore.optim.updater import Updater
from kvstore.spec import Spec
from kvstore.wire import Ack, OptimizerStates, Values, unpack_arrays


def optimized(desk: Desk, name: str = "sgd", lr: float = 0.5, **hyper: object) -> None:
    first = desk.workers[0]
    assert desk.reply(first, first.set_optimizer(name, lr, **hyper)) == Ack(first.seq)


# ---- sync


def test_a_round_is_over_when_all_have_pushed_and_both_are_told():
    desk = Desk(2, values={1: floats(0, 0)})
    a, b = desk.workers
    assert desk.ask(a, a.push({1: floats(1, 2)})) == {}
    assert desk.value().tolist() == [0, 0]
    assert desk.ask(b, b.push({1: floats(10, 20)})) == {(0, a.seq - 1): Ack(a.seq - 1), (1, b.seq): Ack(b.seq)}
    assert desk.value().tolist() == [11, 22]


def test_a_pull_waits_for_the_round_it_must_include():
    desk = Desk(2, values={1: floats(0)})
    a, b = desk.workers
    push, pull = a.push({1: floats(1)}), a.pull([1], 1)
    assert desk.ask(a, push) == {}
    assert desk.ask(a, pull) == {}
    replies = desk.ask(b, b.push({1: floats(2)}, want=True))
    assert replies[0, push.seq] == Ack(push.seq)
    for who in ((0, pull.seq), (1, b.seq)):
        assert values_in(replies[who], [Spec((1,), "float32")])[0].tolist() == [3]


def test_a_pull_of_several_waits_for_the_last_of_them():
    desk = Desk(1, values={1: floats(0), 2: floats(0)})
    (a,) = desk.workers
    pull = a.pull([2, 1], [1, 1])
    assert desk.ask(a, pull) == {}
    first = a.push({1: floats(1)})
    assert desk.ask(a, first) == {(0, first.seq): Ack(first.seq)}
    second = a.push({2: floats(2)})
    replies = desk.ask(a, second)
    assert [v.tolist() for v in values_in(replies[0, pull.seq], [Spec((1,), "float32")] * 2)] == [[2], [1]]


def test_rounds_that_come_in_the_wrong_order_are_applied_in_the_right_one():
    desk = Desk(1, values={1: floats(0)})
    optimized(desk, momentum=0.5)
    (a,) = desk.workers
    plain = torch.zeros(1, requires_grad=True)
    expected = torch.optim.SGD([plain], lr=0.5, momentum=0.5)
    for grad in (1.0, -2.0, 4.0):
        plain.grad = floats(grad)
        expected.step()
    messages = [a.push({1: floats(grad)}, clock) for clock, grad in ((1, 1.0), (2, -2.0), (3, 4.0))]
    assert desk.ask(a, messages[2]) == {}
    assert desk.ask(a, messages[1]) == {}
    assert desk.ask(a, messages[0]).keys() == {(0, message.seq) for message in messages}
    assert desk.value(clock=3).tolist() == plain.tolist()


def test_the_order_of_arrival_changes_no_bit():
    grads = [floats(1e8, 1.1), floats(1.0, 2.2), floats(-1e8, 3.3), floats(0.7, 1e-3)]
    results = set()
    for order in itertools.permutations(range(4)):
        desk = Desk(4, values={1: floats(0, 0)})
        for rank in order:
            worker = desk.workers[rank]
            desk.ask(worker, worker.push({1: grads[rank]}))
        results.add(tuple(desk.value(clock=1).tolist()))
    in_order = grads[0] + grads[1] + grads[2] + grads[3]
    assert results == {tuple(in_order.tolist())}
    assert in_order.tolist() != (grads[3] + grads[2] + grads[1] + grads[0]).tolist(), "these grads cannot tell"


def test_a_contribution_that_no_round_can_take_is_refused():
    desk = Desk(2, values={1: floats(0), 2: floats(0)})
    optimized(desk, lr=1.0)
    a, b = desk.workers
    desk.ask(a, a.push({1: floats(1)}, 1))
    refused = "push 1 of 'k1' by worker 0 belongs to no open round: 0 rounds are over, and no push may come twice"
    for again in (a.push({1: floats(100)}, 1), a.push({2: floats(100), 1: floats(100)}, 1)):
        assert text_of(desk.ask(a, again)[0, again.seq], "UsageError") == refused
    desk.ask(b, b.push({1: floats(2)}, 1))
    assert desk.value(clock=1).tolist() == [-3]
    late = a.push({1: floats(100)}, 1)
    assert "1 rounds are over" in text_of(desk.ask(a, late)[0, late.seq], "UsageError")
    desk.ask(a, a.push({2: floats(5)}, 1))
    desk.ask(b, b.push({2: floats(2)}, 1))
    assert desk.value(2, clock=1).tolist() == [-7], "the refused push has not left a part of it"


def test_an_async_push_that_another_has_overtaken_is_an_update_too():
    desk = Desk(1, "async", values={1: floats(0)})
    optimized(desk, lr=1.0)
    (a,) = desk.workers
    for clock, value in ((2, 10), (1, 1)):
        desk.ask(a, a.push({1: floats(value)}, clock))
    assert desk.value(clock=2).tolist() == [-11]


def test_values_that_were_sent_do_not_change_with_the_next_round():
    for mode, size in itertools.product(("assign", "sgd"), (3, 1 << 15)):
        desk = Desk(1, values={1: torch.zeros(size)})
        if mode == "sgd":
            optimized(desk, lr=1.0)
        (a,) = desk.workers
        held = []
        for clock in range(1, 4):
            push = a.push({1: torch.full((size,), -1.0 if mode == "sgd" else float(clock))}, clock, want=True)
            ((_, reply),) = desk.shard.handle(a.peer, push)
            assert isinstance(reply, Values)
            held.append(reply)
        spec = Spec((size,), "float32")
        assert [set(values_in(reply, [spec])[0].tolist()) for reply in held] == [{1.0}, {2.0}, {3.0}]


# ---- optimizers


def test_an_update_uses_the_sum_and_the_rescaled_gradient():
    desk = Desk(2, values={1: floats(10)})
    optimized(desk, lr=0.5)
    for worker in desk.workers:
        desk.ask(worker, worker.push({1: floats(4)}, rescale=0.5))
    assert desk.value(clock=1).tolist() == [10 - 0.5 * 0.5 * 8]


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
    assert set(map(type, replies.values())) == {Ack}, "and the next one goes on"


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_optimizer_that_throws_is_told_to_all_who_pushed(monkeypatch, workers, mode):
    desk = Desk(workers, mode, values={1: floats(0)})
    optimized(desk)
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


@pytest.mark.parametrize("at", [1, 2])
def test_an_update_that_fails_is_made_of_no_array_or_the_server_ends(monkeypatch, at):
    """Two arrays of one update: if the first fails, neither is changed; if the second does, nothing can go on."""
    desk = Desk(1, values={1: floats(0), 2: floats(0, 0)})
    monkeypatch.setitem(classes(), "rmsprop", Fails)
    optimized(desk, "rmsprop", lr=1.0)
    (a,) = desk.workers
    monkeypatch.setattr(Fails, "at", at)
    push = a.push({1: floats(1), 2: floats(1, 1)})
    if at == 2:
        with pytest.raises(WeightsInDoubt, match=r"rmsprop failed in the middle .*it diverged"):
            desk.ask(a, push)
        return
    replies = desk.ask(a, push)
    assert text_of(replies[0, push.seq], "ServerError") == (
        "ArithmeticError: it diverged; no array of this update of 'k1', 'k2' has changed"
    )
    monkeypatch.setattr(Fails, "at", 0)
    desk.ask(a, a.push({1: floats(1), 2: floats(1, 1)}, 2))
    assert (desk.value(1, clock=2).tolist(), desk.value(2, clock=2).tolist()) == ([-1], [-1, -1])


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
    desk = Desk(2, values={1: torch.zeros(2, dtype=torch.float16)}, finite=True)
    a, b = desk.workers
    desk.ask(a, a.push({1: torch.full((2,), 60000.0, dtype=torch.float16)}))
    push = b.push({1: torch.full((2,), 60000.0, dtype=torch.float16)})
    text = text_of(desk.ask(b, push)[1, push.seq], "NotFinite")
    assert text.startswith("push 1 of 'k1': each worker's values are finite, their sum is not in float16")


def test_async_pushes_that_are_not_finite_are_refused_alone():
    desk = Desk(2, "async", values={1: floats(0)}, finite=True)
    optimized(desk, lr=1.0)
    a, b = desk.workers
    push = a.push({1: floats(float("nan"))}, 1)
    assert "by worker 0" in text_of(desk.ask(a, push)[0, push.seq], "NotFinite")
    desk.ask(b, b.push({1: floats(3)}, 1))
    desk.ask(a, a.push({1: floats(4)}, 2))
    assert desk.value(1).tolist() == [-7]


def test_one_key_that_fails_does_not_fail_those_beside_it():
    desk = Desk(2, values={1: floats(0), 2: floats(0)})
    optimized(desk)
    a, b = desk.workers
    one, two = a.push({1: floats(1)}, lr=0.1), a.push({2: floats(1)}, lr=0.2)
    desk.ask(a, one)
    desk.ask(a, two)
    replies = desk.ask(b, b.push({1: floats(1), 2: floats(1)}, lr=0.2))
    assert replies[0, two.seq] == Ack(two.seq)
    assert replies[0, one.seq].kind == replies[1, b.seq].kind == "Mismatch"


def test_all_segments_of_a_message_are_updated_in_one_call(monkeypatch):
    desk = Desk(1, values={1: floats(0), 2: floats(0, 0)})
    optimized(desk)
    calls = []
    step = Updater.step
    monkeypatch.setattr(
        Updater,
        "step",
        lambda self, groups, grads: calls.append([len(group.params) for group in groups]) or step(self, groups, grads),
    )
    (a,) = desk.workers
    desk.ask(a, a.push({1: floats(1), 2: floats(1, 1)}))
    assert calls == [[2]]


# ---- async


def test_async_every_push_is_an_update_at_once():
    desk = Desk(2, "async", values={1: floats(0)})
    optimized(desk, lr=1.0)
    a, b = desk.workers
    for count, (worker, clock) in enumerate([(a, 1), (b, 1), (b, 2), (a, 2)], start=1):
        reply = desk.reply(worker, worker.push({1: floats(1)}, clock, want=True))
        assert values_in(reply, [Spec((1,), "float32")])[0].tolist() == [-count]


def test_async_a_learning_rate_stays_until_another_comes():
    desk = Desk(2, "async", values={1: floats(0)})
    optimized(desk, lr=1.0)
    a, b = desk.workers
    desk.ask(a, a.push({1: floats(1)}, lr=0.25))
    desk.ask(b, b.push({1: floats(1)}))
    assert desk.value().tolist() == [-0.5]


def test_async_without_an_optimizer_a_push_says_what_to_call():
    desk = Desk(1, "async", values={1: floats(0)})
    (a,) = desk.workers
    assert "call set_optimizer(name, ...) first" in text_of(desk.reply(a, a.push({1: floats(1)})), "UsageError")
    assert desk.value().tolist() == [0]


def test_async_a_pull_is_answered_at_once():
    desk = Desk(2, "async", values={1: floats(7)})
    assert desk.value(clock=99).tolist() == [7]


# ---- refusals


def test_a_segment_is_initialised_once():
    desk = Desk(1, values={1: floats(1)})
    (a,) = desk.workers
    reply = desk.reply(a, a.init({2: floats(5), 1: floats(5)}, keys=["new", "k1"]))
    assert text_of(reply, "AlreadyInitialized") == "key 'k1' is initialized already"
    assert desk.value(1).tolist() == [1]
    assert "no value on this server" in text_of(desk.reply(a, a.pull([2])), "KeyNotInitialized")


@pytest.mark.parametrize("request_of", ["push", "pull", "get_states"])
def test_an_unknown_segment_is_refused(request_of):
    desk = Desk(1, values={1: floats(1)})
    (a,) = desk.workers
    message = a.push({9: floats(1)}) if request_of == "push" else getattr(a, request_of)([1, 9])
    assert "segment 9 has no value" in text_of(desk.reply(a, message), "KeyNotInitialized")


@pytest.mark.parametrize("value", [floats(1), floats(1, 2, 3), torch.zeros(2, dtype=torch.float64)])
def test_a_payload_of_another_size_is_refused_and_is_no_contribution(value):
    desk = Desk(2, values={1: floats(0, 0)})
    a, b = desk.workers
    assert "payload" in text_of(desk.reply(a, a.push({1: value})), "WireError")
    assert desk.ask(b, b.push({1: floats(1, 1)})) == {}
    assert len(desk.ask(a, a.push({1: floats(1, 1)}))) == 2


def test_an_init_whose_payload_does_not_fit_takes_nothing():
    desk = Desk(1)
    (a,) = desk.workers
    message = a.init({1: floats(1), 2: floats(2)})
    message.buffers.append(bytearray(4))
    assert "payload" in text_of(desk.reply(a, message), "WireError")
    again = a.init({1: floats(1), 2: floats(2)})
    assert desk.reply(a, again) == Ack(again.seq)


def test_an_optimizer_refuses_integers_whichever_came_first():
    desk = Desk(1, values={1: torch.zeros(2, dtype=torch.int32)})
    (a,) = desk.workers
    assert "floating point only" in text_of(desk.reply(a, a.set_optimizer()), "Mismatch")
    push = a.push({1: torch.ones(2, dtype=torch.int32)})
    assert desk.reply(a, push) == Ack(push.seq), "without one they are summed"
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


def test_an_empty_array_is_a_value_like_others():
    desk = Desk(1, values={1: torch.zeros(0, 3), 2: floats(1)})
    (a,) = desk.workers
    push = a.push({1: torch.zeros(0, 3), 2: floats(5)})
    assert desk.reply(a, push) == Ack(push.seq)
    assert desk.value(1, clock=1).shape == (0, 3)


# ---- states


def states_of(desk: Desk, ids: list[int]) -> tuple[OptimizerStates, dict[tuple[int, str], torch.Tensor]]:
    worker = desk.workers[0]
    reply = desk.reply(worker, worker.get_states(ids))
    assert isinstance(reply, OptimizerStates), reply
    specs = [Spec(tuple(shape), dtype) for shape, dtype in zip(reply.shapes, reply.dtypes, strict=True)]
    parts = unpack_arrays(reply.buffers, [spec.nbytes for spec in specs])
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
    assert two.reply(b, put) == Ack(put.seq)
    before = one.value(clock=2) - two.value(clock=1)
    one.ask(a, a.push({1: floats(3, 3)}, 3))
    two.ask(b, b.push({1: floats(3, 3)}, 2))
    torch.testing.assert_close(one.value(clock=3) - two.value(clock=2), before)


def test_states_that_were_sent_do_not_change():
    desk = Desk(1, values={1: floats(0)})
    optimized(desk, momentum=0.5)
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
    desk = Desk(1, values={1: torch.zeros(50_000), 2: floats(0, 0)})
    optimized(desk, momentum=0.5)
    a = desk.workers[0]
    desk.ask(a, a.push({1: torch.ones(50_000), 2: floats(1, 1)}, 1))
    text = text_of(desk.reply(a, a.put_states(states)), "Mismatch")
    assert text.startswith("these are not sgd's states of key 'k")
    assert "momentum_buffer float32[50000] belong there" in text or "momentum_buffer float32[2] belong there" in text
    push = a.push({1: torch.ones(50_000), 2: floats(1, 1)}, 2)
    assert desk.reply(a, push) == Ack(push.seq)
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


# ---- departures


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
