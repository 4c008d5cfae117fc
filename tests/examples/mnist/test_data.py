"""MNIST and its stand-in, their parts, and what happens to pictures."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from mnist import data
from mnist.data import augmentation, data_partition, find_mnist, load_digits, load_mnist
from mnist.idx import DataError
from mnist_files import FOUR, idx_images, idx_labels, write_mnist


def test_the_data_set_has_the_scripts_form(tmp_path):
    assert find_mnist(tmp_path) is None
    paths = find_mnist(write_mnist(tmp_path))
    assert [path.name for path in paths] == [f"{name}.gz" for name in FOUR[:3]] + [FOUR[3]]
    mnist = load_mnist(paths)
    shapes = [array.shape for array in (mnist.train_x, mnist.train_y, mnist.test_x, mnist.test_y)]
    assert shapes == [(48, 1, 28, 28), (48, 10), (21, 1, 28, 28), (21, 10)]
    assert np.allclose(mnist.train_x[:, 0], idx_images(48)[1] / 255)
    assert np.array_equal(mnist.train_y.argmax(1), np.arange(48) % 10)
    assert (mnist.train_y.sum(1) == 1).all()


def test_files_that_do_not_fit_together_are_named(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / f"{FOUR[1]}.gz").write_bytes(gzip.compress(idx_labels(47)[0]))
    with pytest.raises(DataError, match=r"train-images.*has 48 pictures, but .*train-labels.* has 47 labels"):
        load_mnist(find_mnist(tmp_path))
    (tmp_path / f"{FOUR[1]}.gz").write_bytes(gzip.compress(idx_labels(48)[0][:-1] + b"\x0b"))
    with pytest.raises(DataError, match="has a label 11; there are 10 digits"):
        load_mnist(find_mnist(tmp_path))
    (tmp_path / f"{FOUR[0]}.gz").write_bytes(gzip.compress(idx_images(48, 20)[0]))
    with pytest.raises(DataError, match="has pictures of 20 x 20, not 28 x 28"):
        load_mnist(find_mnist(tmp_path))


def test_the_digits_have_mnists_form_and_validation_pictures_are_not_trained_on():
    digits = load_digits()
    assert digits.train_x.shape == (1437, 1, 28, 28)
    assert digits.test_y.shape == (360, 10)
    assert digits.train_x.dtype == digits.train_y.dtype == np.float32
    assert 0.9 < digits.train_x.max() <= 1
    assert not digits.train_x[:, :, :4].any()
    trained = {x.tobytes() for x in digits.train_x}
    assert not any(x.tobytes() in trained for x in digits.test_x)


def test_every_worker_trains_on_as_much_and_each_picture_is_evaluated_once():
    x, y = np.arange(11), np.arange(11) + 100
    parts = [data_partition(x, y, rank, 3) for rank in range(3)]
    assert [its.tolist() for its, _ in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert all((labels - its == 100).all() for its, labels in parts)
    evaluated = [data.evaluation_partition(x, y, rank, 3)[0] for rank in range(3)]
    assert sorted(np.concatenate(evaluated)) == x.tolist()


def test_augmentation_moves_and_mirrors():
    x = np.random.default_rng(1).random((40, 1, 28, 28), dtype=np.float32)
    padded = np.pad(x, [[0, 0], [0, 0], [4, 4], [4, 4]], "symmetric")
    changed = augmentation(x.copy(), 40, np.random.default_rng(2))
    found = []
    for its, around in zip(changed, padded, strict=True):
        found += [
            (top, left, mirrored)
            for top in range(8)
            for left in range(8)
            for mirrored in (False, True)
            if np.array_equal(its[:, :, ::-1] if mirrored else its, around[:, top : top + 28, left : left + 28])
        ]
    assert len(found) == 40, "each is one place of its padded self"
    assert {top for top, _, _ in found} == {left for _, left, _ in found} == set(range(8))
    assert 8 < sum(mirrored for _, _, mirrored in found) < 32
    assert np.array_equal(changed, augmentation(x.copy(), 40, np.random.default_rng(2)))
    moved = augmentation(x.copy(), 40, np.random.default_rng(2), mirror=False)
    assert np.array_equal(moved[0], padded[0][:, found[0][0] :, found[0][1] :][:, :28, :28])
