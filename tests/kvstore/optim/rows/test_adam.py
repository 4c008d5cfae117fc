"""Adam on rows: torch's SparseAdam to the bit, AdamW where every row has a gradient."""

from __future__ import annotations

import pytest
import torch
from stepped_rows import Stepped, sparse_batches, step_torchs

from kvstore.optim.tensorwise import eager

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 10, 64])
def test_adam_is_torchs_sparse_adam_to_the_bit(dtype: torch.dtype, width: int) -> None:
    first = torch.randn(50, width, dtype=dtype)
    weight = first.clone().requires_grad_()
    torchs = eager(torch.optim.SparseAdam)([weight], lr=0.01, betas=(0.8, 0.99))
    ours = Stepped("adam", first, lr=0.01, betas=(0.8, 0.99))
    for ids, grads in sparse_batches(first, 30):
        step_torchs(torchs, weight, ids, grads)
        ours.step(ids, grads)
    assert torch.equal(ours.weight, weight.detach())
    assert torch.equal(ours.states["exp_avg"], torchs.state[weight]["exp_avg"])
    assert torch.equal(ours.states["exp_avg_sq"], torchs.state[weight]["exp_avg_sq"])


@pytest.mark.parametrize("hyper", [{}, {"weight_decay": 0.1}, {"amsgrad": True, "maximize": True}])
def test_adamw_of_all_rows_is_torchs(hyper: dict[str, float]) -> None:
    Stepped.require_as_torch("adamw", eager(torch.optim.AdamW), lr=0.01, **hyper)


def test_adam_with_decay_adds_it_to_the_gradient() -> None:
    Stepped.require_as_torch("adam", eager(torch.optim.Adam), lr=0.01, eps=1e-12, weight_decay=0.1, amsgrad=True)
