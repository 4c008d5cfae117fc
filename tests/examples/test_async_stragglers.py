"""The comparison of stores with a slow worker: that all of them end, and what is written; nothing about time."""

from __future__ import annotations

import csv
import sys
from collections import Counter

import async_stragglers
import pytest
from cifar.settings import parse_setting
from scripts import EXAMPLES, start

from kvstore.client.store_options import parse
from kvstore.errors import UnknownName


def test_all_modes_are_ones_that_stores_take():
    for mode in async_stragglers.MODES:
        name, options = parse_setting(mode)
        parse(name, name, options)


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
