"""nn.Embedding(sparse=True) under a Trainer, against torch with all samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.dist import DistStore
from kvstore.rule import Rule
from workers import Trainer

STEPS = 4
BOTH = pytest.mark.parametrize("on_store", [True, False], ids=["on the store", "in the worker"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 8)
        self.out = nn.Linear(8, 1)
        generator = torch.Generator().manual_seed(0)  # of its own: workers are threads here
        for param in self.parameters():
            nn.init.uniform_(param, -0.5, 0.5, generator=generator)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.head(self.bag(ids)))
        return scores


def ids_of(step: int, rank: int | None) -> torch.Tensor:
    ids = torch.randint(0, 30, (8, 3), generator=torch.Generator().manual_seed(step))
    return ids if rank is None else ids[rank::2]


def backward(model: nn.Module, step: int, rank: int | None) -> None:
    (model(ids_of(step, rank)) - 1).square().mean().backward()


def torchs(steps: int = STEPS) -> Model:
    model = Model()
    sparse = torch.optim.SparseAdam(model.bag.parameters(), lr=0.05)
    dense = torch.optim.Adam([*model.head.parameters(), *model.out.parameters()], lr=0.05)
    for step in range(steps):
        model.zero_grad()
        backward(model, step, None)
        sparse.step()
        dense.step()
    return model


def trainer_of(model: Model, store: Any, **options: Any) -> Trainer:
    return Trainer(model.named_parameters(), "adam", {"learning_rate": 0.05}, kvstore=store, **options)


def run(model: Model, trainer: Trainer, steps: range = range(STEPS), rank: int | None = None) -> Model:
    for step in steps:
        trainer.zero_grad()
        backward(model, step, rank)
        trainer.step()
    return model


def same(one: nn.Module, two: nn.Module, atol: float = 0.0) -> None:
    for ours, theirs in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "options",
    [
        {"store": None},
        {"store": "local", "update_on_kvstore": True},
        {"store": "device", "update_on_kvstore": True},
        {"store": "local", "update_on_kvstore": False},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_one_worker_does_as_torch_and_continues_from_a_file(options: dict[str, Any], tmp_path: Path) -> None:
    model = Model()
    trainer = trainer_of(model, **options)
    same(run(model, trainer, range(2)), torchs(2), atol=1e-6)
    trainer.save_states(tmp_path / "states")
    again = Model()
    again.load_state_dict(model.state_dict())
    second = trainer_of(again, **options)
    second.load_states(tmp_path / "states")
    same(run(again, second, range(2, STEPS)), torchs(), atol=1e-6)


def test_parameters_by_number_and_on_two_devices() -> None:
    models = [Model(), Model()]
    trainer = Trainer(
        [list(model.parameters()) for model in models],
        "adam",
        {"learning_rate": 0.05},
        kvstore="device",
        update_on_kvstore=True,
    )
    for step in range(STEPS):
        trainer.zero_grad()
        for rank, model in enumerate(models):
            backward(model, step, rank)
        trainer.step()
    same(*models)
    same(models[0], torchs(), atol=1e-5)


@BOTH
@pytest.mark.parametrize("overlap", [False, True])
def test_two_workers_are_as_one(cluster: ThreadedJob, on_store: bool, overlap: bool) -> None:
    def work(store: DistStore) -> Model:
        model = Model()
        if store.rank:
            nn.init.zeros_(model.bag.weight)
        return run(model, trainer_of(model, store, update_on_kvstore=on_store, overlap=overlap), rank=store.rank)

    first, second = cluster.run(work)
    same(first, second)
    same(first, torchs(), atol=1e-5)


@BOTH
def test_steps_in_which_not_all_workers_have_a_gradient(cluster: ThreadedJob, on_store: bool) -> None:
    def work(store: DistStore) -> Model:
        model = Model()
        trainer = trainer_of(model, store, update_on_kvstore=on_store)
        for step, reached in enumerate((store.rank == 1, False, store.rank == 0, True)):
            trainer.zero_grad()
            if reached:
                backward(model, step, store.rank)
            else:
                model.out(model.head(torch.ones(1, 4))).sum().backward()
            trainer.step(ignore_stale_grad=True)
        return model

    same(*cluster.run(work))


def test_workers_with_fewer_batches(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> Model:
        model = Model()
        trainer = trainer_of(model, store)
        for _ in range(2):
            run(model, trainer, range(1 + 2 * store.rank), store.rank)
            trainer.join()
        return model

    same(*cluster.run(work))


def test_stores_without_full_rounds_are_refused(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> None:
        model = Model()
        run(model, trainer_of(model, store), rank=store.rank)

    for rule in (Rule("async"), Rule(quorum=1)):
        with pytest.raises(kv.UsageError, match=r"gradient of 'bag.weight' is sparse, .* use workers.Embedding"):
            cluster.run(work, mode=rule.mode, rule=rule)


def test_optimizers_without_a_rule_for_rows() -> None:
    model = Model()
    trainer = Trainer(model.named_parameters(), "rmsprop", kvstore=None)
    with pytest.raises(kv.KVStoreError, match="rmsprop"):
        run(model, trainer)


def test_sparse_gradients_are_not_clipped() -> None:
    model = Model()
    trainer = trainer_of(model, "local", update_on_kvstore=True)
    backward(model, 0, None)
    with pytest.raises(kv.Unsupported, match=r"that of 'bag.weight' is sparse"):
        trainer.clip_grad_norm_(1.0)
