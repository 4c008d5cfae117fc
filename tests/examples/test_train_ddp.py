"""train_ddp.py: in this process, and as a job of two workers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import train_ddp
from ddp import options
from ddp.data import Pictures, evaluate
from ddp.models import ResNet9
from scripts import launch, lines_of

import workers
from workers import Reducer

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


@pytest.mark.release
@pytest.mark.timeout(180)
def test_two_workers() -> None:
    process = launch(f"train_ddp.py {' '.join(SMALL)}", workers=2, servers=1)
    assert process.returncode == 0, process.stdout
    assert shapes(lines_of(process, 0)) == LINES
    assert lines_of(process, 1) == []


# ---- its parts


def test_pictures_are_from_0_to_1(dataset) -> None:
    pictures = Pictures(dataset.train)
    picture, label = pictures[51]
    assert len(pictures) == 103
    assert torch.equal(picture, torch.full((3, 32, 32), 0.2))
    assert label == 1


# ---- An evaluation by all workers together


def test_the_share_of_each_worker_counts_once(dataset) -> None:
    model = ResNet9()
    with Reducer("local") as reducer:
        everything = evaluate(model, Pictures(dataset.validation), reducer, batch_size=7, rank=0, size=1)
        parts = [evaluate(model, Pictures(dataset.validation), reducer, batch_size=7, rank=r, size=2) for r in (0, 1)]
    assert model.training
    assert everything[1] == pytest.approx((16 * parts[0][1] + 15 * parts[1][1]) / 31, rel=1e-5)


# ---- Needle's ResNet9


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


# ---- The command line of train_ddp.py


def test_the_options_are_the_seeds_by_default() -> None:
    args = options.parse([])
    assert (args.n_epochs, args.batch_size, args.lr, args.weight_decay) == (1, 128, 0.001, 0.001)
    with pytest.raises(SystemExit):
        options.parse(["--n-epochs", "0"])
