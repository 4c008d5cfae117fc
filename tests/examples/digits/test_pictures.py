from __future__ import annotations

import numpy as np
from digits.pictures import SHADES, read


def test_four_fifths_are_to_train_on_and_no_picture_is_in_both_parts():
    training, validation = read()
    assert training.images.shape == (1437, 8, 8)
    assert validation.images.shape == (360, 8, 8)
    assert training.images.max() == SHADES
    trained = {image.tobytes() for image in training.images}
    assert not any(image.tobytes() in trained for image in validation.images)


def test_both_parts_hold_every_digit_alike():
    counts = [np.bincount(part.labels) for part in read()]
    assert counts[0].sum() + counts[1].sum() == 1797
    assert np.allclose(counts[1] / (counts[0] + counts[1]), 0.2, atol=0.01)
