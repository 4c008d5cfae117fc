"""What each suite measures, and with whom."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.contenders import Limit, Work
from benchmarks.figures import Result, Row
from benchmarks.jobs import Unavailable
from benchmarks.options import parse
from benchmarks.peers import Peers, default_cache
from benchmarks.session import Case
from benchmarks.suites import compression, row_tables
from benchmarks.suites import everything as suite
from benchmarks.suites.cluster import cluster
from benchmarks.suites.devices import DeviceRounds, devices
from benchmarks.suites.encryption import PLAIN, encryption
from benchmarks.suites.exchange import case_name, pushpull, small
from benchmarks.suites.rows import EmbeddingSteps, MxnetRows, OurRows, RowWork
from benchmarks.suites.rows import cases as row_cases
from benchmarks.suites.scaling import scale
from benchmarks.suites.training import note_efficiency
from benchmarks.targets import TARGETS, judge


def test_efficiency_is_what_is_left_of_a_processs_speed(session, fake):
    made = session("train", "--repeats", "1")
    contenders = [fake("kvstore", [125.0]), fake("ddp", [200.0]), fake("alone", [100.0])]
    result = made.measure(Case("train-resnet8", "Steps", contenders, finish=note_efficiency))
    assert [row.note for row in result.rows] == ["efficiency 0.80", "efficiency 0.50", ""]


def test_each_size_has_a_table_with_and_without_aggregation(session, capsys):
    made = session("cluster", "--hosts", "2,3", "--workers-per-host", "2", "-s", "2", "--net", "4MB")
    cluster(made)
    names = [result.name for result in made.results]
    sizes = ["cluster-2x2", "cluster-2x2-flat", "cluster-3x2", "cluster-3x2-flat"]
    assert names == [name for size in sizes for name in (size, f"{size}-memory")]
    rows = {row.name for row in made.results[0].rows}
    assert {"scheduler: all join", "an aggregator: a round: pushes", "servers: a round"} <= rows
    assert not any("aggregator" in row.name for row in made.results[2].rows)
    assert all(row.samples for result in made.results for row in result.rows)


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


def test_three_curves_of_as_many_points_as_there_are_choices(session):
    made = session("scale", "--peers", "none")
    works = []

    def measure(case, show=True):
        work = case.contenders[0].work
        works.append((work.workers, work.servers, work.net))
        return Result(case.name, case.title, [Row("kvstore", [float(len(works))])])

    made.measure = measure
    scale(made, counts=(1, 2), sizes=("1KB", "10KB", "1MB"))
    assert [curve.name for curve in made.curves] == ["scale-workers", "scale-servers", "scale-bytes"]
    assert [len(curve.lines["kvstore"]) for curve in made.curves] == [2, 2, 3]
    assert [work[:2] for work in works[:4]] == [(1, 2), (2, 2), (2, 1), (2, 2)]
    assert [net for _, _, net in works[4:]] == ["1KB", "10KB", "1MB"]


def test_codecs_are_measured_where_hosts_cannot_be_made(session, monkeypatch):
    def refuse():
        raise Unavailable("no root here")

    monkeypatch.setattr(compression, "ELEMENTS", 20_000)
    monkeypatch.setattr(compression, "TURNS", 1)
    monkeypatch.setattr(compression, "require", refuse)
    made = session("compression")
    compression.compression(made)
    assert [result.name for result in made.results] == ["codecs-encode", "codecs-decode"]
    for result in made.results:
        assert [row.name for row in result.rows] == [compression.FLOOR, *compression.CODECS]
        assert result.row(compression.FLOOR).median == pytest.approx(0.08), "ms for 20,000 floats at 1 GB/s"
    assert "hosts skipped: no root here" in made.console.file.getvalue()


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


def test_options_ask_for_one_line(session):
    (case,) = cases(session("pushpull", "--net", "vgg16", "--type", "dist_async", "-n", "4", "--transport", "tcp"))
    assert case.name == "vgg16-none-async-tcp-4x2"
    assert [one.name for one in case.contenders] == ["kvstore, tcp", "mxnet"]
    assert "4 workers, 2 servers" in case.title


def test_without_options_the_lines_with_targets_are_measured(session):
    found = cases(session("pushpull"))
    names = ["resnet50-none", "resnet50-sgd", "vgg16-sgd", "resnet50-none-tcp", "resnet50-none-zeromq"]
    assert [case.name for case in found] == names
    assert [one.name for one in found[0].contenders] == ["kvstore", "kvstore, arena", "mxnet", "gloo"]
    assert [one.name for one in found[3].contenders] == ["kvstore, tcp", "mxnet", "gloo", "sockets"]
    assert [one.name for one in found[4].contenders] == ["kvstore, zeromq", "kvstore"]


def test_without_peers_we_are_alone(session):
    found = cases(session("pushpull", "--peers", "none"))
    assert {one.name.split(",")[0] for case in found for one in case.contenders} == {"kvstore"}


def test_names_say_what_is_unusual(session):
    work = cases(session("pushpull", "-s", "3"))[0].contenders[0].work
    assert case_name(work) == "resnet50-none-2x3"


def test_lists_of_other_arrays_are_compared_with_lists_of_tensors(session):
    sums, updates, _, many = cases(session("small", "--peers", "none"), small)
    for case in (sums, updates, many):
        assert [one.name for one in case.contenders] == ["kvstore", "kvstore, numpy", "kvstore, dlpack"]
        assert [one.words for one in case.contenders] == [(), ("--arrays", "numpy"), ("--arrays", "dlpack")]
        assert case.peers[-1] == "kvstore"


def asked(*words: str) -> Any:
    options = parse(["rows", *words])
    return SimpleNamespace(options=options, peers=Peers(options.peers, default_cache()))


def test_each_case_has_ours_and_what_it_is_compared_with():
    found = {case.name: case for case in row_cases(asked("--rounds", "7", "-n", "3", "-s", "1"))}
    fresh = ["rows-fresh", "rows-fresh-async"]
    assert list(found) == ["rows-sgd", "rows-sgd-async", "rows-adam", "rows-many", "rows-tables", *fresh, "rows-dlrm"]
    for case in found.values():
        assert {one.name for one in case.contenders} & {"kvstore", "26 tables"}
        for one in case.contenders:
            assert isinstance(one, OurRows | MxnetRows | Limit | EmbeddingSteps)
            if isinstance(one, OurRows | MxnetRows):
                assert (one.work.rounds, one.work.workers, one.work.servers) == (7, 3, 1)


@pytest.mark.parametrize(("peers", "kinds"), [("none", {OurRows}), ("mxnet", {OurRows, MxnetRows})])
def test_mxnet_takes_part_if_it_is_asked(peers: str, kinds: set[type]):
    first, *_ = row_cases(asked("--peers", peers))
    assert {type(one) for one in first.contenders} == kinds


def test_the_words_of_a_program():
    work = replace(RowWork(), batch=100, optimizer="adam", rounds=2)
    assert work.words == ["--batch", "100", "--rounds", "2", "--type", "dist_sync", "--optimizer", "adam"]
