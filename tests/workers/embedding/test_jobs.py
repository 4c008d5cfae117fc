"""The modules in jobs of two workers: as one process with all samples; lookahead; uneven workers; whole tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
import workers
from kvstore.client import DistStore
from workers import Trainer

STEPS = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThreadedJob]:
    with ThreadedJob(workers=2, servers=2) as cluster:
        yield cluster


class Recommender(nn.Module):
    """Scores of pairs of an item and a bag of users' ids."""

    def __init__(self, store: Any, optimizer: str | None = "adam") -> None:
        super().__init__()
        if optimizer is not None:
            store.set_optimizer(optimizer, learning_rate=0.05)
        self.item = workers.Embedding(30, 4, store=store, key="item", scale=0.5)
        self.user = workers.EmbeddingBag(None, 4, store=store, key="user", scale=0.5, mode="sum")
        self.head = nn.Linear(4, 1)
        with torch.no_grad():  # not at random: workers are threads here
            self.head.weight.copy_(torch.tensor([[0.5, -0.25, 0.75, -1.0]]))
            self.head.bias.zero_()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.item(batch[:, 0]) * self.user(batch[:, 1:] * 10**10))
        return scores


def batches(rank: int | None, steps: int = STEPS) -> list[torch.Tensor]:
    """All samples of each step, or those of one of two workers."""
    generator = torch.Generator().manual_seed(7)
    whole = [torch.randint(0, 30, (8, 3), generator=generator) for _ in range(steps)]
    return whole if rank is None else [batch[rank::2] for batch in whole]


def ahead(model: Recommender, data: Any) -> Any:
    return workers.lookahead(
        data, {model.item: lambda batch: batch[:, 0], model.user: lambda batch: batch[:, 1:] * 10**10}
    )


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    target = (batch.sum(1, keepdim=True) % 2).float()
    return nn.functional.binary_cross_entropy_with_logits(model(batch), target)


def train(store: Any, rank: int | None, lookahead: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Train tables and head in one store; return all that the model has."""
    model = Recommender(store, None)
    trainer = Trainer(model.named_parameters(), "adam", {"learning_rate": 0.05}, kvstore=store, **options)
    data = batches(rank)
    for batch in ahead(model, data) if lookahead else data:
        trainer.zero_grad()
        loss_of(model, batch).backward()
        trainer.step()
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    return train(kv.create("local"), None, update_on_kvstore=True)


def test_two_workers_are_as_one_with_all_samples(cluster: ThreadedJob, alone: dict[str, torch.Tensor]) -> None:
    first, second = cluster.run(lambda store: train(store, store.rank))
    assert equal(first, second)
    assert first["user.ids"].tolist() == alone["user.ids"].tolist()
    for name in alone:
        torch.testing.assert_close(first[name], alone[name], rtol=0, atol=2e-5)
    third, _ = cluster.run(lambda store: train(store, store.rank, lookahead=True))
    assert equal(first, third)


def test_workers_with_fewer_batches_or_without_tables_in_a_step(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> dict[str, torch.Tensor]:
        model = Recommender(store, None)
        trainer = Trainer(model.named_parameters(), "adam", {"learning_rate": 0.05}, kvstore=store)
        for _ in range(2):
            for number, batch in enumerate(ahead(model, batches(store.rank)[: 3 + 2 * store.rank])):
                trainer.zero_grad()
                if number == 1 and store.rank == 0:
                    model.head(torch.ones(1, 4)).sum().backward()
                else:
                    loss_of(model, batch).backward()
                trainer.step()
            trainer.join()
        state: dict[str, torch.Tensor] = model.state_dict()
        return state

    assert equal(*cluster.run(work))


def test_rank_0_loads_for_all(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> dict[str, torch.Tensor]:
        model = Recommender(store)
        state = {
            "item.weight": torch.full((30, 4), 5.0 + store.rank),
            "user.ids": torch.tensor([3, 2**50]),
            "user.rows": torch.full((2, 4), 7.0 + store.rank),
            **model.head.state_dict(prefix="head."),
        }
        model.load_state_dict(state)
        loaded: dict[str, torch.Tensor] = model.state_dict()
        return loaded

    first, second = cluster.run(work)
    assert equal(first, second)
    assert first["item.weight"].unique().tolist() == [5]
    assert (first["user.ids"].tolist(), first["user.rows"].unique().tolist()) == ([3, 2**50], [7])


@pytest.mark.parametrize("stale", [0, 1])
def test_asynchronous_workers_find_the_signal(cluster: ThreadedJob, stale: int) -> None:
    def work(store: DistStore) -> tuple[float, float]:
        model = Recommender(store)
        (batch,) = batches(store.rank, 1)
        before = float(loss_of(model.eval(), batch).detach())
        model.train()
        for each in workers.lookahead([batch] * 30, {model.item: lambda batch: batch[:, 0]}, stale=stale):
            loss_of(model, each).backward()
        store.barrier()
        return before, float(loss_of(model.eval(), batch).detach())

    for before, after in cluster.run(work, mode="async"):
        assert after < 0.7 * before


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_steps_divide_rows_by_their_batch_size_as_they_do_arrays(cluster: ThreadedJob, mode: str) -> None:
    def work(store: DistStore) -> list[float]:
        dense, rows = nn.Parameter(torch.zeros(1)), workers.Embedding(4, 1, store=store, key="rows", init="zeros")
        trainer = Trainer({"dense": dense}, "sgd", {"lr": 1.0, "rescale_grad": 0.5}, kvstore=store)
        for size in (16, 3, None):
            trainer.zero_grad()
            with trainer.no_sync():
                (rows(torch.ones(5, dtype=torch.long)).sum() + 5 * dense.sum()).backward()
            (rows(torch.ones(3, dtype=torch.long)).sum() + 3 * dense.sum()).backward()
            trainer.step(size)
        store.barrier()
        with torch.no_grad():
            row = rows(torch.tensor([1])).item()
        store.pull("dense", dense)
        assert row == dense.item()
        return [row]

    first, second = cluster.run(work, mode=mode)
    assert first == second == [pytest.approx(-0.5 * 16 * (1 / 16 + 1 / 3 + 1 / 2), abs=1e-5)]


def test_workers_must_freeze_the_same_tables(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> tuple[int, int]:
        store.set_optimizer("sgd", learning_rate=1.0)
        first, second = (workers.Embedding(4, 1, store=store, key=key, init="zeros") for key in "ab")
        for step in range(4):
            first.requires_grad_(step == 0)
            (first([1]).sum() + second([1]).sum()).backward()
        assert [first([1]).item(), second([1]).item()] == [-1, -4]
        versions = tuple(store.table_statistics(key)["version"] for key in "ab")
        second.requires_grad_(store.rank > 0)
        first.requires_grad_(True)

        def meet() -> None:
            (first([1]).sum() + second([1]).sum()).backward()
            store.close()  # which waits for the round

        with pytest.raises(kv.Mismatch, match=r"rescale_grad .* round of 'b': 0 \(frozen there\) on worker 0, 0.5 on"):
            meet()
        return versions

    assert cluster.run(work) == [(2, 4), (2, 4)]  # each change of what is frozen is one round


def test_rows_that_another_worker_has_replaced_before_a_barrier_are_pulled_again(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> list[float]:
        store.set_optimizer("sgd", learning_rate=1.0)
        module = workers.Embedding(4, 1, store=store, key="rows", init="zeros")
        seen = []
        for step, batch in enumerate(workers.lookahead([torch.tensor([1])] * 3, {module: lambda batch: batch})):
            if step == 1:
                store.barrier()
                if store.rank == 0:
                    store.put_rows("rows", kv.RowSparse([1], torch.full((1, 1), 5.0)))
                store.barrier()
            rows = module(batch)
            seen.append(rows.item())
            rows.sum().backward()
        return seen

    assert cluster.run(work) == [[0, 5, 4]] * 2
