"""Our own optimizers on rows: where every row has a gradient, they are what they are on a matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stepped_rows import Stepped, sparse_batches

from kvstore.optim.optimizer import find


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("adabelief", {"weight_decay": 0.1}),
        ("ftrl", {"lamda1": 0.1, "beta": 0.5, "weight_decay": 0.1}),
        ("groupadagrad", {}),
        ("rowwiseadagrad", {"initial_accumulator_value": 0.5, "weight_decay": 0.1}),
        ("rowwiseadam", {"weight_decay": 0.1}),
    ],
)
def test_of_all_rows_it_is_that_of_a_matrix(name: str, hyper: dict[str, Any]) -> None:
    Stepped.require_as_torch(name, find(name).cls, lr=0.05, **hyper)


@pytest.mark.parametrize("name", ["adabelief", "ftrl", "groupadagrad", "rowwiseadagrad", "rowwiseadam"])
def test_rows_without_a_gradient_stay(name: str) -> None:
    first = torch.randn(50, 6)
    rows = Stepped(name, first, lr=0.05)
    rows.step([3, 7], torch.randn(2, 6))
    changed = (rows.weight != first).any(dim=1).nonzero().flatten().tolist()
    assert changed == [3, 7]
    for state in rows.states.values():
        assert (state != 0).any(dim=1).nonzero().flatten().tolist() == [3, 7]


def test_ftrl_makes_small_weights_zero() -> None:
    rows = Stepped("ftrl", torch.full((2, 3), 0.01), lr=0.1, lamda1=1.0)
    for ids, grads in sparse_batches(rows.weight, 1):
        rows.step(ids, grads * 1e-3)
        assert not rows.weight[ids].any()
