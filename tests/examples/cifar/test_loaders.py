"""Loaders: what a worker trains on and validates with, as the options say."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cifar import options
from cifar.batches import seeded
from cifar.images import DataError
from cifar.loaders import changed, synthetic, train_loader, validation_loader

PLAIN = options.parse(
    ["--batch-size", "10", "--random-crop", "0", "--random-mirror", "0", "--last-batch", "keep", "--kv-store", "local"]
)


def place(rank, workers):
    return SimpleNamespace(rank=rank, num_workers=workers)


def numbers(loader):
    """Which of the numbered pictures the loader shows, in its order."""
    return [int(number) for batch, _ in loader for number in batch[:, 0, 0, 0]]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_in_each_epoch_each_picture_is_shown_once(dataset, workers):
    loaders = [train_loader(dataset, PLAIN, place(rank, workers)) for rank in range(workers)]
    orders = []
    for epoch in range(2):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        orders.append([number for loader in loaders for number in numbers(loader)])
        assert sorted(orders[-1]) == list(range(103))
    assert orders[0] != orders[1]


def test_whole_batches_alone_by_default(dataset):
    loader = train_loader(dataset, Namespace(**{**vars(PLAIN), "last_batch": "discard"}), place(0, 2))
    assert [len(labels) for _, labels in loader] == [10] * 5


def test_labels_stay_with_their_pictures(dataset):
    args = Namespace(**{**vars(PLAIN), "random_crop": "1", "random_mirror": 1})
    for batch, labels in train_loader(dataset, args, place(1, 2)):
        assert (batch[:, 0, 16, 16].long() % 10).equal(
            labels
        )  # the middle of a picture is its number, whatever the crop


def test_only_what_may_be_is_mirrored(dataset):
    pixels = torch.arange(32, dtype=torch.uint8).expand(50, 3, 32, 32).contiguous()
    args = Namespace(**{**vars(PLAIN), "random_mirror": 1, "batch_size": 50})
    for mirrored in (True, False):
        shown = replace(dataset, train=replace(dataset.train, pixels=pixels, labels=torch.zeros(50)), mirrored=mirrored)
        ((batch, _),) = train_loader(shown, args, place(0, 1))
        assert {int(first) for first in batch[:, 0, 0, 0]} == ({0, 31} if mirrored else {0})


def test_together_the_workers_validate_every_picture_once_and_unchanged(dataset):
    args = Namespace(**{**vars(PLAIN), "random_crop": "1"})
    shown = [number for rank in range(3) for number in numbers(validation_loader(dataset, args, place(rank, 3)))]
    assert sorted(shown) == list(range(31))


def test_a_batch_beyond_a_workers_share_is_an_error(dataset):
    args = Namespace(**{**vars(PLAIN), "batch_size": 52})
    with pytest.raises(DataError, match="--batch-size 52 is more than a worker's share of numbers: 51 of 103"):
        train_loader(dataset, args, place(0, 2))


def test_the_shape_that_the_network_sees(dataset):
    args = Namespace(**{**vars(PLAIN), "image_shape": (3, 28, 30), "random_crop": "1"})
    for loader in (train_loader(dataset, args, place(0, 1)), validation_loader(dataset, args, place(0, 1))):
        assert next(iter(loader))[0].shape == (10, 3, 28, 30)


def test_a_crop_comes_from_anywhere_in_the_margin():
    row = torch.arange(1, 33, dtype=torch.uint8)  # a column's number; the margin is black
    pictures = row.expand(300, 3, 32, 32).contiguous()

    def first_columns(**options):
        return set(changed(pictures, Namespace(**{**vars(PLAIN), **options}), False)[:, 0, 16, 0].tolist())

    assert first_columns(random_crop="1") == {0, 1, 2, 3, 4, 5}
    assert first_columns(random_crop="1", pad_size=0) == {1}
    assert first_columns(random_crop="1", pad_size=2, image_shape=(3, 28, 28)) == {0, *range(1, 8)}
    assert first_columns(random_crop="0", image_shape=(3, 28, 28)) == {3}


@pytest.mark.parametrize(
    "option",
    [
        {"max_random_h": 36},
        {"max_random_s": 50},
        {"max_random_l": 50},
        {"max_random_rotate_angle": 10},
        {"max_random_shear_ratio": 0.1},
        {"max_random_aspect_ratio": 0.25},
        {"max_random_scale": 1.2},
    ],
)
def test_every_option_changes_pictures_and_no_two_alike(option):
    picture = torch.randint(256, (1, 3, 32, 32), dtype=torch.uint8, generator=seeded(0))
    shown = changed(picture.expand(2, -1, -1, -1), Namespace(**{**vars(PLAIN), **option}), False)
    assert shown.dtype == torch.uint8
    assert not shown[0].equal(picture[0])
    assert not shown[0].equal(shown[1])


def test_the_mean_of_the_command_line_is_subtracted(dataset):
    mean = tuple(value / 255 for value in options.parse(["--rgb-mean", "10,20,30"]).rgb_mean)
    batch, _ = next(iter(validation_loader(replace(dataset, mean=mean), PLAIN, place(0, 1))))
    assert batch[0, :, 0, 0].tolist() == pytest.approx([-10, -20, -30])


def test_noise_is_another_for_each_worker_and_the_same_in_each_batch():
    args = Namespace(**{**vars(PLAIN), "num_examples": 100, "num_classes": 1000, "image_shape": (3, 24, 40)})
    mine, theirs = (synthetic(args, place(rank, 2)) for rank in range(2))
    assert len(mine) == 5
    assert mine[0][0].shape == (10, 3, 24, 40)
    assert mine[0] is mine[4]
    assert not mine[0][0].equal(theirs[0][0])
    assert mine[0][1].max() > 9
