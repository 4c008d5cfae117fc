"""Compressed values at a server, told through the shard: what workers that compress differently give and get."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from asking import Desk, Worker, floats, text_of

from kvstore.codecs import Compressor, decode, parse
from kvstore.values import to_buffer
from kvstore.wire import Push, join

SIZES = {1: 5, 2: 4, 3: 7}
TOP = "threshold", [["threshold", 0.5]]  # sends what is 0.5 or more, as it is


def gradient(number: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * seed + number)
    return torch.randn(SIZES[number], generator=made)


def compressed(worker: Worker, values: dict[int, torch.Tensor], clock: int = 1) -> Push:
    """A push of ``values`` as ``TOP`` has them."""
    compressor = Compressor(parse({"type": TOP[0], **dict(TOP[1])}))
    payloads = [compressor.encode(number, value).cut(0, value.numel()) for number, value in values.items()]
    return replace(
        worker.push(values, clock),
        codec=list(TOP),
        lengths=[payload.numel() for payload in payloads],
        buffers=join([to_buffer(payload) for payload in payloads]),
    )


def arrived(value: torch.Tensor) -> torch.Tensor:
    """What a server has of a compressed ``value``."""
    compression = parse({"type": TOP[0], **dict(TOP[1])})
    return decode(compression, Compressor(compression).encode(0, value).cut(0, value.numel()), value.numel())


@pytest.fixture
def desk() -> Desk:
    return Desk(2, values={number: torch.zeros(size) for number, size in SIZES.items()})


def sums(number: int) -> torch.Tensor:
    return arrived(gradient(number, 0)) + gradient(number, 1)


def all_of(seed: int) -> dict[int, torch.Tensor]:
    return {number: gradient(number, seed) for number in SIZES}


@pytest.mark.parametrize("lists", [[[1, 2, 3]], [[2], [3, 1]], [[3], [2], [1]]], ids=str)
@pytest.mark.parametrize("first", ["compressed", "plain"])
def test_compressed_and_plain_contributions_of_one_round(desk: Desk, lists: list[list[int]], first: str) -> None:
    a, b = desk.workers
    squeezed = compressed(a, all_of(0))
    if first == "compressed":
        desk.ask(a, squeezed)
    for numbers in lists:  # the first one may take a bucket apart that has a compressed contribution
        desk.ask(b, b.push({number: gradient(number, 1) for number in numbers}))
    if first == "plain":
        desk.ask(a, squeezed)
    for number in SIZES:
        assert torch.equal(desk.value(number, clock=1), sums(number))


def test_plain_buffers_that_end_within_a_segment_beside_a_compressed_one(desk: Desk) -> None:
    a, b = desk.workers
    desk.ask(a, compressed(a, all_of(0)))
    whole = torch.cat(list(all_of(1).values()))
    buffers = [to_buffer(part.clone()) for part in whole.split([2, 6, 1, 3, 4])]
    desk.ask(b, replace(b.push(all_of(1)), buffers=buffers))
    for number in SIZES:
        assert torch.equal(desk.value(number, clock=1), sums(number))


def test_a_worker_may_turn_it_on_and_off_from_round_to_round(desk: Desk) -> None:
    a, b = desk.workers
    for clock in range(1, 5):
        one, other = (a, b) if clock % 2 else (b, a)
        desk.ask(one, compressed(one, all_of(0), clock))
        desk.ask(other, other.push(all_of(1), clock))
        for number in SIZES:
            assert torch.equal(desk.value(number, clock=clock), sums(number))


def test_each_way_back_is_encoded_once_whoever_asks_in_between() -> None:
    desk = Desk(3, values={1: floats(0, 0)})
    for clock in range(1, 4):
        replies = {}
        for worker, kind in zip(desk.workers, ("fp16", "int8", "fp16"), strict=True):
            message = replace(worker.push({1: floats(0.1, 0.7)}, clock, want=True), back=[kind, []])
            replies |= {rank: reply for (rank, _), reply in desk.ask(worker, message).items()}
        assert bytes(replies[0].buffers[0]) == bytes(replies[2].buffers[0]) != bytes(replies[1].buffers[0])


def test_weights_that_are_no_floats_do_not_come_back_compressed() -> None:
    desk = Desk(1, values={1: torch.zeros(2, dtype=torch.int32)})
    (a,) = desk.workers
    message = replace(a.pull([1]), back=["fp16", []])
    assert "floating point only" in text_of(desk.reply(a, message), "UsageError")
