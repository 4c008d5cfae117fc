"""The formula of the factorization machine, beside all pairs."""

from __future__ import annotations

from itertools import combinations

import torch
from fm.machine import logits


def test_it_is_the_sum_over_all_pairs() -> None:
    torch.manual_seed(0)
    values, linear, factors = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4, 2)
    expected = 0.5 + (linear * values).sum(dim=1)
    for first, second in combinations(range(4), 2):
        products = (factors[:, first] * factors[:, second]).sum(dim=1)
        expected = expected + products * values[:, first] * values[:, second]
    torch.testing.assert_close(logits(values, linear, factors, torch.tensor([0.5])), expected)


def test_features_with_a_value_of_zero_change_nothing() -> None:
    values, linear, factors = torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2, 3)
    padded = torch.tensor([[1.0, 1.0, 0.0]])
    more = (torch.full((1, 3), 1.0), torch.full((1, 3, 3), 1.0))
    assert torch.equal(logits(padded, *more, torch.zeros(1)), logits(values, linear, factors, torch.zeros(1)))
