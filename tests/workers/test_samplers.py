"""Samplers that split an epoch over workers: every sample once, and a position that can be resumed. Pure."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from kvstore import Mismatch, UnknownName, UsageError
from workers import SplitBatchSampler, SplitSampler

splits = st.tuples(st.integers(0, 40), st.integers(1, 6))


@given(splits, st.booleans(), st.integers(0, 5))
def test_every_sample_is_in_exactly_one_part(split, shuffle, epoch):
    length, parts = split
    samplers = [SplitSampler(length, parts, part, shuffle=shuffle) for part in range(parts)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    sizes = [len(sampler) for sampler in samplers]
    seen = [list(sampler) for sampler in samplers]
    assert sorted(sample for part in seen for sample in part) == list(range(length))
    assert sizes == [len(part) for part in seen]
    assert max(sizes) - min(sizes) <= 1


def test_the_call_of_d2l():
    sampler = SplitSampler(10, 2, 1)
    assert len(sampler) == 5
    assert len(set(sampler)) == 5
    assert sorted(SplitSampler([0.5] * 10)) == list(range(10))


def test_without_shuffling_a_part_is_a_stretch():
    assert [list(SplitSampler(7, 3, part, shuffle=False)) for part in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


def test_each_epoch_has_its_own_order_and_the_seed_another():
    def order(epoch: int, seed: int = 0) -> list[int]:
        sampler = SplitSampler(100, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0) == order(0)
    orders = [order(0), order(1), order(2), order(0, seed=1), order(1, seed=1)]
    assert len({tuple(its) for its in orders}) == len(orders)


def test_parts_of_even_size_repeat_a_sample():
    parts = [list(SplitSampler(8, 3, part, even_size=True, shuffle=False)) for part in range(3)]
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]


def test_epochs_follow_each_other_without_set_epoch():
    plain, told = SplitSampler(30), SplitSampler(30)
    for epoch in range(3):
        told.set_epoch(epoch)
        assert plain.epoch == told.epoch == epoch
        assert list(plain) == list(told)
    told.set_epoch(1)
    plain.set_epoch(1)
    assert list(told) == list(plain)
    told.set_epoch(1)  # once more
    assert told.epoch == 1


def test_an_epoch_that_was_broken_off_begins_again():
    sampler = SplitSampler(30)
    first = next(iter(sampler))
    assert sampler.epoch == 0
    assert next(iter(sampler)) == first
    assert len(list(sampler)) == 30


@given(splits, st.integers(1, 7), st.sampled_from(["keep", "discard", "rollover"]), st.integers(1, 5))
def test_batches_are_gluons(split, size, last, epochs):
    """The same batches as of Gluon's BatchSampler, which keeps the rest in a list, over the same samples."""
    length, parts = split
    batches = SplitBatchSampler(length, size, parts, parts - 1, last)
    samples, rest = SplitSampler(length, parts, parts - 1), []
    for epoch in range(epochs):
        samples.set_epoch(epoch)
        batches.set_epoch(epoch)
        stream = rest + list(samples)
        wanted = [stream[at : at + size] for at in range(0, len(stream), size)]
        rest = []
        if wanted and len(wanted[-1]) < size and last != "keep":
            short = wanted.pop()
            rest = short if last == "rollover" else []
        assert len(batches) == len(wanted)
        assert list(batches) == wanted


@given(
    splits,
    st.integers(1, 7),
    st.sampled_from(["keep", "discard", "rollover", None]),
    st.integers(0, 60),
    st.booleans(),
)
def test_a_resumed_run_goes_on_to_the_item(split, size, last, stop, other_part):
    length, parts = split

    def make(part: int = 0) -> SplitSampler | SplitBatchSampler:
        return SplitSampler(length, parts, part) if last is None else SplitBatchSampler(length, size, parts, part, last)

    def run(sampler, items: list, most: int) -> None:
        for epoch in range(sampler.epoch, 4):
            sampler.set_epoch(epoch)
            for item in sampler:
                items.append((epoch, item))
                if len(items) == most:
                    return

    whole: list = []
    run(make(), whole, 10**6)
    stop = min(stop, len(whole))
    before: list = []
    interrupted = make()
    if stop:
        run(interrupted, before, stop)
    state = json.loads(json.dumps(interrupted.state_dict()))
    part = parts - 1 if other_part and length % parts == 0 else 0
    resumed = make(part)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    after: list = []
    run(resumed, after, 10**6)
    if part == 0:
        assert before + after == whole
    else:
        assert len(before + after) == len(whole)


def test_a_part_that_has_less_than_was_taken_has_nothing_left_of_the_epoch():
    longer, shorter = SplitSampler(5, 2, 0), SplitSampler(5, 2, 1)
    taking = iter(longer)
    next(taking), next(taking)
    shorter.load_state_dict(longer.state_dict())
    assert shorter.epoch == 0
    assert list(shorter) == []
    assert shorter.epoch == 1
    assert len(list(shorter)) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_take_samplers_of_both_kinds(workers):
    dataset = TensorDataset(torch.arange(11))
    loader = DataLoader(dataset, 3, sampler=SplitSampler(dataset, 2, 1), num_workers=0)
    assert len(loader) == 2
    batched = SplitBatchSampler(dataset, 3, 2, 1)
    loader = DataLoader(dataset, batch_sampler=batched, num_workers=workers)
    first = [batch.tolist() for (batch,) in loader]
    other = SplitBatchSampler(dataset, 3, 2, 1)
    assert first == list(other)
    next(iter(loader))  # the loader's workers may have been given all batches by now
    state = batched.state_dict(taken=1)
    assert (state["epoch"], state["taken"]) == (1, 1)
    other.load_state_dict(state)
    rest = list(other)
    other.set_epoch(1)
    assert rest == list(other)[1:]


def test_the_state_between_epochs_is_the_beginning_of_the_next():
    sampler = SplitSampler(4)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["taken"]) == (0, 0)
    list(sampler)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["taken"]) == (1, 0)
    assert (sampler.state_dict(4)["epoch"], sampler.state_dict(4)["taken"]) == (1, 0)


@pytest.mark.parametrize("other", [SplitSampler(9, 2), SplitSampler(8, 4), SplitSampler(8, 2, seed=1)])
def test_a_state_of_another_split_is_refused(other):
    with pytest.raises(Mismatch, match=r"there, .* here"):
        SplitSampler(8, 2).load_state_dict(other.state_dict())
    with pytest.raises(Mismatch, match="batch_size"):
        SplitBatchSampler(8, 2).load_state_dict(SplitSampler(8).state_dict())


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="part_index=2 must be less than num_parts=2"):
        SplitSampler(8, 2, 2)
    with pytest.raises(UsageError, match="num_parts=0"):
        SplitSampler(8, 0)
    with pytest.raises(UsageError, match="length=-1"):
        SplitSampler(-1)
    with pytest.raises(UsageError, match="batch_size=0"):
        SplitBatchSampler(8, 0)
    with pytest.raises(UnknownName, match="keep, discard, rollover"):
        SplitBatchSampler(8, 2, last_batch="pad")
    with pytest.raises(UsageError, match="epoch=-1"):
        SplitSampler(8).set_epoch(-1)
    with pytest.raises(UsageError, match="taken=9 must be at most 8"):
        SplitSampler(8).state_dict(9)
    with pytest.raises(UsageError, match="split evenly"):
        SplitSampler(2, 3, even_size=True)
