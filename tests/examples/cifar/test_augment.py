"""Random changes to batches of pictures."""

from __future__ import annotations

from itertools import product

import torch
from cifar.augment import normalize, random_crop, random_mirror, random_resized_crop
from cifar.batches import seeded


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
