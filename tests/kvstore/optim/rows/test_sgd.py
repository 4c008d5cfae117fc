"""SGD on rows: torch's of sparse gradients to the bit, and lazy momentum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stepped_rows import Stepped, sparse_batches, step_torchs

from kvstore.optim.tensorwise import eager


def test_without_momentum_it_is_torchs_of_sparse_gradients_to_the_bit() -> None:
    first = torch.randn(50, 10)
    weight = first.clone().requires_grad_()
    torchs = eager(torch.optim.SGD)([weight], lr=0.05)
    ours = Stepped("sgd", first, lr=0.05)
    for ids, grads in sparse_batches(first, 20):
        step_torchs(torchs, weight, ids, grads)
        ours.step(ids, grads)
    assert torch.equal(ours.weight, weight.detach())
    assert not ours.states


@pytest.mark.parametrize(
    "hyper",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
    ],
)
def test_of_all_rows_it_is_torchs(hyper: dict[str, Any]) -> None:
    Stepped.require_as_torch("sgd", eager(torch.optim.SGD), lr=0.05, **hyper)


def test_nag_has_nesterovs_momentum() -> None:
    rows = Stepped("nag", torch.zeros(1, 2), lr=0.5, momentum=0.5)
    rows.step([0], torch.ones(1, 2))
    assert rows.weight.tolist() == [[-0.75, -0.75]]


def test_momentum_as_mxnets_keeps_the_rate_of_each_step() -> None:
    rows = Stepped("sgd", torch.zeros(1, 1), lr=1.0, momentum=0.5, momentum_style="mxnet")
    rows.step([0], torch.ones(1, 1))
    rows.step([0], torch.ones(1, 1), lr=0.0)
    assert rows.weight.tolist() == [[-1.5]]
    assert rows.states["momentum_buffer"].tolist() == [[0.5]]


def test_a_row_without_a_gradient_keeps_its_momentum() -> None:
    rows = Stepped("sgd", torch.zeros(2, 1), lr=1.0, momentum=0.5)
    rows.step([0, 1], torch.ones(2, 1))
    rows.step([0], torch.ones(1, 1))
    assert rows.weight.tolist() == [[-2.5], [-1.0]]
    assert rows.states["momentum_buffer"].tolist() == [[1.5], [1.0]]
