"""The comparison of codecs: its settings, what it writes, and that bytes are what the codecs promise."""

from __future__ import annotations

import csv
import re
import sys

import compare_compression
import pytest
import torch
from cifar import resnet, results
from compare_compression import Way, parse, parse_way, statistics, validate
from scripts import launch

import kvstore as kv
from kvstore.codecs import parse as check

PROMISED = {"fp32": 1.0, "fp16": 0.5, "2bit": 1.01 / 16, "topk:k=1": 0.005}


def test_a_way_may_change_the_training_too():
    assert parse_way("1bit:threshold=0,scale=100,mom=0.5") == Way(
        "1bit:threshold=0,scale=100,mom=0.5", {"type": "1bit", "threshold": 0}, scale=100.0, mom=0.5
    )


def test_all_ways_of_the_table_are_ones_that_stores_take():
    ways = parse([]).codecs
    assert [way.name for way in ways] == list(compare_compression.CODECS)
    assert ways[0].compression == {"type": "none"}
    assert {check(way.compression).type for way in ways[1:]} == set(kv.codecs.names())


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


@pytest.mark.faults  # very many runs: each codec has tests of its own
@pytest.mark.timeout(180)  # seconds, but on a busy machine a job takes long to start
def test_a_job_prints_a_line_for_each_and_writes_the_files(tmp_path):
    command = "compare_compression.py --num-epochs 1 --num-examples 64 --batch-size 16 --csv table.csv"
    command += f" --plot picture.png --codecs {' '.join(PROMISED)}"
    process = launch(command, workers=2, servers=1, cwd=tmp_path)
    assert process.returncode == 0, process.stdout
    with (tmp_path / "table.csv").open() as file:
        rows = {row["codec"]: row for row in csv.DictReader(file)}
    assert list(rows) == list(PROMISED)
    for name, row in rows.items():
        assert re.search(rf"^\[worker 0\] {name} +{float(row['accuracy']):.4f} ", process.stdout, re.MULTILINE)
        assert float(row["pushed_part"]) <= PROMISED[name]
        assert float(row["pulled_part"]) == 1.0
    assert int(rows["fp32"]["pushed_bytes"]) == 2 * int(rows["fp16"]["pushed_bytes"])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
