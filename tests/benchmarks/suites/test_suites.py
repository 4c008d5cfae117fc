"""What each suite measures, and with whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.contenders import Limit, Work
from benchmarks.figures import Result, Row
from benchmarks.jobs import Unavailable
from benchmarks.options import parse
from benchmarks.peers import Peers, default_cache
from benchmarks.suites import everything as suite
from benchmarks.suites import row_tables
from benchmarks.suites.devices import DeviceRounds, devices
from benchmarks.suites.encryption import PLAIN, encryption
from benchmarks.suites.exchange import pushpull
from benchmarks.suites.rows import EmbeddingSteps, MxnetRows, OurRows
from benchmarks.suites.rows import cases as row_cases
from benchmarks.targets import TARGETS, judge


def test_one_contender_has_keys_and_none_shares_memory(session):
    cases = []
    made = session("encryption", "--net", "10MB", "-n", "3")
    made.measure = cases.append
    encryption(made)
    (case,) = cases
    assert [contender.name for contender in case.contenders] == [PLAIN, "kvstore, encrypted"]
    assert "3 workers, 2 servers" in case.title
    result = Result(case.name, case.title, [Row(PLAIN, [60.0]), Row("kvstore, encrypted", [])])
    case.finish(result)
    assert [row.note for row in result.rows] == ["1.00 GB/s", ""], "10 MB both ways for each of 3 in 60 ms"


def test_all_that_has_a_target_is_measured(session, monkeypatch):
    for name, value in {"KNOWN": 2_000, "SAVED": 500, "CAPACITY": 300, "PUSHED": 100, "TURNS": 2}.items():
        monkeypatch.setattr(row_tables, name, value)
    made = session("tables", "--rounds", "8")
    row_tables.tables(made)
    verdicts = judge(made.results)
    assert [verdict.target for verdict in verdicts] == [each for each in TARGETS if each.result.startswith("table-")]
    assert all(verdict.ratio is not None for verdict in verdicts)
    assert made.curves[0].lines["resident"][-1][0] == pytest.approx(8e-4)


ONCE = ("pushpull", "small", "asynchronous", "train", "encryption", "memory")


def test_every_measurement_is_made_once(session, monkeypatch):
    made = []
    for name in (*ONCE, "network", "scale"):
        monkeypatch.setattr(suite, name, lambda session, name=name, **_: made.append((name, session.options)))
    suite.everything(session("all", "--peers", "mxnet,gloo"))
    assert [name for name, _ in made] == [*ONCE, "network", "scale"]
    options = dict(made)
    assert {options[name].repeats for name in ONCE} == {1}
    assert list(options["network"].peers) == ["gloo"]
    assert list(options["scale"].peers) == []
    assert options["scale"].rounds == 4


WORK = Work("tiny", 2, 1, "none", "dist_device_sync", 2)


def test_without_a_device_each_row_says_so(session):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(Unavailable, match="there is no CUDA device"):
        DeviceRounds("on one GPU", WORK, "cuda").run()
    made = session("devices", "--workers-per-host", "2", "--repeats", "1")
    devices(made)
    assert made.console.file.getvalue().count("skipped: there is no CUDA device") == 2
    assert not made.failures


@pytest.mark.release
def test_the_job_runs_with_the_stand_in():
    assert len(DeviceRounds("stand-in", WORK, "host", "cpu").run()["stand-in"]) == 2


def cases(made, measure=pushpull):
    found = []
    made.measure = found.append
    measure(made)
    return found


def asked(*words: str) -> Any:
    options = parse(["rows", *words])
    return SimpleNamespace(options=options, peers=Peers(options.peers, default_cache()))


def test_each_case_has_ours_and_what_it_is_compared_with():
    found = {case.name: case for case in row_cases(asked("--rounds", "7", "-n", "3", "-s", "1"))}
    fresh = ["rows-fresh", "rows-fresh-async"]
    assert list(found) == [
        "rows-sgd",
        "rows-sgd-async",
        "rows-adam",
        "rows-many",
        "rows-tables",
        "rows-array",
        *fresh,
        "rows-dlrm",
    ]
    for case in found.values():
        assert {one.name for one in case.contenders} & {"kvstore", "26 tables", "an array"}
        for one in case.contenders:
            assert isinstance(one, OurRows | MxnetRows | Limit | EmbeddingSteps)
            if isinstance(one, OurRows | MxnetRows):
                assert (one.work.rounds, one.work.workers, one.work.servers) == (7, 3, 1)
