"""Samplers that split an epoch over workers: every sample once, and a position that can be resumed. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

import kvstore as kv
from kvstore import Mismatch, UnknownName, UsageError
from kvstore.shares import Share, Shares
from workers import ElasticSampler, SplitBatchSampler, SplitSampler
from workers.common.stores import part_of
from workers.fitting.fit import fit

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


class Store(kv.KVStore):
    """Of worker 1 of 3."""

    num_workers, rank = 3, 1

    def __init__(self) -> None:
        pass


def test_a_store_says_which_part_is_whose():
    assert list(SplitSampler(range(7), shuffle=False, kvstore=Store())) == [3, 4]
    assert list(SplitBatchSampler(range(7), 2, shuffle=False, kvstore=Store())) == [[3, 4]]
    assert len(SplitSampler(7, kvstore=kv.create("local"))) == 7
    with pytest.raises(UsageError, match=r"call workers.init\(\) first"):
        SplitSampler(7, kvstore="auto")
    with pytest.raises(UsageError, match="num_parts=2 and part_index=1 come from kvstore='auto': leave them out"):
        SplitSampler(7, 2, 1, kvstore="auto")


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
    splits, st.integers(1, 7), st.sampled_from(["keep", "discard", "rollover", None]), st.integers(0, 60), st.booleans()
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


# ---- a sampler's position counts what the program has been given, however its loader reads

SAMPLES, EPOCHS = 22, 2  # 11 for each of two parts: batches of 3, 3, 3 and 2


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, item: Any) -> torch.Tensor:
        return torch.tensor(item)


class OwnBatches(BatchSampler):
    """A batch sampler of a program's own."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from sorted(super().__iter__())


def made(kind: str, processes: int = 0, loader: Any = DataLoader, **options: Any) -> tuple[Any, Any]:
    """A sampler of one of two parts, and a loader."""
    if processes:
        options["num_workers"] = processes
    if kind == "samples":
        sampler: Any = SplitSampler(SAMPLES, 2)
        return sampler, loader(Numbers(), batch_size=3, sampler=sampler, **options)
    sampler = SplitBatchSampler(SAMPLES, 3, 2)
    if kind == "batches":
        return sampler, loader(Numbers(), batch_sampler=sampler, **options)
    return sampler, loader(Numbers(), batch_size=None, sampler=sampler, **options)


def loop(sampler: Any, loader: Any, stop: int | None = None, look: bool = False, tell: bool = False) -> list[Any]:
    """The loop of a program, up to a batch; with the epoch of each batch."""
    batches = []
    for epoch in range(sampler.epoch, EPOCHS):
        if tell:
            sampler.set_epoch(epoch)
        if look and not batches:
            next(iter(loader))
        for batch in loader:
            batches.append((epoch, batch.tolist()))
            if len(batches) == stop:
                return batches
    return batches


KINDS = ["samples", "batches", "no batching"]


@pytest.mark.parametrize(
    ("kind", "processes", "options"),
    [*((kind, 0, {}) for kind in KINDS), ("samples", 2, {}), ("batches", 2, {"persistent_workers": True})],
)
def test_a_resumed_loop_has_the_rest_whatever_was_read_ahead_or_looked_at(
    kind: str, processes: int, options: dict[str, Any]
) -> None:
    whole = loop(*made(kind))
    assert len(whole) == 8
    for stop, look in ((2, True), (5, False)):
        sampler, loader = made(kind, processes, **options)
        before = loop(sampler, loader, stop, look, tell=look)
        state = sampler.state_dict()
        resumed, again = made(kind, processes, **options)
        resumed.load_state_dict(state)
        assert before + loop(resumed, again, look=look, tell=look) == whole


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize(("kind", "processes"), [("samples", 2), ("batches", 0)])
def test_torchdatas_loader_keeps_the_position_of_the_sampler(kind: str, processes: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    whole = loop(*made(kind))
    for stop in (2, 4):  # within an epoch, and after its last batch
        sampler, loader = made(kind, processes, stateful)
        before = loop(sampler, loader, stop)
        state, own = loader.state_dict(), sampler.state_dict()
        resumed, again = made(kind, processes, stateful)
        again.load_state_dict(state)
        after = [batch.tolist() for _ in range(EPOCHS) for batch in again]
        assert [batch for _, batch in before] + after == [batch for _, batch in whole]
        resumed, again = made(kind, processes, stateful)
        resumed.load_state_dict(own)
        assert before + loop(resumed, again) == whole


def test_making_an_iterator_changes_nothing() -> None:
    sampler = SplitBatchSampler(SAMPLES, 3, 2)
    whole = list(sampler)
    resumed = SplitBatchSampler(SAMPLES, 3, 2)
    resumed.load_state_dict({**resumed.state_dict(), "taken": 2})
    dropped, read = iter(resumed), iter(resumed)  # as torch's loaders with processes do
    assert list(read) == whole[2:]
    assert resumed.epoch == 1
    resumed.set_epoch(0)
    assert next(dropped) == whole[0]


def test_what_was_resumed_begins_again_where_it_was_resumed() -> None:
    whole = list(SplitSampler(SAMPLES))
    sampler = SplitSampler(SAMPLES)
    sampler.load_state_dict(sampler.state_dict(5))
    assert next(iter(sampler)) == whole[5]
    assert list(sampler) == whole[5:]
    sampler.set_epoch(0)
    assert list(sampler) == whole


@pytest.mark.parametrize("processes", [0, 2])
def test_a_look_at_an_epochs_last_batch_does_not_end_it_if_the_epoch_is_told(processes: int) -> None:
    sampler, loader = made("samples", processes)
    sampler.load_state_dict(sampler.state_dict(9))
    next(iter(loader))
    sampler.set_epoch(0)
    assert [len(batch) for batch in loader] == [2]


@pytest.mark.parametrize("options", [{"in_order": False}, {}])
def test_what_cannot_be_counted_is_an_error(options: dict[str, Any]) -> None:
    sampler = SplitSampler(SAMPLES)
    batches: Any = (BatchSampler if options else OwnBatches)(sampler, 3, False)
    try:
        loader = DataLoader(Numbers(), batch_sampler=batches, num_workers=1, **options)
    except TypeError:
        pytest.skip("this torch's loader always keeps the order")
    reading = iter(loader)
    next(reading)
    with pytest.raises(UsageError, match=r"the loader has read ahead, .* pass it: state_dict\(taken=...\)"):
        sampler.state_dict()
    assert sampler.state_dict(taken=3)["taken"] == 3
    assert len(list(reading)) == 7
    assert sampler.state_dict()["epoch"] == 1


def test_a_look_in_the_middle_of_a_loop_is_not_taken_for_the_position() -> None:
    sampler, loader = made("samples")
    reading = iter(loader)
    next(reading)
    next(reading)
    next(iter(loader))
    with pytest.raises(UsageError, match="two iterations over this sampler are under way"):
        sampler.state_dict()
    next(reading)
    assert sampler.state_dict()["taken"] == 9


def test_a_worker_that_was_added_has_no_part():
    assert part_of(2, 1) == (2, 1)
    with pytest.raises(UsageError, match=r"worker 2 was added to this job .*its first 2 workers .*ElasticSampler"):
        part_of(2, 2)


# ---- shares of an epoch that workers take as they go: ElasticSampler in torch's loaders, over a store of one process

SIZE = 23


class Recorded:
    """A store that notes what was asked of it; ``dies`` has another worker take samples first, and die."""

    num_workers, rank = 1, 0

    def __init__(self, dies: bool = False) -> None:
        self.shares = Shares()
        self.asked: list[dict[str, Any]] = []
        if dies:
            self.shares.take(1, "train", 0, SIZE, 4, 0, 0)
        self.joins = 0

    def take_share(self, size: int, most: int, *, data: str, epoch: int, used: int = 0, passes: int = 0) -> Share:
        self.asked.append({"most": most, "used": used, "passes": passes})
        return self.shares.take(0, data, epoch, size, most, used, passes)

    def join(self, timeout: float | None = None) -> int:
        self.joins += 1
        if self.joins == 1:
            self.shares.lose(1)
        return 0


def loader(store: Any, processes: int = 0, **given: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(SIZE))
    return DataLoader(data, 5, sampler=ElasticSampler(data, store, **given), num_workers=processes)


def items(batches: Iterator[Any]) -> list[int]:
    return [item for (batch,) in batches for item in batch.tolist()]


@pytest.mark.parametrize("processes", [0, 1])
def test_an_epoch_has_each_sample_once_in_an_order_of_its_own(processes: int) -> None:
    store = Recorded()
    batches = loader(store, processes, seed=3)
    orders = []
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        orders.append(items(batches.sampler.passes(batches, store)))  # type: ignore[attr-defined]
    assert all(sorted(order) == list(range(SIZE)) for order in orders)
    assert orders[0] != orders[1]
    assert [each["most"] for each in store.asked] == [5, 5, 5, 5, 5, 5, 0] * 2


def test_without_shuffling_samples_are_in_order() -> None:
    store = Recorded()
    assert items(iter(loader(store, shuffle=False))) == list(range(SIZE))


@pytest.mark.parametrize(("processes", "used"), [(0, [0, 5, 10, 15, 20, 20]), (1, [0, 0, 0, 5, 10, 10])])
def test_what_is_under_way_is_not_used(processes: int, used: list[int]) -> None:
    store = Recorded()
    for number, _ in enumerate(loader(store, processes), 1):
        known = max(each["used"] for each in store.asked)
        assert known <= 5 * (number - 1), "this batch may be lost"
    assert [each["used"] for each in store.asked] == used


def test_samples_that_came_back_are_used_in_another_pass() -> None:
    store = Recorded(dies=True)
    batches = loader(store, shuffle=False)
    order = items(batches.sampler.passes(batches, store))  # type: ignore[attr-defined]
    assert order == [*range(4, SIZE), *range(4)]
    assert store.joins == 2
    assert [each["passes"] for each in store.asked if not each["most"]] == [1, 2]


def test_another_pass_over_an_epoch_that_is_used_up_is_refused() -> None:
    """It would have no sample: a loop over epochs that forgets ``set_epoch`` would train one of them."""
    batches = loader(Recorded(), 1)
    assert len(items(iter(batches))) == SIZE
    with pytest.raises(UsageError, match=r"epoch 0 .* call set_epoch\(epoch\) before each epoch"):
        items(iter(batches))
    batches.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert len(items(iter(batches))) == SIZE


def test_fit_takes_a_loader_with_it() -> None:
    store = kv.create("local")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SIZE, 3), torch.randint(0, 2, (SIZE,)))
    seen: list[int] = []
    batches = DataLoader(data, 5, sampler=ElasticSampler(data, store))
    fit(
        torch.nn.Linear(3, 2),
        batches,
        num_epoch=3,
        kvstore=store,
        batch_end_callback=lambda param: seen.append(param.epoch),
    )
    assert seen == [0] * 5 + [1] * 5 + [2] * 5


def test_bad_arguments_are_named() -> None:
    store = kv.create("local")
    with pytest.raises(UsageError, match="length=0 must be an integer, at least 1"):
        ElasticSampler(0, store)
    with pytest.raises(UsageError, match="epoch=-1"):
        ElasticSampler(3, store).set_epoch(-1)
    assert len(ElasticSampler(3, store)) == 3
