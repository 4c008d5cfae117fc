from __future__ import annotations

import pytest
import torch
from cifar import cifar10
from cifar.images import DataError
from small_cifar10 import batch_file


def test_a_record_is_a_label_and_planes_of_red_green_and_blue(tmp_path):
    red, green, blue = (bytes([value]) * 1024 for value in (1, 2, 3))
    (tmp_path / "one.bin").write_bytes(b"\x07" + b"\x09" + red[1:] + green + blue)
    images = cifar10.read_batch(tmp_path / "one.bin")
    assert images.labels.tolist() == [7]
    assert images.labels.dtype == torch.int64
    assert images.pixels.shape == (1, 3, 32, 32)
    assert images.pixels.dtype == torch.uint8
    assert images.pixels[0, :, 0, 0].tolist() == [9, 2, 3]
    assert images.pixels[0, :, 31, 31].tolist() == [1, 2, 3]


def test_rows_come_before_columns(tmp_path):
    plane = bytes(row * 4 for row in range(32) for _ in range(32))
    (tmp_path / "one.bin").write_bytes(b"\x00" + 3 * plane)
    pixels = cifar10.read_batch(tmp_path / "one.bin").pixels
    assert pixels[0, 0, 5].tolist() == [20] * 32


def test_a_file_of_full_size(tmp_path):
    (tmp_path / "full.bin").write_bytes(batch_file(10000))
    assert (tmp_path / "full.bin").stat().st_size == 30_730_000
    assert len(cifar10.read_batch(tmp_path / "full.bin")) == 10000


def test_five_files_to_train_on_and_one_to_validate(cifar10_folder):
    dataset = cifar10.read_dataset(cifar10_folder)
    assert (len(dataset.train), len(dataset.validation)) == (100, 20)
    second = cifar10.read_batch(cifar10_folder / "data_batch_2.bin")
    assert dataset.train.pixels[20:40].equal(second.pixels)
    assert dataset.mirrored


@pytest.mark.parametrize("damage", [b"", b"\x00" * 3072, b"\x00" * 3074])
def test_a_wrong_length_is_an_error_that_names_the_file(cifar10_folder, damage):
    (cifar10_folder / "data_batch_4.bin").write_bytes(damage)
    with pytest.raises(DataError, match=rf"data_batch_4.bin: {len(damage)} bytes are not a whole number"):
        cifar10.read_dataset(cifar10_folder)


def test_a_wrong_label_is_an_error_that_names_the_record(cifar10_folder):
    data = bytearray(batch_file(20))
    data[3073 * 6] = 10
    (cifar10_folder / "test_batch.bin").write_bytes(data)
    with pytest.raises(DataError, match=r"test_batch.bin: record 6 has the label 10"):
        cifar10.read_dataset(cifar10_folder)


def test_a_missing_file_is_an_error_that_names_it(cifar10_folder):
    (cifar10_folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3.bin: cannot be read \(No such file"):
        cifar10.read_dataset(cifar10_folder)
