"""Pictures in memory."""

from __future__ import annotations

import torch


def test_labels_stay_with_the_pictures_that_are_chosen(dataset):
    some = dataset.train[10:13]
    assert len(some) == 3
    assert some.pixels[:, 0, 0, 0].tolist() == [10, 11, 12]
    assert some.labels.tolist() == [0, 1, 2]
    assert dataset.train[torch.tensor([51, 3])].labels.tolist() == [1, 3]
