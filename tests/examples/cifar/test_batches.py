"""Batches: each worker's share of the pictures, the same again for the same seed."""

from __future__ import annotations

from itertools import chain, product

import pytest
import torch
from cifar.batches import TrainBatches, part, validation_batches
from cifar.images import DataError


def seen(batches, epoch):
    """Which of the numbered pictures an epoch shows: the middle of a picture is its number, whatever the crop."""
    return [int(number) for batch, _ in batches.epoch(epoch) for number in batch[:, 0, 16, 16]]


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_workers_share_the_pictures_and_no_two_read_the_same(dataset, workers):
    parts = [part(dataset.train, rank, workers).pixels[:, 0, 0, 0].tolist() for rank in range(workers)]
    assert sorted(chain(*parts)) == list(range(103))


@pytest.mark.parametrize(("workers", "batch_size"), list(product([1, 2, 3, 7], [1, 5, 14])))
def test_every_worker_has_the_same_number_of_whole_batches(dataset, workers, batch_size):
    all_batches = [TrainBatches(dataset, batch_size, rank=rank, workers=workers, seed=0) for rank in range(workers)]
    assert {len(batches) for batches in all_batches} == {103 // workers // batch_size}
    for batches in all_batches:
        sizes = [len(labels) for _, labels in batches.epoch(0)]
        assert sizes == [batch_size] * len(batches)


def test_an_epoch_shows_no_picture_twice_nor_any_of_another_worker(dataset):
    first, second = (TrainBatches(dataset, 10, rank=rank, workers=2, seed=0) for rank in (0, 1))
    for epoch in range(3):
        shown = seen(first, epoch) + seen(second, epoch)
        assert len(shown) == len(set(shown)) == 100


def test_labels_stay_with_their_pictures(dataset):
    for batch, labels in TrainBatches(dataset, 10, rank=1, workers=2, seed=0).epoch(0):
        assert (batch[:, 0, 16, 16].long() % 10).equal(labels)


def test_the_seed_and_the_epoch_decide_the_batches(dataset):
    def epoch(number, seed=0):
        batches = TrainBatches(dataset, 10, rank=0, workers=2, seed=seed).epoch(number)
        return torch.cat([batch for batch, _ in batches])

    assert epoch(3).equal(epoch(3))
    assert not epoch(3).equal(epoch(4))
    assert not epoch(3).equal(epoch(3, seed=1))


def test_a_batch_beyond_a_workers_share_is_an_error(dataset):
    with pytest.raises(DataError, match="--batch-size 52 is more than a worker's share of numbers: 51 of 103"):
        TrainBatches(dataset, 52, rank=0, workers=2, seed=0)


def test_together_the_workers_validate_every_picture_once_and_unchanged(dataset):
    shown = [batch for rank in range(3) for batch, _ in validation_batches(dataset, 4, rank=rank, workers=3)]
    together = torch.cat(shown)
    assert sorted(together[:, 0, 0, 0].tolist()) == list(range(31))
    assert (together == together[:, :1, :1, :1]).all()
