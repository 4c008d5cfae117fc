"""The network."""

from __future__ import annotations

import math

import pytest
import torch
from lm.transformer import Transformer


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(characters=5, context=8, layers=2, heads=2, width=16)


def test_no_position_sees_what_follows(model):
    numbers = torch.randint(5, (1, 8))
    changed = numbers.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 5
    before, after = model(numbers), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-6)


def test_it_begins_by_knowing_nothing(model):
    loss = model.loss(torch.randint(5, (4, 8)), torch.randint(5, (4, 8)))
    assert loss.item() == pytest.approx(math.log(5), abs=0.1)


def test_a_sample_is_as_long_as_asked_and_repeatable(model):
    start = torch.tensor([1, 2])
    first = model.sample(start, 20, 1.0, seed=3)
    assert len(first) == 20
    assert first == model.sample(start, 20, 1.0, seed=3)
    assert first != model.sample(start, 20, 1.0, seed=4)
