"""The clicks: the same from the same seed, whoever asks, with ids that drift."""

from __future__ import annotations

import numpy as np
import torch
from clicks.auc import auc
from clicks.stream import DENSE, LARGE, Clicks


def test_workers_have_parts_of_one_batch() -> None:
    clicks = Clicks(seed=3, fields=5)
    whole = clicks.batch(7, 10)
    for part in range(3):
        mine = Clicks(seed=3, fields=5).batch(7, 10, part, 3)
        for values, all_of_them in zip(mine, whole, strict=True):
            assert np.array_equal(values, all_of_them[part::3])
    assert whole.ids.shape == whole.rows.shape == (10, 5)
    assert whole.dense.shape == (10, DENSE)
    assert [batch.ids.tolist() for batch in clicks.batches(range(7, 8), 10)] == [whole.ids.tolist()]


def test_other_seeds_and_other_batches_differ() -> None:
    whole = Clicks(seed=3).batch(7, 10)
    assert not torch.equal(Clicks(seed=4).batch(7, 10).ids, whole.ids)
    assert not torch.equal(Clicks(seed=3).batch(8, 10).ids, whole.ids)


def test_a_few_ids_are_frequent_and_most_are_rare() -> None:
    rows = Clicks(fields=3, largest=10_000, period=0).batch(0, 5000).rows
    counts = rows[:, 2].bincount()
    assert rows[:, 2].max() < 10_000
    assert counts[:10].sum() > 1000
    assert (counts == 1).sum() > 500


def test_rows_and_ids_stand_for_one_another() -> None:
    clicks = Clicks(fields=4, largest=5000, period=5)
    batches = [clicks.batch(number, 500) for number in range(12)]
    counts = clicks.rows(12)
    for field in range(4):
        rows = torch.cat([batch.rows[:, field] for batch in batches])
        ids = torch.cat([batch.ids[:, field] for batch in batches])
        assert rows.max() < counts[field]
        assert len({*zip(rows.tolist(), ids.tolist(), strict=True)}) == len(rows.unique()) == len(ids.unique())


def test_the_ids_of_large_fields_drift() -> None:
    clicks = Clicks(fields=2, largest=2 * LARGE, period=10)
    early, half, late = (set(clicks.batch(number, 2000).ids[:, 1].tolist()) for number in (0, 5, 10))
    small = [set(clicks.batch(number, 2000).ids[:, 0].tolist()) for number in (0, 10)]
    assert not early & late
    assert len(early & half) > 100
    assert small[0] & small[1]


def test_the_true_chances_are_the_best_that_there_is() -> None:
    batch = Clicks().batch(0, 20_000)
    labels = batch.labels.numpy()
    best = auc(batch.chances, labels)
    assert 0.75 < best < 0.85
    assert abs(labels.mean() - batch.chances.mean()) < 0.02
    assert auc(batch.dense.numpy() @ np.ones(DENSE), labels) < best
