from __future__ import annotations

import pytest
import torch
from cifar import digits


@pytest.fixture(scope="module")
def images():
    return digits.read_dataset()


def test_the_digits_have_the_form_of_cifar10(images):
    for part in (images.train, images.validation):
        assert part.pixels.shape[1:] == (3, 32, 32)
        assert part.pixels.dtype == torch.uint8
        assert part.labels.dtype == torch.int64
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
