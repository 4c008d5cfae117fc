"""train_fm.py beside torch_fm.py, alone and as a job."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import torch_fm
import train_fm
from fm import options
from scripts import launch, lines_of
from torch import nn

import kvstore as kv

SMALL = ("--clicks", "2000", "--batch-size", "200", "--input-size", "500", "--factor-size", "4", "--log-interval", "5")


def test_one_process_is_as_good_as_torch() -> None:
    args = options.parse([*SMALL, "--num-epoch", "2"])
    table = kv.Table(shape=(500, 4), init="normal", scale=options.SIGMA, seed=args.seed)
    with kv.create("local") as store:
        store.init("first", table)
        factors = nn.Parameter(store.row_sparse_pull("first", row_ids=torch.arange(500)))
    with kv.create("local") as store:
        ours = train_fm.train(args, store)
    theirs = torch_fm.train(args, nn.Parameter(torch.zeros(500, 1)), factors)
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours.auc > 0.5


def test_files_in_libsvms_format(tmp_path: Path, monkeypatch, caplog) -> None:
    file = tmp_path / "samples"
    file.write_text("1 0:1 1:1\n0 2:1\n" * 50)
    words = ["--data", str(file), "--test-data", str(file), "--input-size", "3", "--batch-size", "10", "--lr", "0.1"]
    monkeypatch.setattr(sys, "argv", ["train_fm.py", *words, "--num-epoch", "3"])
    with caplog.at_level("INFO"):
        train_fm.main()
    assert caplog.messages[-1].startswith("AUC 1.0000 of 100 samples not trained on; log loss")


def test_what_the_user_can_mend_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    none = str(tmp_path / "none")
    monkeypatch.setattr(sys, "argv", ["train_fm.py", "--data", none, "--test-data", none])
    with pytest.raises(SystemExit, match=r"^train_fm.py: error: cannot read the samples"):
        train_fm.main()
    with pytest.raises(SystemExit):
        options.parse(["--data", none])
    assert "--data needs --test-data" in capsys.readouterr().err


@pytest.mark.release
@pytest.mark.timeout(180)
def test_two_workers() -> None:
    process = launch(f"train_fm.py {' '.join(SMALL)} --optimizer ftrl", workers=2, servers=1)
    assert process.returncode == 0, process.stdout
    lines = lines_of(process, 0)
    assert re.match(r"Epoch\[0\] Batch \[5\] log_loss=0\.\d{4}$", lines[0])
    assert re.match(r"AUC 0\.\d{4} of 4000 samples not trained on, where 0\.\d{4} is the best possible", lines[-1])
    assert lines_of(process, 1) == []
