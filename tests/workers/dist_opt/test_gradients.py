"""The gradients that are sent: of which parameters, and which cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from singa import alone, loss_of
from torch import nn

import kvstore as kv
from workers import DistOpt


def test_not_an_optimizer() -> None:
    with pytest.raises(kv.UsageError, match=r"such as torch.optim.SGD\(model.parameters\(\), lr=0.005\), not str"):
        DistOpt("sgd")  # type: ignore[arg-type]
    with pytest.raises(kv.UsageError, match="no parameter that requires a gradient"):
        DistOpt(torch.optim.SGD([torch.ones(2)], lr=0.1), "local")


def test_workers_with_other_parameters(run: Any) -> None:
    def work(rank: int) -> None:
        model = nn.Linear(2, 2 + rank)
        with pytest.raises(kv.Mismatch, match=f"worker {1 - rank}'s optimizer has different parameters"):
            DistOpt(torch.optim.SGD(model.parameters(), lr=0.1), "dist_sync")

    run(work)


def test_parameters_that_came_later_and_sparse_gradients() -> None:
    model, sgd = alone()
    sgd.opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(kv.UsageError, match="the optimizer's parameters, or their requires_grad, have changed"):
        sgd.backward_and_update(loss_of(model, 0, 0))
    table = nn.Embedding(3, 2, sparse=True)
    sgd = DistOpt(torch.optim.SGD(table.parameters(), lr=0.1), "local")
    with pytest.raises(
        kv.UsageError, match=r"a parameter of shape \[3, 2\] is sparse: create its layer with sparse=False"
    ):
        sgd.backward_and_update(table(torch.tensor([1])).sum())
