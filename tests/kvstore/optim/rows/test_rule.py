"""What all rules do with gradients before their own formula."""

from __future__ import annotations

import pytest
import torch

from kvstore.optim.row_rules import prepare


@pytest.mark.parametrize(
    ("maximize", "decay", "expected"), [(False, 0.0, 1.0), (True, 0.0, -1.0), (False, 0.5, 2.0), (True, 0.5, 0.0)]
)
def test_gradients_are_turned_round_and_then_decay_is_added(maximize: bool, decay: float, expected: float) -> None:
    rows, grads = torch.full((2, 3), 2.0), torch.ones(2, 3)
    prepare(rows, grads, {"maximize": maximize, "weight_decay": decay})
    assert torch.equal(grads, torch.full((2, 3), expected))
    assert torch.equal(rows, torch.full((2, 3), 2.0))
