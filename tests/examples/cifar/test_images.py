"""Pictures in memory."""

from __future__ import annotations

import colorsys
from itertools import chain, product

import pytest
import torch
from cifar import digits
from cifar.augment import normalize, random_crop, random_mirror, random_resized_crop
from cifar.batches import TrainBatches, part, seeded, validation_batches
from cifar.distort import affine, recolor
from cifar.images import DataError


def test_labels_stay_with_the_pictures_that_are_chosen(dataset):
    some = dataset.train[10:13]
    assert len(some) == 3
    assert some.pixels[:, 0, 0, 0].tolist() == [10, 11, 12]
    assert some.labels.tolist() == [0, 1, 2]
    assert dataset.train[torch.tensor([51, 3])].labels.tolist() == [1, 3]


# ---- Random changes to batches of pictures


def pictures(count=6):
    return torch.randint(1, 256, (count, 3, 32, 32), generator=seeded(1), dtype=torch.uint8)


def test_a_crop_is_a_window_of_the_padded_picture():
    originals = pictures()
    crops = random_crop(originals, seeded(0))
    assert crops.shape == originals.shape
    assert crops.dtype == originals.dtype
    padded = torch.nn.functional.pad(originals, (4, 4, 4, 4))
    for crop, picture in zip(crops, padded, strict=True):
        windows = [picture[:, top : top + 32, left : left + 32] for top, left in product(range(9), repeat=2)]
        assert sum(crop.equal(window) for window in windows) == 1


def test_crops_reach_every_corner():
    picture = pictures(1).expand(2000, -1, -1, -1)
    crops = random_crop(picture, seeded(0))
    assert len({crop.numpy().tobytes() for crop in crops}) == 81


def test_about_half_are_mirrored_and_the_rest_untouched():
    originals = pictures(200)
    mirrored = random_mirror(originals, seeded(0))
    flipped = [new.equal(old.flip(2)) for new, old in zip(mirrored, originals, strict=True)]
    kept = [new.equal(old) for new, old in zip(mirrored, originals, strict=True)]
    assert all(a != b for a, b in zip(flipped, kept, strict=True))
    assert 60 < sum(flipped) < 140


def test_the_same_seed_gives_the_same_changes():
    assert random_crop(pictures(), seeded(1, 2)).equal(random_crop(pictures(), seeded(1, 2)))
    assert not random_crop(pictures(), seeded(1, 2)).equal(random_crop(pictures(), seeded(2, 1)))


def test_normalized_pictures_have_mean_0_and_deviation_1():
    originals = pictures()
    scaled = originals.float() / 255
    mean, std = scaled.mean((0, 2, 3)), scaled.std((0, 2, 3))
    result = normalize(originals, mean.tolist(), std.tolist())
    assert result.dtype == torch.float32
    assert torch.allclose(result.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(result.std((0, 2, 3)), torch.ones(3), atol=1e-5)


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


def pictures_of_distort(count=4):
    return torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=seeded(1))


def test_nothing_asked_for_changes_nothing():
    assert affine(pictures_of_distort(), None).equal(pictures_of_distort())
    assert (recolor(pictures_of_distort(), None).int() - pictures_of_distort().int()).abs().max() <= 1


@pytest.mark.parametrize("amount", [{"hue": 36}, {"saturation": 50}, {"lightness": 50}])
def test_colours_move_as_colorsys_says(amount, monkeypatch):
    """All random numbers are 1, so that every picture moves by the whole amount."""
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.ones(shape))
    by = amount.get("hue", 0) / 180, amount.get("lightness", 0) / 255, amount.get("saturation", 0) / 255
    colors = pictures_of_distort(1)[:, :, :4, :4]
    shown = recolor(colors, None, **amount)
    for before, after in zip(colors.flatten(2)[0].T.tolist(), shown.flatten(2)[0].T.tolist(), strict=True):
        h, l, s = colorsys.rgb_to_hls(*(value / 255 for value in before))  # noqa: E741
        wanted = colorsys.hls_to_rgb((h + by[0]) % 1, min(1, l + by[1]), min(1, s + by[2]))
        assert after == pytest.approx([255 * value for value in wanted], abs=1)


def test_a_quarter_turn(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.ones(shape))
    turned = affine(pictures_of_distort(), None, angle=90)
    either = [pictures_of_distort().rot90(times, (2, 3)) for times in (1, -1)]
    assert any((turned.int() - each.int()).abs().max() <= 1 for each in either)


def test_twice_the_size_shows_the_middle():
    corner = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    corner[:, :, 8:24, 8:24] = 200
    assert (affine(corner, None, scale=(2, 2)) > 0).float().mean() > 0.95
    assert (affine(corner, None, scale=(0.5, 0.5)) > 100).float().mean() == pytest.approx(1 / 16, abs=0.01)


def test_a_wider_aspect_is_as_much_lower(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.ones(shape))
    square = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    square[:, :, 8:24, 8:24] = 200
    shown = affine(square, None, aspect=0.25)[0, 0] > 100
    high, wide = shown.any(1).sum(), shown.any(0).sum()
    assert {int(high), int(wide)} == {14, 18}


# ---- Batches: each worker's share of the pictures, the same again for the same seed


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


@pytest.fixture(scope="module")
def images():
    return digits.read_dataset()


def test_the_digits_have_the_form_of_cifar10(images):
    for subset in (images.train, images.validation):
        assert subset.pixels.shape[1:] == (3, 32, 32)
        assert subset.pixels.dtype == torch.uint8
        assert subset.labels.dtype == torch.int64
    assert images.train.pixels.max() > 250
    assert not images.mirrored


def test_a_fifth_is_kept_for_validation_and_never_trained_on(images):
    assert len(images.train) + len(images.validation) == 1797
    assert len(images.validation) == 360
    trained = {picture.numpy().tobytes() for picture in images.train.pixels}
    assert not any(picture.numpy().tobytes() in trained for picture in images.validation.pixels)


def test_both_parts_hold_every_class_alike(images):
    train, validation = images.train.labels.bincount(), images.validation.labels.bincount()
    assert len(train) == len(validation) == 10
    assert torch.allclose(validation / (train + validation), torch.tensor(0.2), atol=0.01)


def test_the_split_is_always_the_same(images):
    again = digits.read_dataset()
    assert again.validation.pixels.equal(images.validation.pixels)


def test_the_mean_and_deviation_are_those_of_the_pictures(images):
    pixels = images.train.pixels.float() / 255
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.tensor(images.mean), atol=0.002)
    assert torch.allclose(pixels.std((0, 2, 3)), torch.tensor(images.std), atol=0.002)
