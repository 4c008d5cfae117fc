"""Buckets: put together and taken apart as workers push, with the same values as if every segment were alone."""

from __future__ import annotations

from typing import Any

import torch
from asking import Desk, Worker, floats, values_in
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import wire
from kvstore.optim.fused import LANE
from kvstore.spec import Spec
from kvstore.transport.memory import Heap
from kvstore.values import TensorRange
from servers.store.buckets import MAX_SPLITS, Buckets
from servers.store.rounds import Rounds

SIZES = {1: 2, 2: 3, 3: 1, 4: 4}
LANES = {1: LANE, 2: 2 * LANE, 3: LANE + 1, 4: LANE}  # some of them are updated as one
HYPER = {"sgd": {"momentum": 0.9}, "adam": {"amsgrad": True}}


def filled() -> Buckets:
    made = Buckets(lambda: Rounds(frozenset({0, 1})), Heap())
    for number, size in SIZES.items():
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
    assert [made.value(number).tolist() for number in SIZES] == [[n] * size for n, size in SIZES.items()]


def test_a_bucket_has_one_clock():
    made = filled()
    made.pushed([1, 2], [1, 1])
    assert [b.ids for b in made.pushed([1, 2], [2, 1])] == [(1,), (2,)]


def test_an_open_round_keeps_buckets_apart():
    made = filled()
    made.find(1)[0].rounds.contribute([0], 1, None)  # type: ignore[arg-type]
    assert len(made.pushed([1, 2], [1, 1])) == 2


lists = st.lists(
    st.permutations(sorted(SIZES)).flatmap(lambda ids: st.integers(1, 4).map(lambda n: ids[:n])), max_size=8
)


@settings(max_examples=60, deadline=None)
@given(
    lists,
    lists,
    st.randoms(use_true_random=False),
    st.sampled_from([None, *HYPER]),
    st.sampled_from([SIZES, LANES]),
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
    desk = Desk(2, values={1: floats(0, 0), 2: floats(0)})
    a, b = desk.workers
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
