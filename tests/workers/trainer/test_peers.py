"""What workers ask each other before a step: which parameters are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from joined import BOTH
from threaded import ThreadedJob
from torch import nn

import kvstore as kv
from kvstore.client import DistStore
from workers import Trainer


@BOTH
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_without_a_gradient_are_left_out_by_agreement(
    cluster: ThreadedJob, update_on_kvstore: bool, overlap: bool
) -> None:
    """``both`` has gradients everywhere, ``one`` on worker 0 in every other step, ``none`` nowhere."""
    size = 1 << 18  # more than one bucket

    def work(store: DistStore) -> dict[str, float]:
        params = {name: nn.Parameter(torch.ones(size)) for name in ("none", "one", "both")}
        options = {"lr": 1.0, "wd": 0.5}
        trainer = Trainer(params, "sgd", options, store, update_on_kvstore, overlap=overlap)
        for step in range(3):
            trainer.zero_grad()
            used = params["both"] * 0.5
            if store.rank == 0 and step != 1:
                used = used + params["one"] * 2
            used.sum().backward()
            trainer.step(2, ignore_stale_grad=True)
        return {name: param[-1].item() for name, param in params.items()}

    one = 1.0
    for _ in range(2):
        one -= 2 / 2 + 0.5 * one
    both = 1.0
    for _ in range(3):
        both -= 0.5 + 0.5 * both
    assert cluster.run(work) == [{"none": 1.0, "one": one, "both": both}] * 2


def test_where_every_push_is_an_update_a_weight_left_out_is_read_all_the_same(cluster: ThreadedJob) -> None:
    def work(store: DistStore) -> float:
        params = {name: nn.Parameter(torch.ones(1)) for name in ("a", "b")}
        trainer = Trainer(params, "sgd", {"lr": 1.0}, store)
        for mine in (0, 1):
            if store.rank == mine:
                params["a"].grad = torch.ones(1)
                if store.rank == 0:
                    params["b"].grad = torch.ones(1)
                trainer.step(1, ignore_stale_grad=True)
            store.barrier()
        return params["b"].item()

    assert cluster.run(work, mode="async") == [0, 0]


@pytest.mark.parametrize("how", [{"kvstore": None}, {"kvstore": "device", "update_on_kvstore": True}], ids=str)
def test_alone_too(how: dict[str, Any]) -> None:
    params = {name: nn.Parameter(torch.ones(1)) for name in ("used", "unused", "frozen")}
    params["frozen"].requires_grad_(False)
    trainer = Trainer(params, "sgd", {"lr": 1.0, "wd": 0.5}, **how)
    params["used"].grad = torch.ones(1)
    with pytest.raises(kv.UsageError, match=r"'unused' has no gradient.*ignore_stale_grad=True"):
        trainer.step()
    trainer.step(ignore_stale_grad=True)
    assert {name: param.item() for name, param in params.items()} == {"used": -0.5, "unused": 1, "frozen": 1}
    params["used"].grad = None
    trainer.step(ignore_stale_grad=True)
    assert params["used"].item() == -0.5
