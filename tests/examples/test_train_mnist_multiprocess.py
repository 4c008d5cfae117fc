"""train_mnist_multiprocess.py: what it starts, and two workers that launcher.run starts."""

from __future__ import annotations

import sys

import pytest
import train_mnist_multiprocess
from mnist.idx import DataError
from mnist_files import require_lines, write_mnist
from scripts import EXAMPLES, start
from train_mnist import train_mnist_cnn


@pytest.fixture
def started(monkeypatch):
    """What was given to launcher.run, which starts nothing."""
    calls = []

    def run(function, *, args, **sizes):
        calls.append((function, args[0], sizes))
        if args[0].dataset == "mnist":
            raise DataError("MNIST's four files are not all there")

    monkeypatch.setattr(train_mnist_multiprocess.launcher, "run", run)
    return calls


def test_it_starts_the_training_on_as_many_workers_as_asked(started, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_mnist_multiprocess.py", "3", "--num-servers", "2", "-d", "half"])
    train_mnist_multiprocess.main()
    ((function, args, sizes),) = started
    assert function is train_mnist_cnn
    assert (args.dist_option, args.max_epoch) == ("half", 10)
    assert sizes == {"num_workers": 3, "num_servers": 2}


def test_what_the_user_can_mend_is_one_line(started, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_mnist_multiprocess.py", "1", "--dataset", "mnist"])
    with pytest.raises(SystemExit, match=r"^train_mnist_multiprocess.py: error: MNIST's four files are not all there$"):
        train_mnist_multiprocess.main()


@pytest.mark.release
@pytest.mark.timeout(180)  # seconds, but on a busy machine a job takes long to start
def test_two_workers(tmp_path):
    small = f"--dataset mnist --data-dir {write_mnist(tmp_path)} -m 1 -b 8 --split-batch -d sparseTopK"
    require_lines(start(EXAMPLES / "train_mnist_multiprocess.py", 2, "--num-servers", 1, *small.split()))
