from __future__ import annotations

import pytest
import torch
from asking import Worker, floats
from hosting import describe, total
from hypothesis import given
from hypothesis import strategies as st

from kvstore import wire
from kvstore.rule import Rule
from kvstore.transport.memory import Heap
from kvstore.values import to_buffer
from servers.aggregator.encoding import Encoding
from servers.aggregator.gathering import HostSegments, Pushed
from servers.aggregator.store import HostSums


class Summing:
    """The sums of a store with two segments of 2 and 3 elements."""

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
