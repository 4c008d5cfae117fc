"""Answers that bring values, and buckets that are put together and taken apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from asking import Desk, Worker, floats, text_of, values_in
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.codecs import Compressor, decode, parse
from kvstore.optim.fused import LANE
from kvstore.spec import Spec
from kvstore.transport.memory import Heap
from kvstore.values import TensorRange, from_buffer, to_buffer
from servers.store.buckets import MAX_SPLITS, Buckets
from servers.store.rounds import Rounds

# ---- answers that bring values


def test_a_push_that_wants_nothing_is_acknowledged_and_a_pull_brings_values():
    desk, a = Desk(1, values={1: floats(3, 4)}).and_workers()
    replies = desk.shard.stores[0].values
    assert replies.reply(a.push({1: floats(1, 1)}), 2, 0) == wire.Ack(a.seq, 2)
    values = replies.reply(a.pull([1]), 0, 5)
    assert isinstance(values, wire.Values)
    assert (values.ahead, bytes(values.buffers[0])) == (5, floats(3, 4).numpy().tobytes())


def test_an_answer_that_is_being_sent_keeps_its_values():
    desk, a = Desk(1, values={1: floats(3)}).and_workers()
    before = desk.shard.stores[0].values.reply(a.pull([1]), 0, 0)
    assert isinstance(before, wire.Values)
    desk.reply(a, a.push({1: floats(7)}))
    assert bytes(before.buffers[0]) == floats(3).numpy().tobytes()


def test_an_encoded_answer_of_another_server_leaves_the_same_residual():
    back = ["2bit", [["threshold", 0.5]]]
    here, there = (Desk(1, values={1: floats(0.4, 0.7)}) for _ in range(2))
    (a,) = here.workers
    here.shard.stores[0].values.follow(wire.EncodedAnswer(0, [1], back))
    there.reply(there.workers[0], there.workers[0].pull([1], back=back))
    for desk in (here, there):
        desk.reply(desk.workers[0], desk.workers[0].push({1: floats(0.4, 0.7)}))
    second = [desk.reply(desk.workers[0], desk.workers[0].pull([1], 1, back=back)) for desk in (here, there)]
    assert bytes(second[0].buffers[0]) == bytes(second[1].buffers[0])
    assert a.rank == 0


SIZES = {1: 5, 2: 4, 3: 7}
TOP = "threshold", [["threshold", 0.5]]  # sends what is 0.5 or more, as it is


def gradient(number: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * seed + number)
    return torch.randn(SIZES[number], generator=made)


def compressed(worker: Worker, values: dict[int, torch.Tensor], clock: int = 1) -> wire.Push:
    compressor = Compressor(parse({"type": TOP[0], **dict(TOP[1])}))
    payloads = [compressor.encode(number, value).payload(0, value.numel()) for number, value in values.items()]
    return replace(
        worker.push(values, clock),
        codec=list(TOP),
        lengths=[payload.numel() for payload in payloads],
        buffers=wire.pack_arrays([to_buffer(payload) for payload in payloads]),
    )


def arrived(value: torch.Tensor) -> torch.Tensor:
    compression = parse({"type": TOP[0], **dict(TOP[1])})
    return decode(compression, Compressor(compression).encode(0, value).payload(0, value.numel()), value.numel())


# Workers of one round compress alike where all must be in it; with a quorum each may do as it likes.
MIXED = {"quorum": 2}


@pytest.fixture
def desk() -> Desk:
    return Desk(2, values={number: torch.zeros(size) for number, size in SIZES.items()}, **MIXED)


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
    desk = Desk(3, values={1: floats(0, 0)}, quorum=3)
    for clock in range(1, 4):
        replies = {}
        for worker, kind in zip(desk.workers, ("fp16", "int8", "fp16"), strict=True):
            message = replace(worker.push({1: floats(0.1, 0.7)}, clock, want=True), back=[kind, []])
            replies |= {rank: reply for (rank, _), reply in desk.ask(worker, message).items()}
        assert bytes(replies[0].buffers[0]) == bytes(replies[2].buffers[0]) != bytes(replies[1].buffers[0])


def test_weights_that_are_no_floats_do_not_come_back_compressed() -> None:
    desk, a = Desk(1, values={1: torch.zeros(2, dtype=torch.int32)}).and_workers()
    message = replace(a.pull([1]), back=["fp16", []])
    assert "floating point only" in text_of(desk.reply(a, message), "UsageError")


def halves(reply: wire.Message) -> list[torch.Tensor]:
    assert isinstance(reply, wire.Values)
    compression = parse({"type": "fp16"})
    parts = [from_buffer(part, "uint8") for part in wire.unpack_arrays(reply.buffers, reply.lengths)]
    return [decode(compression, part, part.numel() // 2) for part in parts]


def value(number: int, clock: int) -> torch.Tensor:
    return torch.arange(SIZES[number]) / 3 + number + 1e-4 * clock


def test_segments_that_lie_back_to_back_come_back_as_one_payload() -> None:
    desk, a = Desk(1, values={number: torch.zeros(size) for number, size in SIZES.items()}).and_workers()
    expected = Compressor(parse({"type": "fp16"}))
    for clock in range(1, 4):
        values = {number: value(number, clock) for number in SIZES}
        message = replace(a.push(values, clock, want=True), back=["fp16", []])
        reply = desk.reply(a, message)
        assert (reply.segment_counts, reply.lengths) == ([3], [2 * sum(SIZES.values())])
        singly = [
            decode(expected.compression, expected.encode(n, v).payload(0, len(v)), len(v)) for n, v in values.items()
        ]
        assert torch.equal(halves(reply)[0], torch.cat(singly))


@pytest.mark.parametrize("first", [[2], [1, 2], [3], []], ids=str)
def test_a_part_of_them_has_the_same_bits_whoever_asks_first(first: list[int]) -> None:
    desk, a = Desk(1, values={number: torch.zeros(size) for number, size in SIZES.items()}).and_workers()
    expected = Compressor(parse({"type": "fp16"}))
    for clock in range(1, 4):
        values = {number: value(number, clock) for number in SIZES}
        desk.ask(a, a.push(values, clock))
        arrived = {
            n: decode(expected.compression, expected.encode(n, v).payload(0, len(v)), len(v)) for n, v in values.items()
        }
        for numbers in ([first] if first else []) + [[1, 2, 3], [2, 3], [3, 1], [2]]:
            reply = desk.reply(a, replace(a.pull(numbers, clock), back=["fp16", []]))
            assert sum(reply.segment_counts) == len(numbers)
            assert torch.equal(torch.cat(halves(reply)), torch.cat([arrived[number] for number in numbers]))


def test_weights_that_are_not_finite_are_refused_by_the_key_that_is_at_fault() -> None:
    values = {1: floats(0, 1), 2: floats(0, float("inf")), 3: floats(1)}
    desk, a = Desk(1, values=values).and_workers()
    desk.ask(a, a.set_optimizer())
    text = text_of(desk.reply(a, replace(a.pull([1, 2, 3]), back=["fp16", []])), "UsageError")
    assert "key 'k2' has infinite" in text


@pytest.mark.parametrize("numbers", [[1, 2, 3], [2]], ids=str)
def test_sums_that_are_not_finite_are_refused_by_the_key_that_is_at_fault(numbers: list[int]) -> None:
    desk, a = Desk(1, values={number: torch.zeros(2) for number in numbers}).and_workers()
    pushed = {number: floats(0, float("nan") if number == 2 else 1) for number in numbers}
    text = text_of(desk.reply(a, replace(a.push(pushed, want=True), back=["fp16", []])), "UsageError")
    assert "key 'k2' has infinite" in text


def test_an_answer_that_cannot_be_encoded_fails_alone() -> None:
    desk, a, b = Desk(2, values={1: torch.zeros(2)}, **MIXED).and_workers()
    waiting = replace(a.push({1: floats(0, float("nan"))}, want=True), back=["fp16", []])
    assert desk.reply(a, waiting) is None
    last = b.push({1: floats(0, 1)}, want=True)
    replies = desk.ask(b, last)
    assert "key 'k1' has infinite" in text_of(replies[0, waiting.seq], "UsageError")
    assert isinstance(replies[1, last.seq], wire.Values), "its own answer is not compressed"


COUNTS = [[1, 1, 1], [3], [2, 1], [1, 2]]


@pytest.mark.parametrize("segment_counts", COUNTS, ids=str)
@pytest.mark.parametrize("lists", [[[1, 2, 3]], [[2], [3, 1]], [[3], [2], [1]]], ids=str)
def test_a_payload_of_several_segments(desk: Desk, segment_counts: list[int], lists: list[list[int]]) -> None:
    a, b = desk.workers
    numbers, payloads = list(SIZES), []
    for count in segment_counts:
        mine, numbers = numbers[:count], numbers[count:]
        flat = torch.cat([gradient(number, 0).half() for number in mine])
        payloads.append(to_buffer(flat))
    message = a.push(all_of(0))
    lengths = [payload.nbytes for payload in payloads]
    desk.ask(
        a,
        replace(
            message,
            codec=["fp16", []],
            lengths=lengths,
            segment_counts=segment_counts,
            buffers=wire.pack_arrays(payloads),
        ),
    )
    for some in lists:
        desk.ask(b, b.push({number: gradient(number, 1) for number in some}))
    for number in SIZES:
        assert torch.equal(desk.value(number, clock=1), gradient(number, 0).half().float() + gradient(number, 1))


@pytest.mark.parametrize("segment_counts", [[2], [4], [1, 1], [2, 2]], ids=str)
def test_payloads_of_other_segments_than_the_message_is_about(desk: Desk, segment_counts: list[int]) -> None:
    a, _ = desk.workers
    payload = to_buffer(torch.cat(list(all_of(0).values())).half())
    lengths = [payload.nbytes, *[0] * (len(segment_counts) - 1)]
    message = replace(
        a.push(all_of(0)), codec=["fp16", []], lengths=lengths, segment_counts=segment_counts, buffers=[payload]
    )
    assert "segments, where there are 3" in text_of(desk.reply(a, message), "WireError")


# ---- buckets: put together and taken apart as workers push, with the same values as if every segment were alone


LENGTHS = {1: 2, 2: 3, 3: 1, 4: 4}
LANES = {1: LANE, 2: 2 * LANE, 3: LANE + 1, 4: LANE}  # some of them are updated as one
HYPER = {"sgd": {"momentum": 0.9}, "adam": {"amsgrad": True}}


def filled() -> Buckets:
    made = Buckets(lambda: Rounds(frozenset({0, 1})), Heap())
    for number, size in LENGTHS.items():
        made.add(
            [number], [f"k{number}"], [Spec((size,), "float32")], [TensorRange(0, torch.full((size,), float(number)))]
        )
    return made


def test_a_list_that_is_pushed_becomes_one_bucket_and_keeps_its_values():
    made = filled()
    (one,) = made.pushed([2, 4, 1], [1, 1, 1])
    assert one.ids == (2, 4, 1)
    assert one.value.tolist() == [2, 2, 2, 4, 4, 4, 4, 1, 1]
    assert made.pushed([2, 4, 1], [2, 2, 2]) == [one]
    assert made.element_ranges([4, 1, 3]) == [(one, 3, 9), (made.find(3)[0], 0, 1)]
    assert made.value(4).tolist() == [4] * 4


def test_a_part_takes_a_bucket_apart_and_different_lists_for_ever_leave_it_so():
    made = filled()
    for _ in range(MAX_SPLITS):
        assert len(made.pushed([1, 2, 3, 4], [1] * 4)) == 1
        assert [b.ids for b in made.pushed([2], [1])] == [(2,)]
    assert [b.ids for b in made.pushed([1, 2, 3, 4], [1] * 4)] == [(1,), (2,), (3,), (4,)]
    assert [made.value(number).tolist() for number in LENGTHS] == [[n] * size for n, size in LENGTHS.items()]


def test_a_bucket_has_one_clock():
    made = filled()
    made.pushed([1, 2], [1, 1])
    assert [b.ids for b in made.pushed([1, 2], [2, 1])] == [(1,), (2,)]


def test_an_open_round_keeps_buckets_apart():
    made = filled()
    made.find(1)[0].rounds.contribute([0], 1, None)  # type: ignore[arg-type]
    assert len(made.pushed([1, 2], [1, 1])) == 2


lists = st.lists(
    st.permutations(sorted(LENGTHS)).flatmap(lambda ids: st.integers(1, 4).map(lambda n: ids[:n])), max_size=8
)


@settings(max_examples=30, deadline=None)
@given(
    lists, lists, st.randoms(use_true_random=False), st.sampled_from([None, *HYPER]), st.sampled_from([LENGTHS, LANES])
)
def test_lists_of_any_kind_give_what_single_keys_give(
    one: list[list[int]], two: list[list[int]], random: Any, optimizer: str | None, sizes: dict[int, int]
):
    """Two workers push lists of their own, interleaved at random; the values are those of a shard that saw no lists."""
    together, alone = (Desk(2, values={n: torch.zeros(size) for n, size in sizes.items()}) for _ in range(2))
    if optimizer is not None:
        for desk in (together, alone):
            asked = desk.workers[0].set_optimizer(optimizer, 0.5, **HYPER[optimizer])
            assert desk.reply(desk.workers[0], asked) == wire.Ack(asked.seq)
    clocks = [dict.fromkeys(sizes, 0) for _ in range(2)]
    left = {0: list(one), 1: list(two)}
    answered: list[int] = []
    while any(left.values()):
        rank = random.choice([rank for rank, lists in left.items() if lists])
        ids = left[rank].pop(0)
        for number in ids:
            clocks[rank][number] += 1
        values = {n: torch.linspace(0.1 * rank, n + clocks[rank][n], sizes[n]) for n in ids}
        numbers = [clocks[rank][n] for n in ids]
        replies = together.ask(together.workers[rank], together.workers[rank].push(values, numbers))
        answered += [rank for rank, _ in replies]
        for n in random.sample(ids, len(ids)):
            single: Worker = alone.workers[rank]
            alone.ask(single, single.push({n: values[n]}, clocks[rank][n]))
    for number, size in sizes.items():
        over = min(clocks[0][number], clocks[1][number])
        values = [
            values_in(desk.reply(desk.workers[0], desk.workers[0].pull([number], over)), [Spec((size,), "float32")])[0]
            for desk in (together, alone)
        ]
        assert torch.equal(*values), number
    states = [desk.reply(desk.workers[0], desk.workers[0].get_states(list(sizes))) for desk in (together, alone)]
    assert states[0].names == states[1].names
    assert b"".join(states[0].buffers) == b"".join(states[1].buffers)


def test_who_waits_for_a_bucket_that_is_taken_apart_is_answered():
    desk, a, b = Desk(2, values={1: floats(0, 0), 2: floats(0)}).and_workers()
    push = a.push({1: floats(1, 2), 2: floats(3)}, want=True)
    assert desk.ask(a, push) == {}
    pull = b.pull([2], 1)
    assert desk.ask(b, pull) == {}
    assert desk.ask(b, b.push({1: floats(10, 20)})) == {(1, b.seq): wire.Ack(b.seq)}
    replies = desk.ask(b, b.push({2: floats(30)}))
    assert set(replies) == {(0, push.seq), (1, pull.seq), (1, b.seq)}
    specs = [Spec((2,), "float32"), Spec((1,), "float32")]
    assert isinstance(replies[0, push.seq], wire.Values)
    assert [value.tolist() for value in values_in(replies[0, push.seq], specs)] == [[11, 22], [33]]
    assert values_in(replies[1, pull.seq], specs[1:])[0].tolist() == [33]
