"""partition_dataset: every sample once over all workers, in as many batches on each."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

import kvstore as kv
from workers import partition_dataset
from workers.ddp.partition import batch_sizes


class Numbers:
    """Not a torch data set, but has what one has."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Any:
        return np.array([number, 0.5]), number


def parts(samples: int, batch_size: int, size: int, **options: Any) -> list[Any]:
    return [partition_dataset(Numbers(samples), batch_size, rank=rank, size=size, **options)[0] for rank in range(size)]


def labels(loader: Any) -> list[list[int]]:
    return [y.tolist() for _, y in loader]


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 7))
def test_every_sample_comes_once_and_all_have_as_many_batches(samples: int, size: int, each: int) -> None:
    if samples < size:
        return
    read = [loader.batch_sampler for loader in parts(samples, each * size, size)]
    epochs = [[list(sampler) for sampler in read] for _ in range(2)]
    for epoch in epochs:
        assert len({len(batches) for batches in epoch}) == 1
        assert all(1 <= len(batch) <= each for batches in epoch for batch in batches)
        seen = [number for batches in epoch for batch in batches for number in batch]
        assert set(seen) == set(range(samples))
        assert len(seen) == samples or (each == 1 and len(seen) == -(-samples // size) * size)
    assert [len(sampler) for sampler in read] == [len(batches) for batches in epochs[0]]


def test_the_order_is_the_seeds_and_new_in_each_epoch() -> None:
    (one,), (two,), (other,) = parts(50, 8, 1), parts(50, 8, 1), parts(50, 8, 1, seed=7)
    first = labels(one)
    assert first == labels(two)
    assert first != labels(other)
    assert first != labels(one)


def test_a_run_that_goes_on_goes_on_where_it_was() -> None:
    (whole,), (stopped,), (resumed,) = (parts(50, 8, 1) for _ in range(3))
    expected = labels(whole)
    loader = iter(stopped)
    taken = [next(loader)[1].tolist() for _ in range(3)]
    resumed.batch_sampler.load_state_dict(stopped.batch_sampler.state_dict())
    assert taken + labels(resumed) == expected


def test_batches_are_the_workers_part_of_the_batch_size() -> None:
    _, bsz = partition_dataset(Numbers(100), 33, rank=0, size=4)
    assert bsz == 8


def test_floats_get_the_dtype_and_integers_do_not() -> None:
    (loader,) = parts(4, 4, 1, dtype="float32", device="cpu")
    x, y = next(iter(loader))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    (loader,) = parts(4, 4, 1)
    assert next(iter(loader))[0].dtype == torch.float64


def test_samples_of_any_shape_go_to_the_device() -> None:
    Pair = namedtuple("Pair", "x y")
    data = [{"pair": Pair(torch.zeros(2).double(), 1), "name": "a"}] * 3
    loader, _ = partition_dataset(data, 3, dtype=torch.float16, rank=0, size=1)
    batch = next(iter(loader))
    assert isinstance(batch["pair"], Pair)
    assert batch["pair"].x.dtype == torch.float16
    assert batch["name"] == ["a"] * 3
    loader, _ = partition_dataset(TensorDataset(torch.zeros(3, 2)), 3, rank=0, size=1)
    assert next(iter(loader))[0].shape == (3, 2)


def test_what_cannot_be_divided_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(kv.UsageError, match="a Stream cannot be divided"):
        partition_dataset(Stream(), 4, rank=0, size=1)
    with pytest.raises(kv.UsageError, match="3 samples cannot be divided between 4 workers"):
        partition_dataset(Numbers(3), 4, rank=0, size=4)
    with pytest.raises(kv.UsageError, match="must be at least 4"):
        partition_dataset(Numbers(9), 3, rank=0, size=4)
    with pytest.raises(kv.UsageError, match=r"call workers.init\(\) first"):
        partition_dataset(Numbers(9), 3)


@pytest.mark.parametrize(
    ("samples", "batches", "sizes"),
    [(7, 2, [4, 3]), (8, 2, [4, 4]), (8, 3, [4, 3, 1]), (4, 1, [4]), (4, 2, [3, 1])],
)
def test_the_sizes_of_batches(samples: int, batches: int, sizes: list[int]) -> None:
    assert batch_sizes(samples, batches, 4) == sizes
