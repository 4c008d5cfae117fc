"""Random numbers that follow from a seed, a key and a step."""

from __future__ import annotations

import pytest
import torch

from kvstore.codecs import base
from kvstore.codecs.base import Noise


def filled(size: int, step: int = 0) -> torch.Tensor:
    out = torch.full((size,), 9.0)
    Noise(1, "w", step).fill(out)
    return out


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1000])
def test_any_number_is_filled_the_same_each_time(size: int) -> None:
    assert torch.equal(filled(size), filled(size))
    assert bool(((filled(size) >= 0) & (filled(size) < 1)).all())


def test_they_are_uniform() -> None:
    values = filled(100_000)
    counts = torch.histc(values, 10, 0.0, 1.0)
    assert bool((counts - 10_000).abs().max() < 500)
    assert not torch.equal(values, filled(100_000, step=1))


def test_other_devices_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = filled(1000)
    monkeypatch.setattr(base, "on_host", lambda tensor: False)
    there = filled(1000)
    assert torch.equal(there, filled(1000))
    assert not torch.equal(here, there)
    assert bool(((there >= 0) & (there < 1)).all())


def test_normal_and_uniform_numbers_have_the_shape_that_was_asked_for() -> None:
    normal, uniform = Noise(1, "w", 0).normal(3, 1000), Noise(1, "w", 0).uniform(5)
    assert (normal.shape, normal.dtype) == ((3, 1000), torch.float32)
    assert abs(float(normal.mean())) < 0.1
    assert abs(float(normal.std()) - 1) < 0.1
    assert (uniform.shape, uniform.dtype) == ((5,), torch.float64)
