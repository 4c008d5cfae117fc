"""The learning rate over a run."""

from __future__ import annotations

import pytest
from lm.schedule import learning_rate


def test_the_schedule():
    rates = [learning_rate(step, 100, 10, 1.0, 0.1) for step in range(100)]
    assert rates.index(max(rates)) == 10
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert 0.1 <= rates[-1] < 0.101
