"""The comparison of ways to train over a slow line: its options, its table, and a job."""

from __future__ import annotations

import csv

import compare_slow_line
import pytest
from compare_slow_line import WAYS, Row, on_the_line, parse, since, table
from lm import options
from scripts import launch

TINY = "--layers 1 --heads 2 --width 16 --context 16 --batch-size 8 --steps 6 --sample 0"


def test_all_ways_are_options_of_the_example():
    steps = {way: options.parse(words.split()).inner_steps for way, words in WAYS.items()}
    assert [way for way in steps if not steps[way]] == ["synchronous", "synchronous-int8", "alone"]
    assert parse([]).ways == list(WAYS)


def test_what_cannot_be_read_ends_the_program(capsys):
    with pytest.raises(SystemExit):
        parse(["--all", "--text 'no end"])
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
