"""One store at an aggregator: what is sent to servers of what workers ask, and what workers are answered."""

from __future__ import annotations

import pytest
import torch
from asking import Worker, floats
from hosting import Host, describe, floats_in, total, values
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.rule import Rule
from kvstore.transport.memory import Heap
from kvstore.values import to_buffer
from servers.aggregator.encoding import Encoding
from servers.aggregator.gathering import HostSegments, Pushed
from servers.aggregator.store import HOLD_S, HostSums
from servers.requests.reasons import Reason


def test_a_round_is_one_push_with_the_sum_and_one_answer_for_all():
    host = Host()
    first = host.push(3, {1: [1, 2], 2: [3, 4]}, want=True)
    assert host.sent == []
    second = host.push(2, {1: [10, 20], 2: [30, 40]}, want=True)
    exchange = host.take()
    assert (exchange.listed.server, exchange.kind, exchange.fields["ranks"]) == (0, wire.Push, [2, 3])
    assert total(exchange) == [11, 22, 33, 44]
    replies = host.answer(exchange, values(7, 8, 9, 10))
    assert replies.keys() == {(3, first.seq), (2, second.seq)}
    assert all(floats_in(reply) == [7, 8, 9, 10] for reply in replies.values())


def test_a_worker_that_wants_no_values_gets_none():
    host = Host()
    first, second = host.push(2, {1: [1, 2]}), host.push(3, {1: [1, 2]}, want=True)
    exchange = host.take()
    assert exchange.wants
    replies = host.answer(exchange, values(5, 6))
    assert replies[2, first.seq] == wire.Ack(first.seq)
    assert floats_in(replies[3, second.seq]) == [5, 6]


def test_a_repeated_request_is_answered_again_and_pushed_once():
    host = Host()
    first = host.push(2, {1: [1, 2]})
    assert host.ask(2, first) == {}
    host.push(3, {1: [1, 2]})
    exchange = host.take()
    host.answer(exchange, wire.Ack(0))
    assert host.ask(2, first) == {(2, first.seq): wire.Ack(first.seq)}
    assert host.sent == []


def test_an_error_of_the_server_reaches_everybody():
    host = Host()
    first, second = host.push(2, {1: [1, 2]}), host.push(3, {1: [1, 2]})
    replies = host.answer(host.take(), wire.Failure(0, "Mismatch", "they disagree"))
    assert replies[2, first.seq] == wire.Failure(first.seq, "Mismatch", "they disagree")
    assert replies[3, second.seq] == wire.Failure(second.seq, "Mismatch", "they disagree")


@pytest.mark.parametrize("fields", [{"lr": 0.5}, {"rescale": 2.0}, {"changes": [[0, "momentum", 0.5]]}])
def test_workers_that_disagree_are_sent_on_one_by_one(fields):
    host = Host()
    host.push(3, {1: [1, 2]}, **fields)
    host.push(2, {1: [10, 20]})
    assert [(exchange.fields["ranks"], total(exchange)) for exchange in host.sent] == [([2], [10, 20]), ([3], [1, 2])]


def test_what_is_not_finite_is_sent_on_one_by_one_so_that_its_worker_is_known():
    host = Host(finite=True)
    host.push(2, {1: [1, 2]})
    host.push(3, {1: [float("nan"), 2]})
    assert [exchange.fields["ranks"] for exchange in host.sent] == [[2], [3]]


@pytest.mark.parametrize("finite", [False, True])
def test_half_precision_is_summed_in_float32_and_goes_on_so(finite):
    host = Host((1, 2, 3), dtype="float16", finite=finite)
    for rank, numbers in ((1, [2048, 40_000]), (2, [0.5, 40_000]), (3, [0.25, -1])):
        host.push(rank, {1: numbers})
    exchange = host.take()
    assert exchange.fields["in_float32"]
    assert total(exchange) == [2048.75, 79_999]


def test_a_sum_over_devices_is_added_to_other_workers_values():
    host = Host((1, 2), dtype="float16")
    host.push(1, {1: [1, 40_000]})
    wide = to_buffer(floats(0.1, 80_000))
    host.push(2, {1: [0, 0]}, in_float32=True, buffers=[wide])
    exchange = host.take()
    assert exchange.fields["in_float32"]
    assert total(exchange) == [floats(1.1).item(), 120_000]


@pytest.mark.parametrize("fields", [{}, {"encode": ["fp16", []]}])
def test_what_goes_on_by_itself_stays_as_it_came(fields):
    host = Host((1, 2), dtype="float16")
    host.push(1, {1: [1, 2]}, lr=0.5, **fields)
    wide = to_buffer(floats(0.1, 80_000))
    host.push(2, {1: [0, 0]}, in_float32=True, buffers=[wide], **fields)
    half, summed = host.sent
    assert (half.fields["in_float32"], summed.fields["in_float32"]) == (False, not fields)
    if not fields:
        assert total(half, "float16") == [1, 2]
        assert total(summed) == [floats(0.1).item(), 80_000]


def test_a_sum_of_float32_is_no_sum_of_half_precision():
    host = Host()
    host.push(2, {1: [1, 2]})
    host.push(3, {1: [1, 2]})
    assert not host.take().fields["in_float32"]


def test_a_payload_of_the_wrong_size_is_refused_before_it_waits():
    host = Host()
    message = host.workers[2].push({1: floats(1, 2, 3)}, 1)
    reply = host.reply(host.workers[2], message)
    assert isinstance(reply, wire.Failure)
    assert (reply.kind, host.core.stores[0].find(2, message.seq)) == ("WireError", None)


def test_values_at_one_clock_are_asked_for_once():
    host = Host((0, 1, 2))
    pulls = [host.workers[rank].pull([1], 0) for rank in range(3)]
    assert host.ask(0, pulls[0]) == {}
    assert host.ask(1, pulls[1]) == {}
    exchange = host.take()
    assert exchange.fields["ranks"] == [0]
    replies = host.answer(exchange, values(3, 4))
    assert {key: floats_in(reply) for key, reply in replies.items()} == {
        (0, pulls[0].seq): [3, 4],
        (1, pulls[1].seq): [3, 4],
    }
    assert floats_in(host.reply(host.workers[2], pulls[2])) == [3, 4]
    again = host.workers[0].pull([1], 0)
    assert host.ask(0, again) == {}, "everybody had it, so it was forgotten"


def test_a_pull_that_has_failed_is_asked_again():
    host = Host()
    first, second = host.workers[2].pull([1], 0), host.workers[3].pull([1], 0)
    host.ask(2, first)
    assert isinstance(host.answer(host.take(), wire.Failure(0, "ServerError", "no"))[2, first.seq], wire.Failure)
    host.ask(3, second)
    assert host.take().fields["ranks"] == [3]


def test_values_of_before_are_not_given_after_a_round():
    host = Host()
    host.ask(2, host.workers[2].pull([1], 0))
    host.answer(host.take(), values(1, 1))
    host.push(2, {1: [1, 1]})
    host.push(3, {1: [1, 1]})
    host.answer(host.take(), wire.Ack(0))
    host.ask(3, host.workers[3].pull([1], 1))
    assert host.take().fields["clocks"] == [1]


def test_with_a_quorum_nobody_waits_long():
    host = Host((0, 1, 2), quorum=2)
    host.push(0, {1: [1, 2]})
    host.push(1, {1: [10, 20]})
    assert host.core.due() == HOLD_S
    assert host.core.tick(HOLD_S / 2) == []
    assert host.sent == []
    assert host.core.tick(HOLD_S) == []
    exchange = host.take()
    assert (exchange.fields["ranks"], total(exchange)) == ([0, 1], [11, 22])
    host.push(2, {1: [100, 200]})
    late = host.take()
    assert (late.fields["ranks"], host.core.due()) == ([2], None)
    (reply,) = host.answer(late, wire.Ack(0, missed=1)).values()
    assert reply.missed == 1


def test_a_worker_that_joins_is_not_waited_for():
    host = Host()
    host.push(2, {1: [1, 2]})
    pause = host.workers[3].pause({1: 0, 2: 0, 3: 0})
    assert host.reply(host.workers[3], pause) == wire.Ack(pause.seq)
    assert host.take().fields["ranks"] == [2]


def test_a_worker_that_leaves_is_not_waited_for():
    host = Host()
    host.push(2, {1: [1, 2]})
    host.core.depart([3])
    assert host.take().fields["ranks"] == [2]


def test_without_rounds_each_push_goes_on_by_itself_and_answers_pass():
    host = Host(mode="async")
    first = host.push(2, {1: [1, 2]}, want=True, back=["fp16", []])
    second = host.push(2, {1: [1, 2]}, 2)
    assert [exchange.fields["ranks"] for exchange in host.sent] == [[2], [2]]
    compressed = wire.Values(0, lengths=[4], segment_counts=[1], ahead=3, buffers=[b"1234"])
    reply = host.answer(host.sent[0], compressed)[2, first.seq]
    assert (reply.lengths, bytes(reply.buffers[0]), reply.ahead) == ([4], b"1234", 3)
    assert host.answer(host.sent[1], wire.Ack(0)) == {(2, second.seq): wire.Ack(second.seq)}


def test_summed_by_host_what_comes_while_a_push_is_under_way_becomes_one():
    host = Host((0, 1, 2), mode="async", aggregate="host")
    host.push(0, {1: [1, 2]})
    under_way = host.take()
    host.push(1, {1: [10, 20]}, 4)
    host.push(2, {1: [100, 200]}, 7)
    host.push(1, {1: [1000, 2000]}, 5)
    assert host.sent == []
    host.answer(under_way, wire.Ack(0))
    merged = host.take()
    assert (merged.fields["ranks"], merged.fields["rank_clocks"], total(merged)) == ([1, 2], [4, 7], [110, 220])
    host.answer(merged, wire.Ack(0))
    assert host.take().fields["ranks"] == [1]


def test_summed_by_host_nobody_waits_behind_a_push_that_may_wait_for_it():
    host = Host((0, 1), mode="async", aggregate="host", staleness=0)
    host.push(0, {1: [1, 2]}, want=True)
    host.push(1, {1: [1, 2]}, want=True)
    assert [exchange.fields["ranks"] for exchange in host.sent] == [[0], [1]]
    host.sent.clear()
    host.push(0, {1: [1, 2]}, 2)
    under_way = host.take()
    for clock in (2, 3):
        host.push(1, {1: [1, 2]}, clock, want=True)
    host.answer(under_way, wire.Ack(0))
    assert [exchange.fields["clocks"] for exchange in host.sent] == [[2], [3]], "nothing is left for ever"


def test_summed_by_host_a_pull_includes_what_its_worker_has_pushed():
    host = Host((0, 1), mode="async", aggregate="host")
    host.push(0, {1: [1, 2]})
    host.push(1, {1: [1, 2]})
    host.ask(1, host.workers[1].pull([1], 1))
    assert [exchange.kind.__name__ for exchange in host.sent] == ["Push", "Push", "Pull"]


def test_sums_are_compressed_once_and_values_come_back_plain():
    host = Host()
    codec = ["fp16", []]
    for rank in (2, 3):
        host.push(rank, {1: [1, 2]}, want=True, encode=codec, back=codec)
    exchange = host.take()
    assert (exchange.fields["codec"], sum(exchange.fields["lengths"])) == (codec, 4)
    assert total(exchange, "float16") == [2.0, 4.0]
    replies = host.answer(exchange, wire.Values(0, lengths=[4], segment_counts=[1], buffers=exchange.fields["buffers"]))
    assert all(floats_in(reply) == [2, 4] for reply in replies.values())


def test_what_a_worker_has_compressed_itself_goes_on_as_it_is():
    host = Host()
    for rank in (2, 3):
        message = host.workers[rank].push({}, 1)
        fields = {"ids": [1], "clocks": [1], "codec": ["fp16", []], "lengths": [4], "buffers": [b"abcd"]}
        assert host.ask(rank, wire.Push(**{**vars(message), **fields})) == {}
    assert [bytes(exchange.fields["buffers"][0]) for exchange in host.sent] == [b"abcd", b"abcd"]


def test_what_a_request_waits_for_is_said():
    host = Host()
    first = host.push(2, {1: [1, 2]})
    store = host.core.stores[0]
    assert store.find(2, first.seq) == Reason("waits for worker 3, whose push 1 of 'a' is missing", [3])
    host.push(3, {1: [1, 2]})
    assert store.find(2, first.seq) is host.sent[0]
    assert store.find(2, 99) is None


def test_an_empty_message_is_answered_at_once():
    host = Host()
    message = host.workers[2].push({}, 1)
    assert host.reply(host.workers[2], message) == wire.Ack(message.seq)
    pull = host.workers[2].pull([], 1)
    assert floats_in(host.reply(host.workers[2], pull)) == []


def test_closing_fails_those_who_wait():
    host = Host()
    first = host.push(2, {1: [1, 2]})
    replies = {}
    for worker in host.workers.values():
        replies |= host.ask(worker.rank, wire.Close(worker.me(), store=0))
    assert isinstance(replies[2, first.seq], wire.Failure)
    assert host.core.stores == {}


class Summing:
    def __init__(self, rule: Rule | None = None) -> None:
        self.segments = HostSegments()
        self.segments.add(describe(Worker(0), {1: ("a", 0, 2), 2: ("b", 0, 3)}))
        self.listed = self.segments.listed([1, 2])
        self.encoding = Encoding(self.segments.key, self.segments.size)
        self.sums = HostSums(rule or Rule(), Heap(), self.encoding)

    def pushed(self, rank: int, values: torch.Tensor, clock: int | list[int] = 1, **fields: object) -> Pushed:
        message = Worker(rank).push({1: values[:2], 2: values[2:]}, clock)
        return Pushed(b"link", wire.Push(**{**vars(message), **fields}))


@given(st.permutations(range(5)))
def test_sums_are_in_the_order_of_ranks(order: list[int]):
    summing = Summing()
    parts = [torch.tensor([1e8, 1.0, -1e8, 0.1, 3.0]) * (rank + 1) / 7 for rank in range(5)]
    (exchange,) = summing.sums.exchanges(summing.listed, [summing.pushed(rank, parts[rank]) for rank in order])
    wanted = parts[0]
    for part in parts[1:]:
        wanted = wanted + part
    assert exchange.fields["ranks"] == [0, 1, 2, 3, 4]
    assert total(exchange) == wanted.tolist()


def test_a_single_push_is_sent_from_where_it_lies():
    summing = Summing()
    pushed = summing.pushed(3, floats(1, 2, 3, 4, 5))
    (exchange,) = summing.sums.exchanges(summing.listed, [pushed])
    assert exchange.fields["buffers"] is pushed.request.buffers


def test_buffers_may_be_divided_differently():
    summing = Summing()
    flat = floats(1, 2, 3, 4, 5)
    one = summing.pushed(0, flat, buffers=[to_buffer(flat)])
    (exchange,) = summing.sums.exchanges(summing.listed, [one, summing.pushed(1, flat)])
    assert total(exchange) == [2, 4, 6, 8, 10]


def test_different_clocks_become_one_without_rounds_if_each_worker_has_one_clock():
    summing = Summing(Rule("async", aggregate="host"))
    flat = floats(1, 2, 3, 4, 5)
    (exchange,) = summing.sums.exchanges(summing.listed, [summing.pushed(0, flat, 4), summing.pushed(1, flat, 9)])
    assert exchange.fields["rank_clocks"] == [4, 9]
    assert exchange.fields["clocks"] == [9, 9]
    apart = summing.sums.exchanges(summing.listed, [summing.pushed(0, flat, [4, 5]), summing.pushed(1, flat, 9)])
    assert [exchange.fields["ranks"] for exchange in apart] == [[0], [1]]


def test_with_a_staleness_pushes_of_different_clocks_that_want_values_stay_apart():
    summing = Summing(Rule("async", staleness=1, aggregate="host"))
    flat = floats(1, 2, 3, 4, 5)

    def ranks(*clocks: int, want: bool) -> list[list[int]]:
        pushes = [summing.pushed(rank, flat, clock, want=want) for rank, clock in enumerate(clocks)]
        return [exchange.fields["ranks"] for exchange in summing.sums.exchanges(summing.listed, pushes)]

    assert ranks(4, 5, want=True) == [[0], [1]], "the first would wait for what the second needs: its own next push"
    assert ranks(4, 5, want=False) == ranks(5, 5, want=True) == [[0, 1]]


@pytest.mark.parametrize(
    "fields",
    [{"lr": 0.1}, {"rescale": 0.5}, {"changes": [[0, "wd", 0.1]]}, {"encode": ["fp16", []]}, {"back": ["fp16", []]}],
)
def test_what_differs_in_more_than_values_stays_apart(fields):
    summing = Summing()
    flat = floats(1, 2, 3, 4, 5)
    exchanges = summing.sums.exchanges(summing.listed, [summing.pushed(1, flat, **fields), summing.pushed(0, flat)])
    assert [exchange.fields["ranks"] for exchange in exchanges] == [[0], [1]]


def test_a_sum_that_cannot_be_encoded_is_sent_as_its_parts():
    summing = Summing()
    large = torch.full((5,), 2e38)
    pushed = [summing.pushed(rank, large, encode=["fp16", []]) for rank in range(2)]
    exchanges = summing.sums.exchanges(summing.listed, pushed)
    assert [exchange.fields["ranks"] for exchange in exchanges] == [[0], [1]]
    assert {exchange.fields["codec"][0] for exchange in exchanges} == {"fp16"}


def test_a_sum_is_encoded_for_as_many_workers_as_it_is_of():
    summing = Summing()
    flat = floats(1.4, 1.5, -1.6, 0.1, 2)
    pushed = [summing.pushed(rank, flat, encode=["2bit", [["threshold", 1.5]]]) for rank in range(2)]
    (exchange,) = summing.sums.exchanges(summing.listed, pushed)
    assert exchange.fields["codec"] == ["2bit", [["threshold", 3.0]]]
    out = torch.empty(5)
    lengths, counts = exchange.fields["lengths"], exchange.fields["segment_counts"]
    reply = wire.Values(1, lengths=lengths, segment_counts=counts, buffers=exchange.fields["buffers"])
    summing.encoding.decode(exchange.fields["codec"], reply, [2, 3], out)
    assert out.tolist() == [0, 3, -3, 0, 3]
