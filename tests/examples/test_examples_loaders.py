from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cifar import options
from cifar.augment import random_resized_crop
from cifar.batches import seeded
from cifar.images import DataError
from cifar.lines import test_io as read_alone
from cifar.loaders import train_loader, validation_loader

PLAIN = Namespace(batch_size=10, random_crop="none", random_mirror=0, last_batch="keep", seed=0, data_nthreads=0)


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
    args = Namespace(**{**vars(PLAIN), "random_crop": "pad", "random_mirror": 1})
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
    args = Namespace(**{**vars(PLAIN), "random_crop": "pad"})
    shown = [number for rank in range(3) for number in numbers(validation_loader(dataset, args, place(rank, 3)))]
    assert sorted(shown) == list(range(31))


def test_a_batch_beyond_a_workers_share_is_an_error(dataset):
    args = Namespace(**{**vars(PLAIN), "batch_size": 52})
    with pytest.raises(DataError, match="--batch-size 52 is more than a worker's share of numbers: 51 of 103"):
        train_loader(dataset, args, place(0, 2))


def test_a_resized_crop_is_a_part_of_the_picture_made_as_large():
    row = torch.arange(0, 256, 8, dtype=torch.uint8)
    pictures = row.expand(200, 3, 32, 32).contiguous()
    crops = random_resized_crop(pictures, seeded(0))
    assert crops.shape == pictures.shape
    assert crops.dtype == torch.uint8
    assert ((crops.int() - crops[:, :1, :1].int()).abs() <= 1).all()  # rows stay rows
    spans = (crops[:, 0, 0, -1].int() - crops[:, 0, 0, 0].int()) / 248
    assert 0.75 < spans.min() < 0.85  # a side of at least 0.8, of which the outer half pixels are cut
    assert spans.max() > 0.95
    assert len(set(crops[:, 0, 0, 0].tolist())) > 20  # from everywhere


def test_reading_alone_prints_how_fast_it_is(dataset, caplog):
    caplog.set_level("INFO")
    read_alone([None] * 5, 10, 2)
    assert [message.split("\t")[0] for message in caplog.messages] == ["Batch [1]", "Batch [3]"]


def test_d2ls_options():
    args = options.parse(["--d2l", "--lr", "0.5"])
    assert (args.network, args.lr, args.wd, args.mom) == ("resnet18-d2l", 0.5, 5e-4, 0.9)
    assert (args.random_crop, args.last_batch) == ("resize", "keep")
    assert [options.learning_rate(args, epoch) for epoch in (0, 79, 80, 160)] == pytest.approx([0.5, 0.5, 0.05, 0.005])
