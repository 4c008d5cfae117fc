"""``fit`` divides what all workers were given whole, and leaves alone what is divided already."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitted import SGD, network, require_resumable, run, samples, state
from threaded import ThreadedJob
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import kvstore as kv
from workers import Checkpoint, Reducer, SplitBatchSampler, SplitSampler, callbacks, fit, partition_dataset
from workers.fitting.division import DividedSampler, divide, draw, require_same_order

COUNT = 21


class Numbers(Dataset[Any]):
    """Samples that say which they are, perhaps beside a random number."""

    def __init__(self, numbers: Any = range(COUNT), drawn: Callable[[], float] = lambda: 0.0) -> None:
        self.numbers, self.drawn = list(numbers), drawn

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, item: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([self.numbers[item], self.drawn()]), self.numbers[item]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.tensor([float(number), 0.0]), 0) for number in range(COUNT)])


class Shuffled(Sampler[int]):
    """A sampler of a program's own."""

    def __init__(self, length: int, generator: np.random.Generator | None = None) -> None:
        self.length, self.generator = length, generator

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length).tolist()
        return iter(order if self.generator is None else self.generator.permutation(self.length).tolist())


class OwnLoader(DataLoader[Any]):
    """A loader that may do anything."""


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Numbers(), **({"batch_size": 4} | options))


def divided_data(pair: ThreadedJob, make: Callable[[int], Any], epochs: int = 2, **options: Any) -> list[Any]:
    """What each worker reads of what ``make(rank)`` returns, after ``divide``: batches of numbers."""

    def work(store: kv.KVStore, reducer: Reducer) -> list[list[int]]:
        how = {"split": None, "rank": store.rank, "num_workers": store.num_workers, **options}
        mine, part = divide(make(store.rank), "training", reducer=reducer, **how)
        read = []
        for epoch in range(epochs):
            store.barrier()  # workers are threads here: one that still begins an epoch draws from the same generator
            if part is not None:
                require_same_order(part, epoch, reducer)
            for inputs, _ in mine:
                read.append(inputs[:, 0].int().tolist())
        return read

    return run(pair, work)


def counts(read: list[Any]) -> Counter[int]:
    return Counter(number for batches in read for batch in batches for number in batch)


def own_numbers() -> float:
    return float(OWN.random())


OWN = np.random.default_rng()
DIVIDED: dict[str, Callable[[int], Any]] = {
    "shuffle": lambda rank: loader(shuffle=True),
    "a generator of the program's": lambda rank: loader(shuffle=True, generator=torch.Generator().manual_seed(rank)),
    "in order": lambda rank: loader(),
    "a sampler of its own": lambda rank: loader(sampler=Shuffled(COUNT)),
    "a sampler with random numbers of its own": lambda rank: loader(sampler=Shuffled(COUNT, np.random.default_rng(3))),
    "batches": lambda rank: DataLoader(Numbers(), batch_sampler=BatchSampler(Shuffled(COUNT), 4, False)),
    "a whole epoch as one part": lambda rank: loader(sampler=SplitSampler(COUNT)),
    "random samples": lambda rank: loader(Numbers(drawn=lambda: float(torch.rand(())) + random.random())),
    "random samples by a generator of their own": lambda rank: loader(Numbers(drawn=own_numbers)),
}
LEFT: dict[str, Callable[[int], Any]] = {
    "a split sampler": lambda rank: loader(sampler=SplitSampler(COUNT, 2, rank)),
    "split batches": lambda rank: DataLoader(Numbers(), batch_sampler=SplitBatchSampler(COUNT, 4, 2, rank)),
    "torch's": lambda rank: loader(Numbers(range(20)), sampler=DistributedSampler(Numbers(range(20)), 2, rank)),
    "a part of partition_dataset": lambda rank: partition_dataset(Numbers(), 8, rank=rank, size=2)[0],
    "a subset": lambda rank: loader(Subset(Numbers(), range(rank, 20, 2)), shuffle=True),
    "other labels of random samples": lambda rank: loader(Numbers(range(rank * 10, rank * 10 + 10), drawn=own_numbers)),
    "other samples": lambda rank: loader(Numbers(range(rank * 10, rank * 10 + 10)), shuffle=True),
}
OTHER: dict[str, Callable[[int], Any]] = {
    "an iterable": lambda rank: loader(Stream()),
    "a list of batches": lambda rank: list(loader()),
    "a loader of its own": lambda rank: OwnLoader(Numbers(), batch_size=4),
}


@pytest.mark.parametrize("kind", DIVIDED)
def test_what_is_the_same_everywhere_comes_once_over_all_workers(pair: ThreadedJob, kind: str) -> None:
    read = divided_data(pair, DIVIDED[kind])
    assert counts(read) == dict.fromkeys(range(COUNT), 2)
    assert all(counts([mine]) for mine in read)


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_divided_already_is_left_alone(pair: ThreadedJob, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert set(counts(divided_data(pair, LEFT[kind])).values()) == {2}
    (line,) = [message for message in caplog.messages if "training data" in message]
    assert "is left as it is: the workers'" in line
    assert " differ; " in line


@pytest.mark.parametrize("kind", OTHER)
def test_data_that_cannot_be_divided_is_left_alone_and_a_line_says_so(
    pair: ThreadedJob, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert counts(divided_data(pair, OTHER[kind])) == dict.fromkeys(range(COUNT), 4)
    (line,) = [message for message in caplog.messages if "training data" in message]
    assert "is left as it is: a " in line
    with pytest.raises(kv.UsageError, match="split=True, but the training data cannot be divided: a "):
        divided_data(pair, OTHER[kind], split=True)
    assert counts(divided_data(pair, DIVIDED["shuffle"], split=False)) == dict.fromkeys(range(COUNT), 4)


@pytest.mark.parametrize(
    "sampler",
    [SplitSampler(COUNT, 2, 0), DistributedSampler(Numbers(), 2, 0)],
    ids=lambda sampler: type(sampler).__name__,
)
def test_the_same_part_on_every_worker_is_an_error(pair: ThreadedJob, sampler: Any) -> None:
    with pytest.raises(kv.UsageError, match="every worker has been given the same part of 2 of the training data"):
        divided_data(pair, lambda rank: loader(sampler=sampler))


def test_draws_are_divided_not_multiplied(pair: ThreadedJob) -> None:
    read = divided_data(pair, lambda rank: loader(sampler=WeightedRandomSampler([1.0] * COUNT, 30)), epochs=1)
    assert counts(read).total() == 30
    read = divided_data(pair, lambda rank: loader(sampler=SubsetRandomSampler(range(7))))
    assert counts(read) == dict.fromkeys(range(7), 2)


def test_steps_are_those_of_one_process_with_the_joined_batches(pair: ThreadedJob) -> None:
    first, second = divided_data(pair, lambda rank: loader(Numbers(range(16))), epochs=1)
    assert [sorted(one + two) for one, two in zip(first, second, strict=True)] == [[*range(8)], [*range(8, 16)]]


def test_parts_of_even_size(pair: ThreadedJob) -> None:
    first, second = divided_data(pair, DIVIDED["in order"], epochs=1, even_size=True)
    assert (counts([first]).total(), counts([second]).total()) == (11, 11)
    assert set(counts([first, second])) == set(range(COUNT))


def test_a_sampler_whose_order_parts_later_is_an_error(pair: ThreadedJob) -> None:
    class Drifting(Shuffled):
        rank, read = 0, 0

        def __iter__(self) -> Iterator[int]:
            self.read += 1
            return iter(range(COUNT) if self.read * self.rank < 2 else reversed(range(COUNT)))

    def make(rank: int) -> Any:
        sampler = Drifting(COUNT)
        sampler.rank = rank
        return loader(sampler=sampler)

    assert counts(divided_data(pair, make, epochs=1)) == dict.fromkeys(range(COUNT), 1)
    with pytest.raises(kv.UsageError, match="a Drifting, gives another order on other workers in epoch 1"):
        divided_data(pair, make)


def test_one_worker_keeps_its_loader() -> None:
    mine = loader(shuffle=True)
    with Reducer("local") as reducer:
        assert divide(mine, "training", True, reducer, 0, 1).data is mine


def test_drawing_an_order_changes_no_random_state() -> None:
    generator = torch.Generator().manual_seed(5)

    def states() -> list[Any]:
        words = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
        return [torch.get_rng_state().tolist(), generator.get_state().tolist(), words, random.getstate()]

    before = states()
    dataset = Numbers()
    for sampler in (RandomSampler(dataset, generator=generator), Shuffled(COUNT), SequentialSampler(dataset)):
        assert list(draw(sampler, 1, 2)) == list(draw(sampler, 1, 2))
    assert list(draw(Shuffled(COUNT), 1, 2)) != list(draw(Shuffled(COUNT), 1, 3))
    assert list(draw(Shuffled(COUNT), 1, 2)) != list(draw(Shuffled(COUNT), 2, 2))
    assert states() == before


def test_a_position_has_the_seed_and_finds_out_another_order() -> None:
    whole = DividedSampler(Shuffled(COUNT), COUNT, 2, 1, False, seed=7)
    order = list(whole)
    other = DividedSampler(Shuffled(COUNT), COUNT, 2, 1, False, seed=8)
    assert list(other) != order
    whole.set_epoch(0)
    other.load_state_dict(whole.state_dict(4))
    assert list(other) == order[4:]
    fresh = DividedSampler(Shuffled(COUNT, np.random.default_rng()), COUNT, 2, 1, False, seed=7)
    with pytest.raises(kv.Mismatch, match="a Shuffled, gives another order of epoch 0 than in the run that saved it"):
        fresh.load_state_dict(whole.state_dict(4))


# ---- whole trainings


class Seen(nn.Linear):
    """A model that notes its samples."""

    def __init__(self) -> None:
        super().__init__(2, COUNT)
        self.seen: dict[bool, list[int]] = {True: [], False: []}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen[self.training] += inputs[:, 0].int().tolist()
        return super().forward(inputs / COUNT)


@pytest.mark.parametrize(
    ("mode", "how"),
    [("sync", {}), ("sync", {"diloco": {"inner_steps": 2}}), ("sync", {"update_on_kvstore": False}), ("async", {})],
)
def test_a_script_for_one_process_trains_on_each_sample_once(
    pair: ThreadedJob, mode: str, how: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def work(store: kv.KVStore, reducer: Reducer) -> dict[bool, list[int]]:
        model = Seen()
        data = DataLoader(Numbers(range(20)), 4, shuffle=True)
        fit(model, data, loader(), num_epoch=2, kvstore=store, reducer=reducer, **how)
        return model.seen

    first, second = run(pair, work, mode)
    assert Counter(first[True] + second[True]) == dict.fromkeys(range(20), 2)
    assert Counter(first[False] + second[False]) == dict.fromkeys(range(COUNT), 2)
    said = [message for message in caplog.messages if " data is " in message]
    assert said == [
        "The training data is the same on all 2 workers, and each takes its own part; each worker has 10 samples",
        "The validation data is the same on all 2 workers, and each takes its own part; worker 0 has 11 of 21 samples",
    ]


def test_metrics_of_divided_data_are_those_of_all_of_it(pair: ThreadedJob) -> None:
    def work(split: Any) -> Any:
        def worker(store: kv.KVStore, reducer: Reducer) -> Any:
            how = {"num_epoch": 1, "kvstore": store, "reducer": reducer, "optimizer_params": {"learning_rate": 0.0}}
            held_out = DataLoader(samples(23), 4)
            return fit(network(batch_norm=False), held_out, held_out, ["acc", "ce"], split=split, **how)[0]

        return run(pair, worker)

    whole, parts = work(False), work("auto")
    assert parts[0] == parts[1] == pytest.approx(whole[0])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("stateful", [False, True])
def test_a_resumed_run_keeps_the_division_and_its_seed(pair: ThreadedJob, tmp_path: Path, stateful: bool) -> None:
    prefix, kind = str(tmp_path / "model"), DataLoader
    if stateful:
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def work(store: kv.KVStore, reducer: Reducer, resume: Checkpoint | None = None) -> Any:
        model = network(seed=3)
        data = kind(samples(40), 4, shuffle=True, generator=torch.Generator().manual_seed(9 if resume else 5))
        how: dict[str, Any] = {"num_epoch": 3, "kvstore": store, "reducer": reducer, "resume": resume}
        if resume:
            next(iter(data))
        else:
            how["epoch_end_callback"] = callbacks.do_checkpoint(prefix)
            how["batch_end_callback"] = callbacks.do_batch_checkpoint(prefix, 1)
        history = fit(model, data, DataLoader(samples(9), 4, shuffle=True), optimizer_params=SGD, **how)
        return state(model), [values["train-accuracy"] for values in history]

    torch.manual_seed(0)
    require_resumable(pair, work, prefix, [(1, 2)] if stateful else [(1, 0), (1, 2), (1, 4)])


def test_other_values_of_split_are_refused() -> None:
    data = DataLoader(TensorDataset(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long)), 4)
    with pytest.raises(kv.UsageError, match="split='yes' must be True, False or 'auto'"):
        fit(network(), data, num_epoch=1, split="yes")
