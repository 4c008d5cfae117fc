"""A budget of time."""

from __future__ import annotations

import random

import pytest

from kvstore.transport.sockets.budget import Budget


@pytest.fixture
def budget() -> Budget:
    return Budget(share=0.1, burst_s=2.0, least_s=0.5)


def test_as_much_as_is_saved_may_be_spent_at_once(budget: Budget):
    assert budget.spend(1.0, 100.0)
    assert budget.spend(0.9, 100.0)
    assert not budget.spend(0.1, 100.0)


def test_it_grows_with_time_and_not_for_ever(budget: Budget):
    assert not budget.spend(2.0, 100.0)
    assert budget.spend(0.9, 110.0), "a tenth of ten seconds is one"
    assert budget.spend(0.0, 1000.0)
    assert budget.spend(1.5, 1000.0)
    assert not budget.spend(0.5, 1000.0), "two seconds, though more time has passed"


@pytest.mark.parametrize(("spent", "waits"), [(2.0, 5.0), (2.5, 10.0), (12.0, 105.0)])
def test_a_debt_is_paid_off_first(budget: Budget, spent: float, waits: float):
    assert not budget.spend(spent, 100.0)
    assert budget.due() == pytest.approx(100.0 + waits)
    assert not budget.spend(0.0, budget.due() - 5.1)
    assert budget.spend(0.0, 100.0 + waits)


def test_what_is_given_back_may_be_spent_again_and_no_more_is_saved(budget: Budget):
    assert budget.spend(1.5, 100.0)
    budget.refund(1.0)
    assert budget.spend(1.4, 100.0)
    budget.refund(9.0)
    assert not budget.spend(2.0, 100.0)


@pytest.mark.parametrize("seed", range(5))
def test_in_the_long_run_no_more_than_the_share_is_spent(seed: int):
    dice, budget, now, spent, largest = random.Random(seed), Budget(0.02, 1.0, 0.001), 50.0, 0.0, 0.1
    while now < 1050.0:
        cost = dice.random() ** 4 * largest
        now, spent = now + cost, spent + cost
        if not budget.spend(cost, now):
            now = budget.due()
    assert 19.0 <= spent <= 1.0 + 0.02 * 1001.0 + largest
