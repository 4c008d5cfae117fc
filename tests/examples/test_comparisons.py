"""The comparisons of codecs, of ways to train over a slow line, and of stores with a slow worker."""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter

import async_stragglers
import compare_compression
import compare_slow_line
import pytest
import torch
from cifar import resnet, results
from cifar.settings import parse_setting
from compare_compression import Way, parse, parse_way, statistics, validate
from compare_slow_line import WAYS, Row, on_the_line, since, table
from lm import options
from scripts import EXAMPLES, launch, start

import kvstore as kv
from kvstore.client import store_options
from kvstore.codecs import parse as check
from kvstore.errors import UnknownName

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


# ---- ways to train over a slow line

TINY = "--layers 1 --heads 2 --width 16 --context 16 --batch-size 8 --steps 6 --sample 0"


def test_all_ways_are_options_of_the_example():
    steps = {way: options.parse(words.split()).inner_steps for way, words in WAYS.items()}
    assert [way for way in steps if not steps[way]] == ["synchronous", "synchronous-int8", "alone"]
    assert compare_slow_line.parse([]).ways == list(WAYS)


def test_what_cannot_be_read_ends_the_program(capsys):
    with pytest.raises(SystemExit):
        compare_slow_line.parse(["--all", "--text 'no end"])
    assert "cannot be read: No closing quotation" in capsys.readouterr().err


def test_the_line_is_all_interfaces_but_the_loopback(monkeypatch, tmp_path):
    devices = tmp_path / "dev"
    counts = "1000 1 2 3 4 5 6 7 {sent} 1 2 3 4 5 6 7"
    devices.write_text(
        f"Inter-| Receive\n face |bytes\n    lo: {counts.format(sent=1)}\n  eth0: {counts.format(sent=20)}\n"
        f"  eth1:{counts.format(sent=3)}\n"
    )
    monkeypatch.setattr(compare_slow_line, "DEVICES", devices)
    assert on_the_line() == {"eth0": 1020, "eth1": 1003}
    assert since({"eth0": 1000, "gone": 5000}) == 20 + 1003
    monkeypatch.setattr(compare_slow_line, "DEVICES", tmp_path / "none")
    assert on_the_line() == {}


def test_the_table():
    lines = table([Row("diloco", 1, 500, 3.14159, 20.04, 21.0, 99.96)]).splitlines()
    assert [line.split() for line in lines] == [
        ["way", "seed", "steps", "bits", "megabytes", "line_megabytes", "seconds"],
        ["diloco", "1", "500", "3.142", "20.0", "21.0", "100.0"],
    ]


@pytest.mark.faults  # very many runs: each way has tests of its own
def test_a_job_runs_every_way(song, tmp_path):
    words = f"compare_slow_line.py --seeds 2 --csv table.csv --all='{TINY} --text {song}'"
    process = launch(words, workers=2, servers=1, cwd=tmp_path)
    assert process.returncode == 0, process.stdout
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["way"] for row in rows] == list(WAYS)
    bytes_of = {row["way"]: float(row["megabytes"]) for row in rows}
    assert 0 == bytes_of["alone"] < bytes_of["diloco"] < bytes_of["synchronous-int8"] < bytes_of["synchronous"] / 3


# ---- stores with a slow worker: that all of them end, and what is written; nothing about time


def test_all_modes_are_ones_that_stores_take():
    for mode in async_stragglers.MODES:
        name, options = parse_setting(mode)
        store_options.parse(name, name, options)


@pytest.mark.faults  # very many runs: each kind of store has tests of its own
@pytest.mark.timeout(180)  # seconds, but on a busy machine a job takes long to start
def test_jobs_come_to_their_ends(tmp_path):
    modes = ["dist_sync", "dist_ssp:staleness=2"]  # all must end together; each when it likes
    small = ["--num-workers", 2, "--step-time", 0.01, "--max-seconds", 0.5, "--target", 1.1]
    files = ["--csv", "table.csv", "--plot", "picture.png"]
    process = start(EXAMPLES / "async_stragglers.py", *small, "--modes", *modes, *files, cwd=tmp_path)
    assert process.returncode == 0, process.stdout
    with (tmp_path / "table.csv").open() as file:
        sync, ssp = csv.DictReader(file)
    assert [sync["store"], ssp["store"]] == modes
    assert [row["seconds to 1.1"] for row in (sync, ssp)] == ["-", "-"], "nobody gets more right than there are"
    assert (sync["of the slow"], sync["most"]) == (sync["steps of the fast"], "-"), "with rounds nothing is stale"
    assert int(ssp["most"]) <= 2
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_counts_over_all_workers():
    args = async_stragglers.parse([])
    fast = async_stragglers.WorkerReport([(0.5, 0.9), (1.0, 0.96)], steps=9, staleness=Counter({0: 1, 4: 1}), late=1)
    slow = async_stragglers.WorkerReport(steps=2, busy=0.001, staleness=Counter({0: 2}), late=2)
    assert async_stragglers.row(args, "some", [fast, slow]) == {
        "store": "some",
        "seconds to 0.95": "1.0",
        "best": "0.9600",
        "steps of the fast": 9,
        "of the slow": 2,
        "mean staleness": "1.0",
        "most": 4,
        "late arrays": 3,
        "busy ms": "1",
    }


def test_what_the_user_can_mend_is_one_line(monkeypatch):
    def run(*args, **kwargs):
        raise UnknownName("no such store")

    monkeypatch.setattr(async_stragglers.launcher, "run", run)
    monkeypatch.setattr(sys, "argv", ["async_stragglers.py"])
    with pytest.raises(SystemExit, match=r"^async_stragglers.py: error: no such store$"):
        async_stragglers.main()
