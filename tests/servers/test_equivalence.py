"""n workers with batches of b end where one process with batches of n·b does."""

from __future__ import annotations

import itertools

import pytest
import torch
from threaded import ThreadedJob
from torch import nn

from kvstore.client import DistStore
from workers import Trainer

STEPS = 20
BATCH = 8
SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-4}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 5))


def batch(step: int, workers: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1000 + step)
    rows = workers * BATCH
    return torch.randn(rows, 12, generator=draws), torch.randint(0, 5, (rows,), generator=draws)


def alone(workers: int) -> list[torch.Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for step in range(STEPS):
        inputs, labels = batch(step, workers)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("workers", "servers", "update_on_kvstore"),
    [*itertools.product((1, 2, 3), (1, 2, 3), (True,)), (3, 2, False)],
)
def test_n_workers_do_as_one(workers: int, servers: int, update_on_kvstore: bool):
    models = [network(seed=rank) for rank in range(workers)]  # rank 0's weights are the ones that count

    def train(store: DistStore) -> int:
        model = models[store.rank]
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, update_on_kvstore)
        for step in range(STEPS):
            inputs, labels = batch(step, workers)
            mine = slice(store.rank * BATCH, (store.rank + 1) * BATCH)
            trainer.zero_grad()
            mean = step % 2  # a loss that is a mean, or a sum with the size of the whole batch: the same step
            loss = nn.functional.cross_entropy(model(inputs[mine]), labels[mine], reduction="mean" if mean else "sum")
            loss.backward()
            trainer.step(None if mean else workers * BATCH)
        return sum(count > 0 for count in store.statistics().server_bytes)

    with ThreadedJob(workers, servers, bigarray_bound=100) as cluster:
        assert cluster.run(train) == [servers] * workers, "every server holds a part"
    expected = alone(workers)
    start = [parameter.detach() for parameter in network().parameters()]
    assert max((one - two).abs().max() for one, two in zip(expected, start, strict=True)) > 0.05, "nothing was learned"
    for model in models:
        for mine, theirs in zip(model.parameters(), expected, strict=True):
            assert (mine - theirs).abs().max() <= 1e-6
