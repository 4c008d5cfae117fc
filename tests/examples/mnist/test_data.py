"""MNIST and its stand-in, their parts, and what happens to pictures."""

from __future__ import annotations

import gzip
import math
import struct

import numpy as np
import pytest
import torch
from mnist import data, options
from mnist.cnn import CNN
from mnist.data import augmentation, data_partition, find_mnist, load_digits, load_mnist
from mnist.idx import DataError, read_image_file, read_label_file
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


# ---- SINGA's network


def test_the_network_is_singas():
    assert sum(param.numel() for param in CNN().parameters()) == 431080
    assert CNN()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize(
    ("layer", "fans"), [("conv1", 25 + 20), ("conv2", 500 + 50), ("linear1", 800 + 500), ("linear2", 500 + 10)]
)
def test_initial_weights_are_drawn_as_singas(layer, fans):
    torch.manual_seed(0)
    drawn = getattr(CNN(), layer)
    assert drawn.weight.std().item() == pytest.approx(math.sqrt(2 / fans), rel=0.1)
    assert abs(drawn.weight.mean().item()) < 0.1 * math.sqrt(2 / fans)
    assert not drawn.bias.any()


# ---- Files in the idx format


def test_the_readers_return_what_is_in_the_files(tmp_path):
    images, labels = tmp_path / "images.gz", tmp_path / "labels"
    content, pixels = idx_images(5)
    images.write_bytes(gzip.compress(content))
    assert np.array_equal(read_image_file(images), pixels[:, None])
    content, expected = idx_labels(7)
    labels.write_bytes(content)
    assert np.array_equal(read_label_file(labels), expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00" * 9, "has 9 bytes, less than the head of an idx file"),
        (struct.pack(">4I", 2049, 1, 28, 28), "begins with 2049, but an idx file of pictures begins with 2051"),
        (idx_images(2)[0][:-1], "has 1567 bytes for 2 x 28 x 28 pictures"),
        (idx_images(2)[0] + b"\x00", "has 1569 bytes for 2 x 28 x 28 pictures"),
        (struct.pack(">4I", 2051, 2**32 - 1, 2**32 - 1, 2**32 - 1), "has 0 bytes for 4294967295 x"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=rf"images\.gz {message}"):
        read_image_file(path)


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(idx_images(2)[0])[:-20]])
def test_what_is_not_gzip_or_cut_is_named(tmp_path, content):
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"images\.gz cannot be read: .*; fetch it again"):
        read_image_file(path)


# ---- The command line of the two scripts


def test_the_defaults_are_singas():
    args = options.parser("").parse_args([])
    assert (args.max_epoch, args.batch_size, args.learning_rate) == (10, 64, 0.005)
    assert (args.dist_option, args.spars, args.threshold) == ("plain", 0.05, 2097152)
    assert (args.dataset, args.lr_schedule, args.split_batch) == ("auto", "constant", False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-l 0", "0 is not a positive number"),
        ("-s inf", "inf is not a positive number"),
        ("-b 0", "must be 1 or more"),
        ("-m -1", "'-1' is not a whole number"),
        ("-d fastest", "choose from"),
    ],
)
def test_a_wrong_option_is_an_error_that_says_why(line, message, capsys):
    with pytest.raises(SystemExit):
        options.parser("").parse_args(line.split())
    assert message in capsys.readouterr().err
