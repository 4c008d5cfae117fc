"""train_mnist_multiprocess.py: two workers that launcher.run starts."""

from __future__ import annotations

import pytest
from mnist_files import require_lines, write_mnist
from scripts import EXAMPLES, start


@pytest.mark.long
@pytest.mark.timeout(180)  # seconds, but on a busy machine a job takes long to start
def test_two_workers(tmp_path):
    small = f"--dataset mnist --data-dir {write_mnist(tmp_path)} -m 1 -b 8 --split-batch -d sparseTopK"
    require_lines(start(EXAMPLES / "train_mnist_multiprocess.py", 2, "--num-servers", 1, *small.split()))


def test_what_the_user_can_mend_is_one_line(tmp_path):
    process = start(EXAMPLES / "train_mnist_multiprocess.py", 1, "--dataset", "mnist", "--data-dir", tmp_path)
    assert process.returncode == 1
    (error,) = [line for line in process.stdout.splitlines() if line.startswith("train_mnist_multiprocess.py: error: ")]
    assert "MNIST's four files are not all in" in error or "MNIST's four files are not all in" in process.stdout
