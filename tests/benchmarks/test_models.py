"""Models to train."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models import MODELS, build, pictures


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
