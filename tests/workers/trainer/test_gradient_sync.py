"""A trainer, and modules whose tables are in its store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

import workers
from workers import Trainer


@pytest.fixture
def parts() -> tuple[Recorded, workers.Embedding, nn.Linear]:
    store = Recorded()
    return store, workers.Embedding(5, 2, store=store, key="t", init="zeros"), nn.Linear(2, 1)


def trainer_of(store: Recorded, head: nn.Linear, **options: Any) -> Trainer:
    return Trainer(head.named_parameters(), "sgd", options, kvstore=store, update_on_kvstore=True)


def test_a_step_without_the_tables_pushes_no_rows(parts: tuple[Recorded, workers.Embedding, nn.Linear]) -> None:
    store, module, head = parts
    trainer = trainer_of(store, head, learning_rate=0.1)
    for ids in ([1, 2], None, [1]):
        trainer.zero_grad()
        head(torch.ones(1, 2) if ids is None else module(ids)).sum().backward()
        store.calls.clear()
        trainer.step()
        assert store.calls == ([("push", {"t": 0}, {})] if ids is None else [])
    assert store.table_statistics("t")["version"] == 3


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
