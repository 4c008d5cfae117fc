"""``ElasticSampler`` in torch's loaders, over a store of one process that workers take turns to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import kvstore as kv
from kvstore import UsageError
from kvstore.shares import Share, Shares
from workers import ElasticSampler
from workers.fitting.fit import fit

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
