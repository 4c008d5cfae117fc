"""train_ddp.py: in this process, and as a job of two workers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import train_ddp
from scripts import launch, lines_of

import workers

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
