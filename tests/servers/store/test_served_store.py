"""What pushes and pulls do to a store's segments, and the stores of a server."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from asking import Desk, Worker, floats, optimized, sender, text_of, updating, values_in
from asking_rows import evict, init_tables, put_rows, with_tables
from pairs import Pair

from kvstore import wire
from kvstore.errors import UsageError, WireError
from kvstore.rule import Rule
from kvstore.spec import Spec
from kvstore.table import Table
from kvstore.transport.memory import Heap
from kvstore.values import TensorRange, from_buffer, to_buffer
from servers.activity import Waits
from servers.store.array_updates import contribute, require_mergeable, updates_of
from servers.store.bucket import Bucket
from servers.store.rounds import Rounds
from servers.store.target import FAILURES, HeldSegments, ParkedRequest, Target

# ---- what pushes and pulls do to a store's segments, and what it refuses, told through the shard that holds them


def test_a_contribution_that_no_round_can_take_is_refused():
    desk, a, b = optimized(Desk(2, values={1: floats(0), 2: floats(0)}), lr=1.0).and_workers()
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


def test_with_a_quorum_a_late_contribution_is_counted_and_one_that_comes_twice_is_refused():
    desk, a, b, c = Desk(3, values={1: floats(0), 2: floats(0)}, quorum=2).and_workers()
    desk.ask(a, a.push({1: floats(1)}, 1))
    again = a.push({1: floats(100)}, 1)
    assert "no push may come twice" in text_of(desk.reply(a, again), "UsageError")
    desk.ask(b, b.push({1: floats(1)}, 1))
    assert desk.value(1, clock=1).tolist() == [3]
    late = c.push({1: floats(100), 2: floats(1)}, 1)
    assert desk.reply(c, late) is None, "its other segment waits for its round"
    replies = desk.ask(b, b.push({2: floats(1)}, 1))
    assert replies[2, late.seq] == wire.Ack(late.seq, 1)


def test_an_async_push_that_another_has_overtaken_is_an_update_too():
    desk, a = optimized(Desk(1, "async", values={1: floats(0)}), lr=1.0).and_workers()
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
            assert isinstance(reply, wire.Values)
            held.append(reply)
        spec = Spec((size,), "float32")
        assert [set(values_in(reply, [spec])[0].tolist()) for reply in held] == [{1.0}, {2.0}, {3.0}]


def test_a_segment_is_initialized_once():
    desk, a = Desk(1, values={1: floats(1)}).and_workers()
    desk.ask(a, a.push({1: floats(3)}))
    reply = desk.reply(a, a.init({2: floats(5), 1: floats(5)}, keys=["new", "k1"]))
    assert text_of(reply, "AlreadyInitialized") == "key 'k1' is already initialized; push a new value instead"
    assert desk.value(1).tolist() == [3]
    assert "no value on this server" in text_of(desk.reply(a, a.pull([2])), "KeyNotInitialized")


def test_what_nobody_has_pushed_to_may_be_given_again_in_other_groups_and_with_new_ones():
    desk, a = Desk(1, values={1: floats(1), 2: floats(2, 2)}).and_workers()
    desk.ask(a, a.init({3: floats(5), 2: floats(6, 7)}))
    assert [desk.value(number).tolist() for number in (1, 2, 3)] == [[1], [6, 7], [5]]
    desk.ask(a, a.init({1: floats(7), 2: floats(8, 9), 3: floats(9)}))
    assert [desk.value(number).tolist() for number in (1, 2, 3)] == [[7], [8, 9], [9]]


@pytest.mark.parametrize("request_of", ["push", "pull", "get_states"])
def test_an_unknown_segment_is_refused(request_of):
    desk, a = Desk(1, values={1: floats(1)}).and_workers()
    message = a.push({9: floats(1)}) if request_of == "push" else getattr(a, request_of)([1, 9])
    assert "segment 9 has no value" in text_of(desk.reply(a, message), "KeyNotInitialized")


@pytest.mark.parametrize("value", [floats(1), floats(1, 2, 3), torch.zeros(2, dtype=torch.float64)])
def test_a_payload_of_another_size_is_refused_and_is_no_contribution(value):
    desk, a, b = Desk(2, values={1: floats(0, 0)}).and_workers()
    assert "payload" in text_of(desk.reply(a, a.push({1: value})), "WireError")
    assert desk.ask(b, b.push({1: floats(1, 1)})) == {}
    assert len(desk.ask(a, a.push({1: floats(1, 1)}))) == 2


def test_an_init_whose_payload_does_not_fit_takes_nothing():
    desk, a = Desk(1).and_workers()
    message = a.init({1: floats(1), 2: floats(2)})
    message.buffers.append(bytearray(4))
    assert "payload" in text_of(desk.reply(a, message), "WireError")
    again = a.init({1: floats(1), 2: floats(2)})
    assert desk.reply(a, again) == wire.Ack(again.seq)


def test_an_empty_array_is_a_value_like_others():
    desk, a = Desk(1, values={1: torch.zeros(0, 3), 2: floats(1)}).and_workers()
    push = a.push({1: torch.zeros(0, 3), 2: floats(5)})
    assert desk.reply(a, push) == wire.Ack(push.seq)
    assert desk.value(1, clock=1).shape == (0, 3)


def test_a_round_is_over_when_all_have_pushed_and_both_are_told():
    desk, a, b = Desk(2, values={1: floats(0, 0)}).and_workers()
    assert desk.ask(a, a.push({1: floats(1, 2)})) == {}
    assert desk.value().tolist() == [0, 0]
    assert desk.ask(b, b.push({1: floats(10, 20)})) == {
        (0, a.seq - 1): wire.Ack(a.seq - 1),
        (1, b.seq): wire.Ack(b.seq),
    }
    assert desk.value().tolist() == [11, 22]


def test_a_pull_waits_for_the_round_it_must_include():
    desk, a, b = Desk(2, values={1: floats(0)}).and_workers()
    push, pull = a.push({1: floats(1)}), a.pull([1], 1)
    assert desk.ask(a, push) == {}
    assert desk.ask(a, pull) == {}
    replies = desk.ask(b, b.push({1: floats(2)}, want=True))
    assert replies[0, push.seq] == wire.Ack(push.seq)
    for who in ((0, pull.seq), (1, b.seq)):
        assert values_in(replies[who], [Spec((1,), "float32")])[0].tolist() == [3]


def test_a_pull_of_several_waits_for_the_last_of_them():
    desk, a = Desk(1, values={1: floats(0), 2: floats(0)}).and_workers()
    pull = a.pull([2, 1], [1, 1])
    assert desk.ask(a, pull) == {}
    first = a.push({1: floats(1)})
    assert desk.ask(a, first) == {(0, first.seq): wire.Ack(first.seq)}
    second = a.push({2: floats(2)})
    replies = desk.ask(a, second)
    assert [v.tolist() for v in values_in(replies[0, pull.seq], [Spec((1,), "float32")] * 2)] == [[2], [1]]


def test_rounds_that_come_in_the_wrong_order_are_applied_in_the_right_one():
    desk, a = optimized(Desk(1, values={1: floats(0)}), momentum=0.5).and_workers()
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


def test_async_a_pull_is_answered_at_once():
    desk = Desk(2, "async", values={1: floats(7)})
    assert desk.value(clock=99).tolist() == [7]


def test_each_bucket_gets_its_part_of_the_values_and_its_clock():
    desk = Desk(1, values={1: floats(0), 2: floats(0, 0)})
    buckets = desk.shard.stores[0].buckets
    push = Worker(0).push({1: floats(1), 2: floats(2, 3)}, [1, 2], lr=0.5)
    first, second = updates_of(push, buckets.pushed(push.ids, push.clocks), Rule(), None)
    assert [update.contributions[0].clock for update in (first, second)] == [1, 2]
    assert [update.contributions[0].ranges[0].values.tolist() for update in (first, second)] == [[1], [2, 3]]
    assert first.hyper.lr == 0.5


def test_a_push_of_a_round_that_is_over_is_late_with_a_quorum_and_refused_without():
    desk, a, b = Desk(2, values={1: floats(0)}, quorum=1).and_workers()
    desk.ask(a, a.push({1: floats(1)}))
    (bucket,) = desk.shard.stores[0].buckets.all()
    push = b.push({1: floats(2)})
    (update,) = updates_of(push, [bucket], Rule(quorum=1), None)
    assert bucket.rounds.is_late(update.contributions[0].ranks, update.contributions[0].clock)
    desk = Desk(2, values={1: floats(0)})
    for worker in desk.workers:
        desk.ask(worker, worker.push({1: floats(1)}))
    (bucket,) = desk.shard.stores[0].buckets.all()
    with pytest.raises(UsageError, match="belongs to no open round"):
        updates_of(push, [bucket], Rule(), None)


def test_workers_that_are_summed_may_each_have_a_clock():
    desk = Desk(2, "async", values={1: floats(0)}, aggregate="host")
    push = Worker(0, role="aggregator").push({1: floats(2)}, 3, ranks=[0, 1], rank_clocks=[2, 3])
    (bucket,) = desk.shard.stores[0].buckets.all()
    contribute(push, bucket, updates_of(push, [bucket], Rule("async", aggregate="host"), None)[0].contributions[0])
    assert bucket.rounds.clocks == {0: 2, 1: 3}
    require_mergeable(push, Rule("async", aggregate="host"))
    with pytest.raises(UsageError, match="one clock"):
        require_mergeable(push, Rule())


# ---- the stores of a server: a standby has the same ones, and refuses what cannot be


def test_a_store_that_all_have_closed_is_gone_at_the_standby_too():
    pair = Pair(2, values={1: floats(1)})
    for worker in pair.workers:
        pair.ask(worker, wire.Close(worker.me(), 0))
        pair.require_same()
    assert pair.standby.stores == {}


def test_what_follows_from_no_state_is_refused():
    pair = Pair(1, values={1: floats(1)})
    pair.catch_up()
    for message, why in [
        (wire.ReadBy(9, [1], [0]), "not open"),
        (wire.Stop(), "no change"),
        (wire.Grouped(0, [1, 2], [2]), "not all here"),
        (wire.Grouped(0, [1], [2]), "cannot be"),
        (wire.Close(sender(), 0), ""),
        (wire.OptimizerCalls(0, [1], [], None, None, [], wire.encode(wire.Close(sender(), 0))), "among the calls"),
    ]:
        if why:
            with pytest.raises(ValueError, match=why):
                pair.standby.apply(message)


def push_at(desk: Desk, now: float, worker: int) -> None:
    desk.shard.times.now = now
    asker = desk.workers[worker]
    desk.ask(asker, asker.push({1: floats(1)}, 1))


def test_a_server_says_who_waits_for_whom():
    desk = Desk(3, values={1: floats(0)})
    push_at(desk, 10.0, 0)
    push_at(desk, 11.0, 2)
    waits = desk.shard.activity(14.0).waits
    assert waits == ([0, 2], [1], 4.0, "waits for worker 1, whose push 1 of 'k1' is missing")
    push_at(desk, 15.0, 1)
    assert desk.shard.activity(16.0).waits == Waits()


def test_of_a_request_for_very_many_keys_some_are_looked_at():
    desk, one, other = Desk(2, values={number: floats(0) for number in range(1, 1001)}).and_workers()
    desk.ask(one, one.push({number: floats(1) for number in range(1, 1001)}, 1))
    desk.ask(other, other.push({number: floats(1) for number in range(1, 501)}, 1))
    waits = desk.shard.activity(1.0).waits
    assert (waits.waiting, waits.missing) == ([0], [1]), "the other's half of the keys is done"
    assert "worker 1, whose push 1 of" in waits.why


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_a_server_holds_and_has_done(mode: str):
    desk = Desk(2, mode, values={1: floats(0, 0), 2: floats(0)}) if mode == "sync" else updating(2)
    for clock in (1, 2, 3):
        for worker in desk.workers:
            desk.ask(worker, worker.push({1: floats(1, 1) if mode == "sync" else floats(1)}, clock))
    activity = desk.shard.activity(1.0)
    assert activity.rounds == (3 if mode == "sync" else 6)
    assert activity.held == (12 if mode == "sync" else 4 * desk.segment(1).spec.size)


@pytest.mark.parametrize(
    "make", [lambda w: init_tables(w, {8: Table(dim=2)}), lambda w: put_rows(w, 7, {1: (1, 1)}), lambda w: evict(w, 7)]
)
def test_what_changes_a_whole_table_is_worker_zeros(make: Any):
    desk = with_tables(2)
    b = desk.workers[1]
    message = make(b)
    said = f"only worker 0 may send {type(message).__name__}, and worker 1 did"
    assert text_of(desk.reply(b, message), "UsageError") == said


def test_requests_about_tables_need_an_open_store():
    desk, a = with_tables(1).and_workers()
    message = evict(a, 7)
    closed = type(message)(**{**vars(message), "store": 5})
    assert "store 5 is not open" in text_of(desk.reply(a, closed), "UsageError")


def test_a_store_serves_until_the_last_worker_has_closed_it():
    desk, a, b = Desk(2, values={1: floats(3)}).and_workers()
    assert desk.reply(b, wire.Close(b.me(), 0)) == wire.Ack(b.seq)
    assert desk.value(1).tolist() == [3]
    assert desk.reply(a, wire.Close(a.me(), 0)) == wire.Ack(a.seq)
    assert "store 0 is not open" in text_of(desk.reply(a, a.pull([1])), "UsageError")


# ---- what contributions go to: who waits for its rounds, and why they have failed


def target() -> Target[str]:
    spec = Spec((2,), "float32")
    return Target(HeldSegments([3, 8], ["a", "b"], [spec, spec], [0, 0]), Rounds([0]))


def test_requests_are_released_when_all_targets_that_they_wait_for_are_where_they_must_be():
    first, second, worker = target(), target(), Worker()
    one, both = ParkedRequest(b"", worker.pull([3])), ParkedRequest(b"", worker.pull([3, 8]))
    for each, of in ((one, [first]), (both, [first, second])):
        for at in of:
            at.parked.append((1, each))
            each.left += 1
    first.rounds.contribute([0], 1, "")
    assert first.release(None) == []
    assert first.rounds.complete() is not None
    error = ValueError("of the first")
    assert first.release(error) == [one]
    second.rounds.contribute([0], 1, "")
    assert second.rounds.complete() is not None
    assert second.release(None) == [both]
    assert both.error is error
    assert first.parked == second.parked == []


def test_a_target_is_idle_while_no_round_is_open_and_nobody_waits():
    made = target()
    assert made.idle
    made.parked.append((1, ParkedRequest(b"", Worker().pull([3]))))
    assert not made.idle
    made.parked.clear()
    made.rounds.contribute([0], 1, "")
    assert not made.idle


def test_the_last_failures_are_kept_and_places_are_known_by_id():
    made = target()
    for version in range(FAILURES + 3):
        made.fail(version, ValueError(version))
    assert sorted(made.failures) == list(range(3, FAILURES + 3))
    assert made.places == {3: 0, 8: 1}
    assert made.segments.segment(1).key == "b"


class Watched(Heap):
    reading = False

    def busy(self, buffer: Any) -> bool:
        return self.reading


def bucket(*values: torch.Tensor, memory: Heap | None = None) -> Bucket:
    ids = range(len(values))
    specs = [Spec(tuple(value.shape), "float32") for value in values]
    segments = HeldSegments(ids, [f"k{number}" for number in ids], specs, [0] * len(values))
    made = Bucket(segments, "float32", Rounds(frozenset({0})), memory or Heap())
    made.load([TensorRange(0, torch.cat([value.reshape(-1) for value in values]))])
    return made


def sent(of: Bucket) -> torch.Tensor:
    return from_buffer(of.readable(0, of.size), "float32")


def test_segments_lie_one_after_the_other():
    made = bucket(floats(1, 2), torch.full((2, 2), 3.0), floats(), torch.tensor(4.0))
    assert made.value.tolist() == [1, 2, 3, 3, 3, 3, 4]
    assert (made.starts, made.sizes, made.shapes) == ([0, 2, 6, 6], [2, 4, 0, 1], [(2,), (2, 2), (0,), ()])
    assert from_buffer(made.readable(2, 7), "float32").tolist() == [3, 3, 3, 3, 4]


class Message:
    pass


@pytest.mark.parametrize("change", ["assign", "update"])
def test_what_a_message_that_is_kept_refers_to_does_not_change(change: str):
    memory = Watched()  # nobody reads it
    made = bucket(floats(1), memory=memory)
    for kept in (True, False):
        message = Message()
        before = sent(made)
        value = before.item()
        made.lend(message)
        if not kept:
            del message
        if change == "assign":
            made.assign([[TensorRange(0, floats(value + 3))]])
        else:
            made.writable()
            made.value += 3
        assert sent(made).item() == value + 3
        assert before.item() == (value if kept else value + 3)


@pytest.mark.parametrize("change", ["assign", "update"])
@pytest.mark.parametrize("reading", [True, False])
def test_what_is_being_read_does_not_change(change: str, reading: bool):
    memory = Watched()
    made = bucket(floats(1, 2), floats(3), memory=memory)
    view, memory.reading = sent(made), reading
    if change == "assign":
        made.assign([[TensorRange(0, floats(4, 5, 6))]])
    else:
        made.writable()
        made.value += 3
    assert sent(made).tolist() == [4, 5, 6]
    assert view.tolist() == ([1, 2, 3] if reading else [4, 5, 6]), "memory that nobody reads is used again"


def test_memory_that_has_never_been_sent_is_used_again():
    memory = Watched()
    memory.reading = True
    made = bucket(floats(1), memory=memory)
    before = made.value.data_ptr()
    made.writable()
    made.assign([[TensorRange(0, floats(2))]])
    assert made.value.data_ptr() == before


@pytest.mark.parametrize("change", ["assign", "update", "refused"])
def test_what_is_adopted_is_not_copied_and_never_written(change: str) -> None:
    made = bucket(floats(1, 2), memory=Watched())
    buffer = bytearray(to_buffer(floats(3, 4)))
    made.adopt(buffer)
    assert made.value.data_ptr() == from_buffer(buffer, "float32").data_ptr()
    assert sent(made).tolist() == [3, 4]
    if change == "update":
        made.writable()
        made.value.add_(1)
    elif change == "assign":
        made.assign([[TensorRange(0, floats(4, 5))]])
    else:
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                made.assign([[TensorRange(0, floats(9, 9))]], check=refuse)
        assert made.value.tolist() == [3, 4]
        made.writable()
        made.value.add_(1)
    assert made.value.tolist() == [4, 5]
    assert from_buffer(buffer, "float32").tolist() == [3, 4]
    own = made.value.data_ptr()
    made.assign([[TensorRange(0, floats(6, 7))]])
    assert made.value.data_ptr() == own, "its own memory again"


def test_only_all_elements_can_be_adopted() -> None:
    made = bucket(floats(1, 2))
    with pytest.raises(WireError):
        made.adopt(bytearray(4))
    assert made.value.tolist() == [1, 2]
    empty = bucket(floats())
    empty.adopt(bytearray())
    assert empty.value.tolist() == []


def refuse(_: torch.Tensor) -> None:
    raise ValueError("no")
