"""Files in the idx format."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from mnist.idx import DataError, read_image_file, read_label_file
from mnist_files import idx_images, idx_labels


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
