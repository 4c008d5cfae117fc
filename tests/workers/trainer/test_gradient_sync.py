"""A trainer, and modules whose tables are in its store."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

import kvstore as kv
import workers
from workers import Trainer


@pytest.fixture
def parts() -> tuple[Recorded, workers.Embedding, nn.Linear]:
    store = Recorded()
    return store, workers.Embedding(5, 2, store=store, key="t", init="zeros"), nn.Linear(2, 1)


def trainer_of(store: Recorded, head: nn.Linear, **options: Any) -> Trainer:
    return Trainer(head.named_parameters(), "sgd", options, kvstore=store, update_on_kvstore=True)


def test_a_step_pushes_the_rows_that_backward_has_touched(parts: tuple[Recorded, workers.Embedding, nn.Linear]) -> None:
    store, module, head = parts
    trainer = trainer_of(store, head, learning_rate=0.1)
    for ids in ([1, 2], [], [1]):
        trainer.zero_grad()
        head(module(ids) if ids else torch.ones(1, 2)).sum().backward()
        assert store.names() == (["pull"] if ids else [])
        trainer.step()
        assert store.calls == [("push", {"t": len(ids)}, {})]
        store.calls.clear()
    assert store.table_statistics("t")["version"] == 3


@pytest.mark.parametrize("updates", [True, False])
def test_rows_are_divided_by_the_batch_size_as_arrays_are(updates: bool) -> None:
    store = Recorded(learning_rate=1.0, rescale_grad=1.0 if updates else 0.5)
    module, dense = workers.Embedding(5, 1, store=store, key="t", init="zeros"), nn.Parameter(torch.zeros(1))
    trainer = Trainer(
        {"dense": dense}, "sgd", {"lr": 1.0, "rescale_grad": 0.5}, kvstore=store, update_on_kvstore=updates or "auto"
    )
    moved = 0.0
    for size in (8, 3, None, 16):
        trainer.zero_grad()
        (module([1] * 6).sum() + 6 * dense.sum()).backward()
        trainer.step(size)
        moved -= 0.5 * 6 / (size or 1)
        assert dense.item() == pytest.approx(moved)
        assert torch.equal(module([1])[0].detach(), dense.detach())
    with trainer.no_sync():
        (module([1]).sum() + dense.sum()).backward()
    assert store.rescale_grad == (0.5 / 16 if updates else 0.5)  # the program's own pushes are as before


def test_backward_passes_of_a_step_add_up(parts: tuple[Recorded, workers.Embedding, nn.Linear]) -> None:
    store, module, head = parts
    trainer = trainer_of(store, head, learning_rate=1.0)
    with trainer.no_sync():
        (module([1]).sum() + head(torch.ones(1, 2)).sum()).backward()
    (module([1]).sum() + head(torch.ones(1, 2)).sum()).backward()
    module.flush()  # the step knows better
    assert "push" not in store.names()
    trainer.step(4)
    assert store.names() == ["push"]
    assert module([1]).tolist() == [[-0.5] * 2]


@pytest.mark.parametrize("by", ["trainer", "optimizer", "model"])
def test_gradients_that_are_dropped_are_those_of_rows_too(by: str) -> None:
    store = Recorded()
    model = nn.ModuleDict(
        {"table": workers.Embedding(5, 2, store=store, key="t", init="zeros"), "head": nn.Linear(2, 1)}
    )
    module, head = model["table"], model["head"]
    trainer = Trainer(model.named_parameters(), "sgd", {"lr": 1.0}, kvstore=store, update_on_kvstore=True)
    head(module(torch.tensor([1]))).sum().backward()  # of a step that is skipped, for its gradients are not finite
    {"trainer": trainer, "optimizer": trainer.optimizer, "model": model}[by].zero_grad()
    (module(torch.tensor([2])).sum() + head(torch.ones(1, 2)).sum()).backward()
    trainer.step()
    assert module(torch.tensor([1, 2])).tolist() == [[0, 0], [-1, -1]]


def test_rows_with_a_factor_of_their_own_keep_it() -> None:
    store = Recorded()
    module = workers.Embedding(5, 1, store=store, key="t", init="zeros", rescale_grad=0.25)
    head = nn.Linear(1, 1)
    trainer = trainer_of(store, head, learning_rate=1.0)
    (module([1]).sum() + head(torch.ones(1, 1)).sum()).backward()
    trainer.step(8)
    assert module([1]).item() == -0.25


def test_a_store_without_an_optimizer_only_reads_its_tables() -> None:
    store, head = kv.create("local"), nn.Linear(2, 1)
    module = workers.Embedding(5, 2, store=store, key="t", init="zeros").eval()
    trainer = Trainer(head.named_parameters(), "sgd", {"lr": 1.0}, kvstore=store)
    assert not trainer.update_on_kvstore
    head(module([1])).sum().backward()
    trainer.step()


def test_a_trainer_that_has_gone_leaves_pushes_to_backward(
    parts: tuple[Recorded, workers.Embedding, nn.Linear],
) -> None:
    store, module, head = parts
    trainer = Trainer(head.parameters(), "sgd", {"lr": 1.0}, kvstore=store)  # which updates alone
    module([1]).sum().backward()
    assert store.names() == ["pull"]
    del trainer
    gc.collect()
    module([1]).sum().backward()
    assert store.names() == ["pull", "push"]


def test_its_no_sync_is_for_the_tables_too(parts: tuple[Recorded, workers.Embedding, nn.Linear]) -> None:
    store, module, head = parts
    trainer = trainer_of(store, head, learning_rate=0.1)
    with trainer.no_sync():
        module([1]).sum().backward()
        head(module([2])).sum().backward()
    assert store.table_statistics("t")["version"] == 0
    trainer.step()
    assert store.table_statistics("t")["version"] == 1
    assert module([1]).tolist() == [[pytest.approx(-0.1)] * 2]


def test_its_learning_rates_are_the_tables_too(parts: tuple[Recorded, workers.Embedding, nn.Linear]) -> None:
    store, module, head = parts
    trainer = trainer_of(store, head, lr_scheduler=lambda update: float(update))
    before = 0.0
    for update in (1, 2, 3):
        (head(torch.ones(1, 2)).sum() + module([1]).sum()).backward()
        trainer.step()
        after = module([1])[0, 0].item()
        assert before - after == pytest.approx(update)
        before = after
