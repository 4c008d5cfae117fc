"""train_mnist.py: in this process, and as a job."""

from __future__ import annotations

import math
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import train_mnist
from mnist import options
from mnist_files import LINES, require_lines, write_mnist
from scripts import launch

import kvstore as kv
from workers import group


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
    with pytest.raises(SystemExit, match=r"^train_mnist.py: error: spars=1.5 must be the part of the elements to send"):
        run("-m", "1", "-d", "sparseTopK", "-s", "1.5")


@pytest.mark.release
@pytest.mark.timeout(180)  # seconds, but on a busy machine a job takes long to start
def test_two_workers(tmp_path):
    small = f"--dataset mnist --data-dir {write_mnist(tmp_path)} -m 1 -b 8 --split-batch"
    process = launch(f"train_mnist.py {small} -d half", workers=2, servers=1)
    require_lines(process)
