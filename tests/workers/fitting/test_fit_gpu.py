"""fit on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from fitted import SGD, loader, network, state

from workers import fit


@pytest.mark.gpu
def test_a_model_on_a_gpu_learns_as_one_on_the_cpu(cuda: torch.device) -> None:
    here, there = network(), network().to(cuda)
    expected = fit(here, loader(16, 4), loader(6, 3), num_epoch=2, optimizer_params=SGD)
    assert fit(there, loader(16, 4), loader(6, 3), num_epoch=2, optimizer_params=SGD) == expected
    for name, tensor in state(here).items():
        torch.testing.assert_close(state(there)[name].cpu(), tensor, rtol=1e-3, atol=1e-4)
