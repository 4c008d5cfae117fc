"""An evaluation by all workers together."""

from __future__ import annotations

import pytest
from ddp.data import Pictures
from ddp.evaluation import evaluate
from ddp.models import ResNet9

from workers import Reducer


def test_the_share_of_each_worker_counts_once(dataset) -> None:
    model = ResNet9()
    with Reducer("local") as reducer:
        everything = evaluate(model, Pictures(dataset.validation), reducer, batch_size=7, rank=0, size=1)
        parts = [evaluate(model, Pictures(dataset.validation), reducer, batch_size=7, rank=r, size=2) for r in (0, 1)]
    assert model.training
    assert everything[1] == pytest.approx((16 * parts[0][1] + 15 * parts[1][1]) / 31, rel=1e-5)
