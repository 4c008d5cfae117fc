"""train_ddp.py: its parts in this process, and the script as a job of two workers and two servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_ddp
from ddp import options
from ddp.data import Pictures
from ddp.evaluation import evaluate
from ddp.models import ResNet9

import workers
from workers import Reducer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_ddp.py"
SMALL = ("--dataset", "digits", "--num-examples", "96", "--batch-size", "32", "--disp-batches", "2")
LINES = [
    "original dataset length: 96",
    "epoch: 1/1",
    "acc: #; avg_loss: #",
    "acc: #; avg_loss: #",
    "Training Time: #",
    "evaluation: acc: #; avg_loss: #",
]


def shapes(lines: list[str]) -> list[str]:
    return [re.sub(r"\d+\.\d+(e-\d+)?", "#", line) for line in lines]


def test_the_network_is_needles() -> None:
    model = ResNet9()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    convolutions = [tuple(its.shape) for its in model.parameters() if its.dim() == 4]
    assert convolutions == [
        (16, 3, 7, 7),
        (32, 16, 3, 3),
        (32, 32, 3, 3),
        (32, 32, 3, 3),
        (64, 32, 3, 3),
        (128, 64, 3, 3),
        (128, 128, 3, 3),
        (128, 128, 3, 3),
    ]


def test_pictures_are_from_0_to_1(dataset) -> None:
    pictures = Pictures(dataset.train)
    picture, label = pictures[51]
    assert len(pictures) == 103
    assert torch.equal(picture, torch.full((3, 32, 32), 0.2))
    assert label == 1


def test_the_share_of_each_worker_counts_once(dataset) -> None:
    model = ResNet9()
    with Reducer("local") as reducer:
        everything = evaluate(model, Pictures(dataset.validation), reducer, batch_size=7, rank=0, size=1)
        parts = [evaluate(model, Pictures(dataset.validation), reducer, batch_size=7, rank=r, size=2) for r in (0, 1)]
    assert model.training
    assert everything[1] == pytest.approx((16 * parts[0][1] + 15 * parts[1][1]) / 31, rel=1e-5)


def test_the_options_are_the_seeds_by_default() -> None:
    args = options.parse([])
    assert (args.n_epochs, args.batch_size, args.lr, args.weight_decay) == (1, 128, 0.001, 0.001)
    with pytest.raises(SystemExit):
        options.parse(["--n-epochs", "0"])


def test_alone_it_prints_needles_lines(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["train_ddp.py", *SMALL])
    try:
        train_ddp.main()
    finally:
        workers.shutdown()
    assert shapes(capsys.readouterr().out.splitlines()) == LINES


def test_what_the_user_can_mend_is_one_line(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["train_ddp.py", *SMALL, "--batch-size", "0"])
    with pytest.raises(SystemExit):
        train_ddp.main()
    monkeypatch.setattr(sys, "argv", ["train_ddp.py"])
    monkeypatch.setenv("DMLC_NUM_WORKER", "2")
    with pytest.raises(SystemExit, match=r"^train_ddp.py: error: this process is not part of a distributed job"):
        train_ddp.main()


@pytest.mark.timeout(180)
def test_two_workers_and_two_servers() -> None:
    command = f"python {SCRIPT} {' '.join(SMALL)}"
    process = subprocess.run(
        [sys.executable, "-m", "launcher", "-n", "2", "-s", "2", "--launcher", "local", command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )
    assert process.returncode == 0, process.stdout
    lines = {rank: re.findall(rf"^\[worker {rank}\] (.*)$", process.stdout, re.MULTILINE) for rank in (0, 1)}
    assert shapes(lines[0]) == LINES
    assert lines[1] == []
