"""Results: sessions, tables, targets, and what bounds a round."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.figures import Result, Row
from benchmarks.jobs import JobFailed, Unavailable
from benchmarks.remote import SETTINGS
from benchmarks.round_model import MEASURED, Cluster, Constants, predict, table
from benchmarks.session import Case
from benchmarks.suites import compression, exchange, grid, rows, training
from benchmarks.suites.memory import summary
from benchmarks.suites.network import add_limit
from benchmarks.tables import result_table, verdict_table
from benchmarks.targets import TARGETS, Target, judge
from benchmarks.wire import wire_ms

# ---- a session: contenders take turns, and what becomes of their figures


def test_contenders_take_turns(session, fake):
    log = []
    made = session("pushpull", "--repeats", "3")
    case = Case("work", "Work", [fake("a", [1.0, 2.0, 9.0], log), fake("b", [4.0], log)])
    result = made.measure(case)
    assert log == ["a", "b"] * 3
    assert [(row.name, row.median) for row in result.rows] == [("a", 2.0), ("b", 4.0)]


def test_who_cannot_run_is_excused_and_asked_once(session, fake):
    log = []
    made = session("pushpull", "--repeats", "2")
    contenders = [fake("mxnet", [Unavailable("pip has no network")], log), fake("kvstore", [1.0], log)]
    result = made.measure(Case("work", "Work", contenders))
    assert log == ["mxnet", "kvstore", "kvstore"]
    assert result.rows[0] == Row("mxnet", [], "skipped: pip has no network")
    assert not made.failures


def test_a_failure_is_shown_with_what_the_process_said(session, fake):
    made = session("pushpull")
    made.measure(Case("work", "Work", [fake("kvstore", [JobFailed("launch.py exited with 1:\n    Boom")])]))
    assert made.failures == ["kvstore"]
    assert "Boom" in made.console.file.getvalue()
    assert "failed: launch.py exited with 1" in made.console.file.getvalue()


def test_the_record_and_the_picture(session, fake, tmp_path):
    made = session("pushpull", "--repeats", "1", "--json", str(tmp_path / "deep" / "record.json"))
    names = {"kvstore": 10.0, "mxnet": 100.0, "gloo": 15.0}
    made.measure(Case("resnet50-none", "ResNet-50", [fake(name, [ms]) for name, ms in names.items()]))
    made.finish()
    record = json.loads((tmp_path / "deep" / "record.json").read_text())
    assert record["results"][0]["rows"][0]["ratios"] == {"mxnet": 0.1, "gloo": 0.6667}
    assert [one["reached"] for one in record["targets"]] == [True, False, None, None]
    assert record["options"]["what"] == "pushpull"
    assert record["machine"]["python"]
    assert (tmp_path / "out" / "pushpull.png").exists()


# ---- results: rows and their ratios, tables, curves, verdicts and the picture of a session


def shown(table) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()


def test_a_table_has_a_line_for_each_contender_and_a_column_for_each_peer_that_ran(result):
    text = shown(result_table(result))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    assert lines["ours"] == ["ours", "20.0", "10.0", "0.200"]
    assert "÷ mxnet" in text
    assert "÷ gloo" not in text
    assert lines["gloo"] == ["gloo", "skipped:", "no", "gloo"]


def test_the_verdicts_table_says_which_targets_are_reached(result):
    targets = [
        Target("work", "ours", "mxnet", 1 / 4),
        Target("work", "ours", "mxnet", 1 / 6),
        Target("work", "ours", "gloo", 1.0),
    ]
    lines = [line.strip() for line in shown(verdict_table(judge([result], targets))).splitlines()]
    words = [line.split("  ")[-1].strip() for line in lines if line.startswith("work: ours")]
    assert words == ["reached", "NOT REACHED", "not measured"]


def test_ratios_are_of_medians_and_only_of_what_was_measured(result):
    assert result.ratio("ours", "mxnet") == 0.2
    assert result.ratio("ours", "gloo") is None
    assert result.ratio("nobody", "mxnet") is None


# ---- targets


def result(ours: float, peer: float) -> Result:
    return Result("work", "", [Row("kvstore", [ours]), Row("mxnet", [peer])])


@pytest.mark.parametrize(("ours", "reached"), [(10.0, True), (9.0, True), (10.1, False)])
def test_a_target_is_a_ratio_of_two_rows(ours, reached):
    (verdict,) = judge([result(ours, 60.0)], [Target("work", "kvstore", "mxnet", 1 / 6)])
    assert verdict.to_json()["reached"] is reached
    assert verdict.to_json()["ratio"] == pytest.approx(ours / 60)


def test_what_was_not_measured_is_neither_reached_nor_missed():
    (verdict,) = judge([result(1.0, 2.0)], [Target("work", "kvstore", "gloo", 1.0)])
    assert (verdict.ratio, verdict.word, verdict.to_json()["reached"]) == (None, "not measured", None)
    assert judge([], TARGETS) == []


def test_every_target_names_rows_that_there_will_be(session):
    """A name that is misspelt would be a target that nobody ever misses."""
    made = session("all")
    found: dict[str, set[str]] = {}
    made.measure = lambda case: found.update({case.name: {one.name for one in case.contenders}})
    for measurement in (exchange.pushpull, exchange.small, exchange.asynchronous, rows.rows, training.train):
        measurement(made)
    found |= {one.name: {row.name for row in one.rows} for one in summary([(0, [{"all": 1.0}])], 2.0)}
    for name in ("hosts-4", "hosts-4+4"):  # these need root to be asked
        found[name] = {"kvstore", f"kvstore, {SETTINGS['plain-one-thread'].label}", "gloo", "wire"}
    for target in TARGETS:
        if re.fullmatch(r"hosts-\d+x\d+-(resnet50|\d+MB)-\d+[mg]bit", target.result):
            ours = {"kvstore", *(f"kvstore, {setting.label}" for setting in SETTINGS.values())}
            found[target.result] = {*ours, *grid.PEERS}
    found |= {f"codecs-{way}": {compression.FLOOR, *compression.CODECS} for way in ("encode", "decode")}
    found["hosts-4-compressed"] = {compression.PLAIN, *compression.BOTH_WAYS}
    timed = [Row(name, [1.0]) for name in ("kvstore", "ddp", "alone", "alone, forward only", "wire")]
    hosts = Result("hosts-train", "", timed)
    add_limit(hosts)
    found[hosts.name] = {row.name for row in hosts.rows}
    for target in TARGETS:
        if target.result.startswith(("table-", "publish-", "followers-")):  # tests of these suites measure them
            continue
        assert {target.row, target.peer} <= found[target.result], target


# ---- the model of a round: what bounds it, that it is near what was measured, and that the page has what it says


PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
FAST = Constants(0.0, 0.0, 1e15, 1e15, 1e15, 1e15, 1e15)  # processors that cost nothing


@pytest.mark.parametrize("name", [name for name, _, _ in MEASURED])
def test_it_is_near_what_was_measured(name: str) -> None:
    cluster, measured = next((cluster, ms) for other, cluster, ms in MEASURED if other == name)
    assert 1e3 * predict(cluster).round_s == pytest.approx(measured, rel=0.11)


def test_without_aggregation_each_worker_of_a_host_costs_as_much_as_a_host() -> None:
    flat = Cluster(8, 4, 8, 1e9, beside=True, aggregated=False)
    assert predict(flat, FAST).round_s == pytest.approx(4 * predict(replace(flat, aggregated=True), FAST).round_s)


def test_slow_encryption_and_slow_messages_are_named() -> None:
    cluster = Cluster(8, 4, 2, 100e9, encrypted=True)
    assert predict(cluster, replace(FAST, curve=1e6)).bottleneck == "server's encryption"
    assert predict(cluster, replace(FAST, message_s=1.0)).bottleneck == "server's thread"
    many = replace(cluster, servers=512)
    assert predict(many, replace(FAST, message_s=1.0)).bottleneck == "aggregator's thread"


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [line for line in table() if line not in page]
    assert not missing, "put what `python -m benchmarks.round_model` prints into docs/scaling.md"


# ---- what the lines between hosts allow


@pytest.mark.parametrize(
    ("nbytes", "hosts", "rate", "expected"),
    [(10_000_000, 2, "200mbit", 400), (10_000_000, 4, "200mbit", 600), (102_228_128, 4, "1gbit", 1227)],
)
def test_what_the_wire_allows(nbytes, hosts, rate, expected):
    assert wire_ms(nbytes, hosts, rate) == pytest.approx(expected, abs=1)


def test_what_the_wire_allows_where_servers_have_hosts_of_their_own():
    assert wire_ms(102_228_128, 4, servers_apart=True) == pytest.approx(818, abs=1)
