"""Gradients of several backward passes, and tied weights."""

from __future__ import annotations

import torch
from joined import BOTH, SGD, close, loss_of, network, run
from threaded import ThreadedJob
from torch import nn

from kvstore.client import DistStore
from workers import Trainer


@BOTH
def test_gradients_accumulate(cluster: ThreadedJob, update_on_kvstore: bool) -> None:
    def work(model: nn.Module, store: DistStore) -> None:
        trainer = Trainer(model.named_parameters(), "sgd", SGD, store, update_on_kvstore)
        first, middle = 6 * store.rank, 6 * store.rank + 3
        for step in range(4):
            trainer.zero_grad()
            with trainer.no_sync():
                (loss_of(model, step, slice(first, middle)) / 2).backward()
            (loss_of(model, step, slice(middle, middle + 3)) / 2).backward()
            trainer.step()

    theirs = network()
    optimizer = torch.optim.SGD(theirs.parameters(), **SGD)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(theirs, step).backward()
        optimizer.step()
    close(run(cluster, work), theirs)


@BOTH
def test_tied_weights_are_one_key_under_both_names(cluster: ThreadedJob, update_on_kvstore: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight
            nn.init.eye_(self.one.weight)

    models = [Tied(), Tied()]

    def work(store: DistStore) -> int:
        model = models[store.rank]
        named = model.named_parameters(remove_duplicate=False)
        options = {"lr": 1.0, "lr_mult": {"two.weight": 0.5}}
        trainer = Trainer(named, "sgd", options, store, update_on_kvstore)
        model.two(model.one(torch.ones(3))).sum().backward()
        trainer.step(2)
        return store.statistics().keys

    assert cluster.run(work) == [1, 1]
    assert torch.allclose(models[0].one.weight, torch.eye(3) - 0.5 * 2)
    assert models[1].two.weight is models[1].one.weight
