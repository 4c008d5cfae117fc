"""SGLD: half a step of SGD, and noise whose variance is the rate."""

from __future__ import annotations

import pytest
import torch

from kvstore.optim.layerwise import SGLD


def stepped(generator: torch.Generator | None, rate: float = 0.25) -> torch.Tensor:
    weight = torch.full((100_000,), 2.0)
    weight.grad = torch.ones(100_000)
    SGLD([weight], lr=rate, weight_decay=0.5, generator=generator).step()
    return weight


def test_the_noise_has_the_variance_of_the_rate() -> None:
    noise = stepped(torch.Generator().manual_seed(0)) - (2.0 - 0.25 / 2 * (1 + 0.5 * 2.0))
    assert noise.mean().item() == pytest.approx(0, abs=5 * 0.5 / 100_000**0.5)
    assert noise.std().item() == pytest.approx(0.5, rel=0.01)


def test_a_rate_of_zero_changes_nothing() -> None:
    assert torch.equal(stepped(None, rate=0.0), torch.full((100_000,), 2.0))


def test_two_of_them_have_noise_of_their_own() -> None:
    assert not torch.equal(stepped(None), stepped(None))
