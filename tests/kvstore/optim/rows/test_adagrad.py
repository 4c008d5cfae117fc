"""Adagrad on rows: torch's of sparse gradients, to the bit."""

from __future__ import annotations

import pytest
import torch
from stepped_rows import Stepped, sparse_batches, step_torchs

from kvstore.optim.tensorwise import eager


@pytest.mark.parametrize("width", [1, 10, 64])
def test_it_is_torchs_of_sparse_gradients_to_the_bit(width: int) -> None:
    hyper = {"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.1}
    first = torch.randn(50, width)
    weight = first.clone().requires_grad_()
    torchs = eager(torch.optim.Adagrad)([weight], **hyper)  # type: ignore[arg-type]
    ours = Stepped("adagrad", first, **hyper)
    for ids, grads in sparse_batches(first, 30):
        step_torchs(torchs, weight, ids, grads)
        ours.step(ids, grads)
    assert torch.equal(ours.weight, weight.detach())
    assert torch.equal(ours.states["sum"], torchs.state[weight]["sum"])


def test_decay_is_added_to_the_gradient() -> None:
    Stepped.require_as_torch("adagrad", eager(torch.optim.Adagrad), lr=0.05, weight_decay=0.1, maximize=True)
