"""The MNIST example: its files' reader, what happens to pictures, and the scripts as jobs."""

from __future__ import annotations

import gzip
import math
import os
import re
import struct
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import train_mnist
from mnist import data, options
from mnist.cnn import CNN
from mnist.data import augmentation, data_partition, find_mnist, load_digits, load_mnist
from mnist.idx import DataError, read_image_file, read_label_file

import kvstore as kv
from workers import group

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FOUR = (*data.FILES,)


def idx_images(count: int, size: int = 28, seed: int = 0) -> tuple[bytes, np.ndarray]:
    pixels = np.random.default_rng(seed).integers(256, size=(count, size, size), dtype=np.uint8)
    return struct.pack(">4I", 2051, count, size, size) + pixels.tobytes(), pixels


def idx_labels(count: int) -> tuple[bytes, np.ndarray]:
    labels = (np.arange(count) % 10).astype(np.uint8)
    return struct.pack(">2I", 2049, count) + labels.tobytes(), labels


def write_mnist(folder: Path, train: int = 48, test: int = 21) -> Path:
    """MNIST's four files, small: compressed, but for the last."""
    for name, count in zip(FOUR, (train, train, test, test), strict=True):
        content = (idx_images if "images" in name else idx_labels)(count)[0]
        if name == FOUR[-1]:
            (folder / name).write_bytes(content)
        else:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return folder


# ---- files


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


# ---- what happens to pictures


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


# ---- the scripts


LINES = [
    r"\(48, 1, 28, 28\)",
    r"\(48, 10\)",
    r"\(21, 1, 28, 28\)",
    r"\(21, 10\)",
    r"Starting Epoch 0:",
    r"Training loss = \d+\.\d{6}, training accuracy = [01]\.\d{6}",
    r"Evaluation accuracy = [01]\.\d{6}, Elapsed Time = \d+\.\d{6}s",
]


def arguments(folder: Path, *words: str) -> Namespace:
    words = ("--dataset", "mnist", "--data-dir", str(folder), "-m", "1", "-b", "8", *words)
    return options.parser("").parse_args(words)


@pytest.fixture
def alone():
    """Afterwards, this process is in no group."""
    yield
    group.shutdown()


@pytest.mark.parametrize("option", options.DIST_OPTIONS)
def test_one_process_trains_in_every_way(tmp_path, capsys, alone, option):
    accuracy = train_mnist.train_mnist_cnn(
        arguments(write_mnist(tmp_path), "-d", option, "--threshold", "20000", "-l", "0.1")
    )
    assert 0 <= accuracy <= 1
    lines = capsys.readouterr().out.splitlines()
    assert all(re.fullmatch(*pair) for pair in zip(LINES, lines, strict=True)), lines
    assert f"{accuracy:f}" in lines[-1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [0.005] * 12),
        (["--lr-schedule", "cosine"], [0.005 * (1 + math.cos(math.pi * step / 12)) / 2 for step in range(12)]),
    ],
)
def test_the_learning_rate_stays_or_falls_to_0_over_the_run(tmp_path, monkeypatch, alone, words, expected):
    used = []
    update = train_mnist.update

    def noting(sgd, loss, args):
        used.append(sgd.opt.param_groups[0]["lr"])
        update(sgd, loss, args)

    monkeypatch.setattr(train_mnist, "update", noting)
    train_mnist.train_mnist_cnn(arguments(write_mnist(tmp_path), "-m", "2", *words))
    assert used == pytest.approx(expected)


def test_a_batch_is_each_workers_own_or_shared_out_evenly(tmp_path):
    assert train_mnist.own_batch_size(arguments(tmp_path), 3) == 8
    assert train_mnist.own_batch_size(arguments(tmp_path, "--split-batch"), 4) == 2
    with pytest.raises(kv.UsageError, match="cannot share 8 pictures out evenly among 3 workers; choose a multiple of"):
        train_mnist.own_batch_size(arguments(tmp_path, "--split-batch"), 3)


def test_no_epochs_is_no_training(tmp_path, alone):
    assert train_mnist.train_mnist_cnn(arguments(write_mnist(tmp_path), "-m", "0", "--lr-schedule", "cosine")) == 0


def test_what_the_user_can_mend_is_one_line(tmp_path, monkeypatch, alone):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["train_mnist.py", "--data-dir", str(tmp_path), *words])
        train_mnist.main()

    with pytest.raises(SystemExit, match=r"^train_mnist.py: error: MNIST's four files are not all in "):
        run("--dataset", "mnist")
    with pytest.raises(SystemExit, match=r"^train_mnist.py: error: --batch-size 2000 is more than a worker's part"):
        run("--batch-size", "2000")
    with pytest.raises(SystemExit, match=r"^train_mnist.py: error: spars=1.5 is the part of the elements to send"):
        run("-m", "1", "-d", "sparseTopK", "-s", "1.5")


def start(*words: object) -> list[str]:
    """Run a script with these arguments to its end; returns what rank 0 has printed."""
    process = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.returncode == 0, process.stdout
    assert "[worker 1] " not in process.stdout, "only rank 0 prints"
    return re.findall(r"^\[worker 0\] (.*)$", process.stdout, re.MULTILINE)


@pytest.mark.timeout(180)  # seconds, but on a busy machine a job takes long to start
@pytest.mark.parametrize("how", ["launch.py", "launcher.run"])
def test_two_workers(tmp_path, how):
    small = f"--dataset mnist --data-dir {write_mnist(tmp_path)} -m 1 -b 8 --split-batch"
    if how == "launch.py":
        command = f"python {EXAMPLES / 'train_mnist.py'} {small} -d half"
        lines = start(ROOT / "launcher" / "launch.py", "-n", 2, "-s", 1, "--launcher", "local", command)
    else:
        lines = start(
            EXAMPLES / "train_mnist_multiprocess.py", 2, "--num-servers", 1, *small.split(), "-d", "sparseTopK"
        )
    assert all(re.fullmatch(*pair) for pair in zip(LINES, lines, strict=True)), lines
