from __future__ import annotations

import pytest
import torch

from benchmarks.models import MODELS, build, pictures
from benchmarks.networks import elements, shapes_of


@pytest.mark.parametrize(
    ("name", "arrays", "numbers"),
    [
        ("resnet50", 161, 25_557_032),
        ("vgg16", 32, 138_357_544),
        ("small", 2000, 256_000),
        ("many", 100_000, 200_000),
        ("tiny", 1, 256),
        ("40MB", 1, 10_000_000),
        ("1KB", 1, 250),
        ("1GB", 1, 250_000_000),
        ("1B", 1, 1),
    ],
)
def test_shapes(name, arrays, numbers):
    shapes = shapes_of(name)
    assert (len(shapes), elements(shapes)) == (arrays, numbers)


@pytest.mark.parametrize("name", ["resnet", "40", "MB", "4TB", "-1MB"])
def test_an_unknown_network_is_told_those_there_are(name):
    with pytest.raises(
        ValueError, match=f"no network '{name}'; choose from resnet50, vgg16, small, many, tiny, or a size"
    ):
        shapes_of(name)


@pytest.mark.parametrize(("name", "millions"), [("resnet8", 0.078), ("resnet18", 11.17)])
def test_models(name, millions):
    numbers = sum(parameter.numel() for parameter in build(name).parameters())
    assert numbers / 1e6 == pytest.approx(millions, rel=0.01)


def test_a_model_classifies_pictures_and_is_the_same_each_time():
    images, labels = pictures(seed=3)
    assert build("resnet8")(images).shape == (16, 10)
    assert labels.max() < 10
    assert torch.equal(pictures(seed=3)[0], images)
    assert not torch.equal(pictures(seed=4)[0], images)
    for one, other in zip(build("resnet8").parameters(), build("resnet8").parameters(), strict=True):
        assert torch.equal(one, other)
    assert set(MODELS) == {"resnet8", "resnet18"}
