"""The comparison of codecs: its settings, what it writes, and that bytes are what the codecs promise."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import compare_compression
import pytest
import torch
from cifar import resnet, results
from cifar.settings import parse_setting
from compare_compression import Way, parse, parse_way, statistics, validate

import kvstore as kv
from kvstore.codecs import parse as check

ROOT = Path(__file__).resolve().parents[2]
PROMISED = {"fp32": 1.0, "fp16": 0.5, "2bit": 1.01 / 16, "topk:k=1": 0.005}


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("fp16", ("fp16", {})),
        ("topk:ratio=0.05,k=3", ("topk", {"ratio": 0.05, "k": 3})),
        ("int8:stochastic=True,pull=bf16", ("int8", {"stochastic": True, "pull": "bf16"})),
    ],
)
def test_a_setting_is_a_name_and_what_is_set(text, parsed):
    assert parse_setting(text) == parsed


def test_a_way_may_change_the_training_too():
    assert parse_way("1bit:threshold=0,scale=100,mom=0.5") == Way(
        "1bit:threshold=0,scale=100,mom=0.5", {"type": "1bit", "threshold": 0}, scale=100.0, mom=0.5
    )


def test_all_ways_of_the_table_are_ones_that_stores_take():
    ways = parse([]).codecs
    assert [way.name for way in ways] == list(compare_compression.CODECS)
    assert ways[0].compression == {"type": "none"}
    assert {check(way.compression).type for way in ways[1:]} == set(kv.codecs.names())


def test_a_table_lines_up():
    rows = [{"codec": "a", "n": "10"}, {"codec": "long", "n": "5"}]
    assert results.table(rows) == "codec   n\na      10\nlong    5"


def test_what_is_missing_is_said_before_training(monkeypatch):
    monkeypatch.setattr(results, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["compare_compression.py", "--plot", "x.png"])
    with pytest.raises(SystemExit, match=r"^compare_compression.py: error: --plot needs matplotlib.*pip install"):
        compare_compression.main()


def test_validation_counts_and_leaves_the_statistics_alone():
    model = resnet.build("resnet", 8)
    before = {name: tensor.clone() for name, tensor in statistics(model).items()}
    assert {name.rsplit(".", 1)[1] for name in before} == {"running_mean", "running_var"}
    pictures = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    guesses = model.eval()(pictures).argmax(1)
    counts = validate(model, [(pictures, guesses), (pictures, (guesses + 1) % 10)])
    assert counts == {"right": 8.0, "count": 16.0}
    assert all(tensor.equal(before[name]) for name, tensor in statistics(model).items())


@pytest.mark.timeout(180)  # seconds, but on a busy machine a job takes long to start
def test_a_job_prints_a_line_for_each_and_writes_the_files(tmp_path):
    script = ROOT / "examples" / "compare_compression.py"
    command = f"python {script} --num-epochs 1 --num-examples 64 --batch-size 16 --csv table.csv --plot picture.png"
    command += f" --codecs {' '.join(PROMISED)}"
    process = subprocess.run(
        [sys.executable, ROOT / "launcher" / "launch.py", "-n", "2", "-s", "2", "--launcher", "local", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    with (tmp_path / "table.csv").open() as file:
        rows = {row["codec"]: row for row in csv.DictReader(file)}
    assert list(rows) == list(PROMISED)
    for name, row in rows.items():
        assert re.search(rf"^\[worker 0\] {name} +{float(row['accuracy']):.4f} ", process.stdout, re.MULTILINE)
        assert float(row["pushed_part"]) <= PROMISED[name]
        assert float(row["pulled_part"]) == 1.0
    assert int(rows["fp32"]["pushed_bytes"]) == 2 * int(rows["fp16"]["pushed_bytes"])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
